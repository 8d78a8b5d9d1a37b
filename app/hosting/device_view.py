"""The computing device as the snapshot shows it: its memory, the share of the hosted blocks, and its sensors. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from app.serving.stats import ServerStats
from app.snapshot.views import DeviceView

if TYPE_CHECKING:
    from engine.device.probe import Device
    from engine.hosting import Hosted, HostingPlan


class MemoryCap(Protocol):
    """The user's memory limit."""

    @property
    def max_vram_bytes(self) -> int | None: ...


def device_view(
    device: Device, plan: HostingPlan, hosted: Hosted | None, stats: ServerStats, limit: MemoryCap
) -> DeviceView:
    """Return the device at this moment; figures without a sensor are None."""
    used_tokens = stats.kv_total_tokens - stats.kv_free_tokens
    share = used_tokens / stats.kv_total_tokens if stats.kv_total_tokens else 0.0
    cache_bytes = plan.budget.kv_bytes if hosted is not None else 0
    return DeviceView(
        id=device.id,
        name=device.name,
        memory_total_bytes=device.total_bytes,
        memory_free_bytes=device.free_bytes,
        limit_bytes=limit.max_vram_bytes,
        weights_bytes=hosted.weight_bytes if hosted is not None else 0,
        cache_bytes=cache_bytes,
        cache_used_bytes=int(share * cache_bytes),
        load=device.utilisation,
        temperature_c=device.temperature_c,
        power_w=device.power_w,
        step_s=stats.usual_step_s or None,
        quantisation="int8" if plan.quantised else "none",
    )

"""The computing devices as the snapshot shows them: memory, share of the hosted blocks, and sensors. Pure."""

from __future__ import annotations

from collections.abc import Mapping
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


def device_views(
    seen: Mapping[str, Device], plan: HostingPlan, hosted: Hosted | None, stats: ServerStats, limit: MemoryCap
) -> tuple[DeviceView, ...]:
    """Return the plan's devices, as they were `seen` last; figures without a sensor are None."""
    used_tokens = stats.kv_total_tokens - stats.kv_free_tokens
    used = used_tokens / stats.kv_total_tokens if stats.kv_total_tokens else 0.0
    views = []
    for index, share in enumerate(plan.shares):
        device = seen.get(share.device.id, share.device)
        part = hosted.span.parts[index] if hosted is not None and index < len(hosted.span.parts) else None
        cache_bytes = share.budget.kv_bytes if part is not None else 0
        views.append(
            DeviceView(
                id=device.id,
                name=device.name,
                memory_total_bytes=device.total_bytes,
                memory_free_bytes=device.free_bytes,
                limit_bytes=limit.max_vram_bytes,
                weights_bytes=part.weight_bytes if part is not None else 0,
                cache_bytes=cache_bytes,
                cache_used_bytes=int(used * cache_bytes),
                load=device.utilisation,
                temperature_c=device.temperature_c,
                power_w=device.power_w,
                step_s=stats.usual_step_s or None,
                quantisation=plan.quantisation,
                cache=plan.cache,
                start=part.start if part is not None else None,
                stop=part.stop if part is not None else None,
            )
        )
    return tuple(views)

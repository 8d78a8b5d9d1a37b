"""Plans and loads the blocks that this machine hosts: picks the device, computes what fits, loads it, measures it.

Which blocks to host is decided by `app.hosting`; the arithmetic of what fits is in `engine.budget`.
"""

from __future__ import annotations

import dataclasses
import gc
from dataclasses import dataclass

import torch

from engine.benchmark import Throughput, measure_span
from engine.budget import BlockBudget, fit, int8_weights, unquantised
from engine.config import ModelConfig
from engine.device.dtypes import pick_dtype
from engine.device.probe import Device, find_device, probe_devices
from engine.model.linear import cpu_products
from engine.model.span import LoadProgress, SpanOptions, SpanRunner, load_span
from engine.session_runner import SessionRunner
from engine.sources.base import ModelSource


@dataclass(frozen=True)
class HostingPlan:
    """One device, and how many blocks of one model fit on it."""

    device: Device
    dtype: torch.dtype
    quantised: bool
    budget: BlockBudget

    @property
    def blocks(self) -> int:
        """Number of blocks that fit."""
        return self.budget.blocks


@dataclass(frozen=True)
class Hosted:
    """Loaded blocks, ready to serve."""

    runner: SessionRunner
    throughput: Throughput
    span: SpanRunner

    @property
    def weight_bytes(self) -> int:
        """Bytes of the blocks' weights, without their KV cache."""
        return self.span.weight_bytes

    def grow(self, source: ModelSource) -> None:
        """Load one more block after the last."""
        self.span.grow(source)

    def measured(self) -> Hosted:
        """Return the same blocks with their speed measured again."""
        return dataclasses.replace(self, throughput=measure_span(self.span, batch=False))


def plan_hosting(
    config: ModelConfig, device_name: str | None, cap_bytes: int | None, *, quantised: bool = False
) -> HostingPlan:
    """Compute how many blocks fit on a device (None: the best one) next to what else runs there.

    Raises `DeviceError` if the named device does not exist or is not usable.
    """
    device = find_device(device_name, probe_devices())
    dtype = pick_dtype(device.id).dtype
    precision = (int8_weights if quantised else unquantised)(dtype.itemsize)
    return HostingPlan(device, dtype, quantised, fit(config, device, precision, cap_bytes).budget)


def load_blocks(
    source: ModelSource,
    start: int,
    stop: int,
    plan: HostingPlan,
    progress: LoadProgress | None = None,
    *,
    grows_to: int | None = None,
) -> SpanRunner:
    """Load blocks [start, stop) onto the plan's device, with KV cache laid out for growth up to `grows_to`."""
    room = (grows_to or stop) - start
    options = SpanOptions(
        torch.device(plan.device.id),
        plan.dtype,
        "int8" if plan.quantised else "none",
        kv_bytes=plan.budget.kv_bytes,
        room=room,
    )
    if options.device.type == "cpu":
        options = dataclasses.replace(options, packed=_has_room_for_copies(plan, room))
    return load_span(source, start, stop, options, progress)


def measured_host(span: SpanRunner) -> Hosted:
    """Measure loaded blocks and wrap them for serving; call it on the thread that will run them."""
    if span.options.device.type == "cpu":
        cpu_products(span.options.dtype)  # times the products now rather than during the first prompt
    return Hosted(SessionRunner(span), measure_span(span, batch=False), span)


def _has_room_for_copies(plan: HostingPlan, blocks: int) -> bool:
    """True if a second copy of the weights, packed for batches, stays within the memory limit."""
    budget = plan.budget
    copies = blocks * budget.weight_bytes_per_block
    return not plan.quantised and copies <= (budget.blocks - blocks) * budget.weight_bytes_per_block


def release(device_id: str) -> None:
    """Free unused memory and return what torch's allocator keeps on this device to the system."""
    gc.collect()
    kind = torch.device(device_id).type
    if kind in ("cuda", "mps", "xpu"):
        getattr(torch, kind).empty_cache()

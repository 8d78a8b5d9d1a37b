"""From a device and a memory limit to hosted blocks: what fits, loading it, and how fast it turned out to be."""

from __future__ import annotations

import dataclasses
import gc
from dataclasses import dataclass

import torch

from engine.benchmark import Throughput, measure_span
from engine.budget import Allowance, BlockBudget, Precision, default_headroom, int8_weights, plan_blocks
from engine.config import ModelConfig
from engine.device.dtypes import pick_dtype
from engine.device.probe import Device, find_device, probe_devices
from engine.model.linear import cpu_products
from engine.model.span import LoadProgress, SpanOptions, SpanRunner, load_span
from engine.session_runner import SessionRunner
from engine.sources.base import ModelSource


@dataclass(frozen=True)
class HostingPlan:
    """What one device can host of one model."""

    device: Device
    dtype: torch.dtype
    quantised: bool
    budget: BlockBudget

    @property
    def blocks(self) -> int:
        """How many blocks fit."""
        return self.budget.blocks


@dataclass(frozen=True)
class Hosted:
    """Loaded blocks, ready to be served."""

    runner: SessionRunner
    throughput: Throughput
    span: SpanRunner

    @property
    def weight_bytes(self) -> int:
        """What the blocks take, without their cache."""
        return self.span.weight_bytes

    def grow(self, source: ModelSource) -> None:
        """Read one more block, behind the last."""
        self.span.grow(source)

    def measured(self) -> Hosted:
        """The same blocks with their speed as it is now."""
        return dataclasses.replace(self, throughput=measure_span(self.span, batch=False))


def plan_hosting(
    config: ModelConfig, device_name: str | None, cap_bytes: int | None, *, quantised: bool = False
) -> HostingPlan:
    """How many blocks fit on a device (the best one where none is named) beside the rest of what runs there."""
    device = find_device(device_name, probe_devices())
    dtype = pick_dtype(device.id).dtype
    precision = int8_weights(dtype.itemsize) if quantised else Precision(dtype.itemsize, dtype.itemsize)
    headroom = default_headroom(device.kind, device.total_bytes)
    budget = plan_blocks(config, Allowance(device.free_bytes, headroom, cap_bytes), precision)
    return HostingPlan(device, dtype, quantised, budget)


def load_blocks(
    source: ModelSource,
    start: int,
    stop: int,
    plan: HostingPlan,
    progress: LoadProgress | None = None,
    *,
    grows_to: int | None = None,
) -> SpanRunner:
    """Read blocks [start, stop) onto the plan's device, with room for more up to `grows_to`."""
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
    """Loaded blocks with their speed, on the thread that will run them."""
    if span.options.device.type == "cpu":
        cpu_products(span.options.dtype)  # measured now, not under the first prompt
    return Hosted(SessionRunner(span), measure_span(span, batch=False), span)


def _has_room_for_copies(plan: HostingPlan, blocks: int) -> bool:
    """Whether a second copy of the weights, laid out for batches, stays within the limit."""
    budget = plan.budget
    copies = blocks * budget.weight_bytes_per_block
    return not plan.quantised and copies <= (budget.blocks - blocks) * budget.weight_bytes_per_block


def release(device_id: str) -> None:
    """Give memory that nobody uses any more back to the system, where torch keeps it for itself."""
    gc.collect()
    kind = torch.device(device_id).type
    if kind in ("cuda", "mps", "xpu"):
        getattr(torch, kind).empty_cache()

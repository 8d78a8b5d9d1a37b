"""Plans and loads the blocks that this machine hosts: picks the device, computes what fits, loads it, measures it.

Which blocks to host is decided by `app.hosting`; the arithmetic of what fits is in `engine.budget`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.benchmark import Throughput, measure_span
from engine.budget import BlockBudget, allowance_on, fit, int8_weights, unquantised
from engine.config import ModelConfig
from engine.device.dtypes import pick_dtype
from engine.device.probe import Device, find_device, probe_devices
from engine.errors import EngineError
from engine.model.block import WeightOptions, build_block
from engine.model.linear import cpu_products
from engine.model.span import LoadProgress, SpanOptions, SpanRunner, load_span
from engine.session_runner import SessionRunner
from engine.sources.base import ModelSource, block_part
from engine.sources.layout import expected_shapes

log = logging.getLogger("shoal.device")

CPU_ENDS = WeightOptions(torch.device("cpu"), torch.float32)


@dataclass(frozen=True)
class HostingPlan:
    """One device, and how many blocks of one model fit on it."""

    device: Device
    dtype: torch.dtype
    quantised: bool
    budget: BlockBudget
    cap_bytes: int | None = None

    @property
    def blocks(self) -> int:
        """Number of blocks that fit."""
        return self.budget.blocks

    @property
    def head_options(self) -> WeightOptions | None:
        """Where the head runs if the plan has room for it beside the blocks; None: on the CPU."""
        return WeightOptions(torch.device(self.device.id), self.dtype) if self.budget.ends_bytes else None


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
        with _memory_errors():
            self.span.grow(source)

    def measured(self) -> Hosted:
        """Warm up all blocks after the last has been loaded; return them with their speed measured again."""
        with _memory_errors():
            _warm_up(self.span)
            return dataclasses.replace(self, throughput=measure_span(self.span, batch=False))


Weights = Literal["auto", "own", "int8"]  # the setting `weights`: how the weights of hosted blocks are kept


@dataclass(frozen=True)
class HostingWish:
    """The user's settings for hosting, and how many blocks should be hosted at least."""

    device: str | None = None  # None: the best one
    cap_bytes: int | None = None
    weights: Weights = "auto"
    wanted_blocks: int = 1


def plan_hosting(config: ModelConfig, kind: str, wish: HostingWish) -> HostingPlan:
    """Compute how many blocks of a model fit on a device next to what else runs there.

    `kind` is the type of the model's tensors, as in "BF16". With `weights` "auto", int8 is chosen only on a GPU,
    where it makes the difference between hosting the wanted blocks and not. Raises `DeviceError` if the named device
    does not exist or is not usable.
    """
    gc.collect()  # blocks of an earlier attempt may wait for it
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    device = find_device(wish.device, probe_devices())
    dtype = pick_dtype(device.id, own_dtype(kind))

    def plan(quantised: bool) -> HostingPlan:
        precision = (int8_weights if quantised else unquantised)(dtype.itemsize)
        budget = fit(config, device, precision, wish.cap_bytes).budget
        return HostingPlan(device, dtype, quantised, budget, wish.cap_bytes)

    own = plan(quantised=False)
    if wish.weights == "own" or (wish.weights == "auto" and device.kind == "cpu"):
        return own
    int8 = plan(quantised=True)
    return int8 if wish.weights == "int8" or own.blocks < wish.wanted_blocks <= int8.blocks else own


def own_dtype(kind: str) -> torch.dtype:
    """Return the dtype that keeps tensors of this type best: fp16 for fp16, else bf16, which has float32's range."""
    return torch.float16 if kind == "F16" else torch.bfloat16


def load_blocks(
    source: ModelSource,
    start: int,
    stop: int,
    plan: HostingPlan,
    progress: LoadProgress | None = None,
    *,
    grows_to: int | None = None,
) -> SpanRunner:
    """Load blocks [start, stop) onto the plan's device, with KV cache laid out for growth up to `grows_to`.

    Raises `EngineError` if the device's memory is full.
    """
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
    _hold_to_cap(plan)
    with _memory_errors():
        return load_span(source, start, stop, options, progress)


def warm_kernels(config: ModelConfig, plan: HostingPlan) -> None:
    """Build and load the kernels of a CUDA device with one empty block, while the real ones are being read.

    Does nothing where the block would not fit into the memory that the plan keeps for the KV cache, which is still free
    then, or if the card fails: the real blocks will tell.
    """
    budget = plan.budget
    if torch.device(plan.device.id).type != "cuda" or 2 * budget.weight_bytes_per_block > budget.kv_bytes:
        return
    options = SpanOptions(torch.device(plan.device.id), plan.dtype, "int8" if plan.quantised else "none")
    kv_bytes = min(budget.kv_bytes // 4, config.context_length * budget.kv_bytes_per_token // budget.blocks)
    with contextlib.suppress(RuntimeError):
        block = build_block(0, _EmptyTensors(config), options)
        SpanRunner(config, 0, [block], dataclasses.replace(options, kv_bytes=kv_bytes)).warm_up()
        del block
    release(plan.device.id)


class _EmptyTensors:
    """A block's tensors, all zero."""

    def __init__(self, config: ModelConfig) -> None:
        self.shapes = expected_shapes(config, block_part(0))

    def read(self, outs: Mapping[str, Tensor]) -> None:
        for out in outs.values():
            out.zero_()


def measured_host(span: SpanRunner) -> Hosted:
    """Warm up and measure loaded blocks and wrap them for serving; call it on the thread that will run them.

    Raises `EngineError` if the device's memory is full.
    """
    if span.options.device.type == "cpu":
        cpu_products(span.options.dtype)  # times the products now rather than during the first prompt
    with _memory_errors():
        if span.is_complete:
            _warm_up(span)
        return Hosted(SessionRunner(span), measure_span(span, batch=False), span)


def _hold_to_cap(plan: HostingPlan) -> None:
    """Let torch take no more of the plan's device than the cap leaves beside the driver's own memory.

    A step that would need more fails then, instead of taking memory that the user wanted to keep.
    """
    if torch.device(plan.device.id).type == "cuda":
        total = plan.device.total_bytes
        reserved = allowance_on(plan.device, plan.cap_bytes).reserved_bytes
        limit = total if plan.cap_bytes is None else max(plan.cap_bytes - reserved, 0)
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), plan.device.id)


@contextlib.contextmanager
def _memory_errors() -> Iterator[None]:
    """Turn torch's error for a full device into an `EngineError`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        log.info("the device's memory is full: %s", error)
        raise EngineError(f"the device's memory is full: {str(error).split('. ')[0].removeprefix('CUDA ')}") from error


def _warm_up(span: SpanRunner) -> None:
    span.warm_up()
    if span.options.device.type == "cuda":
        torch.cuda.empty_cache()  # what loading and warming up needed for a moment


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

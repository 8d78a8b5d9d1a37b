"""Plans and loads the blocks that this machine hosts: picks the devices, computes what fits, loads it, measures it.

Which blocks to host is decided by `app.hosting`; the arithmetic of what fits is in `engine.budget`.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.benchmark import Throughput, measure_span
from engine.budget import (
    INT4_BYTES,
    BlockBudget,
    CacheFormat,
    Precision,
    allowance_on,
    fit,
    grid_weights,
    int8_weights,
    plan_blocks,
    unquantised,
)
from engine.config import ModelConfig
from engine.device.dtypes import pick_dtype
from engine.device.kinds import kind_named, kind_of
from engine.device.probe import Device, chosen_devices, is_memory_full, probe_devices
from engine.errors import DeviceFull
from engine.model.block import Quantisation, WeightOptions, build_block
from engine.model.grid_tiles import padded_share
from engine.model.hosted_span import HostedSpan
from engine.model.linear import cpu_products
from engine.model.onnx_graph import grids_pay
from engine.model.span import LoadProgress, SpanOptions, SpanRunner, load_span
from engine.model.triton_trials import triton_grids_work
from engine.session_runner import SessionRunner
from engine.sources.base import ModelSource, block_part
from engine.sources.grid import Grid, quantise
from engine.sources.layout import expected_shapes

log = logging.getLogger("shoal.device")

# A card's allocator rounds tensors up to whole megabytes, and a matrix in a grid has three: 18 blocks of 164 MiB took
# 186 MiB more.
GRID_ROUNDING = 17 / 16
GRID_KERNEL_BYTES = 32 << 20  # that the kernels of such products take on a card beside other ones
# What torch's allocator for ARM takes for unused and may return, and a size that it asks the system for.
_UNUSED_S, _LARGE_BYTES = 0.2, 64 << 20
CPU_ENDS = WeightOptions(torch.device("cpu"), torch.float32, "stored")


@dataclass(frozen=True)
class DeviceShare:
    """One device of a plan, and its part of the blocks and of the cache."""

    device: Device
    budget: BlockBudget

    @property
    def block_bytes(self) -> int:
        """Memory that one block less would free: its weights and its part of the cache."""
        return max(1, self.budget.weight_bytes_per_block + self.budget.kv_bytes // max(1, self.budget.blocks))

    def with_blocks(self, blocks: int) -> DeviceShare:
        """Return the share with another number of blocks, each with as much cache as before."""
        old = self.budget
        kv_bytes, per_token = (part * blocks // max(1, old.blocks) for part in (old.kv_bytes, old.kv_bytes_per_token))
        return DeviceShare(
            self.device, dataclasses.replace(old, blocks=blocks, kv_bytes=kv_bytes, kv_bytes_per_token=per_token)
        )


@dataclass(frozen=True)
class HostingPlan:
    """The device, or devices, and how many blocks of one model fit there."""

    device: Device
    dtype: torch.dtype
    quantisation: Quantisation
    budget: BlockBudget  # of `device`
    cap_bytes: int | None = None  # for all devices together
    more: tuple[DeviceShare, ...] = ()  # further devices, for the blocks that do not fit on the first
    cache: CacheFormat = "own"

    @property
    def shares(self) -> tuple[DeviceShare, ...]:
        """All devices, in the order of their blocks."""
        return (DeviceShare(self.device, self.budget), *self.more)

    @property
    def blocks(self) -> int:
        """Number of blocks that fit."""
        return sum(share.budget.blocks for share in self.shares)

    @property
    def device_name(self) -> str:
        """The names of all devices for the user; several of one name are counted."""
        names = [share.device.name for share in self.shares]
        counts = {name: names.count(name) for name in names}
        return ", ".join(name if count == 1 else f"{count} × {name}" for name, count in counts.items())

    def parts(self, start: int, stop: int) -> list[tuple[DeviceShare, int, int]]:
        """Return which blocks of [start, stop) each device hosts: the first device as many as fit there, and so on."""
        parts = []
        for share in self.shares:
            end = min(stop, start + share.budget.blocks)
            if start < end:
                parts.append((share, start, end))
            start = max(start, end)
        assert start == stop, "a plan hosts no more blocks than fit"
        return parts

    def with_blocks(self, counts: Sequence[int]) -> HostingPlan:
        """Return the plan with other numbers of blocks, one for each share; devices without blocks are left out."""
        shares = [share.with_blocks(n) for share, n in zip(self.shares, counts, strict=True) if n]
        assert shares, "a plan hosts at least one block"
        first, *more = shares
        return dataclasses.replace(self, device=first.device, budget=first.budget, more=tuple(more))

    @property
    def head_options(self) -> WeightOptions | None:
        """Where the head runs if the plan has room for it beside the blocks; None: on the CPU."""
        return WeightOptions(torch.device(self.device.id), self.dtype) if self.budget.ends_bytes else None


@dataclass(frozen=True)
class Hosted:
    """Loaded blocks, ready to serve."""

    runner: SessionRunner
    throughput: Throughput
    span: HostedSpan

    @property
    def weight_bytes(self) -> int:
        """Bytes of the blocks' weights, without their KV cache."""
        return self.span.weight_bytes

    def keep(self, start: int, stop: int) -> Hosted:
        """Free all blocks but [start, stop), return their memory to the system, and measure the others again.

        Sessions that use other blocks must be closed before. Raises `DeviceFull`.
        """
        devices = [part.options.device for part in self.span.parts]
        self.span.keep(start, stop)
        for device in set(devices):
            release(str(device))
        with _memory_errors():
            return dataclasses.replace(self, throughput=measure_span(self.span, batch=False))

    def grow(self, source: ModelSource) -> None:
        """Load one more block after the last."""
        with _memory_errors():
            self.span.grow(source)

    def measured(self) -> Hosted:
        """Warm up all blocks after the last has been loaded; return them with their speed measured again."""
        with _memory_errors():
            _warm_up(self.span)
            return dataclasses.replace(self, throughput=measure_span(self.span, batch=False))


Weights = Literal["auto", "own", "int8", "int4"]  # the setting `weights`: how the weights of hosted blocks are kept


@dataclass(frozen=True)
class HostingWish:
    """The user's settings for hosting, and how many blocks should be hosted at least."""

    device: str | None = None  # several are separated by commas; None: the best one, and others of its kind
    cap_bytes: int | None = None
    weights: Weights = "auto"
    wanted_blocks: int = 1
    cache: CacheFormat = "own"


def plan_hosting(config: ModelConfig, kind: str, wish: HostingWish, grid_bytes: float | None = None) -> HostingPlan:
    """Compute how many blocks of a model fit on a device next to what else runs there.

    `kind` is the type of the model's tensors, as in "BF16"; `grid_bytes` is what a weight takes in the grid of its
    file (`stored_bytes`), None for files of plain numbers. Weights in a grid stay in it on a CPU
    that computes with grids faster than with numbers. With `weights` "auto" on a GPU, the grid or else int8 is chosen
    where it makes the difference between hosting the wanted blocks and not. Raises `DeviceError` if
    the named device does not exist or is not usable.
    """
    gc.collect()  # blocks of an earlier attempt may wait for it
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    devices = chosen_devices(wish.device, probe_devices())
    own = pick_dtype(devices[0].id, own_dtype(kind))
    if wish.device is None:  # a card that would be slow in this format is left out
        devices = [device for device in devices if pick_dtype(device.id, own_dtype(kind)) == own]
    on_cpu = devices[0].kind == "cpu"

    def plan(quantisation: Quantisation) -> HostingPlan:
        in_grid, cap_bytes = quantisation in ("int4", "stored"), wish.cap_bytes
        dtype = torch.float32 if on_cpu and in_grid else own  # ONNX Runtime's products take float32 rows
        precision = (int8_weights if quantisation == "int8" else unquantised)(dtype.itemsize)
        if in_grid:
            held = INT4_BYTES if grid_bytes is None else grid_bytes
            if kind_named(devices[0].kind).captures_steps:
                held *= padded_share(config) * GRID_ROUNDING
                cap_bytes = cap_bytes and max(1, cap_bytes - GRID_KERNEL_BYTES)
            precision = grid_weights(held, dtype.itemsize, on_cpu=on_cpu)
        precision = dataclasses.replace(precision, cache=wish.cache)
        first, *more = _fill(config, devices, precision, cap_bytes, spread=wish.device is not None)
        budget = first.budget
        if more:
            held_blocks = budget.blocks + sum(share.budget.blocks for share in more)
            reason = f"{1 + len(more)} devices hold {held_blocks} of {config.n_blocks} blocks"
            budget = dataclasses.replace(budget, reason=reason)
        return HostingPlan(first.device, dtype, quantisation, budget, cap_bytes, tuple(more), wish.cache)

    stored = grid_bytes is not None
    if wish.weights == "int8":
        return plan("int8")
    if wish.weights == "int4":  # what is in a grid already is not rounded again
        if not computes_grids(devices[0].kind):
            log.warning("weights in 4 bits are decoded for every step on %s, which is slow", devices[0].id)
        return plan("stored" if stored else "int4")
    first = plan("stored" if stored and on_cpu and computes_grids(devices[0].kind) else "none")
    if wish.weights == "own" or on_cpu or first.blocks >= wish.wanted_blocks:
        return first
    smaller: tuple[Quantisation, ...] = ("stored", "int8") if stored else ("int8",)
    others = [plan(quantisation) for quantisation in smaller if quantisation != first.quantisation]
    return next((other for other in others if other.blocks >= wish.wanted_blocks), first)


def source_kind(source: ModelSource) -> str:
    """Return the type of a model's largest tensors, as in "BF16"."""
    return max(source.parts[block_part(0)], key=lambda tensor: tensor.length).kind


def computes_grids(kind: str) -> bool:
    """True if a kind of device has products for weights in a grid; of a CPU, if they are also faster, by measurement.

    On an H200 they are faster for few rows and slower for prompts, so a card uses them for the memory that they save.
    """
    return grids_pay() if kind == "cpu" else kind_named(kind).captures_steps and triton_grids_work()


def _fill(
    config: ModelConfig, devices: Sequence[Device], precision: Precision, cap_bytes: int | None, *, spread: bool
) -> list[DeviceShare]:
    """Give each device as many of the model's blocks as fit, until none are left; the first may also host the head.

    With `spread`, a device gets no more than its part of the free memory of all of them.
    """
    shares: list[DeviceShare] = []
    left, cap_left = config.n_blocks, cap_bytes
    for index, device in enumerate(devices):
        if not left:
            break
        most = left
        if spread:
            most = math.ceil(left * device.free_bytes / max(1, sum(each.free_bytes for each in devices[index:])))
        part, allowance = dataclasses.replace(config, n_blocks=most), allowance_on(device, cap_left)
        if shares:
            budget = plan_blocks(part, allowance, precision)
        else:
            budget = fit(part, device, precision, cap_left).budget
        if budget.blocks:
            shares.append(DeviceShare(device, budget))
            left -= budget.blocks
            cap_left = cap_left and max(0, cap_left - allowance.reserved_bytes - budget.total_bytes)
    return shares or [DeviceShare(devices[0], fit(config, devices[0], precision, cap_bytes).budget)]


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
    before_cache: Callable[[], object] = lambda: None,
) -> HostedSpan:
    """Load blocks [start, stop) onto the plan's devices, with KV cache laid out for growth up to `grows_to`.

    `before_cache` is called before a KV cache takes its memory. Raises `DeviceFull` if a device's memory is full.
    """
    _hold_to_cap(plan)
    parts: list[SpanRunner] = []
    with _memory_errors():
        for share, first, last in plan.parts(start, grows_to or stop):
            options = _span_options(plan, share, room=last - first)
            if first < stop:
                own_progress = _progress_from(progress, first - start, stop - start)
                parts.append(load_span(source, first, min(last, stop), options, own_progress, before_cache))
            else:
                parts.append(SpanRunner(source.config, first, [], options))
    return HostedSpan(parts)


def _span_options(plan: HostingPlan, share: DeviceShare, room: int) -> SpanOptions:
    device = torch.device(share.device.id)
    packed = device.type == "cpu" and plan.quantisation == "none" and _has_room_for_copies(share, room)
    kv_bytes = share.budget.kv_bytes
    return SpanOptions(device, plan.dtype, plan.quantisation, packed, kv_bytes, room, plan.cache)


def _progress_from(progress: LoadProgress | None, done: int, total: int) -> LoadProgress | None:
    """Return a callback for one device that counts against the blocks of all."""
    return None if progress is None else lambda own, _: progress(done + own, total)


def warm_kernels(config: ModelConfig, plan: HostingPlan) -> None:
    """Build and load the kernels of devices that capture steps with one empty block, while the real ones are read.

    Does nothing where the block would not fit into the memory that the plan keeps for the KV cache, which must be free
    until this returns, or if the card fails: the real blocks will tell.
    """
    for share in plan.shares:
        budget, device = share.budget, torch.device(share.device.id)
        if not kind_of(device).captures_steps or 2 * budget.weight_bytes_per_block > budget.kv_bytes:
            continue
        options = SpanOptions(device, plan.dtype, plan.quantisation, cache=plan.cache)
        kv_bytes = min(budget.kv_bytes // 4, config.context_length * budget.kv_bytes_per_token // budget.blocks)
        with contextlib.suppress(RuntimeError):
            block = build_block(0, _EmptyTensors(config, plan.quantisation), options)
            SpanRunner(config, 0, [block], dataclasses.replace(options, kv_bytes=kv_bytes)).warm_up(chooses_tiles=False)
            del block
        release(share.device.id)


class _EmptyTensors:
    """A block's tensors, all zero."""

    def __init__(self, config: ModelConfig, quantisation: Quantisation) -> None:
        self.shapes = expected_shapes(config, block_part(0))
        self._has_grids = quantisation == "stored"

    def read(self, outs: Mapping[str, Tensor]) -> None:
        for out in outs.values():
            out.zero_()

    def grid(self, role: str) -> Grid | None:
        """Return a matrix of zeros in 4 bits, if blocks have any in a grid."""
        return quantise(torch.zeros(self.shapes[role])) if self._has_grids and len(self.shapes[role]) == 2 else None


def measured_host(span: HostedSpan) -> Hosted:
    """Warm up and measure loaded blocks and wrap them for serving; call it on the thread that will run them.

    Raises `DeviceFull` if a device's memory is full.
    """
    if any(part.options.device.type == "cpu" for part in span.parts):
        cpu_products(span.options.dtype)  # times the products now rather than during the first prompt
    with _memory_errors():
        if span.is_complete:
            _warm_up(span)
        return Hosted(SessionRunner(span), measure_span(span, batch=False), span)


def _hold_to_cap(plan: HostingPlan) -> None:
    """Let torch take no more of the plan's devices than the cap leaves beside the driver's own memory.

    A step that would need more fails then, instead of taking memory that the user wanted to keep.
    """
    for device in {share.device.id for share in plan.shares if kind_of(torch.device(share.device.id)).captures_steps}:
        total = torch.cuda.get_device_properties(device).total_memory
        if plan.cap_bytes is None:
            limit = total
        elif plan.more:
            limit = sum(share.budget.total_bytes for share in plan.shares if share.device.id == device)
        else:
            limit = max(plan.cap_bytes - allowance_on(plan.device, plan.cap_bytes).reserved_bytes, 0)
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)


@contextlib.contextmanager
def _memory_errors() -> Iterator[None]:
    """Turn torch's error for a full device into `DeviceFull`."""
    try:
        yield
    except Exception as error:
        if not is_memory_full(error):
            raise
        log.info("the device's memory is full: %s", error)
        raise DeviceFull(f"the device's memory is full: {str(error).split('. ')[0].removeprefix('CUDA ')}") from error


def _warm_up(span: HostedSpan) -> None:
    span.warm_up()
    if any(kind_of(part.options.device).captures_steps for part in span.parts):
        torch.cuda.empty_cache()  # what loading and warming up needed for a moment


def _has_room_for_copies(share: DeviceShare, blocks: int) -> bool:
    """True if a second copy of the weights, packed for batches, stays within the memory limit."""
    budget = share.budget
    copies = blocks * budget.weight_bytes_per_block
    return copies <= (budget.blocks - blocks) * budget.weight_bytes_per_block


def release(device_id: str) -> None:
    """Free unused memory and return what allocators keep, on this device and in the process, to the system."""
    gc.collect()
    kind = kind_of(torch.device(device_id)).torch_type
    if kind == "cpu":  # torch's allocator for ARM looks for pages to return only when something large is freed
        time.sleep(_UNUSED_S)
        torch.empty(_LARGE_BYTES, dtype=torch.uint8)
    else:
        with contextlib.suppress(RuntimeError):  # a card that has failed raises at everything
            getattr(torch, kind).empty_cache()
    with contextlib.suppress(AttributeError, OSError, TypeError):  # only glibc has it, and Windows has no such library
        ctypes.CDLL(None).malloc_trim(0)

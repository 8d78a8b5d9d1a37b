"""Decode steps captured as CUDA graphs: one launch per step instead of hundreds.

A step runs on Triton's fused kernels or, where Triton or its compiler is missing, on torch's own operations over
gathered pages. Both read positions and pages from fixed buffers, so that a captured step serves any session; a batch is
padded to the next captured size. A step's input may come from the host, or from what the device has yet to compute, so
that it can go on without the host (`DecodeGraphs.launch`).
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import ModelConfig
from engine.model.block import Attend, Block, block_forward
from engine.model.grid_tiles import TiledGrid
from engine.model.kv_cache import PAGE_TOKENS, BlockCache, KVLease, KVPool, Segment, page_table, row_places
from engine.model.linear import GridLinear
from engine.model.rope import RotaryTable
from engine.model.triton_trials import triton_grids_work, triton_int8_cache_works, triton_works

log = logging.getLogger("shoal.engine.graphs")

BATCHES = (1, 2, 4, 8, 16, 32, 64)
MAX_RUN = 16  # rows of one session, a token and its guesses: each of them reads the session's past again
MAX_CAPTURED = 64  # besides single blocks; each graph holds some memory for its intermediate results
MAX_PENDING = 16  # steps that wait to be captured
# A step that runs so often is captured at once. That takes ten times as long as the step does block by block, and all
# sessions wait meanwhile: an asker can use another part of a span for each of its replies.
CAPTURE_AT = 64
MAX_AHEAD = 2  # steps that may be launched before the first of them has ended
SMALLEST_PAGES = 16  # 1024 tokens: `plain_step` reads every page it is given, so longer contexts use separate graphs


@dataclass(frozen=True)
class SpanParts:
    """Weights, cache and rotations that a step of a span uses."""

    config: ModelConfig
    blocks: Sequence[Block]
    pool: KVPool
    rope: RotaryTable


@dataclass
class HostBuffers:
    """Pinned host memory of one step that is under way."""

    x: Tensor  # (rows, hidden)
    where: Tensor  # (rows, 1 + max_pages) int32: position, then pages
    out: Tensor  # (rows, hidden)
    staged_pages: list[list[int] | None]  # page list that each row of `where` holds now
    event: Any = None  # set by the device once `out` is written


@dataclass
class StepBuffers:
    """Fixed memory of all steps of one batch size: on the device, and on the host for each that may be under way."""

    x: Tensor
    where: Tensor
    out: Tensor
    hosts: list[HostBuffers]  # taken in turn, the first next


class ShapeKey(NamedTuple):
    """What distinguishes one captured step from another."""

    rows: int
    pages: int  # that the step may read
    start: int  # first block, counted from the span's start
    stop: int


T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class UnderWay(Generic[T]):
    """A step that the device runs while its caller does something else."""

    is_done: Callable[[], bool]  # takes microseconds
    result: Callable[[], T]  # to be called once, as soon as `is_done` returns True

    def then(self, convert: Callable[[T], U]) -> UnderWay[U]:
        """The same step with its result converted."""
        return UnderWay(self.is_done, lambda: convert(self.result()))


@dataclass(frozen=True)
class StepUnderWay(UnderWay[T]):
    """A step under way whose output the device can go on with."""

    rows: Tensor | None = None  # (N, hidden) on the device; the next step overwrites it

    def then(self, convert: Callable[[T], U]) -> StepUnderWay[U]:
        """The same step with its result converted."""
        return StepUnderWay(self.is_done, lambda: convert(self.result()), self.rows)


Replay = Callable[[], None]  # runs a captured step from `StepBuffers.x` to `out`; does not wait for its end


class DecodeGraphs:
    """Captured decode steps of one span, by batch size, page count and part of the span.

    A step through a part that was not captured yet runs block by block: single blocks are captured for a batch size
    when that is first needed, once for all parts. If that fails, it is tried again once something else was
    captured. The step waits in a list until `capture_pending` is called in a quiet moment. Under constant load
    there is none, so its `CAPTURE_AT`th run captures it. Routes use parts of a span as often as all of it, because
    the spans of neighbours overlap. Those used longest ago are given up for others.

    Without fused kernels, whose graphs serve contexts of every length, the kernels of such a step are launched one by
    one, which takes ten times as long.
    """

    def __init__(self, parts: SpanParts) -> None:
        self._parts = parts
        self._buffers: dict[int, StepBuffers] = {}
        self._captured: OrderedDict[ShapeKey, Replay] = OrderedDict()  # the one used longest ago first
        self._blocks: dict[ShapeKey, Replay] = {}  # single ones, which run on `StepBuffers.x` in place
        self._pending: OrderedDict[ShapeKey, int] = OrderedDict()  # likewise; and how often each ran
        self._memory: Any = None  # memory pool shared by all graphs
        self._max_pages = max(1, min(-(-parts.config.context_length // PAGE_TOKENS), parts.pool.scratch_page))
        grids = [linear.grid for block in parts.blocks for linear in block.linears if isinstance(linear, GridLinear)]
        works = triton_grids_work() if grids else triton_works()
        if parts.pool.cache == "int8":
            works = works and triton_int8_cache_works()
        self.fused = works and _kernels_support(parts.config) and all(isinstance(grid, TiledGrid) for grid in grids)
        self.by_blocks = self.fused
        self._blocks_failed = False  # the last capture of single blocks, and nothing was captured since
        parts.pool.clears_slots = not self.fused  # `plain_step` reads whole pages, `fused_step` only written slots

    def covers(self, segments: Sequence[Segment]) -> bool:
        """True if these segments are a decode step: a token and perhaps guesses each, at most `BATCHES[-1]` rows."""
        rows = sum(segment.count for segment in segments)
        return rows <= BATCHES[-1] and all(segment.count <= MAX_RUN for segment in segments)

    def step(self, hidden: Tensor, segments: Sequence[Segment], part: slice) -> Tensor:
        """Run tokens of each session through blocks `part` of the span: (N, hidden) -> (N, hidden) on the host."""
        places = row_places(segments)
        key = self._key(places, part)
        with on_device(self._parts.pool.device):
            replay = self._replay_of(key)  # what is captured for it overwrites the buffers
            buffers, host = self._staged(key, hidden, places)
            replay()
            host.out.copy_(buffers.out, non_blocking=True)
        self._wait()
        return host.out[: len(places)].clone()

    def _replay_of(self, key: ShapeKey) -> Replay:
        """Return how a step is run; count its runs while it is not captured, and capture it if there are many."""
        if key not in self._captured:
            self._pending[key] = self._pending.pop(key, 0) + 1
            if len(self._pending) > MAX_PENDING:
                self._pending.popitem(last=False)
            if self._pending[key] >= CAPTURE_AT:
                del self._pending[key]
                self._try(lambda: self._capture_once(key))
        if key in self._captured:
            self._captured.move_to_end(key)
            return self._captured[key]
        by_blocks = self.by_blocks and not self._blocks_failed
        if by_blocks and not self._try(lambda: self._capture_blocks(key)):
            by_blocks, self._blocks_failed = False, True
        return partial(self._run_blocks if by_blocks else self._run, self._buffers_of(key.rows), key)

    def _try(self, capture: Callable[[], None]) -> bool:
        try:
            capture()
        except Exception:  # torch raises errors of every kind; steps run without a graph
            log.exception("a step could not be captured")
            return False
        return True

    def _capture_blocks(self, key: ShapeKey) -> None:
        for block in _blocks_of(key):
            if block not in self._blocks:
                self._blocks[block] = self._capture(block, in_place=True)

    def _run_blocks(self, buffers: StepBuffers, key: ShapeKey) -> None:
        for block in _blocks_of(key):
            self._blocks[block]()
        buffers.out.copy_(buffers.x)

    def launch(self, hidden: Tensor, segments: Sequence[Segment], part: slice) -> StepUnderWay[Tensor] | None:
        """Start a captured step without waiting; None if it is not captured.

        `hidden` may be on the device, and need not be computed yet. At most `MAX_AHEAD` steps may be under way.
        """
        places = row_places(segments)
        key = self._key(places, part)
        if key not in self._captured:
            return None
        replay = self._replay_of(key)
        with on_device(self._parts.pool.device):
            buffers, host = self._staged(key, hidden, places)
            replay()
            host.out.copy_(buffers.out, non_blocking=True)
            event = host.event = host.event or torch.cuda.Event()
            event.record()
        used = len(places)
        return StepUnderWay(event.query, lambda: host.out[:used].clone(), buffers.out[:used])

    def _key(self, places: Sequence[tuple[KVLease, int]], part: slice) -> ShapeKey:
        rows = next(size for size in BATCHES if size >= len(places))
        pages = self._pages(max(len(lease.pages) for lease, _ in places))
        return ShapeKey(rows, pages, part.start, part.stop)

    def _staged(
        self, key: ShapeKey, hidden: Tensor, places: Sequence[tuple[KVLease, int]]
    ) -> tuple[StepBuffers, HostBuffers]:
        """Have a step's input written to the device's buffers, rows, positions and pages."""
        buffers, used = self._buffers_of(key.rows), len(places)
        host = buffers.hosts.pop(0)
        buffers.hosts.append(host)
        rows = buffers.x if hidden.device == buffers.x.device else host.x
        rows[:used].copy_(hidden)
        if used < key.rows:  # a padding row writes to the scratch page, which other rows read behind their mask
            rows[used:].zero_()
        if rows is host.x:
            buffers.x.copy_(rows, non_blocking=True)
        self._stage_positions(host, places)
        buffers.where.copy_(host.where, non_blocking=True)
        return buffers, host

    def capture(self, part: slice) -> None:
        """Capture the steps of every batch size through these blocks: the shortest contexts, or all if fused."""
        for rows in BATCHES:
            self._capture_once(ShapeKey(rows, self._pages(1), part.start, part.stop))

    def capture_pending(self) -> bool:
        """Capture one step that ran uncaptured before; False if there is none."""
        if not self._pending:
            return False
        key, _ = self._pending.popitem()  # the latest: the others may be of replies that are over
        self._capture_once(key)
        return True

    @property
    def has_pending(self) -> bool:
        """True if a step ran that is not captured yet."""
        return bool(self._pending)

    def _pages(self, needed: int) -> int:
        """Pages that a step for sessions of `needed` pages is captured for."""
        if self.fused:  # its kernels read only the pages that a session has
            return self._max_pages
        pages = SMALLEST_PAGES
        while pages < needed:
            pages *= 2
        return min(pages, self._max_pages)

    def _buffers_of(self, rows: int) -> StepBuffers:
        if rows not in self._buffers:
            pool, hidden = self._parts.pool, self._parts.config.hidden_size
            dtype, device = pool.dtype, pool.device
            blank = page_table(rows, self._max_pages, [], pool.scratch_page)
            self._buffers[rows] = StepBuffers(
                x=torch.zeros(rows, hidden, dtype=dtype, device=device),
                where=blank.to(device, copy=True),
                out=torch.zeros(rows, hidden, dtype=dtype, device=device),
                hosts=[
                    HostBuffers(
                        x=pinned(torch.zeros(rows, hidden, dtype=dtype), device),
                        where=pinned(blank.clone(), device),
                        out=pinned(torch.zeros(rows, hidden, dtype=dtype), device),
                        staged_pages=[None] * rows,
                    )
                    for _ in range(MAX_AHEAD + 1)
                ],
            )
        return self._buffers[rows]

    def _stage_positions(self, host: HostBuffers, places: Sequence[tuple[KVLease, int]]) -> None:
        """Write positions and pages to the host's table; rewrites only the rows whose pages changed."""
        table = host.where.numpy()
        for row in range(len(host.staged_pages)):
            lease, position = places[row] if row < len(places) else (None, 0)
            pages = None if lease is None else lease.pages
            table[row, 0] = position
            if host.staged_pages[row] is not pages:  # a lease replaces its list and never changes it in place
                used = 1 + len(pages or ())
                table[row, 1:used] = pages or ()
                table[row, used:] = self._parts.pool.scratch_page
                host.staged_pages[row] = pages

    def _run(self, buffers: StepBuffers, key: ShapeKey, *, in_place: bool = False) -> None:
        """The step itself, from `StepBuffers.x` to `out`, or back to `x`: what a graph captures."""
        with on_device(self._parts.pool.device):
            step = fused_step if self.fused else plain_step
            out = step(self._parts, slice(key.start, key.stop), buffers.x, buffers.where[:, : 1 + key.pages])
            (buffers.x if in_place else buffers.out).copy_(out)

    def _wait(self) -> None:
        """Wait until the device has written a step's output."""
        torch.cuda.current_stream(self._parts.pool.device).synchronize()

    def _capture_once(self, key: ShapeKey) -> None:
        if key in self._captured:
            return
        if len(self._captured) >= MAX_CAPTURED:  # the one used longest ago goes, but none of the whole span
            parts = (old for old in self._captured if old.stop - old.start < len(self._parts.blocks))
            del self._captured[next(parts, next(iter(self._captured)))]
        self._captured[key] = self._capture(key)
        self._blocks_failed = False  # a card that was full for a moment has room again

    def _capture(self, key: ShapeKey, *, in_place: bool = False) -> Replay:
        """Run the step once to warm up, then capture it as a graph."""
        device, buffers = self._parts.pool.device, self._buffers_of(key.rows)
        buffers.where.copy_(page_table(key.rows, self._max_pages, [], self._parts.pool.scratch_page))
        graph = captured(lambda: self._run(buffers, key, in_place=in_place), device, self._memory)
        self._memory = self._memory or graph.pool()
        return graph.replay


def _blocks_of(key: ShapeKey) -> list[ShapeKey]:
    return [key._replace(start=block, stop=block + 1) for block in range(key.start, key.stop)]


_capturing = Lock()  # torch ends the process if two threads capture at once, as blocks and the head would


def captured(run: Callable[[], None], device: torch.device, memory: Any) -> torch.cuda.CUDAGraph:
    """Run something once on a card to warm up, then capture it, in a memory pool or, with None, in one of its own."""
    stream = _capture_stream(device)
    with _capturing:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):  # warm-up: kernels and library handles cannot be built during capture
            run()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode="thread_local"):
            run()
    return graph


@functools.cache
def _capture_stream(device: torch.device) -> Any:
    """The stream of a card on which graphs are captured; torch's own belongs to whichever card captured first.

    One for all graphs of a card: on each stream that ever multiplied, cuBLAS keeps up to 32 MiB.
    """
    return torch.cuda.Stream(device)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a card the current one, on which Triton launches and the driver keeps its books; nothing for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """Pin a host tensor's memory for as long as it lives, so that captured copies may use it.

    Not torch's own pinned memory: its allocator watches every copy with an event, which a captured copy never sets.
    """
    if device.type == "cuda":
        cudart: Any = torch.cuda.cudart()
        address = tensor.data_ptr()
        with on_device(device):
            torch.cuda.check_error(cudart.cudaHostRegister(address, tensor.nbytes, 0))
        weakref.finalize(tensor, cudart.cudaHostUnregister, address).atexit = False  # the driver does it at the end
    return tensor


def fused_step(parts: SpanParts, part: slice, x: Tensor, where: Tensor) -> Tensor:
    """Run one token per row through Triton's kernels: five launches per block, six for several rows.

    Several rows may belong to one session. A row finds the keys of those before it only if all are written before any
    row attends, so by a kernel of their own.
    """
    from engine.model import triton_kernels as kernels

    config, rows = parts.config, x.shape[0]
    positions = where[:, 0].contiguous()
    cos, sin = parts.rope.turns(positions)
    paged = kernels.PagedRows(positions, where[:, 1:].contiguous(), cos, sin)
    scratch = kernels.AttentionScratch(rows, config, x.device)
    x = x.clone()  # the residual stream, updated in place
    qkv = x.new_empty(rows, (config.n_heads + 2 * config.n_kv_heads) * config.head_dim)
    attended = x.new_empty(rows, config.n_heads * config.head_dim)
    gated = x.new_empty(rows, config.intermediate_size)
    residual = kernels.Fold(residual=x)
    for block, cache in zip(parts.blocks[part], parts.pool.blocks[part], strict=True):
        kernels.product(x, block.qkv, qkv, kernels.Fold(norm=block.attn_norm, eps=config.norm_eps))
        if rows > 1:
            kernels.write(qkv, cache, block, config, paged)
        kernels.attend(qkv, cache, attended, block, config, paged, scratch, written=rows > 1)
        kernels.product(attended, block.o, x, residual)
        mlp = kernels.Fold(norm=block.mlp_norm, eps=config.norm_eps, gated=True)
        kernels.product(x, block.gate_up, gated, mlp)
        kernels.product(gated, block.down, x, residual)
    return x


def plain_step(parts: SpanParts, part: slice, x: Tensor, where: Tensor) -> Tensor:
    """Run one token per row through torch's own operations, over pages gathered by index."""
    positions, pages = where[:, 0].to(torch.int64), where[:, 1:].to(torch.int64)
    rows = x.shape[0]
    offsets = torch.arange(PAGE_TOKENS, device=x.device)
    slots = (pages[:, :, None] * PAGE_TOKENS + offsets).view(rows, -1)  # (rows, max_pages * PAGE_TOKENS)
    new_slots = slots.gather(1, positions[:, None]).view(-1)
    age = positions[:, None] - torch.arange(slots.shape[1], device=x.device)
    rope = parts.rope.at(positions)
    for block, cache in zip(parts.blocks[part], parts.pool.blocks[part], strict=True):
        window = parts.config.window_of(block.index)
        visible = age >= 0 if window is None else (age >= 0) & (age < window)
        x = block_forward(block, parts.config, x, rope, _gathered(cache, new_slots, slots, visible))
    return x


def _gathered(cache: BlockCache, new_slots: Tensor, slots: Tensor, visible: Tensor) -> Attend:
    """Return attention of one row per session over pages gathered by index; `visible` is (rows, length)."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.write(new_slots, k.transpose(0, 2), v.transpose(0, 2))
        keys, values = (
            # (1, kv_heads, rows * length, head_dim) -> (rows, kv_heads, length, head_dim)
            seen.view(seen.shape[1], *slots.shape, seen.shape[3]).transpose(0, 1)
            for seen in cache.read(slots.view(-1), q.dtype)
        )
        mask = visible[:, None, None, :]
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
        return out.reshape(q.shape[0], -1)

    return attend


def _kernels_support(config: ModelConfig) -> bool:
    from engine.model import triton_kernels as kernels

    return kernels.supports(config)

"""Decode steps captured as CUDA graphs: one launch per step instead of hundreds.

A step runs on Triton's fused kernels or, where Triton or its compiler is missing, on torch's own operations over
gathered pages. Both read positions and pages from fixed buffers, so that a captured step serves any session; a batch is
padded to the next captured size.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import ModelConfig
from engine.model.attention import Segment
from engine.model.block import Attend, Block, block_forward
from engine.model.kv_cache import PAGE_TOKENS, BlockCache, KVPool
from engine.model.rope import RotaryTable

log = logging.getLogger("shoal.engine.graphs")

BATCHES = (1, 2, 4, 8, 16)
MAX_CAPTURED = 64  # each graph holds some memory for its intermediate results
SMALLEST_PAGES = 16  # 1024 tokens; longer contexts use separate graphs, doubling in size


@functools.cache
def triton_works() -> bool:
    """True if Triton can build and run a kernel on this machine; if not, logs the cause once."""
    try:
        from engine.model import triton_kernels as kernels
        from engine.model.linear import DenseLinear

        x = torch.ones(1, 64, device="cuda", dtype=torch.float16)
        out = torch.empty(1, 64, device="cuda", dtype=torch.float16)
        kernels.product(x, DenseLinear(x.expand(64, 64).contiguous()), out, kernels.Fold())
        return bool((out == 64).all())
    except Exception as error:  # a missing compiler can raise almost any exception
        log.warning("Triton cannot run kernels on this machine (%s); decode steps use torch's own operations", error)
        return False


@dataclass(frozen=True)
class SpanParts:
    """Weights, cache and rotations that a step of a span uses."""

    config: ModelConfig
    blocks: Sequence[Block]
    pool: KVPool
    rope: RotaryTable


@dataclass
class StepBuffers:
    """Fixed memory that a captured step reads and writes."""

    x: Tensor  # (rows, hidden)
    where: Tensor  # (rows, 1 + max_pages) int32: position, then pages
    staged: Tensor  # the host's copy of `where`, in pinned memory
    staged_pages: list[list[int] | None]  # page list that each row of `staged` holds now
    copied: torch.cuda.Event  # set once `staged` has been read and may be written again
    out: Tensor  # (rows, hidden)
    graph: torch.cuda.CUDAGraph


class DecodeGraphs:
    """Captured decode steps of one span, by batch size, page count and part of the span."""

    def __init__(self, parts: SpanParts) -> None:
        self._parts = parts
        self._captured: dict[tuple[int, int, int, int], StepBuffers] = {}
        self._memory: Any = None  # memory pool shared by all graphs
        self.fused = triton_works() and _kernels_support(parts.config)
        parts.pool.clears_slots = not self.fused  # `plain_step` reads whole pages, `fused_step` only written slots

    def covers(self, segments: Sequence[Segment]) -> bool:
        """True if a captured step can run these segments: one token each, at most `BATCHES[-1]` sessions."""
        return len(segments) <= BATCHES[-1] and all(segment.count == 1 for segment in segments)

    def step(self, hidden: Tensor, segments: Sequence[Segment], part: slice) -> Tensor:
        """Run one token of each session through blocks `part` of the span: (N, hidden) -> (N, hidden)."""
        rows = next(size for size in BATCHES if size >= len(segments))
        pages = SMALLEST_PAGES
        while pages < max(len(segment.lease.pages) for segment in segments):
            pages *= 2
        key = (rows, pages, part.start, part.stop)
        if key not in self._captured:
            if len(self._captured) >= MAX_CAPTURED:
                del self._captured[next(iter(self._captured))]  # the oldest capture
            self._captured[key] = self._capture(rows, pages, part)
        buffers = self._captured[key]
        buffers.x[: len(segments)].copy_(hidden, non_blocking=True)
        if len(segments) < rows:  # a padding row writes to the scratch page, which other rows read behind their mask
            buffers.x[len(segments) :].zero_()
        self._stage_positions(buffers, segments)
        buffers.graph.replay()
        return buffers.out[: len(segments)].clone()

    def _stage_positions(self, buffers: StepBuffers, segments: Sequence[Segment]) -> None:
        """Copy positions and pages to the device; rewrites only the rows whose pages changed."""
        buffers.copied.synchronize()
        table = buffers.staged.numpy()
        for row in range(len(buffers.staged_pages)):
            pages = segments[row].lease.pages if row < len(segments) else None
            table[row, 0] = segments[row].start if pages is not None else 0
            if buffers.staged_pages[row] is not pages:  # a lease replaces its list and never changes it in place
                used = 1 + len(pages or ())
                table[row, 1:used] = pages or ()
                table[row, used:] = self._parts.pool.scratch_page
                buffers.staged_pages[row] = pages
        buffers.where.copy_(buffers.staged, non_blocking=True)
        buffers.copied.record()

    def _capture(self, rows: int, pages: int, part: slice) -> StepBuffers:
        """Run the step once to warm up, then capture it as a graph over new buffers."""
        pool = self._parts.pool
        device = pool.device
        x = torch.zeros(rows, self._parts.config.hidden_size, device=device, dtype=pool.blocks[0].keys.dtype)
        staged = page_table(rows, pages, [], pool.scratch_page).pin_memory()
        where = staged.to(device)
        step = fused_step if self.fused else plain_step
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):  # warm-up: kernels and library handles cannot be built during capture
            step(self._parts, part, x, where)
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            out = step(self._parts, part, x, where)
        self._memory = self._memory or graph.pool()
        return StepBuffers(x, where, staged, [None] * rows, torch.cuda.Event(), out, graph)


def page_table(rows: int, pages: int, segments: Sequence[Segment], scratch_page: int) -> Tensor:
    """Return (rows, 1 + pages) int32: each segment's position and pages; unused rows point at the scratch page."""
    blank = [0] + [scratch_page] * pages
    table = [[s.start, *s.lease.pages, *blank[1 + len(s.lease.pages) :]] for s in segments]
    return torch.tensor(table + [blank] * (rows - len(segments)), dtype=torch.int32)


def fused_step(parts: SpanParts, part: slice, x: Tensor, where: Tensor) -> Tensor:
    """Run one token per row through Triton's kernels: five launches per block."""
    from engine.model import triton_kernels as kernels

    config, rows = parts.config, x.shape[0]
    positions = where[:, 0].contiguous()
    cos, sin = parts.rope.turns(positions)
    paged = kernels.PagedRows(positions, where[:, 1:].contiguous(), cos, sin)
    scratch = kernels.AttentionScratch(rows, config, where.shape[1] - 1, x.device)
    x = x.clone()  # the residual stream, updated in place
    qkv = x.new_empty(rows, (config.n_heads + 2 * config.n_kv_heads) * config.head_dim)
    attended = x.new_empty(rows, config.n_heads * config.head_dim)
    gated = x.new_empty(rows, config.intermediate_size)
    residual = kernels.Fold(residual=x)
    for block, cache in zip(parts.blocks[part], parts.pool.blocks[part], strict=True):
        kernels.product(x, block.qkv, qkv, kernels.Fold(norm=block.attn_norm, eps=config.norm_eps))
        kernels.attend(qkv, cache, attended, block, config, paged, scratch)
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
        cache.keys.index_copy_(2, new_slots, k.transpose(0, 2))
        cache.values.index_copy_(2, new_slots, v.transpose(0, 2))
        # (kv_heads, rows, length, head_dim) -> (rows, kv_heads, length, head_dim)
        keys, values = cache.keys[0][:, slots].transpose(0, 1), cache.values[0][:, slots].transpose(0, 1)
        mask = visible[:, None, None, :]
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
        return out.reshape(q.shape[0], -1)

    return attend


def _kernels_support(config: ModelConfig) -> bool:
    from engine.model import triton_kernels as kernels

    return kernels.supports(config)

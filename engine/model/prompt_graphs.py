"""Chunks of prompts on a card: what each block computes before and after attention, captured as two CUDA graphs.

A chunk has few rows for a card: it computes them in less time than a node's host takes to launch the kernels one by
one, beside an event loop that wants the same interpreter. Attention depends on the sessions of a chunk and is launched
as ever. A chunk is padded to the next captured size; the rows that are added see nobody and nobody sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.model.block import Attend, Block, after_attention, before_attention
from engine.model.cuda_graphs import Replay, captured, on_device
from engine.model.linear import DenseLinear

SIZES = (64, 256)  # rows; a chat's first prompt mostly has fewer than 64
Capture = Callable[[Callable[[], None]], Replay]


@dataclass(frozen=True)
class ChunkBuffers:
    """Fixed memory of all chunks of one size, which every block reads and writes."""

    x: Tensor  # (rows, hidden): into a block and out of it
    cos: Tensor
    sin: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    attended: Tensor  # (rows, heads * head_dim)


@dataclass(frozen=True)
class CapturedBlock:
    """A block's work around attention on the buffers of one size."""

    before: Replay
    after: Replay


class PromptGraphs:
    """Captured blocks by size of a chunk; blocks with weights in other forms than numbers are left out."""

    def __init__(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype, capture: Capture | None = None
    ) -> None:
        self._config, self._device, self._dtype = config, device, dtype
        self._capture = capture or self._captured
        self._memory: Any = None  # memory pool shared by all graphs
        self._buffers: dict[int, ChunkBuffers] = {}
        self._blocks: dict[tuple[int, int], CapturedBlock] = {}  # by size and block

    def add(self, blocks: Sequence[Block]) -> None:
        """Capture blocks for chunks of every size; those that are captured already stay as they are."""
        for rows in SIZES:
            for block in blocks:
                if (rows, block.index) not in self._blocks and _is_dense(block):
                    self._blocks[rows, block.index] = self._capture_block(block, self._buffers_of(rows))

    def keep(self, start: int, stop: int) -> None:
        """Forget all blocks but [start, stop)."""
        self._blocks = {key: own for key, own in self._blocks.items() if start <= key[1] < stop}

    def covers(self, blocks: Sequence[Block], rows: int) -> bool:
        """True if a chunk of so many rows can run through these blocks."""
        size = _size_of(rows)
        return size is not None and all((size, block.index) in self._blocks for block in blocks)

    def run(
        self, x: Tensor, rope: tuple[Tensor, Tensor], blocks: Sequence[Block], attends: Mapping[int, Attend]
    ) -> Tensor:
        """Run the rows x (N, hidden) on the device through blocks that are covered, as `block_forward` does."""
        rows, size = len(x), _size_of(len(x))
        assert size is not None, "the chunk is covered"
        buffers = self._buffers_of(size)
        for buffer, own in ((buffers.x, x), (buffers.cos, rope[0]), (buffers.sin, rope[1])):
            buffer[:rows].copy_(own)
        for buffer in (buffers.x, buffers.attended):
            buffer[rows:].zero_()
        q, k, v, attended = (own[:rows] for own in (buffers.q, buffers.k, buffers.v, buffers.attended))
        with on_device(self._device):
            for block in blocks:
                graphs = self._blocks[size, block.index]
                graphs.before()
                attended.copy_(attends[block.index](q, k, v))
                graphs.after()
        return buffers.x[:rows].clone()

    def _capture_block(self, block: Block, buffers: ChunkBuffers) -> CapturedBlock:
        def before() -> None:
            rope = (buffers.cos, buffers.sin)
            qkv = before_attention(block, self._config, buffers.x, rope, block.multiply)
            for buffer, own in zip((buffers.q, buffers.k, buffers.v), qkv, strict=True):
                buffer.copy_(own)

        def after() -> None:
            buffers.x.copy_(after_attention(block, self._config, buffers.x, buffers.attended, block.multiply))

        with on_device(self._device):
            return CapturedBlock(self._capture(before), self._capture(after))

    def _captured(self, run: Callable[[], None]) -> Replay:
        graph = captured(run, self._device, self._memory)
        self._memory = self._memory or graph.pool()
        return graph.replay

    def _buffers_of(self, rows: int) -> ChunkBuffers:
        if rows not in self._buffers:
            c = self._config
            q_heads, kv_heads = (rows, c.n_heads, 1, c.head_dim), (rows, c.n_kv_heads, 1, c.head_dim)
            turns = (rows, 1, 1, c.head_dim)
            shapes = ((rows, c.hidden_size), turns, turns, q_heads, kv_heads, kv_heads, (rows, c.n_heads * c.head_dim))
            zeros = (torch.zeros(shape, dtype=self._dtype, device=self._device) for shape in shapes)
            self._buffers[rows] = ChunkBuffers(*zeros)
        return self._buffers[rows]


def _size_of(rows: int) -> int | None:
    return next((size for size in SIZES if size >= rows), None)


def _is_dense(block: Block) -> bool:
    return all(isinstance(linear, DenseLinear) for linear in block.linears)

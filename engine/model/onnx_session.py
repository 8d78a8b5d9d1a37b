"""A span of grids on the CPU as one graph of ONNX Runtime, attention included, for steps of a single session.

One call a step instead of two a block, and the threads of one pool. The runtime's attention takes the keys and values
of a sequence in one piece of memory, so it is for sessions whose cache slots are neighbours, as nearly all are, in
blocks without a sliding window and with a cache of float32. Everything else is left to `onnx_block`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.model.block import Block
from engine.model.kv_cache import KVPool, Segment
from engine.model.onnx_block import (
    BlockWeights,
    RowTurns,
    add_gated,
    add_norm,
    add_qkv,
    add_residual_norm,
    add_turns,
)
from engine.model.onnx_graph import Graph, GraphWriter, Shifted, many_rows

MAX_ROWS = 8  # of a step: a token, and those that a draft guessed
SPIN_US = 50  # a sixth of a step less on two quiet cores; 200 are no faster, and slower beside other programs
MAX_BINDINGS = 64  # places in the pool and numbers of rows whose addresses are kept


class SessionGraph:
    """The graph of consecutive blocks over the cache of their pool."""

    def __init__(
        self, config: ModelConfig, blocks: Sequence[Block], weights: Mapping[int, BlockWeights], pool: KVPool
    ) -> None:
        assert can_join(config, blocks, pool)
        self._config, self._pool = config, pool
        self._graph = _whole_span(config, blocks, weights, pool)
        self._rows = {rows: _Rows(config, rows) for rows in range(1, MAX_ROWS + 1)}
        self._bound: OrderedDict[tuple[int, int], Callable[[], None]] = OrderedDict()  # by first slot and rows

    @property
    def nbytes(self) -> int:
        """Bytes that the graph takes beside the constants that it shares with the blocks' own graphs."""
        return self._graph.nbytes

    def covers(self, segments: Sequence[Segment]) -> bool:
        """True if the graph can compute a step of these segments."""
        if len(segments) != 1 or segments[0].lease.first_slot is None:
            return False
        return segments[0].count <= MAX_ROWS and segments[0].count < many_rows()

    def run(self, x: Tensor, cos: Tensor, sin: Tensor, segment: Segment) -> Tensor:
        """Run float32 rows x (N, hidden) through all blocks, and write their keys and values: (N, hidden).

        `cos` and `sin`, each (N, head_dim / 2), are those of the rows' positions.
        """
        first_slot = segment.lease.first_slot
        assert first_slot is not None, "only slots that are neighbours are covered"
        rows = self._rows[segment.count]
        rows.x.copy_(x)
        rows.turns.cos.copy_(cos)
        rows.turns.sin.copy_(sin)
        rows.last.fill_(segment.stop - 1)
        rows.total.fill_(segment.stop)
        self._binding(first_slot, segment.count)()
        return rows.y.clone()

    def _binding(self, first_slot: int, rows: int) -> Callable[[], None]:
        key = first_slot, rows
        if key not in self._bound:
            self._bound[key] = self._bind(first_slot, self._rows[rows])
            if len(self._bound) > MAX_BINDINGS:
                self._bound.popitem(last=False)
        self._bound.move_to_end(key)
        return self._bound[key]

    def _bind(self, first_slot: int, rows: _Rows) -> Callable[[], None]:
        # A head's keys of all slots lie behind one another, then those of the next head follow. So, seen from its first
        # slot, a session lies in memory as a cache of the pool's size does; and of that the runtime touches the
        # session's own tokens only, which end within the pool.
        shift = first_slot * self._config.head_dim
        caches = [Shifted(kept, shift) for cache in self._pool.blocks for kept in cache.tensors]
        return self._graph.bind((rows.x, *rows.turns, rows.last, rows.total, *caches), (rows.y, *caches))


class _Rows:
    """Memory for the inputs and the output of steps of one number of rows."""

    def __init__(self, config: ModelConfig, rows: int) -> None:
        self.x = torch.empty(rows, config.hidden_size)
        self.y = torch.empty(rows, config.hidden_size)
        self.turns = RowTurns.empty(config, rows)
        self.last = torch.empty(1, dtype=torch.int32)  # position of the last row
        self.total = torch.empty((), dtype=torch.int32)  # tokens of the session after the step


def can_join(config: ModelConfig, blocks: Sequence[Block], pool: KVPool) -> bool:
    """True if these blocks, with this cache, can be one graph."""
    has_windows = any(config.window_of(block.index) is not None for block in blocks)
    return pool.cache == "own" and pool.dtype == torch.float32 and pool.total_tokens > 0 and not has_windows


def _whole_span(
    config: ModelConfig, blocks: Sequence[Block], weights: Mapping[int, BlockWeights], pool: KVPool
) -> Graph:
    writer = GraphWriter()
    hidden, width = config.hidden_size, config.head_dim
    q_size, kv_size = config.n_heads * width, config.n_kv_heads * width
    shape = tuple(pool.blocks[0].keys.shape)
    residual = writer.input("x", ("N", hidden))
    turns = add_turns(writer, config)
    last, total = writer.input("last", (1,), torch.int32), writer.input("total", (), torch.int32)
    caches: list[str] = []  # as they are after the step: in the same memory
    heads = {"num_heads": config.n_heads, "kv_num_heads": config.n_kv_heads}
    down = ""
    for block in blocks:
        own = weights[block.index]
        if down:
            normed, residual = add_residual_norm(writer, down, residual, block.attn_norm, config)
        else:
            normed = add_norm(writer, residual, block.attn_norm, config)
        qk, v = add_qkv(writer, normed, turns, block, config, own)
        q, k = writer.add_many("Split", [qk, writer.shape(q_size, kv_size)], [None] * 2, axis=2)
        one_sequence = [
            writer.add("Reshape", [rows, writer.shape(1, -1, size)])
            for rows, size in ((q, q_size), (k, kv_size), (v, kv_size))
        ]
        before = [writer.input(f"{name}{block.index}", shape) for name in ("keys", "values")]
        attended, *after = writer.add_many(
            "GroupQueryAttention", [*one_sequence, *before, last, total], [None] * 3, own=True, **heads
        )
        caches += after
        rows = writer.add("Reshape", [attended, writer.shape(-1, q_size)])
        gated, residual = add_gated(writer, rows, residual, block, config, own)
        down = writer.product(gated, own["down"])
    writer.output(writer.add("Add", [down, residual]), ("N", hidden))
    for name in caches:
        writer.output(name, shape)
    return writer.compile(SPIN_US)

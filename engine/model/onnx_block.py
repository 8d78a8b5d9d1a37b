"""A block of grids on the CPU as two graphs of ONNX Runtime: before its attention and after it.

Between two products of a step lie norms, rotations, gates and sums, each a call into torch that takes longer than its
arithmetic for one row. In a graph they cost little. Attention stays torch's: it reads the paged cache where it lies
(`engine.model.attention`), for sessions of any length. Blocks with an adapter are left to `block_forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.model.block import Attend, Block, Matrix
from engine.model.linear import GridLinear, Linear
from engine.model.onnx_graph import Graph, GraphWriter, GridConstants, many_rows, runtime
from engine.sources.grid import Grid

MAX_BOUND = 8  # rows of the largest step whose memory is kept: it saves a tenth of a millisecond a block
BlockWeights = Mapping[Matrix, GridConstants]


class RowTurns(NamedTuple):
    """Cosines and sines of the rows of a step, each (N, head_dim / 2), and the numbers of the rows, (N, 1)."""

    cos: Tensor
    sin: Tensor
    numbers: Tensor

    @classmethod
    def empty(cls, config: ModelConfig, rows: int) -> RowTurns:
        """Return memory for the cosines and sines of so many rows."""
        cos, sin = torch.empty(2, rows, config.head_dim // 2)
        return cls(cos, sin, torch.arange(rows)[:, None])


class BoundRows:
    """Memory for steps of one number of rows, which all blocks use in turn, and views of it as attention takes them."""

    def __init__(self, config: ModelConfig, rows: int) -> None:
        heads, kv_heads, width = config.n_heads, config.n_kv_heads, config.head_dim
        self.x = torch.empty(rows, config.hidden_size)  # the input of each block, and its output
        self.turns = RowTurns.empty(config, rows)
        self.qk = torch.empty(rows, 1, (heads + kv_heads) * width)
        self.v = torch.empty(rows, kv_heads * width)
        self.attended = torch.empty(rows, heads * width)
        q, k = self.qk.view(rows, heads + kv_heads, 1, width).split((heads, kv_heads), dim=1)
        self.qkv = q, k, self.v.view(rows, kv_heads, 1, width)


class BlockGraphs:
    """The graphs of one block; those for many rows are made when they are needed first."""

    def __init__(self, block: Block, config: ModelConfig) -> None:
        self._block, self._config = block, config
        self.weights = {name: _constants(getattr(block, name)) for name in get_args(Matrix)}
        self._before: dict[bool, Graph] = {}
        self._after: dict[bool, Graph] = {}
        self._bound: dict[int, tuple[Callable[[], None], Callable[[], None]]] = {}  # by the number of rows
        self._prepare(many=False)

    def _prepare(self, *, many: bool) -> None:
        if many not in self._before:
            self._before[many] = _before_attention(self._block, self._config, self.weights, many=many)
            self._after[many] = _after_attention(self._block, self._config, self.weights, many=many)

    @property
    def nbytes(self) -> int:
        """Bytes that the graphs take beside the block's own weights."""
        graphs = sum(graph.nbytes for graph in (*self._before.values(), *self._after.values()))
        return graphs + sum(weights.nbytes for weights in self.weights.values())

    def forward(self, x: Tensor, turns: RowTurns, attend: Attend, *, many: bool) -> Tensor:
        """Run the block over float32 rows x (N, hidden), as `block_forward` does."""
        heads, kv_heads, head_dim = self._config.n_heads, self._config.n_kv_heads, self._config.head_dim
        rows = x.shape[0]
        self._prepare(many=many)
        qk, v = self._before[many].run(x, *turns)
        q, k = qk.view(rows, heads + kv_heads, 1, head_dim).split((heads, kv_heads), dim=1)
        attended = attend(q, k, v.view(rows, kv_heads, 1, head_dim))
        return self._after[many].run(attended.contiguous(), x)[0]

    def forward_bound(self, rows: BoundRows, attend: Attend) -> None:
        """Run the block over the rows x, in place; always with the same memory for the same number of rows."""
        count = rows.x.shape[0]
        if count not in self._bound:
            # The output may take the input's place: it is written by the last operation, which does not read the input.
            before = self._before[False].bind((rows.x, *rows.turns), (rows.qk, rows.v))
            self._bound[count] = before, self._after[False].bind((rows.attended, rows.x), (rows.x,))
        before, after = self._bound[count]
        before()
        rows.attended.copy_(attend(*rows.qkv))
        after()


class SpanGraphs:
    """The graphs of a span's blocks, by the block's index; empty where blocks are computed by torch."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._blocks: Mapping[int, BlockGraphs] = {}  # replaced, never changed: other threads read it meanwhile
        self._rows: dict[int, BoundRows] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def nbytes(self) -> int:
        """Bytes that the graphs take beside the blocks' own weights."""
        return sum(graphs.nbytes for graphs in self._blocks.values())

    def add(self, block: Block) -> None:
        """Compile a block's graphs, if all its matrices are grids on the CPU and ONNX Runtime is there."""
        on_cpu = block.attn_norm.device.type == "cpu"
        in_grids = all(isinstance(each, GridLinear) and isinstance(each.grid, Grid) for each in block.linears)
        if on_cpu and in_grids and runtime() is not None:
            self._blocks = {**self._blocks, block.index: BlockGraphs(block, self._config)}

    def keep(self, start: int, stop: int) -> None:
        """Drop the graphs of all blocks but [start, stop)."""
        self._blocks = {index: graphs for index, graphs in self._blocks.items() if start <= index < stop}

    def covers(self, blocks: Sequence[Block]) -> bool:
        """True if all these blocks have graphs."""
        return all(block.index in self._blocks for block in blocks)

    def weights(self, blocks: Sequence[Block]) -> dict[int, BlockWeights]:
        """Return the constants of blocks that have graphs, by the block's index."""
        return {block.index: self._blocks[block.index].weights for block in blocks}

    def run(self, x: Tensor, cos: Tensor, sin: Tensor, attends: Mapping[int, Attend]) -> Tensor:
        """Run float32 rows x (N, hidden) through the blocks that `attends` names, in its order: (N, hidden).

        `cos` and `sin`, each (N, head_dim / 2), are those of the rows' positions.
        """
        count = x.shape[0]
        many = count >= many_rows()
        if many or count > MAX_BOUND:
            turns = RowTurns(cos, sin, torch.arange(count)[:, None])
            for index, attend in attends.items():
                x = self._blocks[index].forward(x, turns, attend, many=many)
            return x
        rows = self._rows.get(count)
        if rows is None:
            rows = self._rows[count] = BoundRows(self._config, count)
        rows.x.copy_(x)
        rows.turns.cos.copy_(cos)
        rows.turns.sin.copy_(sin)
        for index, attend in attends.items():
            self._blocks[index].forward_bound(rows, attend)
        return rows.x.clone()


def _constants(linear: Linear) -> GridConstants:
    assert isinstance(linear, GridLinear), "a block with graphs has grids only"
    assert isinstance(linear.grid, Grid), "tiles are for GPUs"
    return GridConstants(linear.grid, linear.bias)


def _before_attention(block: Block, config: ModelConfig, weights: BlockWeights, *, many: bool) -> Graph:
    """Norm, product with q, k and v, and rotation: rows -> q and k (N, 1, heads * head_dim), v (N, kv heads * …)."""
    writer = GraphWriter(many=many)
    x = writer.input("x", ("N", config.hidden_size))
    turns = add_turns(writer, config)
    qk, v = add_qkv(writer, add_norm(writer, x, block.attn_norm, config), turns, block, config, weights)
    q_size, kv_size = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    writer.output(qk, ("N", 1, q_size + kv_size))
    writer.output(v, ("N", kv_size))
    return writer.compile()


def _after_attention(block: Block, config: ModelConfig, weights: BlockWeights, *, many: bool) -> Graph:
    """Product with o, norm, gated products, and both residuals: attended rows and the block's input -> output."""
    writer = GraphWriter(many=many)
    attended = writer.input("attended", ("N", config.n_heads * config.head_dim))
    x = writer.input("x", ("N", config.hidden_size))
    gated, residual = add_gated(writer, attended, x, block, config, weights)
    writer.output(writer.product(gated, weights["down"], plus=residual), ("N", config.hidden_size))
    return writer.compile()


# --- parts of a block, as operations of a graph -----------------------------------------------------------------------


def add_turns(writer: GraphWriter, config: ModelConfig) -> Sequence[str]:
    """Add the inputs that say how the rows are turned (`RowTurns`)."""
    half = config.head_dim // 2
    return (
        writer.input("cos", ("N", half)),
        writer.input("sin", ("N", half)),
        writer.input("numbers", ("N", 1), torch.int64),
    )


def add_norm(writer: GraphWriter, x: str, weight: Tensor, config: ModelConfig) -> str:
    """Add RMSNorm."""
    inputs = [x, writer.constant(weight)]
    return writer.add("SimplifiedLayerNormalization", inputs, axis=-1, epsilon=config.norm_eps)


def add_residual_norm(writer: GraphWriter, x: str, residual: str, weight: Tensor, config: ModelConfig) -> Sequence[str]:
    """Add a sum and its RMSNorm; returns the norm and the sum."""
    inputs, outs = [x, residual, writer.constant(weight)], (None, "", "", None)
    found = writer.add_many("SkipSimplifiedLayerNormalization", inputs, outs, own=True, epsilon=config.norm_eps)
    return found[0], found[3]


def add_qkv(
    writer: GraphWriter, x: str, turns: Sequence[str], block: Block, config: ModelConfig, weights: BlockWeights
) -> tuple[str, str]:
    """Add the product with q, k and v and the rotation; returns q and k (N, 1, heads * head_dim), and v (N, …)."""
    width = config.head_dim
    q_size, kv_size = config.n_heads * width, config.n_kv_heads * width
    qkv = writer.product(x, weights["qkv"])
    if block.q_norm is not None and block.k_norm is not None:
        q, k, v = writer.add_many("Split", [qkv, writer.shape(q_size, kv_size, kv_size)], [None] * 3, axis=1)
        both = []
        for each, count, weight in ((q, config.n_heads, block.q_norm), (k, config.n_kv_heads, block.k_norm)):
            heads = writer.add("Reshape", [each, writer.shape(-1, count, width)])
            normed = add_norm(writer, heads, weight, config)
            both.append(writer.add("Reshape", [normed, writer.shape(-1, 1, count * width)]))
        qk = writer.add("Concat", both, axis=2)
    else:
        flat, v = writer.add_many("Split", [qkv, writer.shape(q_size + kv_size, kv_size)], [None] * 2, axis=1)
        qk = writer.add("Reshape", [flat, writer.shape(-1, 1, q_size + kv_size)])
    cos, sin, numbers = turns
    count = config.n_heads + config.n_kv_heads
    # Every row is a sequence of one token whose position is the row's own number in the tables.
    return writer.add("RotaryEmbedding", [qk, numbers, cos, sin], own=True, num_heads=count, interleaved=0), v


def add_gated(
    writer: GraphWriter, attended: str, x: str, block: Block, config: ModelConfig, weights: BlockWeights
) -> tuple[str, str]:
    """Add what follows attention, up to the input of the last product; returns that and what is added to its result."""
    projected = writer.product(attended, weights["o"])
    normed, residual = add_residual_norm(writer, projected, x, block.mlp_norm, config)
    both = writer.product(normed, weights["gate_up"])
    inner = config.intermediate_size
    gate, up = writer.add_many("Split", [both, writer.shape(inner, inner)], [None] * 2, axis=1)
    gate = writer.add("QuickGelu", [gate], own=True, alpha=1.0)  # x × sigmoid(x), which is silu
    return writer.add("Mul", [gate, up]), residual

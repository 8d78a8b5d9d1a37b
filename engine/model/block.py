"""One transformer block of the Llama line, for every family: biases, QK-norm and windows are flags of the config.

A block works on rows: (N, hidden), where the N tokens of a step may belong to several sequences. Only attention depends
on which row belongs to which sequence, so it is passed in as a function (`engine.model.attention`). Nothing here writes
in place, so the same code runs under autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import ModelConfig
from engine.device.kinds import kind_of
from engine.model.grid_tiles import fits_tiles, tiled
from engine.model.linear import DenseLinear, GridLinear, Int8Linear, Linear, packed
from engine.model.rope import rotate
from engine.sources.grid import QUANTISED_GROUP, Grid, join, quantise

# Weights as numbers, in 8 bits a row, in 4 bits a group of 32, or in the grid of 4 to 8 bits that their file has.
Quantisation = Literal["none", "int8", "int4", "stored"]
# q (N, heads, 1, head_dim), k and v (N, kv_heads, 1, head_dim) -> (N, heads * head_dim)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Matrix = Literal["qkv", "o", "gate_up", "down"]  # the products of a block
Multiply = Callable[[Matrix, Tensor, Tensor | None], Tensor]  # (matrix, rows, residual) -> rows
FUSED: dict[Matrix, tuple[str, ...]] = {
    "qkv": ("q", "k", "v"),
    "o": ("o",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
}


@dataclass
class Block:
    """Weights of one block; q, k, v and gate, up are fused so that each group is one product."""

    index: int
    attn_norm: Tensor
    qkv: Linear
    o: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear

    def multiply(self, matrix: Matrix, x: Tensor, residual: Tensor | None) -> Tensor:
        """Return the product of rows x with one of the block's matrices, plus the residual if given."""
        linear: Linear = getattr(self, matrix)
        return linear(x, residual)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The block's products."""
        return self.qkv, self.o, self.gate_up, self.down

    @property
    def nbytes(self) -> int:
        """Bytes that all weights take in memory."""
        norms = (self.attn_norm, self.mlp_norm, self.q_norm, self.k_norm)
        return sum(n.nbytes for n in norms if n is not None) + sum(linear.nbytes for linear in self.linears)


@dataclass(frozen=True)
class WeightOptions:
    """Device, dtype and quantisation of weights; `packed` adds, on CPU, a second pre-packed copy for batches."""

    device: torch.device
    dtype: torch.dtype
    quantisation: Quantisation = "none"
    packed: bool = False


class TensorReader(Protocol):
    """The tensors of one block, by role."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each tensor that the block has."""

    def read(self, outs: Mapping[str, Tensor]) -> None:
        """Fill these tensors."""

    def grid(self, role: str) -> Grid | None:
        """Return a matrix in the grid of its file, on the CPU; None if it has none."""


def build_block(index: int, reader: TensorReader, how: WeightOptions) -> Block:
    """Read the tensors of one block into their place on the device, fused groups into one matrix each."""
    shapes = reader.shapes  # checked by the reader: every role that the config wants is there
    pending: dict[str, Tensor] = {}  # allocated, and to be read

    def vectors(*roles: str) -> Tensor | None:
        """Allocate 1-D tensors one after the other; None if the block has none of them."""
        sizes = [shapes[role][0] for role in roles if role in shapes]
        if not sizes:
            return None
        joined = torch.empty(sum(sizes), device=how.device, dtype=how.dtype)
        pending.update(zip((role for role in roles if role in shapes), joined.split(sizes), strict=True))
        return joined

    def linear(*roles: str) -> Linear:
        bias = vectors(*(f"{role}_bias" for role in roles))
        sizes, columns = [shapes[role][0] for role in roles], shapes[roles[0]][1]
        if how.quantisation == "int8":
            like = torch.empty(0, device=how.device, dtype=how.dtype)
            made = Int8Linear.empty(sum(sizes), columns, like, bias)
            for index, role in enumerate(roles):  # one dense matrix at a time
                weight = like.new_empty(shapes[role])
                reader.read({role: weight})
                made.fill(sum(sizes[:index]), weight)
            return made
        if how.quantisation in ("int4", "stored") and (grids := _grids(reader, roles, how)):
            grid = join(grids)
            in_tiles = kind_of(how.device).captures_steps and fits_tiles(grid)
            return GridLinear(tiled(grid) if in_tiles else grid, bias)
        weight = torch.empty(sum(sizes), columns, device=how.device, dtype=how.dtype)
        pending.update(zip(roles, weight.split(sizes), strict=True))
        return DenseLinear(weight, bias)

    attn_norm, mlp_norm = vectors("attn_norm"), vectors("mlp_norm")
    assert attn_norm is not None
    assert mlp_norm is not None
    block = Block(
        index=index,
        attn_norm=attn_norm,
        qkv=linear("q", "k", "v"),
        o=linear("o"),
        q_norm=vectors("q_norm"),
        k_norm=vectors("k_norm"),
        mlp_norm=mlp_norm,
        gate_up=linear("gate", "up"),
        down=linear("down"),
    )
    reader.read(pending)
    if how.packed:
        for each in block.linears:
            if isinstance(each, DenseLinear):
                each.packed = packed(each.weight)
    return block


def _grids(reader: TensorReader, roles: tuple[str, ...], how: WeightOptions) -> list[Grid]:
    """Return matrices as grids; empty if they are to be kept as numbers.

    A grid of the file is never rounded again. With "int4", any other matrix is, if its rows consist of whole groups.
    """
    grids: list[Grid] = []
    for role in roles:
        grid = reader.grid(role)
        if grid is None and how.quantisation == "int4" and reader.shapes[role][1] % QUANTISED_GROUP == 0:
            weight = torch.empty(reader.shapes[role], device=how.device, dtype=how.dtype)
            reader.read({role: weight})
            grid = quantise(weight)
        if grid is None:
            return []
        grids.append(grid.to(how.device))
    return grids


def block_forward(
    block: Block,
    config: ModelConfig,
    x: Tensor,
    rope: tuple[Tensor, Tensor],
    attend: Attend,
    multiply: Multiply | None = None,
) -> Tensor:
    """Run one block over the rows x (N, hidden); `rope` holds the rows' cosines and sines.

    `multiply` takes the place of the block's own products, for adapters.
    """
    multiply = multiply or block.multiply
    q, k, v = before_attention(block, config, x, rope, multiply)
    return after_attention(block, config, x, attend(q, k, v), multiply)


def before_attention(
    block: Block, config: ModelConfig, x: Tensor, rope: tuple[Tensor, Tensor], multiply: Multiply
) -> tuple[Tensor, Tensor, Tensor]:
    """The first half of `block_forward`: queries, keys and values, each (N, heads, 1, head_dim)."""
    heads, kv_heads, head_dim = config.n_heads, config.n_kv_heads, config.head_dim
    normed = F.rms_norm(x, (config.hidden_size,), block.attn_norm, config.norm_eps)
    qkv = multiply("qkv", normed, None).view(-1, heads + 2 * kv_heads, 1, head_dim)
    if block.q_norm is not None:
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        q = rotate(F.rms_norm(q, (head_dim,), block.q_norm, config.norm_eps), *rope)
        k = rotate(F.rms_norm(k, (head_dim,), block.k_norm, config.norm_eps), *rope)
    else:
        qk, v = qkv.split((heads + kv_heads, kv_heads), dim=1)
        q, k = rotate(qk, *rope).split((heads, kv_heads), dim=1)
    return q, k, v


def after_attention(block: Block, config: ModelConfig, x: Tensor, attended: Tensor, multiply: Multiply) -> Tensor:
    """The second half of `block_forward`: the rows x and what attention gave for them become the block's output."""
    x = multiply("o", attended, x)
    normed = F.rms_norm(x, (config.hidden_size,), block.mlp_norm, config.norm_eps)
    gate, up = multiply("gate_up", normed, None).chunk(2, dim=-1)
    return multiply("down", F.silu(gate) * up, x)

"""Matrices in the grid of their file: small integers, and a scale and perhaps a minimum for each group of columns.

GGUF's types of 4, 5, 6 and 8 bits are kept as they are: nothing is rounded again, and `Grid.dense` gives the numbers
that `engine.sources.dequant` gives. Types of 5 and 6 bits take a byte a weight, since no product reads them packed.
`quantise` makes a grid of 4 bits from a matrix of plain numbers; `engine.sources.packed` makes those of AWQ and GPTQ
checkpoints. Products with grids are left to `engine.model`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from engine.sources.layout import KIND_SIZES, PACKED_GROUPS

QUANTISED_GROUP = 32  # columns that share a scale and a minimum in a grid made by `quantise`
_SLICE_ELEMENTS = 1 << 22  # decoded, rounded or put into tiles at a time: a card may be nearly full while it loads
_LARGEST_HALF = 65504.0


@dataclass(frozen=True)
class Grid:
    """A matrix (out, in): scale × (integer - zero), or scale × integer + minimum where there are minima."""

    bits: Literal[4, 8]  # of an integer in memory
    group: int  # columns that share a scale
    zero: int  # the middle of the integers; what they mean if there are no minima
    quantised: Tensor  # uint8: (out, in), or (out, in / 2) with the even column of each pair in the low half
    scale: Tensor  # (out, in / group), float16 or float32
    minimum: Tensor | None  # like `scale`

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.quantised.shape[0], self.quantised.shape[1] * 8 // self.bits

    @property
    def nbytes(self) -> int:
        """Bytes of integers, scales and minima."""
        return self.quantised.nbytes + self.scale.nbytes + (0 if self.minimum is None else self.minimum.nbytes)

    def to(self, device: torch.device) -> Grid:
        """Return the grid on a device."""
        minimum = None if self.minimum is None else self.minimum.to(device)
        return replace(self, quantised=self.quantised.to(device), scale=self.scale.to(device), minimum=minimum)

    def rows(self, which: slice | Tensor) -> Grid:
        """Return the grid of some rows."""
        minimum = None if self.minimum is None else self.minimum[which]
        return replace(self, quantised=self.quantised[which], scale=self.scale[which], minimum=minimum)

    def integers(self) -> Tensor:
        """Return the integers as uint8 (out, in)."""
        return unpack(self.quantised) if self.bits == 4 else self.quantised

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix as numbers, computed in float32."""
        return numbers_of(self.integers(), self.group, self.zero, self.scale, self.minimum).to(dtype)


def numbers_of(integers: Tensor, group: int, zero: int, scale: Tensor, minimum: Tensor | None) -> Tensor:
    """Return integers (out, in) with their scales and minima, (out, in / group), as float32."""
    values = integers.reshape(integers.shape[0], -1, group).float()
    if minimum is None:
        values = values.sub_(zero).mul_(scale.float()[..., None])
    else:
        values = values.mul_(scale.float()[..., None]).add_(minimum.float()[..., None])
    return values.reshape(integers.shape)


def unpack(packed: Tensor) -> Tensor:
    """Return the two integers of each byte, low half first: (out, in / 2) -> (out, in)."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).view(packed.shape[0], -1)


def pack(integers: Tensor) -> Tensor:
    """Put each pair of integers below 16 into one byte, low half first: (out, in) -> (out, in / 2)."""
    return integers[:, 0::2] | (integers[:, 1::2] << 4)


def join(grids: Sequence[Grid]) -> Grid:
    """Put the rows of several grids into one; grids of another form are first given that of the finest.

    Then a weight may differ from that of its own grid by float32's rounding, and it may take more bits.
    """
    first = grids[0]
    alike = all((g.bits, g.group, g.zero, g.minimum is None) == _form(first) for g in grids)
    alike = alike and all(g.scale.dtype == first.scale.dtype for g in grids)
    if not alike:
        bits: Literal[4, 8] = 8 if any(g.bits == 8 for g in grids) else 4
        group = min(g.group for g in grids)
        grids = [_widened(g, bits, group) for g in grids]
        first = grids[0]
    minima = [g.minimum for g in grids if g.minimum is not None]
    return Grid(
        first.bits,
        first.group,
        max(g.zero for g in grids),
        torch.cat([g.quantised for g in grids]),
        torch.cat([g.scale for g in grids]),
        torch.cat(minima) if minima else None,
    )


def _form(grid: Grid) -> tuple[int, int, int, bool]:
    return grid.bits, grid.group, grid.zero, grid.minimum is None


def _widened(grid: Grid, bits: Literal[4, 8], group: int) -> Grid:
    """Return a grid with at least these bits, at most this group, float32 scales, and minima."""
    scale = grid.scale.float()
    minimum = scale * -grid.zero if grid.minimum is None else grid.minimum.float()
    repeats = grid.group // group
    quantised = grid.quantised if grid.bits == bits else unpack(grid.quantised)
    scale, minimum = scale.repeat_interleave(repeats, dim=1), minimum.repeat_interleave(repeats, dim=1)
    return Grid(bits, group, grid.zero, quantised, scale, minimum)


def row_slices(n_out: int, n_in: int) -> list[slice]:
    """Return slices of a matrix's rows, so that work on one after the other takes little memory.

    All but the last have a multiple of 16 rows.
    """
    rows = max(16, _SLICE_ELEMENTS // n_in // 16 * 16)
    return [slice(first, first + rows) for first in range(0, n_out, rows)]


def quantise(weight: Tensor) -> Grid:
    """Round a matrix to 4 bits: in each group the least number becomes 0, the largest 15, and steps between are even.

    Scale and minimum are rounded to float16 first, so that the integers fit what is kept of them.
    """
    return join([_quantised(weight[rows]) for rows in row_slices(*weight.shape)])


def _quantised(weight: Tensor) -> Grid:
    groups = weight.float().view(weight.shape[0], -1, QUANTISED_GROUP)
    low, high = (end.clamp(-_LARGEST_HALF, _LARGEST_HALF) for end in groups.aminmax(dim=-1))
    minimum, scale = low.half(), ((high - low) / 15).half()
    steps = scale.float().clamp_min(1e-12)[..., None]
    integers = ((groups - minimum.float()[..., None]) / steps).round_().clamp_(0, 15).to(torch.uint8)
    return Grid(4, QUANTISED_GROUP, 8, pack(integers.view(weight.shape)), scale, minimum)


class _Decoded(NamedTuple):
    """Blocks of a GGUF tensor as integers (blocks, elements), scales and minima (blocks, groups)."""

    integers: Tensor
    scale: Tensor
    minimum: Tensor | None = None


class _Form(NamedTuple):
    bits: Literal[4, 8]
    group: int
    zero: int
    decode: Callable[[Tensor], _Decoded]


def _half(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 at byte `start` of each block: (blocks, 1)."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def _nibbles(packed: Tensor) -> Tensor:
    """Unpack (blocks, 16) bytes to (blocks, 32) values: all low halves, then all high halves."""
    return torch.cat((packed & 15, packed >> 4), dim=1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """Unpack (blocks, 4) bytes to the (blocks, 32) fifth bits of 5-bit values, each 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (((packed.unsqueeze(-1) >> shifts) & 1) << 4).view(packed.shape[0], 32)


def _q4_0(blocks: Tensor) -> _Decoded:
    return _Decoded(_nibbles(blocks[:, 2:]), _half(blocks, 0))


def _q4_1(blocks: Tensor) -> _Decoded:
    return _Decoded(_nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Tensor) -> _Decoded:
    return _Decoded(_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), _half(blocks, 0))


def _q5_1(blocks: Tensor) -> _Decoded:
    return _Decoded(_nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Tensor) -> _Decoded:
    return _Decoded(blocks[:, 2:] ^ 0x80, _half(blocks, 0))  # a signed byte plus 128


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eight 6-bit scales and minima of Q4_K and Q5_K times their shared factors, each (blocks, 8)."""
    low, high, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([low & 0x3F, (mixed & 0x0F) | ((low >> 2) & 0x30)], dim=1)
    minima = torch.cat([high & 0x3F, (mixed >> 4) | ((high >> 2) & 0x30)], dim=1)
    return _half(blocks, 0).float() * scales, -(_half(blocks, 2).float() * minima)


def _paired_nibbles(packed: Tensor) -> Tensor:
    """Unpack (blocks, 128) bytes to (blocks, 256) values: of every 32 bytes the low halves, then the high halves."""
    groups = packed.reshape(-1, 4, 1, 32)
    return torch.cat([groups & 0x0F, groups >> 4], dim=2).view(-1, 256)


def _q4_k(blocks: Tensor) -> _Decoded:
    return _Decoded(_paired_nibbles(blocks[:, 16:]), *_scales_and_minima(blocks))


def _q5_k(blocks: Tensor) -> _Decoded:
    shifts = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    fifth = ((blocks[:, 16:48].unsqueeze(1) >> shifts) & 1) << 4  # (blocks, 8, 32)
    return _Decoded(_paired_nibbles(blocks[:, 48:]) | fifth.view(-1, 256), *_scales_and_minima(blocks))


def _q6_k(blocks: Tensor) -> _Decoded:
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = torch.cat([low & 0x0F, low >> 4], dim=2).view(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3) << 4  # (blocks, 2, 4, 32)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float() * _half(blocks, 208).float()
    return _Decoded((low | high).view(-1, 256), scales)


_FORMS: dict[str, _Form] = {
    "Q4_0": _Form(4, 32, 8, _q4_0),
    "Q4_1": _Form(4, 32, 8, _q4_1),
    "Q5_0": _Form(8, 32, 16, _q5_0),
    "Q5_1": _Form(8, 32, 16, _q5_1),
    "Q8_0": _Form(8, 32, 128, _q8_0),
    "Q4_K": _Form(4, 32, 8, _q4_k),
    "Q5_K": _Form(8, 32, 16, _q5_k),
    "Q6_K": _Form(8, 16, 32, _q6_k),
}
GRID_KINDS = frozenset(_FORMS) | PACKED_GROUPS.keys()  # types that are kept in their own grid


@cache
def grid_bytes_per_weight(kind: str) -> float:
    """Bytes that a weight of this type takes as a grid, scales and minima included."""
    if kind in PACKED_GROUPS:
        return 1 / 2 + 8 / PACKED_GROUPS[kind]  # with float32 factors; less if all zero points are in the middle
    form = _FORMS[kind]
    factors = form.decode(torch.zeros(1, KIND_SIZES[kind][1], dtype=torch.uint8))
    per_group = factors.scale.element_size() * (1 if factors.minimum is None else 2)
    return form.bits / 8 + per_group / form.group


def block_grid_bytes(groups: Iterable[Sequence[tuple[str, tuple[int, ...]]]]) -> float | None:
    """Mean bytes of a block's weights as grids; None if none of them is of a type in `GRID_KINDS`.

    `groups` are the types and shapes of the matrices that are joined to one each. A group with another type is kept as
    numbers and counted with 4 bytes; one of several types is counted as `join` keeps it.
    """
    total, count, has_grids = 0.0, 0, False
    for group in groups:
        kinds, weights = {kind for kind, _ in group}, sum(math.prod(shape) for _, shape in group)
        if not kinds <= GRID_KINDS:
            per_weight = 4.0
        elif len(kinds) == 1:
            per_weight, has_grids = grid_bytes_per_weight(next(iter(kinds))), True
        else:
            forms = [_bits_and_group(kind) for kind in kinds]
            per_weight, has_grids = max(bits for bits, _ in forms) / 8 + 8 / min(group for _, group in forms), True
        total, count = total + per_weight * weights, count + weights
    return total / count if has_grids else None


def _bits_and_group(kind: str) -> tuple[int, int]:
    return (4, PACKED_GROUPS[kind]) if kind in PACKED_GROUPS else _FORMS[kind][:2]


def decode_grid(raw: Tensor, kind: str, shape: tuple[int, ...]) -> Grid:
    """Turn the bytes of a tensor of one of GGUF's types into a grid, on the CPU."""
    form, (n_out, n_in), (elements, size) = _FORMS[kind], shape, KIND_SIZES[kind]
    blocks = raw.view(n_out, n_in // elements, size)
    slices = []
    for part in (blocks[rows] for rows in row_slices(n_out, n_in)):
        decoded = form.decode(part.reshape(-1, size))
        integers = decoded.integers.view(len(part), n_in)
        minimum = None if decoded.minimum is None else decoded.minimum.view(len(part), -1)
        packed = pack(integers) if form.bits == 4 else integers
        slices.append(Grid(form.bits, form.group, form.zero, packed, decoded.scale.view(len(part), -1), minimum))
    return join(slices)

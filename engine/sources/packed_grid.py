"""Makes grids of the matrices of AWQ and GPTQ checkpoints; `packed` describes their form."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.sources.grid import Grid, pack
from engine.sources.layout import PACKED_GROUPS

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # which of a word's integers is that of column 0, 1, …
_MIDDLE = 8


def decode_packed(raw: Tensor, kind: str, shape: tuple[int, ...]) -> Grid:
    """Turn the bytes of an entry made by `find_packed` into a grid, on the CPU.

    Zero points that are all in the middle need no minima. Other minima are scale × -zero, which needs more bits than
    float16 has: then scales and minima are float32.
    """
    (n_out, n_in), group = shape, PACKED_GROUPS[kind]
    groups = n_in // group
    weights, zeros, scales = raw.split((n_out * n_in // 2, groups * n_out // 2, groups * n_out * 2))
    scale = scales.view(torch.float16).view(groups, n_out).t().contiguous()
    if kind.startswith("AWQ"):
        integers = _integers(weights, n_in, _AWQ_ORDER)
        quantised = pack(integers.t().contiguous())
        zero = _integers(zeros, groups, _AWQ_ORDER)
    else:
        # A word's eight rows are eight columns here, and its bytes hold the pairs that a grid has.
        quantised = weights.view(n_in // 8, n_out, 4).transpose(0, 1).reshape(n_out, n_in // 2)
        zero = _integers(zeros, groups, tuple(range(8)))
        zero = zero if kind.startswith("GPTQ_V2") else (zero + 1) & 15
    zero = zero.t()
    if bool((zero == _MIDDLE).all()):
        return Grid(4, group, _MIDDLE, quantised, scale, None)
    wide = scale.float()
    return Grid(4, group, _MIDDLE, quantised, wide, wide * -zero.float())


def _integers(raw: Tensor, rows: int, order: tuple[int, ...]) -> Tensor:
    """Unpack words of eight integers, of which number order[i] is that of column i: (rows, columns) uint8."""
    both = raw.view(rows, -1, 4)  # (rows, words, bytes)
    integers = torch.stack((both & 15, both >> 4), dim=-1).view(rows, -1, 8)
    return integers[..., list(order)].reshape(rows, -1)

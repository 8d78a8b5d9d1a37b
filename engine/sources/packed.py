"""Matrices of AWQ and GPTQ checkpoints: 4 bits a weight, with a scale and a zero point for each group of columns.

A file has such a matrix (out, in) transposed, as three tensors: `qweight` with eight integers in each 32-bit word,
`qzeros` likewise, and `scales` in float16. A weight is scale × (integer - zero). Here the three are one entry, their
bytes one after the other, so that a manifest and peers handle it as any other tensor. `decode_packed` makes the grid of
it, without rounding anything.

| | qweight | words hold | qzeros |
|---|---|---|---|
| GPTQ | (in / 8, out) | eight rows of the file in order | (in / group, out / 8), zero - 1; the second format: zero |
| AWQ | (in, out / 8) | columns 0, 2, 4, 6, 1, 3, 5, 7 | (in / group, out / 8) in the same order |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.errors import SourceError
from engine.sources.base import TensorEntry
from engine.sources.device_reader import read_range
from engine.sources.files import AGAIN, Fields, shown
from engine.sources.grid import Grid, pack
from engine.sources.layout import PACKED_GROUPS

_ELSE = "take the unquantised model or a GGUF file of it"
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # which of a word's integers is that of column 0, 1, …
_MIDDLE = 8


@dataclass(frozen=True)
class Packing:
    """The form of a checkpoint's quantised matrices: one of `PACKED_GROUPS`."""

    kind: str

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return PACKED_GROUPS[self.kind]

    def shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the three tensors in the file for a matrix (out, in)."""
        n_out, n_in = shape
        qweight = (n_in, n_out // 8) if self.kind.startswith("AWQ") else (n_in // 8, n_out)
        return {
            "qweight": qweight,
            "qzeros": (n_in // self.group, n_out // 8),
            "scales": (n_in // self.group, n_out),
        }


def parse_packing(config: Mapping[str, Any], origin: str) -> Packing | None:
    """Read `quantization_config` of a `config.json`; None if the weights are plain numbers.

    Raises `SourceError` for a form that is not read here.
    """
    values = config.get("quantization_config")
    if values is None:
        return None
    if not isinstance(values, dict):
        raise SourceError(f"{origin}: quantization_config is {shown(values)}, expected an object: {AGAIN}")
    fields = Fields(values, f"{origin} (quantization_config)")
    method = fields.text("quant_method", default="")
    if method not in ("awq", "gptq"):
        raise SourceError(
            f"{origin}: the weights are quantised in a form that Shoal does not read ({shown(method)}): {_ELSE}"
        )
    bits, group = values.get("bits", values.get("w_bit")), values.get("group_size", values.get("q_group_size"))
    if bits != 4 or group not in PACKED_GROUPS.values():
        raise SourceError(
            f"{origin}: {method.upper()} with {shown(bits)} bits in groups of {shown(group)} is not supported, "
            f"only 4 bits in groups of 32, 64 or 128 are: {_ELSE}"
        )
    if method == "awq":
        version = fields.text("version", default="gemm")
        if version != "gemm":
            raise SourceError(f"{origin}: AWQ in the layout {shown(version)} is not supported, only gemm is: {_ELSE}")
        return Packing(f"AWQ_{group}")
    if fields.flag("desc_act"):
        raise SourceError(
            f"{origin}: GPTQ with columns in the order of their activations (desc_act) is not supported: "
            "take a version without it, the unquantised model or a GGUF file"
        )
    form = fields.text("checkpoint_format", default="gptq")
    if form not in ("gptq", "gptq_v2"):
        raise SourceError(f"{origin}: GPTQ in the format {shown(form)} is not supported: {_ELSE}")
    return Packing(f"GPTQ_{group}" if form == "gptq" else f"GPTQ_V2_{group}")


def find_packed(
    packing: Packing, tensors: Mapping[str, TensorEntry], name: str, shape: tuple[int, ...]
) -> TensorEntry | None:
    """Return a matrix `….weight` as one entry over its three tensors; None if the file does not have them.

    Raises `SourceError` if they do not fit together or the matrix has its columns in another order.
    """
    stem = name.removesuffix(".weight")
    if f"{stem}.qweight" not in tensors or len(shape) != 2:
        return None
    found: list[TensorEntry] = []
    for part, expected in packing.shapes(shape).items():
        entry = tensors.get(f"{stem}.{part}")
        if entry is None:
            raise SourceError(f"{tensors[f'{stem}.qweight'].file}: tensor {stem}.{part} is missing: {AGAIN}")
        kind = "F16" if part == "scales" else "I32"
        if (entry.kind, entry.shape) != (kind, expected):
            raise SourceError(
                f"{entry.file}: tensor {entry.name} is {entry.kind} {list(entry.shape)}, where its config says "
                f"{kind} {list(expected)}: {_ELSE}"
            )
        found.append(entry)
    order = tensors.get(f"{stem}.g_idx")
    if order is not None:
        _check_order(order, packing.group, shape[1])
    first, *others = found
    length = sum(entry.length for entry in found)
    more = tuple(extent for entry in others for extent in entry.extents)
    return TensorEntry("", name, packing.kind, shape, first.file, first.offset, length, more=more)


def _check_order(entry: TensorEntry, group: int, columns: int) -> None:
    """Raise `SourceError` unless GPTQ's list of groups says that neighbouring columns share one."""
    raw = torch.empty(entry.length, dtype=torch.uint8)
    read_range(entry, 0, raw)
    if entry.kind != "I32" or not np.array_equal(raw.numpy().view("<i4"), np.arange(columns) // group):
        raise SourceError(
            f"{entry.file}: {entry.name} has columns in the order of their activations, which is not supported: {_ELSE}"
        )


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

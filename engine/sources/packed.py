"""Matrices of AWQ and GPTQ checkpoints: 4 bits a weight, with a scale and a zero point for each group of columns.

A file has such a matrix (out, in) transposed, as three tensors: `qweight` with eight integers in each 32-bit word,
`qzeros` likewise, and `scales` in float16. A weight is scale × (integer - zero). Here the three are one entry, their
bytes one after the other, so that a manifest and peers handle it as any other tensor. `packed_grid.decode_packed` makes
the grid of it, without rounding anything. This module does without torch.

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

from engine.errors import SourceError
from engine.sources.base import TensorEntry
from engine.sources.files import AGAIN, Fields, read_at, shown
from engine.sources.layout import PACKED_GROUPS

_ELSE = "take the unquantised model or a GGUF file of it"


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
    listed = entry.kind == "I32" and entry.length == columns * 4
    raw = read_at(entry.file, entry.offset, entry.length) if listed else b""
    if not np.array_equal(np.frombuffer(raw[: len(raw) // 4 * 4], "<i4"), np.arange(columns) // group):
        raise SourceError(
            f"{entry.file}: {entry.name} has columns in the order of their activations, which is not supported: {_ELSE}"
        )

"""Turns a tensor's bytes into a torch tensor: plain floats, GGUF's block-quantised types, AWQ's and GPTQ's matrices.

A tensor whose numbers need no conversion is read straight into its place, on a GPU through `DeviceReader`. Any other is
read at once and decoded in slices, straight into the requested dtype, so that peak memory is the raw bytes plus the
result.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.errors import SourceError
from engine.sources.base import ModelSource, TensorEntry
from engine.sources.dequant import dequantise
from engine.sources.device_reader import DeviceReader, read_range
from engine.sources.files import AGAIN
from engine.sources.grid import GRID_KINDS, Grid, decode_grid
from engine.sources.layout import PACKED_GROUPS, byte_length, check_part
from engine.sources.packed_grid import decode_packed

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class PartReader:
    """Reads the tensors of one part into memory that the caller has allocated, on any device.

    Raises `SourceError` if the part is unknown, damaged or contradicts the config. Nothing else of the model's files is
    read.
    """

    def __init__(self, source: ModelSource, part: str, device_reader: DeviceReader | None = None) -> None:
        if part not in source.parts:
            raise SourceError(f"{source.label} has no part {part}")
        check_part(source.config, part, source.parts[part])
        self._entries = {entry.role: entry for entry in source.parts[part]}
        self._device_reader = device_reader

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor, by role."""
        return {role: entry.shape for role, entry in self._entries.items()}

    @property
    def kinds(self) -> dict[str, str]:
        """The type of each tensor in its file, by role."""
        return {role: entry.kind for role, entry in self._entries.items()}

    def read(self, outs: Mapping[str, Tensor]) -> None:
        """Fill contiguous tensors of the right shape, by role; their dtype and device may be any."""
        on_device: list[tuple[TensorEntry, Tensor]] = []
        for role, out in outs.items():
            entry, kind = self._entries[role], out.device.type
            is_plain = _PLAIN.get(entry.kind) == out.dtype and not entry.interleaved_heads
            if not is_plain or kind not in ("cpu", "cuda"):
                out.copy_(decode(entry, _read(entry), out.dtype))
                continue
            _check_length(entry, entry.length)
            raw = out.view(-1).view(torch.uint8)
            if kind == "cpu":
                read_range(entry, 0, raw)
            else:
                on_device.append((entry, raw))
        if on_device:
            assert self._device_reader is not None, "device memory needs a device reader"
            self._device_reader.read(on_device)

    def grid(self, role: str) -> Grid | None:
        """Return a matrix in the grid of its file, on the CPU; None if its numbers are not in one of `GRID_KINDS`."""
        entry = self._entries[role]
        if entry.kind not in GRID_KINDS:
            return None
        _check_length(entry, entry.length)
        grid = (decode_packed if entry.kind in PACKED_GROUPS else decode_grid)(_read(entry), entry.kind, entry.shape)
        if not entry.interleaved_heads:
            return grid
        order = _undo_interleaving(torch.arange(entry.shape[0])[:, None], entry.interleaved_heads).view(-1)
        return grid.rows(order)


def load_part(source: ModelSource, part: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Read and decode one part of a model on the CPU; raises `SourceError` as `PartReader` does."""
    reader = PartReader(source, part)
    outs = {role: torch.empty(shape, dtype=dtype) for role, shape in reader.shapes.items()}
    reader.read(outs)
    return outs


def decode(entry: TensorEntry, raw: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode one tensor from its raw bytes (uint8), which the result may reuse."""
    _check_length(entry, raw.numel())
    if entry.kind in _PLAIN:
        values = raw.view(_PLAIN[entry.kind]).to(dtype).reshape(entry.shape)
    elif entry.kind in PACKED_GROUPS:
        values = decode_packed(raw, entry.kind, entry.shape).dense(dtype)
    else:
        values = dequantise(raw, entry.kind, dtype).reshape(entry.shape)
    return _undo_interleaving(values, entry.interleaved_heads) if entry.interleaved_heads else values


def read_tensor(entry: TensorEntry) -> Tensor:
    """Read one tensor of plain floats as float32; raises `SourceError` for any other type."""
    if entry.kind not in _PLAIN:
        raise SourceError(f"{entry.file}: tensor {entry.name} has type {entry.kind}, expected {', '.join(_PLAIN)}")
    return decode(entry, _read(entry))


def _check_length(entry: TensorEntry, length: int) -> None:
    if byte_length(entry.kind, entry.shape) != entry.length or length != entry.length:
        raise SourceError(f"{entry.file}: tensor {entry.name} does not have the expected {entry.length} bytes: {AGAIN}")


def _undo_interleaving(values: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each head from (pair, half) to (half, pair), the order that `engine.model.rope` rotates."""
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, -1)  # (heads, width / 2, 2, columns)
    return pairs.transpose(1, 2).reshape(values.shape)


def _read(entry: TensorEntry) -> Tensor:
    raw = torch.empty(entry.length, dtype=torch.uint8)
    read_range(entry, 0, raw)
    return raw

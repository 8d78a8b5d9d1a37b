"""From a tensor's bytes to a torch tensor: plain floats and GGUF's block-quantised kinds.

A part's bytes may come from a file (`load_part`) or from memory (`load_bytes`). Each tensor is read with one read and
decoded in slices, straight into the dtype that was asked for, so the peak is the raw bytes plus the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.errors import SourceError
from engine.sources.base import ModelSource, TensorEntry
from engine.sources.dequant import dequantise
from engine.sources.files import AGAIN, unreadable
from engine.sources.layout import byte_length, check_part

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def load_part(source: ModelSource, part: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Read and decode one part of a model; nothing else of its files is touched."""
    if part not in source.parts:
        raise SourceError(f"{source.label} has no part {part}")
    entries = source.parts[part]
    check_part(source.config, part, entries)
    return {entry.role: decode(entry, _read(entry), dtype) for entry in entries}


def load_bytes(
    entries: Sequence[TensorEntry], data: bytes | bytearray | memoryview, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Decode a part from its bytes: those of its tensors, one after the other."""
    total = sum(entry.length for entry in entries)
    if len(data) != total:
        raise SourceError(f"a part of {total} bytes came with {len(data)}: fetch it again")
    view, start, tensors = memoryview(data), 0, {}
    for entry in entries:
        raw = torch.empty(entry.length, dtype=torch.uint8)
        if entry.length:
            _bytes_of(raw)[:] = view[start : start + entry.length]
        tensors[entry.role] = decode(entry, raw, dtype)
        start += entry.length
    return tensors


def decode(entry: TensorEntry, raw: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """One tensor from its raw bytes (uint8, owned by the result from now on)."""
    if byte_length(entry.kind, entry.shape) != entry.length or raw.numel() != entry.length:
        raise SourceError(f"{entry.file}: tensor {entry.name} has not the {entry.length} bytes it should have: {AGAIN}")
    if entry.kind in _PLAIN:
        values = raw.view(_PLAIN[entry.kind]).to(dtype).reshape(entry.shape)
    else:
        values = dequantise(raw, entry.kind, dtype).reshape(entry.shape)
    return _undo_interleaving(values, entry.interleaved_heads) if entry.interleaved_heads else values


def _undo_interleaving(values: Tensor, heads: int) -> Tensor:
    """Rows of each head from (pair, half) order to (half, pair) order, as the rotation of halves wants them."""
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, -1)  # (heads, width / 2, 2, columns)
    return pairs.transpose(1, 2).reshape(values.shape)


def _bytes_of(raw: Tensor) -> memoryview:
    """A tensor's memory as writable bytes."""
    array: Any = raw.numpy()
    return memoryview(array).cast("B")


def _read(entry: TensorEntry) -> Tensor:
    raw = torch.empty(entry.length, dtype=torch.uint8)
    buffer = _bytes_of(raw) if entry.length else memoryview(b"")
    try:
        with entry.file.open("rb", buffering=0) as file:
            file.seek(entry.offset)
            done = 0
            while done < entry.length:  # one read may return less than asked (2 GiB at most on Linux)
                count = file.readinto(buffer[done:])
                if not count:
                    raise SourceError(f"{entry.file} is cut short: tensor {entry.name} is not whole: {AGAIN}")
                done += count
    except OSError as error:
        raise unreadable(entry.file, error) from error
    return raw

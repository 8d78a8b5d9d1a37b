"""Turns a tensor's bytes into a torch tensor: plain floats and GGUF's block-quantised types.

Each tensor is read at once and decoded in slices, straight into the requested dtype, so that peak memory is the raw
bytes plus the result.
"""

from __future__ import annotations

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
    """Read and decode one part of a model; nothing else of its files is read.

    Raises `SourceError` if the part is unknown, damaged or contradicts the config.
    """
    if part not in source.parts:
        raise SourceError(f"{source.label} has no part {part}")
    entries = source.parts[part]
    check_part(source.config, part, entries)
    return {entry.role: decode(entry, _read(entry), dtype) for entry in entries}


def decode(entry: TensorEntry, raw: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode one tensor from its raw bytes (uint8), which the result may reuse."""
    if byte_length(entry.kind, entry.shape) != entry.length or raw.numel() != entry.length:
        raise SourceError(f"{entry.file}: tensor {entry.name} does not have the expected {entry.length} bytes: {AGAIN}")
    if entry.kind in _PLAIN:
        values = raw.view(_PLAIN[entry.kind]).to(dtype).reshape(entry.shape)
    else:
        values = dequantise(raw, entry.kind, dtype).reshape(entry.shape)
    return _undo_interleaving(values, entry.interleaved_heads) if entry.interleaved_heads else values


def _undo_interleaving(values: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each head from (pair, half) to (half, pair), the order that `engine.model.rope` rotates."""
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, -1)  # (heads, width / 2, 2, columns)
    return pairs.transpose(1, 2).reshape(values.shape)


def _bytes_of(raw: Tensor) -> memoryview:
    """Return a tensor's memory as writable bytes."""
    array: Any = raw.numpy()
    return memoryview(array).cast("B")


def _read(entry: TensorEntry) -> Tensor:
    raw = torch.empty(entry.length, dtype=torch.uint8)
    buffer = _bytes_of(raw) if entry.length else memoryview(b"")
    try:
        with entry.file.open("rb", buffering=0) as file:
            file.seek(entry.offset)
            done = 0
            while done < entry.length:  # one read may return less than requested (at most 2 GiB on Linux)
                count = file.readinto(buffer[done:])
                if not count:
                    raise SourceError(f"{entry.file} is cut short: tensor {entry.name} is incomplete: {AGAIN}")
                done += count
    except OSError as error:
        raise unreadable(entry.file, error) from error
    return raw

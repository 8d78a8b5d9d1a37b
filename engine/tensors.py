"""From a tensor's bytes to a torch tensor: plain floats and GGUF's block-quantised kinds.

A part's bytes may come from a file (`load_part`) or from memory (`load_bytes`). Each tensor is read with one read and
decoded in slices, straight into the dtype that was asked for, so the peak is the raw bytes plus the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.errors import SourceError
from engine.sources.base import ModelSource, TensorEntry
from engine.sources.files import AGAIN, unreadable
from engine.sources.layout import KIND_SIZES, byte_length, check_part

_SLICE_ELEMENTS = 1 << 19  # decoded at a time: small enough for the processor's cache
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
        values = _dequantise(raw, entry.kind, dtype).reshape(entry.shape)
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


def _dequantise(raw: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    elements, size = KIND_SIZES[kind]
    blocks = raw.view(-1, size)  # (blocks, bytes of a block)
    result = torch.empty(blocks.shape[0], elements, dtype=dtype)
    step = max(_SLICE_ELEMENTS // elements, 1)
    expand = _LEGACY.get(kind) or _with_gguf(kind)
    for start in range(0, blocks.shape[0], step):
        result[start : start + step] = expand(blocks[start : start + step])
    return result


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of each block, as (blocks, 1) float32."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """(blocks, 16) bytes to (blocks, 32) values: all low halves, then all high halves."""
    values = torch.empty(packed.shape[0], 32)
    values[:, :16] = torch.bitwise_and(packed, 15)
    values[:, 16:] = torch.bitwise_right_shift(packed, 4)
    return values


def _fifth_bits(packed: Tensor) -> Tensor:
    """(blocks, 4) bytes to the (blocks, 32) fifth bits of 5-bit values, each 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8)
    bits = torch.bitwise_right_shift(packed.unsqueeze(-1), shifts).bitwise_and_(1)  # (blocks, 4, 8)
    return bits.reshape(packed.shape[0], 32).float().mul_(16.0)


def _q4_0(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 2:]).sub_(8.0).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:]).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 6:]).add_(_fifth_bits(blocks[:, 2:6])).sub_(16.0).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor) -> Tensor:
    values = _nibbles(blocks[:, 8:]).add_(_fifth_bits(blocks[:, 4:8]))
    return values.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float().mul_(_half(blocks, 0))


_LEGACY: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
}  # fmt: skip


def _with_gguf(kind: str) -> Callable[[Tensor], Tensor]:
    """The `gguf` package's own decoder, for the kinds with nested scales."""
    import gguf  # slow to import, and needed by K-quantised files alone

    number: Any = gguf.GGMLQuantizationType[kind]

    def expand(blocks: Tensor) -> Tensor:
        return torch.from_numpy(gguf.dequantize(blocks.numpy(), number))

    return expand

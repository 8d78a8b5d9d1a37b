"""Decodes GGUF's block-quantised types to plain numbers with torch; `grid` keeps the same types as small integers.

Every type stores a few shared scales per block and packs its small integers into bytes. All results are bit-identical
to those of the `gguf` package, with which the tests compare them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.sources.layout import KIND_SIZES

_SLICE_ELEMENTS = 1 << 19  # decoded at a time, to fit the processor's cache


def dequantise(raw: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Decode a quantised tensor's bytes to (blocks, elements per block)."""
    elements, size = KIND_SIZES[kind]
    blocks = raw.view(-1, size)  # (blocks, bytes of a block)
    result = torch.empty(blocks.shape[0], elements, dtype=dtype)
    step = max(_SLICE_ELEMENTS // elements, 1)
    expand = _DECODERS[kind]
    for start in range(0, blocks.shape[0], step):
        result[start : start + step] = expand(blocks[start : start + step])
    return result


def _half(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 at byte `start` of each block, as (blocks, 1) float32."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Unpack (blocks, 16) bytes to (blocks, 32) values: all low halves, then all high halves."""
    values = torch.empty(packed.shape[0], 32)
    values[:, :16] = torch.bitwise_and(packed, 15)
    values[:, 16:] = torch.bitwise_right_shift(packed, 4)
    return values


def _fifth_bits(packed: Tensor) -> Tensor:
    """Unpack (blocks, 4) bytes to the (blocks, 32) fifth bits of 5-bit values, each 0 or 16."""
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


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eight 6-bit scales and minima of Q4_K and Q5_K times their shared factors, each (blocks, 8, 1)."""
    low, high, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([low & 0x3F, (mixed & 0x0F) | ((low >> 2) & 0x30)], dim=1)
    minima = torch.cat([high & 0x3F, (mixed >> 4) | ((high >> 2) & 0x30)], dim=1)
    shared, shared_minimum = _half(blocks, 0), _half(blocks, 2)
    return (shared * scales).unsqueeze(-1), (shared_minimum * minima).unsqueeze(-1)


def _paired_nibbles(packed: Tensor) -> Tensor:
    """Unpack (blocks, 128) bytes to (blocks, 8, 32) values: of every 32 bytes the low halves, then the high halves."""
    groups = packed.reshape(-1, 4, 1, 32)
    return torch.cat([groups & 0x0F, groups >> 4], dim=2).reshape(-1, 8, 32)


def _pairs_of_bits(packed: Tensor) -> Tensor:
    """Unpack (blocks, 64) bytes to (blocks, 16, 16) values of 2 bits: of every 32 bytes the lowest bits come first."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    return ((packed.reshape(-1, 2, 1, 32) >> shifts) & 3).reshape(-1, 16, 16)


def _q2_k(blocks: Tensor) -> Tensor:
    scales, minima = blocks[:, :16] & 0x0F, blocks[:, :16] >> 4  # (blocks, 16)
    scales, minima = scales * _half(blocks, 80), minima * _half(blocks, 82)
    values = _pairs_of_bits(blocks[:, 16:80]).float()
    return values.mul_(scales.unsqueeze(-1)).sub_(minima.unsqueeze(-1)).reshape(-1, 256)


def _q3_k(blocks: Tensor) -> Tensor:
    low, high = blocks[:, 96:104], blocks[:, 104:108]  # of the sixteen 6-bit scales
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 4, 1)
    high = ((high.unsqueeze(1) >> shifts) & 3).reshape(-1, 16) << 4
    scales = (torch.cat([low & 0x0F, low >> 4], dim=1) | high).float().sub_(32.0) * _half(blocks, 108)  # (blocks, 16)
    shifts = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    third = (((blocks[:, :32].unsqueeze(1) >> shifts) & 1) << 2).reshape(-1, 16, 16)
    values = (_pairs_of_bits(blocks[:, 32:96]) | third).float().sub_(4.0)
    return values.mul_(scales.unsqueeze(-1)).reshape(-1, 256)


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(blocks)
    return _paired_nibbles(blocks[:, 16:]).float().mul_(scales).sub_(minima).reshape(-1, 256)


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(blocks)
    shifts = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    fifth = ((blocks[:, 16:48].unsqueeze(1) >> shifts) & 1) << 4  # (blocks, 8, 32)
    values = _paired_nibbles(blocks[:, 48:]) | fifth
    return values.float().mul_(scales).sub_(minima).reshape(-1, 256)


def _q6_k(blocks: Tensor) -> Tensor:
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = torch.cat([low & 0x0F, low >> 4], dim=2).reshape(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3) << 4  # (blocks, 2, 4, 32)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float() * _half(blocks, 208)  # (blocks, 16)
    values = (low | high).reshape(-1, 16, 16).float().sub_(32.0)
    return values.mul_(scales.unsqueeze(-1)).reshape(-1, 256)


_DECODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip

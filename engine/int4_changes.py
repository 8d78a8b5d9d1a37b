"""Rows of changes as 4-bit multiples of one scale for 16 numbers, about half of the bytes of `int8`. Pure.

A row of `row_bytes(width)` bytes, little-endian:

    2                      largest  the largest scale: bits 20 to 31 of a float32, which are its sign, its exponent and
                                    3 bits more, rounded up
    1 for each 16 numbers  scales   by how much less than that these bits are in each scale
    1 for each 2 numbers   whole    from -7 to 7, the first of two in the low half; a number is its scale times this

Each number is off by half a scale at most. The products are exact, so that equal bytes give equal rows on every
machine. A row with NaN, infinity or numbers next to it is one of NaN; such rows are refused where they arrive.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Buffer = bytes | bytearray | memoryview
Floats = NDArray[np.float32]

GROUP = 16  # numbers that share a scale
MOST = 7  # largest multiple
_LARGEST_BYTES = 2
_DROPPED_BITS = 20  # of a float32
_SPAN = 255  # from the largest scale of a row to the least
_NOT_FINITE = (0x7F800000 >> _DROPPED_BITS) - 8 * 3  # scales from here on, times `MOST`, may be infinite
_SMALLEST_SCALE = 2.0**-90  # so that no scale of a row is below what a float32 has without loss


def row_bytes(width: int) -> int:
    """Bytes of a row of `width` numbers."""
    return _LARGEST_BYTES + _groups(width) + -(-width // 2)


def encode(rows: Floats) -> bytes:
    """Encode rows (N, width)."""
    count, width = rows.shape
    groups = _groups(width)
    padded = np.zeros((count, groups, GROUP), np.float32)
    padded.reshape(count, -1)[:, :width] = rows
    with np.errstate(invalid="ignore", over="ignore"):
        exact = np.maximum(np.abs(padded).max(axis=2) / np.float32(MOST), np.float32(_SMALLEST_SCALE))  # NaN stays
    bits = (exact.view(np.uint32) + np.uint32(2**_DROPPED_BITS - 1)) >> np.uint32(_DROPPED_BITS)  # (N, groups)
    largest = bits.max(axis=1, keepdims=True)
    below = np.minimum(largest - bits, np.uint32(_SPAN))
    is_finite = largest < _NOT_FINITE
    scales = np.where(is_finite, (largest - below) << np.uint32(_DROPPED_BITS), 0x3F800000).astype(np.uint32)
    multiples = np.rint(np.where(is_finite[:, :, None], padded, 0) / scales.view(np.float32)[:, :, None])
    halves = multiples.astype(np.int8).reshape(count, -1).view(np.uint8) & 0xF
    out = np.empty((count, row_bytes(width)), np.uint8)
    first = _LARGEST_BYTES + groups
    out[:, :_LARGEST_BYTES] = largest.astype("<u2").view(np.uint8)
    out[:, _LARGEST_BYTES:first] = below
    out[:, first:] = (halves[:, ::2] | halves[:, 1::2] << 4)[:, : -(-width // 2)]
    return out.tobytes()


def decode(data: Buffer, width: int) -> Floats:
    """Return the rows (N, width) of whole encoded rows; one whose scales are not possible is one of NaN."""
    stored = np.frombuffer(data, np.uint8).reshape(-1, row_bytes(width))
    first = _LARGEST_BYTES + _groups(width)
    largest = stored[:, :_LARGEST_BYTES].copy().view("<u2").astype(np.uint32)  # (N, 1)
    is_possible = (largest < _NOT_FINITE) & (largest > _SPAN)
    bits = np.where(is_possible, largest - stored[:, _LARGEST_BYTES:first], 0x7FC00000 >> _DROPPED_BITS)
    scales = (bits.astype(np.uint32) << np.uint32(_DROPPED_BITS)).view(np.float32)  # (N, groups)
    pairs = stored[:, first:]
    halves = np.stack((pairs << 4, pairs & 0xF0), axis=2).reshape(len(stored), -1)[:, :width]
    whole = (halves.view(np.int8) >> 4).astype(np.float32)  # with their signs
    rows: Floats = whole * np.repeat(scales, GROUP, axis=1)[:, :width]
    return rows


def _groups(width: int) -> int:
    return -(-width // GROUP)

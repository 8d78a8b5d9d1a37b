"""The wire format `int8`: rows of numbers as 8-bit multiples of one scale per row, the largest as 16-bit ones. Pure.

Hidden states of language models have a few numbers that are ten and more times the others. A scale that fits them into
8 bits leaves 4 bits to the rest: with it one in eleven tokens of SmolLM2 changed. So the `wide_count(width)` largest of
a row have a second byte, and the scale fits the next one. A row of `row_bytes(width)` bytes, little-endian:

    4                 scale    float32 with 9 significant bits, so that every multiple of it is exact
    2 for each wide   indexes  of the numbers that need two bytes, in order; unused ones are 0
    1 for each wide   high     their upper bytes; 0 where unused
    width             low      the lower bytes, all signed: a number is scale * (256 * high + low)

Each number is off by half a scale at most. Rows do not depend on each other, and equal rows give equal bytes. Rows that
were decoded are encoded to the same bytes again, unless the largest number is 256 times the first of the narrow ones. A
row with NaN or infinity has NaN as its scale, and is refused where it arrives. Numbers above `_LARGEST` are sent as it,
so that nobody is blamed for passing on what it was sent.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Buffer = bytes | bytearray | memoryview
Floats = NDArray[np.float32]

_NARROW = 127  # largest multiple in one byte
_WIDE = 127 * 257  # and in two
_SCALE_BYTES, _INDEX_BYTES, _HIGH_BYTES = 4, 2, 1
_NUMBERS_PER_WIDE = 44  # at that, a row takes 0.27 of float32's bytes
_SMALLEST_SCALE = 2.0**-100
_LARGEST = 2.0**127  # all multiples of the scale that it needs are finite
_DROPPED_BITS = np.uint32(0x7FFF)  # of a float32: sign, exponent and 8 bits after the leading one remain


def wide_count(width: int) -> int:
    """Numbers of a row that have two bytes."""
    return width // _NUMBERS_PER_WIDE


def row_bytes(width: int) -> int:
    """Bytes of a row of `width` numbers."""
    return _SCALE_BYTES + (_INDEX_BYTES + _HIGH_BYTES) * wide_count(width) + width


def encode(rows: Floats) -> bytes:
    """Encode rows (N, width)."""
    count, width = rows.shape
    wide = wide_count(width)
    is_finite = np.isfinite(rows).all(axis=1)
    rows = np.clip(rows, -_LARGEST, _LARGEST)
    with np.errstate(invalid="ignore"):
        scale = _scales(np.abs(rows), wide)
        multiples = np.rint(rows / scale[:, None])
    scale[~is_finite] = np.nan
    whole = np.where(np.isnan(scale)[:, None], 0, multiples).astype(np.int32)
    low = ((whole + 128) & 255) - 128
    high = (whole - low) >> 8
    out = np.empty((count, row_bytes(width)), np.uint8)
    out[:, :_SCALE_BYTES] = scale.astype("<f4")[:, None].view(np.uint8)
    if wide:
        row, column = np.nonzero(high)  # row by row, in order
        slot = np.arange(len(row)) - np.searchsorted(row, row)
        at, upper = np.zeros((count, wide), "<u2"), np.zeros((count, wide), np.int8)
        at[row, slot], upper[row, slot] = column, high[row, column]
        indexes, uppers = _sections(out, wide)
        indexes[:], uppers[:] = at.view(np.uint8), upper.view(np.uint8)
    out[:, -width:] = low.astype(np.int8).view(np.uint8)
    return out.tobytes()


def decode(data: Buffer, width: int) -> Floats:
    """Return the rows (N, width) of whole encoded rows; in one with a bad scale or index not all are finite."""
    stored = np.frombuffer(data, np.uint8).reshape(-1, row_bytes(width))
    scale = stored[:, :_SCALE_BYTES].copy().view("<f4")[:, 0].astype(np.float32)
    scale[~(scale > 0)] = np.nan
    whole = stored[:, -width:].view(np.int8).astype(np.int32)
    wide = wide_count(width)
    if wide:
        indexes, uppers = _sections(stored, wide)
        at = indexes.copy().view("<u2").astype(np.intp)
        scale[(at >= width).any(axis=1)] = np.nan
        upper = uppers.view(np.int8).astype(np.int32)
        np.add.at(whole, (np.arange(len(whole))[:, None], np.minimum(at, width - 1)), 256 * upper)
    with np.errstate(over="ignore", invalid="ignore"):
        return whole.astype(np.float32) * scale[:, None]


def _scales(size: Floats, wide: int) -> Floats:
    """Return the scale of each row of absolute numbers, which fits all of them; NaN and infinity stay what they are."""
    largest = size.max(axis=1)
    narrow = largest if not wide else np.partition(size, -1 - wide, axis=1)[:, -1 - wide]
    exact = np.maximum(narrow / np.float32(_NARROW), largest / np.float32(_WIDE))
    exact = np.maximum(exact, np.float32(_SMALLEST_SCALE))
    bits = exact.view(np.uint32)  # rounded up: a larger scale holds all numbers too
    scales: Floats = ((bits + _DROPPED_BITS) & ~_DROPPED_BITS).view(np.float32)
    return scales


def _sections(stored: NDArray[np.uint8], wide: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the parts of encoded rows that hold indexes and upper bytes."""
    first, second = _SCALE_BYTES + _INDEX_BYTES * wide, _SCALE_BYTES + (_INDEX_BYTES + _HIGH_BYTES) * wide
    return stored[:, _SCALE_BYTES:first], stored[:, first:second]

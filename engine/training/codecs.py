"""Numbers as bytes for the exchange between islands: plain float32, or int8 with one scale for 4096 numbers.

The int8 format has first the scales, float32, then the numbers. A scale has 16 significant bits and is rounded up, so
that every product of a scale and a number is exact: encoding what was decoded gives the same bytes on every machine,
and nothing is off by more than half a scale. All integers and floats are little-endian.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from engine.errors import NotFinite, TrainingError

Codec = Literal["f32", "int8"]
CODECS: tuple[Codec, ...] = ("f32", "int8")
GROUP = 4096  # numbers that share a scale
_LEAST = 2.0**-100  # a group whose largest number is below this is sent as zeros
_MOST = 2.0**70  # above all that training makes; the norm of a change of such numbers is a double without trouble
_DROPPED_BITS = 0xFF  # of a scale's 24 significant bits


def encode(vector: Tensor, codec: Codec) -> bytes:
    """Return the bytes of a float32 vector on the CPU; raises `NotFinite` if a number is not finite or too large."""
    values = vector.numpy()
    if not values.size:
        return b""
    largest = float(np.abs(values).max())
    if not largest < _MOST:  # NaN too
        raise NotFinite("a number to send is not finite, or too large")
    if codec == "f32":
        return values.astype("<f4", copy=False).tobytes()
    padded = np.zeros(-(-values.size // GROUP) * GROUP, dtype=np.float32)
    padded[: values.size] = values
    groups = padded.reshape(-1, GROUP)
    scales = _scales(np.abs(groups).max(axis=1))
    safe = np.where(scales > 0, scales, np.float32(1))[:, None]
    numbers = np.rint(groups / safe)
    numbers[scales == 0] = 0
    return scales.astype("<f4").tobytes() + numbers.astype(np.int8).reshape(-1)[: values.size].tobytes()


def decode(data: bytes | memoryview, count: int, codec: Codec) -> Tensor:
    """Return the `count` numbers in some bytes; raises `TrainingError` if these are not so many, finite numbers."""
    if len(data) != encoded_bytes(count, codec):
        raise TrainingError(f"{len(data)} bytes are not {count} numbers in {codec}")
    if codec == "f32":
        values = np.frombuffer(data, dtype="<f4").astype(np.float32)
        if values.size and not float(np.abs(values).max()) < _MOST:
            raise TrainingError("a number that was sent is not finite, or too large")
        return torch.from_numpy(values)
    groups = -(-count // GROUP)
    scales = np.frombuffer(data, dtype="<f4", count=groups).astype(np.float32)
    if groups and not (scales.min() >= 0 and scales.max() < _MOST):
        raise TrainingError("a scale that was sent is not finite, negative or too large")
    numbers = np.frombuffer(data, dtype=np.int8, offset=4 * groups).astype(np.float32)
    return torch.from_numpy(numbers * np.repeat(scales, GROUP)[:count])


def bounded(vector: Tensor) -> Tensor:
    """Return a vector of finite numbers with those that `encode` would refuse made smaller."""
    return vector.clamp(-_MOST / 2, _MOST / 2)


def encoded_bytes(count: int, codec: Codec) -> int:
    """Number of bytes of so many numbers."""
    return 4 * count if codec == "f32" else 4 * -(-count // GROUP) + count


def _scales(largest: np.ndarray) -> np.ndarray:
    """Return the least scale of 16 significant bits with which each group's largest number is at most 127."""
    scales = (np.where(largest < _LEAST, 0, largest) / np.float32(127)).astype("<f4")
    bits = scales.view("<u4")
    return ((bits + _DROPPED_BITS) & ~np.uint32(_DROPPED_BITS)).astype("<u4").view("<f4")

"""Numbers as bytes for the exchange between islands: plain float32, or whole numbers of 8 or 4 bits with scales.

int8 has one scale for 4096 numbers, from -127 to 127; int4 one for 128, from -7 to 7, two in a byte, the first in its
low half. The scales come first, float32, then the numbers. A scale has 16 significant bits and is rounded up, so that
every product of a scale and a number is exact: encoding what was decoded gives the same bytes on every machine, and
nothing is off by more than half a scale. All integers and floats are little-endian.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.errors import NotFinite, TrainingError

Codec = Literal["f32", "int8", "int4"]
CODECS: tuple[Codec, ...] = ("f32", "int8", "int4")


class _Grouped(NamedTuple):
    """A format of whole numbers: how many share a scale, the largest of them, and how many are in a byte."""

    group: int
    most: int
    in_byte: int


GROUP = 4096  # numbers of int8 that share a scale
_FORMATS = {"int8": _Grouped(GROUP, 127, 1), "int4": _Grouped(128, 7, 2)}
_LEAST = 2.0**-100  # a group whose largest number is below this is sent as zeros
_MOST = 2.0**70  # above all that training makes; the norm of a change of such numbers is a double without trouble
_DROPPED_BITS = 0xFF  # of a scale's 24 significant bits


def codec_named(name: str) -> Codec:
    """Return the codec of a name; raises `TrainingError` if there is none."""
    for codec in CODECS:
        if codec == name:
            return codec
    raise TrainingError(f"{name} is not a number format of changes; update Shoal")


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
    form = _FORMATS[codec]
    padded = np.zeros(-(-values.size // form.group) * form.group, dtype=np.float32)
    padded[: values.size] = values
    groups = padded.reshape(-1, form.group)
    scales = _scales(np.abs(groups).max(axis=1), form.most)
    safe = np.where(scales > 0, scales, np.float32(1))[:, None]
    numbers = np.rint(groups / safe)
    numbers[scales == 0] = 0
    whole = numbers.astype(np.int8).reshape(-1)[: form.in_byte * -(-values.size // form.in_byte)]
    if codec == "int4":
        halves = whole.view(np.uint8) & 0xF
        whole = (halves[::2] | halves[1::2] << 4).view(np.int8)
    return scales.astype("<f4").tobytes() + whole.tobytes()


def check(data: bytes | memoryview, count: int, codec: Codec) -> None:
    """Raise `TrainingError` unless some bytes are `count` finite numbers; of whole numbers, only scales are read."""
    if len(data) != encoded_bytes(count, codec):
        raise TrainingError(f"{len(data)} bytes are not {count} numbers in {codec}")
    if not count:
        return
    if codec == "f32":
        if not float(np.abs(np.frombuffer(data, dtype="<f4")).max()) < _MOST:  # NaN too
            raise TrainingError("a number that was sent is not finite, or too large")
        return
    scales = _sent_scales(data, count, codec)
    if not (scales.min() >= 0 and scales.max() < _MOST):
        raise TrainingError("a scale that was sent is not finite, negative or too large")


def decode(data: bytes | memoryview, count: int, codec: Codec) -> Tensor:
    """Return the `count` numbers in some bytes; raises `TrainingError` if these are not so many, finite numbers."""
    check(data, count, codec)
    if codec == "f32":
        return torch.from_numpy(np.frombuffer(data, dtype="<f4").astype(np.float32))
    scales = _sent_scales(data, count, codec)
    whole = np.frombuffer(data, dtype=np.int8, offset=4 * scales.size)
    if codec == "int4":
        halves = np.stack((whole.view(np.uint8) << 4, whole.view(np.uint8) & 0xF0), axis=1)
        whole = (halves.view(np.int8) >> 4).reshape(-1)[:count]  # with their signs
    return torch.from_numpy(whole.astype(np.float32) * np.repeat(scales, _FORMATS[codec].group)[:count])


def bounded(vector: Tensor) -> Tensor:
    """Return a vector of finite numbers with those that `encode` would refuse made smaller."""
    return vector.clamp(-_MOST / 2, _MOST / 2)


def encoded_bytes(count: int, codec: Codec) -> int:
    """Number of bytes of so many numbers."""
    if codec == "f32":
        return 4 * count
    form = _FORMATS[codec]
    return 4 * -(-count // form.group) + -(-count // form.in_byte)


def _sent_scales(data: bytes | memoryview, count: int, codec: Codec) -> np.ndarray:
    """Return the scales at the beginning of some bytes, which are long enough."""
    return np.frombuffer(data, dtype="<f4", count=-(-count // _FORMATS[codec].group)).astype(np.float32)


def _scales(largest: np.ndarray, most: int) -> np.ndarray:
    """Return the least scale of 16 significant bits with which each group's largest number is at most `most`."""
    scales = (np.where(largest < _LEAST, 0, largest) / np.float32(most)).astype("<f4")
    bits = scales.view("<u4")
    return ((bits + _DROPPED_BITS) & ~np.uint32(_DROPPED_BITS)).astype("<u4").view("<f4")

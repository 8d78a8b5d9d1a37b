"""Sketches of gradients: a few numbers by which two machines compare a gradient that both have computed.

Every number of the gradient counts with a sign drawn from a seed, and its place decides to which number of the sketch
it is added. Distances of sketches are those of the gradients, but for chance. Pure; the signs are the same everywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

NUMBERS = 32  # of a sketch


def sketch_of(gradients: Mapping[str, Tensor], scale: float, seed: bytes) -> Generator[None, None, tuple[float, ...]]:
    """Return the sketch of a gradient, given as the summed ones of each part, times `scale`; yields after each."""
    total = torch.zeros(NUMBERS, dtype=torch.float64)
    for part, sums in gradients.items():
        signs = torch.from_numpy(_signs(seed + part.encode(), sums.numel())).to(sums.device)
        signed = F.pad(sums * signs, (0, -sums.numel() % NUMBERS))
        total += signed.view(-1, NUMBERS).sum(dim=0, dtype=torch.float64).cpu()
        yield
    return tuple((total * scale).float().tolist())


def _signs(seed: bytes, count: int) -> np.ndarray:
    """Return `count` signs, as float32."""
    key = int.from_bytes(hashlib.sha256(seed).digest()[:16], "little")
    drawn = np.random.Philox(key=key).random_raw(-(-count // 64))
    bits = np.unpackbits(drawn.astype("<u8").view(np.uint8), count=count)
    return bits.astype(np.float32) * 2 - 1

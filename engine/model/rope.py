"""Rotary position embedding: inverse frequencies under each scaling rule, and the rotation itself.

Heads are split in halves (dimension i is paired with i + head_dim/2), as Hugging Face lays weights out.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.config import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Return the float32 angle per position of each pair of dimensions: (head_dim/2,)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return inv_freq / rope.factor
    if rope.kind == "llama3":
        return _llama3(inv_freq, rope)
    if rope.kind == "yarn":
        return _yarn(inv_freq, rope, head_dim)
    return inv_freq


def amplitude(rope: Rope) -> float:
    """Factor on cosines and sines: yarn's attention temperature, 1 for the other rules."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0


def _llama3(inv_freq: Tensor, rope: Rope) -> Tensor:
    """Keep fast rotations, stretch slow ones by `factor`, and blend in between."""
    wavelength = 2 * math.pi / inv_freq
    longest = rope.original_context / rope.low_freq_factor
    shortest = rope.original_context / rope.high_freq_factor
    blend = (rope.original_context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * inv_freq / rope.factor + blend * inv_freq
    scaled = torch.where(wavelength > longest, inv_freq / rope.factor, inv_freq)
    between = (wavelength >= shortest) & (wavelength <= longest)
    return torch.where(between, blended, scaled)


def _yarn(inv_freq: Tensor, rope: Rope, head_dim: int) -> Tensor:
    """Interpolate the dimensions that turn slowly, leave the fast ones, ramp linearly in between."""

    def dimension_of(turns: float) -> float:
        return (head_dim * math.log(rope.original_context / (turns * 2 * math.pi))) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension_of(rope.beta_fast)), 0)
    high = min(math.ceil(dimension_of(rope.beta_slow)), head_dim - 1)
    span = max(high - low, 0.001)  # avoids a division by zero if both ends coincide
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return inv_freq / rope.factor * ramp + inv_freq * (1 - ramp)


class RotaryTable:
    """Cosines and sines for the positions of one step, computed once and shared by all blocks of a span."""

    def __init__(self, rope: Rope, head_dim: int, device: torch.device, dtype: torch.dtype) -> None:
        self._inv_freq = inverse_frequencies(rope, head_dim).to(device)
        self._amplitude = amplitude(rope)
        self._dtype = dtype

    def turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return float32 cosines and sines of positions (N,), each (N, head_dim/2)."""
        angles = positions[:, None].to(torch.float32) * self._inv_freq
        return angles.cos() * self._amplitude, angles.sin() * self._amplitude

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines of positions (N,) for `rotate`, each (N, 1, 1, head_dim)."""
        cos, sin = self.turns(positions)
        # The first half of the sines is negated once here instead of in every block's rotation.
        both = torch.cat((cos, cos, -sin, sin), dim=-1).to(self._dtype)[:, None, None]
        half = both.shape[-1] // 2
        return both[..., :half], both[..., half:]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads x (N, heads, 1, head_dim) to their positions."""
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos, swapped, sin)

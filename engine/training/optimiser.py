"""AdamW over a vector of weights, Muon over a matrix, the learning rate of each step, and clipping by a norm.

All functions are pure: the caller keeps the old state until the new one is accepted everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.errors import TrainingError


@dataclass(frozen=True)
class AdamW:
    """Constants of the optimiser; the learning rate comes with each step."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0


class Moments(NamedTuple):
    """A block's weights and AdamW's two moments, float32 vectors of one length."""

    values: Tensor
    first: Tensor
    second: Tensor

    @classmethod
    def fresh(cls, values: Tensor) -> Moments:
        """The state before the first step."""
        return cls(values, torch.zeros_like(values), torch.zeros_like(values))


MOST_RATIO = 8.0  # of a first moment to the root of its second: at most 7.3 (Cauchy and Schwarz), and rounding
_ROUNDED = 1.01  # bfloat16 and sums of many numbers lose less
_LEAST_FIRST = 1e-15  # below it the squares of gradients may be too small for float32


def are_moments(first: Tensor, second: Tensor, clip: float | None = None) -> bool:
    """True if these can be moments of `AdamW` with its usual constants, or of Muon where there is no second.

    All are finite, and none is larger than gradients of the norm `clip` make it. A first moment far beyond the root of
    its second is none: 1 beside 0 would move a weight by 1e8 times the learning rate. Of a longer `first` the last ones
    have a second.
    """
    if not bool(torch.isfinite(first).all() and torch.isfinite(second).all()) or bool((second < 0).any()):
        return False
    most = second.sqrt().mul_(MOST_RATIO).add_(_LEAST_FIRST)
    if bool((first[first.numel() - second.numel() :].abs() > most).any()):
        return False
    return clip is None or float(first.double().norm()) <= _ROUNDED * clip


def adamw_step(state: Moments, gradient: Tensor, number: int, rate: float, how: AdamW) -> Moments:
    """Return the state after step `number` (from 1), as `torch.optim.AdamW` computes it; `state` is not changed."""
    first = state.first.lerp(gradient, 1 - how.beta1)
    second = torch.addcmul(state.second * how.beta2, gradient, gradient, value=1 - how.beta2)
    spread = second.sqrt().div_(math.sqrt(1 - how.beta2**number)).add_(how.eps)
    values = state.values * (1 - rate * how.weight_decay)
    return Moments(values.addcdiv_(first, spread, value=-rate / (1 - how.beta1**number)), first, second)


@dataclass(frozen=True)
class Muon:
    """Constants of Muon, which is for matrices; all other weights of such a job are AdamW's.

    The step of a matrix has the size that AdamW's would have, so one learning rate serves both.
    """

    momentum: float = 0.95
    weight_decay: float = 0.0
    iterations: int = 5


_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalised(matrix: Tensor, iterations: int) -> Tensor:
    """Return a matrix with the same singular vectors whose singular values are near one (Newton and Schulz).

    It computes in the matrix's own format: torch's Muon always uses bfloat16, which many CPUs emulate.
    """
    a, b, c = _NEWTON_SCHULZ
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.t() if tall else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(iterations):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.t() if tall else x


def muon_step(matrix: Tensor, momentum: Tensor, gradient: Tensor, rate: float, how: Muon) -> tuple[Tensor, Tensor]:
    """Return a matrix and its momentum after a step, as `torch.optim.Muon` computes it; nothing is changed."""
    momentum = momentum.lerp(gradient, 1 - how.momentum)
    update = orthogonalised(gradient.lerp(momentum, how.momentum), how.iterations)
    adjusted = rate * 0.2 * math.sqrt(max(matrix.shape))
    return (matrix * (1 - rate * how.weight_decay)).add_(update, alpha=-adjusted), momentum


@dataclass(frozen=True)
class Schedule:
    """The learning rate over a job: a linear warm-up, then half a cosine down to zero."""

    rate: float
    steps: int
    warm_up: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise TrainingError(f"the learning rate must be a positive number, not {self.rate}")

    def at(self, number: int) -> float:
        """Rate of step `number`, from 0."""
        if number < self.warm_up:
            return self.rate * (number + 1) / (self.warm_up + 1)
        done = (number - self.warm_up) / max(1, self.steps - self.warm_up)
        return self.rate * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def total_norm(squared: Iterable[float], scale: float) -> float:
    """Norm of the scaled gradient over all blocks; the sum is exact, so the order and the split do not matter."""
    return scale * math.sqrt(math.fsum(squared))


def clip_factor(norm: float, limit: float | None) -> float:
    """Factor that brings a gradient of this norm down to the limit; 1 if it is below, or without a limit."""
    return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))

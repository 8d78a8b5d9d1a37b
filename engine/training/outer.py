"""The step between islands: merges their changes, and applies the merged one to the weights that all of them share.

A change is the shared weights less an island's own after its steps. Pure, and the same bits for the same values in the
same order on one kind of device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CLIP_ITERATIONS = 5


@dataclass(frozen=True)
class Nesterov:
    """Constants of the outer step."""

    rate: float = 0.7
    momentum: float = 0.9


def nesterov_step(values: Tensor, momentum: Tensor, change: Tensor, how: Nesterov) -> tuple[Tensor, Tensor]:
    """Return the shared weights and the momentum after one outer step, as `torch.optim.SGD` with `nesterov`."""
    momentum = momentum * how.momentum + change
    return values - how.rate * (change + how.momentum * momentum), momentum


def merged(changes: Tensor, weights: Sequence[float], *, clip: bool) -> Tensor:
    """Return the weighted mean of changes (islands, numbers); with `clip`, what lies far from their middle counts less.

    Centred clipping: from the median of each number on, every change moves the centre by its distance, but by no more
    than the median distance of all. So less than half of the islands can move the result by a bounded length only.
    """
    shares = torch.tensor(weights, dtype=torch.float32)
    shares = shares / shares.sum()
    if not clip or len(changes) < 3:
        return _sum(changes, shares)
    centre = _middle(changes)
    for _ in range(CLIP_ITERATIONS):
        away = changes - centre
        distances = away.double().square().sum(dim=1).sqrt()
        limit = _middle(distances)
        factors = torch.where(distances > limit, limit / distances.clamp(min=1e-30), torch.ones_like(distances))
        centre = centre + _sum(away, shares * factors.float())
    return centre


def agreement(changes: Tensor) -> list[tuple[float, float]]:
    """Return for each change (islands, numbers) its norm and its cosine with the median of the others.

    Of two islands each is compared with the other; alone, the cosine is one.
    """
    found = []
    for index, change in enumerate(changes):
        others = torch.cat((changes[:index], changes[index + 1 :]))
        norm = float(change.double().norm())
        if not len(others):
            found.append((norm, 1.0))
            continue
        found.append((norm, _cosine(change, _middle(others))))
    return found


def likeness(changes: Tensor, past: Tensor) -> list[float]:
    """Return the cosine of each change (islands, numbers) with one of an earlier round."""
    return [_cosine(change, past) for change in changes]


def _cosine(first: Tensor, second: Tensor) -> float:
    """Cosine of two vectors; 0 if one of them is all zeros."""
    length = float(first.double().norm()) * float(second.double().norm())
    return float(first.double() @ second.double()) / length if length else 0.0


def _middle(rows: Tensor) -> Tensor:
    """Median over the rows; of an even number, the mean of the two in the middle (torch takes the lower one)."""
    ordered = rows.sort(dim=0).values
    return (ordered[(len(rows) - 1) // 2] + ordered[len(rows) // 2]) / 2


def _sum(rows: Tensor, shares: Tensor) -> Tensor:
    """Weighted sum of rows, added one after another so that the order of additions is fixed."""
    total = rows[0] * shares[0]
    for row, share in zip(rows[1:], shares[1:], strict=True):
        total = total + row * share
    return total

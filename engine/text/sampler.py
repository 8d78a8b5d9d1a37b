"""Samples the next token: a pure function of logits, history, settings and position.

The random number for a position depends only on the seed and the position, so a reply that is replayed after a failure
draws the same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import EngineError


@dataclass(frozen=True)
class Sampling:
    """Sampling settings; temperature 0 is greedy. Raises `EngineError` for values out of range."""

    temperature: float = 0.7
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        checks = (
            (0 <= self.temperature <= 100, "temperature must be between 0 and 100"),
            (self.top_k >= 0, "top_k must be 0 or more"),
            (0 < self.top_p <= 1, "top_p must be above 0 and at most 1"),
            (0 <= self.min_p <= 1, "min_p must be between 0 and 1"),
            (0 < self.repetition_penalty <= 100, "repetition_penalty must be above 0 and at most 100"),
        )
        for passed, problem in checks:
            if not passed:
                raise EngineError(problem)


def sample(logits: Tensor, history: Sequence[int], settings: Sampling, position: int) -> int:
    """Return the next token for logits (vocab,) after the tokens of `history`."""
    logits = logits.float()
    if settings.repetition_penalty != 1.0 and history:
        logits = penalised(logits, history, settings.repetition_penalty)
    if settings.temperature == 0:
        return int(logits.argmax())
    probabilities, tokens = torch.softmax(logits / settings.temperature, dim=-1).sort(descending=True, stable=True)
    kept = probabilities[: kept_count(probabilities, settings)].double().cumsum(0)
    draw = uniform(settings.seed, position) * float(kept[-1])
    return int(tokens[min(int(torch.searchsorted(kept, draw, right=True)), len(kept) - 1)])


def penalised(logits: Tensor, history: Sequence[int], penalty: float) -> Tensor:
    """Return logits (vocab,) with each token of `history` less likely: positive ones divided, negative multiplied."""
    seen = torch.tensor(sorted(set(history)), device=logits.device)
    values = logits[seen]
    return logits.index_copy(0, seen, torch.where(values > 0, values / penalty, values * penalty))


def kept_count(probabilities: Tensor, settings: Sampling) -> int:
    """Return how many of the descending probabilities pass all filters; at least one.

    Each filter is applied to the full distribution: the first top_k, the smallest head whose mass reaches top_p, and
    those of at least min_p times the highest.
    """
    count = len(probabilities)
    if settings.top_k:
        count = min(count, settings.top_k)
    if settings.top_p < 1:
        before = probabilities.double().cumsum(0) - probabilities.double()
        count = min(count, int((before < settings.top_p).sum()))
    if settings.min_p > 0:
        count = min(count, int((probabilities >= settings.min_p * probabilities[0]).sum()))
    return max(count, 1)


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) that depends only on seed and position and is the same on every machine."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)

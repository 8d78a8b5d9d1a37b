"""Honest islands are never taken for ones that send the last merged change again, however alike their changes are."""

from __future__ import annotations

import pytest
import torch

from app.core.pieces import at_once
from app.rounds.decisions import replayed
from engine.island import IslandModel, IslandTerms
from engine.training.optimiser import AdamW, Schedule
from engine.training.outer import Nesterov
from engine.training.parameters import drawn_model
from tests.app.rounds.island_swarm import CPU, SMALL, Text

EVERY, BATCH = 5, 2


@pytest.mark.parametrize(
    ("rate", "alone", "own"),
    [
        (1e-2, 0, False),
        (1e-4, 0, False),  # changes of two rounds are almost parallel
        (1e-3, 3, False),  # the last merged change is one island's own
        pytest.param(1e-3, 0, True, marks=pytest.mark.soak),  # texts of their own
    ],
)
def test_honest_islands_are_never_doubted(rate: float, alone: int, own: bool) -> None:
    check_honest(1, rounds=10, rate=rate, alone=alone, own=own)


@pytest.mark.soak
@pytest.mark.parametrize("rate", [1e-2, 1e-3, 1e-4])
@pytest.mark.parametrize("seed", range(2, 7))
def test_honest_islands_are_not_doubted_in_many_rounds(seed: int, rate: float) -> None:
    for alone, own in ((0, False), (3, False), (0, True)):
        check_honest(seed, rounds=60, rate=rate, alone=alone, own=own)


def check_honest(seed: int, *, rounds: int, rate: float, alone: int, own: bool) -> None:
    """Three honest islands, of which the first begins alone, train and merge; a replay beside them would be found."""
    terms = IslandTerms(
        Schedule(rate, rounds * EVERY, 0), 1.0, AdamW(weight_decay=0.1), Nesterov(), "int8", robust=True, rows=256
    )
    models = [IslandModel(SMALL, drawn_model(SMALL, seed), CPU, terms) for _ in range(3)]
    text, drawn = Text(), torch.Generator().manual_seed(seed)
    found = 0
    for number in range(rounds):
        active = models[:1] if number < alone else models
        rows = []
        for at, model in enumerate(active):
            first, count = (at * text.count // 3, text.count // 3) if own else (0, text.count)
            for step in range(EVERY):
                places = torch.randint(count, (BATCH,), generator=drawn).tolist()
                at_once(model.step([text.sequence(first + place) for place in places], number * EVERY + step))
            rows.append(model.change())
        merged = models[0].merge(rows, 0, [1.0] * len(rows))
        if merged.past and len(active) == 3:
            likeness = dict(zip("abc", merged.past, strict=True))
            # an island that was alone before may seem to send its own change again, but only once
            assert replayed(likeness) == {} or number == alone, (number, likeness)
            found += replayed(likeness | {"d": 1.0}).keys() == {"d"}
        for model in models:
            model.advance(merged.leaves)
            model.commit(counted=model in active)
    # changes that are parallel from round to round hide a replay, which does no harm then
    assert rate < 1e-2 or found >= (rounds - alone) // 2

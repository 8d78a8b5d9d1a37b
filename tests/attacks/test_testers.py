"""Tests of changes where rounds are short and often fail: honest changes pass, and harmful ones are found."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import torch

from app.core.pieces import at_once
from app.rounds.reading import positions_of, sequence_at
from app.rounds.testers import HARM_READ, RATIO_UNITS, DrawnTest, harmful, loss_ratio
from engine.island import LEAF, IslandModel, IslandTerms
from engine.training.codecs import encode
from engine.training.optimiser import AdamW, Schedule
from engine.training.outer import Nesterov
from engine.training.parameters import drawn_model
from tests.app.rounds.island_swarm import CPU, SMALL, Text

NAMES = ("a", "b", "c", "d")
BATCH = 2
NOISE = torch.Generator().manual_seed(1)
LIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "honest": lambda change: change,
    "nothing": lambda change: 0 * change,
    "flipped": lambda change: -change,
    "tenfold": lambda change: 10 * change,
    "flipped tenfold": lambda change: -10 * change,
    "noise": lambda change: 10 * change.std() * torch.randn(change.shape, generator=NOISE),
}


class Verdict(NamedTuple):
    """What testers say of one change of a kind."""

    kind: str
    is_harmful: bool
    means: float  # the worst ratio of mean losses that one of them found


def verdicts_in(rounds: int, steps: int, seed: int, *kinds: str) -> list[Verdict]:
    """The tests of a job in which changes are lost at random, each of a change with lies in its place."""
    lot, text = random.Random(seed), Text()
    terms = IslandTerms(
        Schedule(3e-2, 30 * steps), 1.0, AdamW(weight_decay=0.1), Nesterov(), "int8", robust=True, rows=256
    )
    models = {name: IslandModel(SMALL, drawn_model(SMALL, seed), CPU, terms) for name in NAMES}
    found = list[Verdict]()
    for number in range(rounds):
        first, last = number * steps, max(0, number - 1) * steps
        read: dict[str, list[Sequence[int]]] = {name: [] for name in NAMES}
        for name, model in models.items():
            model.begin_round(number, "int8", range(first, first + steps), range(last, first))
            for step in range(steps):
                places = positions_of(first * BATCH * len(NAMES), NAMES, name, step, BATCH)
                read[name] += [text.sequence(sequence_at(place, text.count, 1)) for place in places]
                at_once(model.step(read[name][-BATCH:], first + step))
        sent = {name: model.change() for name, model in models.items()}
        counted = sorted(lot.sample(NAMES, lot.randint(1, 4)))
        if len(counted) > 2:
            for author in counted:
                found += verdicts_of(models, sent, read, author, [one for one in counted if one != author], text, kinds)
        merged = models["a"].merge([sent[name] for name in counted], 0, [1.0] * len(counted)).leaves
        for name, model in models.items():
            model.advance(merged)
            model.commit(counted=name in counted)
    return found


def verdicts_of(
    models: Mapping[str, IslandModel],
    sent: Mapping[str, list[bytes]],
    read: Mapping[str, list[Sequence[int]]],
    author: str,
    testers: Sequence[str],
    text: Text,
    kinds: Sequence[str],
) -> list[Verdict]:
    """What testers say of a member's change, and of lies in its place."""
    change = models[author]._sent
    assert change is not None
    lies = [[encode(leaf, "int8") for leaf in lie(change).split(LEAF)] for lie in map(LIES.__getitem__, kinds)]
    told: dict[str, dict[str, tuple[int, ...]]] = {kind: {} for kind in kinds}
    means = dict.fromkeys(kinds, 0.0)
    for tester in testers:
        model = models[tester]
        texts: list[Sequence[Sequence[int]]] = [read[author][:16], text.held]
        losses = at_once(model.trial(model.states(), [sent[tester], *lies], "int8", texts))
        for at, kind in enumerate(kinds, 2):
            told[kind][tester] = tuple(loss_ratio(of_text[0], of_text[at], of_text[1]) for of_text in losses)
            means[kind] = max(means[kind], fmean(losses[0][at]) / fmean(losses[0][0]))
    test = (DrawnTest(author, tuple(testers)),)
    return [Verdict(kind, bool(harmful(test, told[kind])), means[kind]) for kind in kinds]


def test_honest_changes_of_short_rounds_do_no_harm() -> None:
    """By the means alone, one of some dozens did: it made the loss on what its author read 1.07 times as large."""
    found = verdicts_in(14, 1, 5, "honest")
    assert any(one.means > HARM_READ / RATIO_UNITS for one in found)
    assert not any(one.is_harmful for one in found)


def test_changes_that_do_harm_are_found() -> None:
    kinds = ("honest", "nothing", "flipped", "tenfold", "flipped tenfold", "noise")
    found = verdicts_in(6, 5, 1, *kinds)
    harmful_of = Counter(one.kind for one in found if one.is_harmful)
    assert harmful_of["honest"] == harmful_of["nothing"] == 0
    tests = len(found) / len(kinds)
    assert min(harmful_of["tenfold"], harmful_of["flipped tenfold"]) >= 0.8 * tests
    assert harmful_of["flipped"] >= tests / 2
    assert harmful_of["noise"] >= tests / 4

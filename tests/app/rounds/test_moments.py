"""Newcomers take over the moments of another island, of which nobody can attest that they are right."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from app.core.canonical_json import Fields
from app.core.errors import RecordError
from app.rounds import wire
from app.rounds.moments import NORM_FACTOR, Offer, best_offers, offer_in
from app.training.wire import StatePart
from p2p.errors import RemoteError
from tests.app.rounds.island_swarm import SMALL, IslandSwarm, Node, lesson_of, members_of, open_islands

PART = StatePart(b"p" * 32, 8)


def offer(first: float, second: float = 1.0, steps: int = 5) -> Offer:
    return Offer(steps, (first, second), (PART,))


@pytest.mark.parametrize(
    ("offers", "gave", "wanted"),
    [
        ({}, {}, set()),
        ({"a": offer(1.0)}, {}, {"a"}),
        ({"a": offer(1.0), "b": offer(100.0)}, {}, {"a", "b"}),  # of two nobody can say which one is wrong
        ({"a": offer(1.0), "b": offer(1.1), "c": offer(100.0)}, {}, {"a", "b"}),
        ({"a": offer(1.0), "b": offer(1.1), "c": offer(1.0, 1e-9)}, {}, {"a", "b"}),
        ({"a": offer(1.0), "b": offer(1.1), "c": offer(1.0 / (1.2 * NORM_FACTOR))}, {}, {"a", "b"}),
        ({"a": offer(0.0), "b": offer(0.0), "c": offer(0.0)}, {}, {"a", "b", "c"}),
    ],
)
def test_moments_far_from_the_middle_are_taken_from_nobody(
    offers: dict[str, Offer], gave: dict[str, int], wanted: set[str]
) -> None:
    assert {*best_offers(offers, gave, random.Random(0))} == wanted


def test_who_gave_the_state_comes_first() -> None:
    offers = {peer: offer(1.0) for peer in "abcd"}
    assert best_offers(offers, {"c": 10, "a": 5}, random.Random(0))[:2] == ["c", "a"]
    # by lot otherwise, so that newcomers do not all ask the same one
    assert len({best_offers(offers, {}, random.Random(number))[0] for number in range(50)}) == 4


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.floats(1e-3, 1e3), min_size=3), st.floats(10, 1e9))
def test_a_minority_never_keeps_out_all_others(norms: dict[str, float], factor: float) -> None:
    same = dict.fromkeys(norms, offer(1.0))
    liars = sorted(norms)[: (len(norms) - 1) // 2]
    found = best_offers(same | {peer: offer(factor) for peer in liars}, {}, random.Random(0))
    assert {*found} == norms.keys() - {*liars}


@pytest.mark.parametrize(
    "values",
    [
        {"steps": 0}, {"norms": []}, {"norms": [1.0]}, {"norms": [1.0, -1.0]}, {"norms": [1.0, 1e40]},
        {"norms": ["a", 1.0]}, {"parts": [["ab", 3]]}, {"parts": [["ab" * 32, 0]]}, {"parts": 1},
    ],
)  # fmt: skip
def test_an_offer_that_is_none_is_refused(values: dict[str, Any]) -> None:
    right = {"steps": 3, "norms": [1.0, 2.0], "parts": [["ab" * 32, 8]]}
    assert offer_in(Fields("moments", right)).steps == 3
    with pytest.raises(RecordError):
        offer_in(Fields("moments", right | values))


async def newcomer(swarm: IslandSwarm, number: int = 4) -> Node:
    """Let an island join after some rounds, and wait until it takes part."""
    await swarm.until(lambda: swarm.nodes[0].island.standing.round >= 2)
    late = swarm.add(number, has_model=False)
    await swarm.until(lambda: late.island.figures.fetched > 0)
    return late


async def test_a_newcomer_takes_over_moments(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_islands(tmp_path, 0, 1, 2, lesson=lesson_of(SMALL), steps=80) as swarm:
        late = await newcomer(swarm)
        assert late.model.has_moments
        assert late.model._model.version >= 5  # steps that the moments are of
        await swarm.finished(0, 1, 2, 4)
        assert members_of(late.island.log)[-1] == 4
        assert not any(entry.doubted for entry in late.island.log)
        # nothing of it is left with the newcomer, and at most two sets with a giver
        for node in swarm.nodes.values():
            run = node.island._moments.run
            kept = [root for root, runs in node.island._states._runs.items() if run in runs]
            assert len(kept) <= (0 if node is late else 2 * len(node.model.moments_bytes))


async def test_who_had_to_wait_for_a_place_takes_over_moments(
    tmp_path: Path, patient_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has had each state since the first round, so that it never fetches one; with fresh moments it is left out."""
    monkeypatch.setattr("app.rounds.record.MAX_MEMBERS_TOGETHER", 3)
    async with open_islands(tmp_path, 0, 1, 2, 3, lesson=lesson_of(SMALL), steps=60) as swarm:
        await swarm.until(lambda: swarm.nodes[0].island.standing.round >= 3)
        outside = next(node for node in swarm.nodes.values() if node.name not in swarm.nodes[0].island.standing.members)
        assert outside.island.figures.steps == outside.island.figures.fetched == 0
        swarm.kill(next(number for number, node in swarm.nodes.items() if node is not outside))
        await swarm.until(lambda: outside.island.figures.steps > 0)
        assert outside.model._model.version > outside.island.figures.steps  # others' steps are in its moments
        await swarm.finished(*swarm.nodes)
        assert not any(entry.doubted for entry in outside.island.log)


async def test_who_comes_back_with_its_state_takes_over_moments(tmp_path: Path, patient_clock: MockClock) -> None:
    """As after a pause. With fresh ones its changes are unlike the others' for some rounds."""
    async with open_islands(tmp_path, 0, 1, 2, steps=200) as swarm:
        first, before = swarm.nodes[0].island, swarm.nodes[1]
        await swarm.until(lambda: first.standing.round >= 5 and before.island.head == first.head)
        entries, states = list(before.island.log), before.model.states()
        swarm.kill(1)
        again = swarm.add(1)
        begin = again.island.begin
        again.island.begin = partial(begin, entries, states)  # type: ignore[method-assign]
        await swarm.until(lambda: again.island.figures.steps > 0)
        assert again.model._model.version > again.island.figures.steps  # others' steps are in its moments
        assert again.island.figures.fetched == 0
        number = first.standing.round
        await swarm.until(lambda: first.standing.round >= number + 3)
        assert not any(entry.doubted for entry in first.log)


async def test_wrong_moments_are_not_taken(tmp_path: Path, patient_clock: MockClock) -> None:
    def wrong(model: Any) -> None:
        honest = model.moments
        model.moments = lambda: honest()._replace(norms=(1e6, 1e6))

    async with open_islands(tmp_path, 0, 1, 2, steps=40) as swarm:
        liar = swarm.add(3, change=wrong)
        await swarm.until(lambda: liar.name in swarm.nodes[0].island.standing.members)
        late = await newcomer(swarm)
        own = late.model.moments()
        assert 0 < own.norms[0] < 1e3


@pytest.mark.parametrize("how", ["none", "damaged"])
async def test_without_moments_a_newcomer_begins_with_fresh_ones(
    tmp_path: Path, how: str, patient_clock: MockClock
) -> None:
    async with open_islands(tmp_path, 0, 1, steps=80) as swarm:
        for node in swarm.nodes.values():
            model: Any = node.model
            honest = model.moments

            def damaged(honest: Any = honest) -> Any:
                found = honest()
                return found._replace(parts=[data[:2] + b"\xff" * (len(data) - 2) for data in found.parts])

            model.moments = damaged
            if how == "none":
                exchange = node.island._moments

                async def refuse(number: int) -> bytes:
                    raise RemoteError("none here", wire.NOT_YET)

                exchange.answer = refuse  # type: ignore[method-assign]
        late = await newcomer(swarm)
        assert not late.model.has_moments
        await swarm.finished(0, 1, 4)
        assert members_of(late.island.log)[-1] == 3


async def test_a_card_that_is_full_costs_the_moments_alone(tmp_path: Path, patient_clock: MockClock) -> None:
    def fill(model: Any) -> None:
        def full(moments: Any) -> None:
            raise RuntimeError("CUDA out of memory")

        model.take_moments = full

    async with open_islands(tmp_path, 0, 1, steps=80) as swarm:
        await swarm.until(lambda: swarm.nodes[0].island.standing.round >= 2)
        late = swarm.add(4, has_model=False, change=fill)
        await swarm.until(lambda: late.island.figures.fetched > 0)
        assert not late.model.has_moments
        await swarm.finished(0, 1, 4)
        assert members_of(late.island.log)[-1] == 3


async def test_a_giver_that_dies_costs_its_moments_alone(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_islands(tmp_path, 0, 1, 2, steps=40) as swarm:
        await swarm.until(lambda: swarm.nodes[0].island.standing.round >= 2)
        late = swarm.add(4, has_model=False)
        asked: Counter[str] = Counter()
        exchange = late.island._moments
        took = exchange._took

        async def dying(model: Any, peer: str, found: Offer) -> bool:
            if not asked:
                swarm.kill(next(number for number, node in swarm.nodes.items() if node.name == peer))
            asked[peer] += 1
            return await took(model, peer, found)

        exchange._took = dying  # type: ignore[method-assign, assignment]
        await swarm.until(lambda: late.island.figures.fetched > 0)
        assert len(asked) == 2
        assert late.model.has_moments
        await swarm.finished(*swarm.nodes)

"""Testers are drawn by lot, and what they say decides only if most of them agree."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from app.core.errors import RecordError
from app.manifest.merkle import HASH_BYTES
from app.rounds import testers, wire
from app.rounds.decisions import leading_order, share_ranges
from app.rounds.island import LeftOut
from app.rounds.log import follow, make_entry, replay
from app.rounds.testers import (
    HARM_READ,
    HARM_ROUNDS,
    HARM_UNSEEN,
    MOST_RATIO,
    MOST_SEQUENCES,
    MOST_TESTED,
    ROUNDS_A_TEST,
    TESTERS,
    TRAINED,
    DrawnTest,
    drawn_steps,
    drawn_tests,
    harmful,
    loss_ratio,
)
from engine.island import LEAF
from engine.training.codecs import encode
from p2p.errors import RemoteError
from tests.app.rounds.island_swarm import SMALL, lesson_of, open_islands
from tests.app.rounds.statements import BY_PEER, NOW_MS, PEOPLE, RECORD, history, members, result, round_of

PEERS = st.lists(st.text("abcdefgh", min_size=1, max_size=3), min_size=0, max_size=16, unique=True)


def root(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(4, "big")).digest()


@given(st.integers(0, 10**6), PEERS, st.sets(st.text("abcdefgh", min_size=1, max_size=3), max_size=4))
def test_nobody_tests_itself_and_all_draw_the_same(number: int, peers: list[str], doubted: set[str]) -> None:
    tests = drawn_tests(root(number), peers, doubted)
    assert tests == drawn_tests(root(number), peers[::-1], doubted)
    assert len(tests) <= MOST_TESTED
    assert len({test.peer for test in tests}) == len(tests)
    assert bool(tests) or not doubted & {*peers} or len(peers) < 3
    for test in tests:
        assert test.peer in peers
        assert test.peer not in test.testers
        assert len({*test.testers}) == len(test.testers) == min(TESTERS, len(peers) - 1)
        assert {*test.testers} <= {*peers}


def test_lots_fall_on_all_alike() -> None:
    peers, count = ["a", "b", "c", "d", "e"], 4000
    drawn = [drawn_tests(root(number), peers, ()) for number in range(count)]
    tested = Counter(test.peer for tests in drawn for test in tests)
    testing = Counter(peer for tests in drawn for test in tests for peer in test.testers)
    assert sum(tested.values()) == pytest.approx(count / ROUNDS_A_TEST, rel=0.15)
    for peer in peers:
        assert tested[peer] == pytest.approx(count / ROUNDS_A_TEST / 5, rel=0.4)
        assert testing[peer] == pytest.approx(TESTERS * count / ROUNDS_A_TEST / 5, rel=0.3)


def test_who_tests_depends_on_the_root_and_not_on_the_tested_alone() -> None:
    peers = [f"peer{number}" for number in range(9)]
    assert len({drawn_tests(root(number), peers, {"peer3"})[0].testers for number in range(50)}) > 30


def test_the_doubted_are_tested_in_every_round() -> None:
    for number in range(50):
        assert "b" in {test.peer for test in drawn_tests(root(number), ["a", "b", "c"], {"b", "gone"})}


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 9))
def test_drawn_sequences_are_among_those_that_were_read(number: int, steps: int, batch: int) -> None:
    drawn = drawn_steps(root(number), "a", steps, batch)
    assert len({*drawn}) == len(drawn) == min(MOST_SEQUENCES, steps * batch)
    assert all(0 <= step < steps and 0 <= row < batch for step, row in drawn)


THREE = (DrawnTest("liar", ("a", "b", "c")),)
WORSE = (HARM_READ + 1, 0)


@pytest.mark.parametrize(
    ("tests", "told", "found"),
    [
        ((), {"a": (5000, 5000)}, False),
        (THREE, {}, False),
        (THREE, {"a": WORSE, "b": WORSE, "c": (900, 0)}, True),
        (THREE, {"a": WORSE, "b": (900, 0), "c": (900, 0)}, False),
        (THREE, {"a": WORSE, "b": WORSE}, True),
        (THREE, {"a": (MOST_RATIO, 0), "b": (900, 0)}, False),  # one liar among two testers
        (THREE, {"a": WORSE}, False),
        (THREE, {"a": WORSE, "b": (0, 0), "c": (0, 0)}, False),
        (THREE, {"a": (HARM_READ, 0), "b": (HARM_READ, 0)}, False),
        (THREE, {"a": (1000, HARM_UNSEEN + 1), "b": (1000, HARM_UNSEEN + 1)}, True),
        (THREE, {"a": (1000, HARM_UNSEEN), "b": (1000, HARM_UNSEEN)}, False),
        (THREE, {"x": WORSE, "y": WORSE, "z": WORSE}, False),  # who was not drawn has no say
        (THREE, {"a": (*WORSE, 0, 0), "b": (*WORSE, 0, 0)}, False),  # about another number of tests
        ((DrawnTest("liar", ("a", "b")),), {"a": WORSE, "b": WORSE}, True),
        ((DrawnTest("liar", ("a", "b")),), {"a": WORSE, "b": (1000, 0)}, False),
    ],
)
def test_most_testers_have_to_agree(tests: Sequence[DrawnTest], told: dict[str, tuple[int, ...]], found: bool) -> None:
    assert (harmful(tests, told).keys() == {"liar"}) is found


@pytest.mark.parametrize(
    ("read", "unseen", "is_found"),
    [
        (950, 1400, False), (950, 1501, True), (999, 1201, False), (1000, 1201, True), (1051, 900, True),
        (0, 1201, True), (0, 1200, False),
    ],
)  # fmt: skip
def test_a_change_that_comes_from_training_may_do_more_to_unseen_text(read: int, unseen: int, is_found: bool) -> None:
    """A few unseen sequences tell little: honest changes of a small job were left out for them."""
    tests = (DrawnTest("one", ("a", "b", "c")),)
    assert bool(harmful(tests, dict.fromkeys("abc", (read, unseen)))) is is_found


def test_each_test_has_its_own_ratios() -> None:
    tests = (DrawnTest("one", ("a", "b")), DrawnTest("two", ("a", "b")))
    assert harmful(tests, {"a": (900, 900, *WORSE), "b": (900, 900, *WORSE)}).keys() == {"two"}


USUAL = (2.0, 2.2, 1.8, 2.1)  # losses on four sequences


def by(*more: float) -> tuple[float, ...]:
    """The usual losses, each larger by so much."""
    return tuple(loss + each for loss, each in zip(USUAL, more, strict=True))


@pytest.mark.parametrize(
    ("before", "after", "own", "ratio"),
    [
        ((2.0, 2.0), (1.0, 1.0), (2.0, 2.0), 500),
        ((2.0, 2.0), (2.0, 2.0), (2.0, 2.0), 1000),
        ((0.1, 0.1), (0.2, 0.2), (0.1, 0.1), 1100),
        ((0.2, 0.2), (0.1, 0.1), (0.2, 0.2), 900),
        ((1.0, 1.0), (0.0, 0.0), (1.0, 1.0), 1),
        ((0.0, 0.0), (1.0, 1.0), (0.0, 0.0), 2000),
        ((1.0, 1.0), (1e9, 1e9), (1.0, 1.0), MOST_RATIO),
        ((2.0, 2.0), (2.0, math.nan), (2.0, 2.0), MOST_RATIO),
        ((2.0, 2.0), (2.0, math.inf), (2.0, 2.0), MOST_RATIO),
        ((2.0, math.nan), (2.0, 2.0), (2.0, 2.0), 0),  # the fault is not the change's
        ((2.0, 2.0), (3.0, 3.0), (2.0, math.inf), 0),
        ((2.0,), (3.0,), (2.0,), 0),  # of one sequence nobody can tell
        (USUAL, by(0.9, -0.1, -0.1, -0.1), USUAL, 1000),  # worse by a tenth, for one sequence of them
        (USUAL, by(0.2, 0.21, 0.2, 0.19), USUAL, 1092),
        (USUAL, by(0.2, 0.21, 0.2, 0.19), by(0.2, 0.2, 0.2, 0.2), 1000),  # the tester's own does so, too
        (USUAL, by(2.0, 2.1, 2.0, 1.9), by(0.2, 0.2, 0.2, 0.2), 1822),
        ((2.0, 2.0), (2.1, 2.9), (2.0, 2.0), 1000),  # two tell little if they differ
    ],
)
def test_losses_as_thousandths(
    before: Sequence[float], after: Sequence[float], own: Sequence[float], ratio: int
) -> None:
    assert loss_ratio(before, after, own) == ratio


def test_the_log_doubts_whom_drawn_testers_found_harmful() -> None:
    people = PEOPLE[:4]
    standing = replay(RECORD, history(1, people))
    liar = people[1].peer_id
    entry, standing = round_of(standing, people, liar=liar)
    (test, *_) = (test for test in standing.tests if test.peer == liar)
    assert liar in entry.doubted  # its change was unlike the others', so it is tested
    found = members(standing, people)
    at = 2 * standing.tests.index(test)
    ratios = [900] * 2 * len(standing.tests)
    ratios[at] = HARM_READ + 100
    after = hashlib.sha256(found.raw).digest()
    report = {peer: (1.0, 0.5) for peer in found.members}
    results = [
        result(BY_PEER[peer], found, after, report, tested=tuple(ratios) if peer in test.testers else ())
        for peer in found.members
    ]

    def made(told: Sequence[Any]) -> Any:
        leader = BY_PEER[found.leader]
        return make_entry(
            leader, RECORD, standing, found, told, every=10, codec="int8", present=(), now_ms=NOW_MS
        )  # fmt: skip

    harmed = made(results)
    assert "1.15 times" in harmed.doubted[liar]
    assert not harmed.left_out  # both doubts are about the same change
    again = follow(RECORD, standing, harmed)
    (test, *_) = (test for test in again.tests if test.peer == liar)
    ratios = [900] * 2 * len(again.tests)
    ratios[2 * again.tests.index(test)] = HARM_READ + 100
    second, stood = round_of(again, people, tested={peer: tuple(ratios) for peer in test.testers})
    assert second.left_out.keys() == stood.banned.keys() == {liar}  # two changes in a row did harm
    # a leader cannot leave the testers' word out
    silent = [result(BY_PEER[peer], found, after, report) for peer in found.members]
    assert not made(silent).doubted
    forged = made(silent)
    with pytest.raises(RecordError):
        follow(RECORD, standing, forged.__class__(**{**forged.__dict__, "results": tuple(harmed.results)}))


@pytest.mark.parametrize(("read", "is_left_out"), [(TRAINED - 5, False), (TRAINED + 1, True), (0, True)])
def test_who_is_unlike_twice_stays_if_its_change_comes_from_training(read: int, is_left_out: bool) -> None:
    people = PEOPLE[:4]
    standing = replay(RECORD, history(2, people))
    odd = people[1].peer_id
    _, standing = round_of(standing, people, liar=odd)
    assert standing.unlike == {odd}
    (test,) = (test for test in standing.tests if test.peer == odd)
    ratios = [900] * 2 * len(standing.tests)
    ratios[2 * standing.tests.index(test)] = read
    entry, after = round_of(standing, people, liar=odd, tested={peer: tuple(ratios) for peer in test.testers})
    assert odd in entry.doubted
    assert (odd in entry.left_out) == is_left_out
    assert any(one.peer == odd for one in after.tests) == (not is_left_out)  # it is tested again


@pytest.mark.parametrize(("rounds_ago", "is_left_out"), [(2, True), (HARM_ROUNDS - 1, True), (HARM_ROUNDS, False)])
def test_who_does_harm_now_and_then_is_left_out(rounds_ago: int, is_left_out: bool) -> None:
    people = PEOPLE[:4]
    standing = replay(RECORD, history(1, people))
    liar = people[1].peer_id
    before = [frozenset({liar})] + [frozenset[str]()] * (rounds_ago - 1)
    test = DrawnTest(liar, tuple(one.peer_id for one in people if one.peer_id != liar))
    standing = replace(standing, harms=tuple(before)[1 - HARM_ROUNDS :], tests=(test,))
    entry, after = round_of(standing, people, tested={peer: (HARM_READ + 1, 900) for peer in test.testers})
    assert entry.doubted.keys() == {liar}
    assert after.banned.keys() == ({liar} if is_left_out else set())
    assert len(after.harms) == min(HARM_ROUNDS - 1, rounds_ago + 1)
    assert after.harms[-1] == {liar}


def test_an_unlike_change_counts_only_if_it_was_tested() -> None:
    people = PEOPLE[:4]
    odd = people[1].peer_id
    _, standing = round_of(replay(RECORD, history(2, people)), people, liar=odd)
    assert round_of(standing, people, liar=odd)[0].left_out.keys() == {odd}
    assert not round_of(replace(standing, tests=()), people, liar=odd)[0].left_out


def overshoot(model: Any) -> None:
    """Let an island send its change several times: like the others' in direction and near them in norm."""
    honest = model.change

    def lie() -> list[bytes]:
        honest()
        return [encode(leaf, model.codec) for leaf in (model._sent * 4.0).split(LEAF)]

    model.change = lie


async def test_who_does_harm_that_no_norm_shows_is_found_by_testers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patient_clock: MockClock
) -> None:
    monkeypatch.setattr(testers, "ROUNDS_A_TEST", 1)
    async with open_islands(tmp_path, 0, 1, 2, lesson=lesson_of(SMALL), steps=400, rate=3e-2) as swarm:
        liar = swarm.add(3, change=overshoot)
        await swarm.until(lambda: liar.failure is not None, within_s=2000)
        assert isinstance(liar.failure, LeftOut)
        log = swarm.nodes[0].island.log
        assert log[-1].left_out.keys() == {liar.name}
        assert "makes the loss" in log[-1].left_out[liar.name]


async def test_honest_changes_pass_every_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patient_clock: MockClock
) -> None:
    monkeypatch.setattr(testers, "ROUNDS_A_TEST", 1)
    async with open_islands(tmp_path, 0, 1, 2, 3, lesson=lesson_of(SMALL), steps=40, rate=3e-3) as swarm:
        await swarm.finished(0, 1, 2, 3)
        log = swarm.nodes[0].island.log
        told = [one.tested for entry in log for one in entry.results if one.tested]
        assert len(told) >= TESTERS * (len(log) - 4)
        assert all(0 < read <= HARM_READ for pairs in told for read in pairs[::2])
        assert all(0 < unseen <= HARM_UNSEEN for pairs in told for unseen in pairs[1::2])
        assert not any(entry.doubted for entry in log)


@pytest.mark.parametrize("what", ["trial", pytest.param("retrace", marks=pytest.mark.soak)])
async def test_a_card_that_is_full_costs_the_test_alone(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch, patient_clock: MockClock
) -> None:
    monkeypatch.setattr(testers, "ROUNDS_A_TEST", 1)
    tried: list[object] = []

    def fill(model: Any) -> None:
        def full(*args: Any) -> Any:
            tried.append(args)
            raise RuntimeError("CUDA out of memory")

        setattr(model, what, full)

    async with open_islands(tmp_path, 0, 1, 2, steps=60, rate=3e-3, recompute=True) as swarm:
        swarm.add(3, change=fill)
        await swarm.finished(0, 1, 2, 3)
        assert tried
        assert not any(entry.doubted for entry in swarm.nodes[0].island.log)


@pytest.mark.parametrize("code", [wire.UNKNOWN, wire.WRONG])
async def test_who_cannot_show_its_change_any_more_is_not_doubted(
    tmp_path: Path, code: str, monkeypatch: pytest.MonkeyPatch, patient_clock: MockClock
) -> None:
    """So answers a node whose job is paused, and an island that was restarted."""
    monkeypatch.setattr(testers, "ROUNDS_A_TEST", 1)
    # steps are so long that testers have asked several times before the next round ends their test
    async with open_islands(tmp_path, 0, 1, 2, steps=400, step_s=1.0) as swarm:
        island = swarm.add(3, step_s=1.0).island
        shown, asked = island._on_exchange, list[str]()

        async def answer(method: str, peer: str, fields: Any) -> Any:
            if island._tested is not None and fields.hex_bytes("list", HASH_BYTES) == island.log[-1].list.hash:
                asked.append(peer)
                raise RemoteError("not here any more", code)
            return await shown(method, peer, fields)

        island._on_exchange = answer  # type: ignore[method-assign]
        await swarm.until(lambda: len({*asked}) == TESTERS)
        number = island.standing.round
        await swarm.until(lambda: island.standing.round >= number + 2)
        assert not any(entry.doubted for entry in island.log)


async def test_who_commits_to_what_is_no_change_is_doubted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patient_clock: MockClock
) -> None:
    """Of the share that it merges itself, nobody but testers sees its leaves: they are one byte too short."""
    monkeypatch.setattr(testers, "ROUNDS_A_TEST", 1)
    right: dict[bytes, bytes] = {}  # by the leaf that was sent

    def shorten(model: Any) -> None:
        honest_change, honest_merge = model.change, model.merge

        def change() -> list[bytes]:
            leaves, standing = list(honest_change()), liar.island.standing
            members = leading_order(swarm.record.id, standing.round, standing.members)
            if liar.name in members:
                for at in share_ranges(len(leaves), len(members))[members.index(liar.name)]:
                    right[leaves[at][:-1]] = leaves[at]
                    leaves[at] = leaves[at][:-1]
            return leaves

        def merge(rows: Any, first: int, weights: Any) -> Any:
            return honest_merge([[right.get(leaf, leaf) for leaf in row] for row in rows], first, weights)

        model.change, model.merge = change, merge

    async with open_islands(tmp_path, 0, 1, 2, lesson=lesson_of(SMALL), steps=400) as swarm:
        liar, island = swarm.add(3, change=shorten), swarm.nodes[0].island
        await swarm.until(lambda: any(entry.doubted for entry in island.log), within_s=2000)
        assert island.log[-1].doubted.keys() == {liar.name}
        assert "makes the loss" in island.log[-1].doubted[liar.name]

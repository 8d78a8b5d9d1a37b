"""Who a job goes on without: one that causes every incident soon rests most, and nobody rests for ever."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.training.blame import MOST_AWAITED_S, MOST_REST_S, REST_S, Blame


def test_each_rest_is_twice_as_long_up_to_an_hour() -> None:
    blame, rests = Blame(), []
    for _ in range(2000):
        blame.rest("a", 0.0)
        rests.append(next(after for after in (REST_S * 2**n for n in range(8)) if "a" not in blame.resting(after)))
    assert rests[:5] == [30.0, 60.0, 120.0, 240.0, 480.0]
    assert blame.resting(MOST_REST_S - 1) == ["a"]
    assert blame.resting(MOST_REST_S) == []


def rest_of(blame: Blame, peer: str, now: float) -> float:
    """Have a peer rest, and return for how long."""
    blame.rest(peer, now)
    return blame._until[peer] - now


def test_a_rest_is_forgotten_in_an_hour() -> None:
    blame, hours = Blame(), MOST_REST_S
    assert [rest_of(blame, "a", 0.0) for _ in range(3)] == [30.0, 60.0, 120.0]
    assert blame.rests("a", 0.0) == 3
    assert blame.rests("a", 2 * hours) == 1
    assert rest_of(blame, "a", 2 * hours) == 60.0
    assert [rest_of(blame, "a", number * 5 * hours) for number in range(1, 100)] == [REST_S] * 99
    for _ in range(1000):  # more than there are to an hour's rest are not remembered
        blame.rest("a", 1000 * hours)
    assert rest_of(blame, "a", 1000 * hours) == MOST_REST_S
    assert rest_of(blame, "a", 1008 * hours) == REST_S
    blame.rest("b", 2000 * hours)
    assert set(blame._until) == set(blame._forgotten_at) == {"b"}


@given(st.lists(st.floats(0, 2 * MOST_REST_S), min_size=1, max_size=300))
def test_however_long_it_behaves_between_a_hop_stops_a_job_about_once_an_hour(behaves_s: list[float]) -> None:
    blame, now = Blame(), 0.0
    for seconds in behaves_s:
        now += seconds
        now += rest_of(blame, "liar", now)
    assert len(behaves_s) <= now / MOST_REST_S + 8


def test_those_whose_rest_ends_first_come_first() -> None:
    blame = Blame()
    for peer in ("twice", "twice", "once"):
        blame.rest(peer, 0.0)
    assert blame.resting(1.0) == ["once", "twice"]


@pytest.mark.parametrize(
    ("suspects", "spare", "chosen"),
    [
        pytest.param(("needed", "other"), {"other"}, "other", id="one that the job can do without"),
        pytest.param(("a", "b"), {"a", "b"}, "a", id="of equals the first"),
        pytest.param(("a", "b"), set(), "a", id="of equals that are needed the first"),
    ],
)
def test_who_is_left_first(suspects: tuple[str, ...], spare: set[str], chosen: str) -> None:
    assert Blame().choose(suspects, 0.0, spare.__contains__) == chosen


def test_those_that_are_needed_take_turns() -> None:
    blame, found = Blame(), []
    for _ in range(6):
        found.append(blame.choose(("a", "b", "c"), 0.0))
        blame.rest(found[-1], 0.0)
    assert found == ["a", "b", "c"] * 2


def test_who_accuses_one_after_another_is_left_at_its_second_lie() -> None:
    blame = Blame()
    assert blame.choose(("honest 1", "liar"), 0.0, lambda peer: True) == "honest 1"
    assert blame.choose(("honest 2", "liar"), 0.0, lambda peer: True) == "liar"


@given(
    behaves=st.integers(0, 12),
    liars=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_liars_soon_rest_more_than_anybody_honest(behaves: int, liars: int, seed: int) -> None:
    """Liars hold the second blocks with one honest hop, and accuse whoever sent them a micro-batch after some steps."""
    rng, blame, now = random.Random(seed), Blame(), 0.0
    first, second = ["first 0", "first 1", "first 2"], ["honest", *(f"liar {n}" for n in range(liars))]
    rested = dict.fromkeys((*first, *second), 0.0)
    for _ in range(400):
        for _ in range(behaves):
            blame.step_made()
        resting = set(blame.resting(now))
        senders, others = ([peer for peer in peers if peer not in resting] for peers in (first, second))
        lying = [peer for peer in others if peer.startswith("liar")]
        if lying:
            pair = rng.choice(senders or first), rng.choice(lying)
            alone = [peers[0] for peers in (senders, others) if len(peers) == 1]
            chosen = blame.choose(pair, now, lambda peer, alone=alone: peer not in alone)  # type: ignore[misc]
            blame.rest(chosen, now)
            rested[chosen] += 1
        now += 30.0
    assert rested["honest"] == 0
    assert max(rested[peer] for peer in first) <= max(rested[peer] for peer in second)


def test_a_job_may_wait_for_a_peer_half_of_the_time() -> None:
    blame = Blame()
    for _ in range(1000):
        blame.time_passed(100.0, ("slow", "as slow"))
        blame.time_passed(100.0, ("other",))
    assert blame.too_slow == []
    blame.time_passed(100.0, ("slow",))
    assert blame.too_slow == []
    blame.time_passed(MOST_AWAITED_S - 99.0, ("slow",))
    assert blame.too_slow == ["slow"]
    blame.rest("slow", 0.0)
    assert blame.too_slow == []


@given(st.lists(st.tuples(st.floats(0, 1000), st.booleans()), max_size=50))
def test_who_is_too_slow_was_awaited_for_long_and_for_longer_than_not(waits: list[tuple[float, bool]]) -> None:
    blame, before = Blame(), 0.0
    for seconds, is_awaited in waits:
        blame.time_passed(seconds, ("a",) if is_awaited else ())
        before = max(0.0, before + (seconds if is_awaited else -seconds))
        assert blame.too_slow == (["a"] if before > MOST_AWAITED_S else [])

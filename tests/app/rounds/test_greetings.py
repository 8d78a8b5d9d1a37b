"""Whom an island greets: all of its job, and of a swarm of any size a few by lot."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest

from app.rounds.greetings import (
    MOST_AWAY,
    MOST_WAITING,
    NAMED,
    SILENT_MOST_S,
    SILENT_S,
    STRANGERS,
    STRANGERS_ALONE,
    UNKNOWN_MOST_S,
    UNKNOWN_S,
    Greetings,
    Heard,
    JobPeers,
)

PERIOD_S = 5.0
HEAD = bytes(32)


def crowd(count: int, name: str = "member") -> list[str]:
    """Members of a swarm that train nothing."""
    return [f"{name}{number}" for number in range(count)]


def heard(peers: Iterable[str], at: float = 0.0, others: tuple[str, ...] = ()) -> dict[str, Heard]:
    """What some islands said of themselves."""
    return {peer: Heard(at, 1, HEAD, others) for peer in peers}


def known(
    swarm: Iterable[str] = (),
    *,
    expected: Iterable[str] = (),
    recent: Iterable[str] = (),
    alive: Iterable[str] = (),
    others: tuple[str, ...] = (),
) -> JobPeers:
    """The peers of a job; those that are there name others."""
    return JobPeers([*expected], [*recent], [*alive], heard(alive, others=others), [*swarm])  # fmt: skip


def periods(
    greetings: Greetings, peers: JobPeers, count: int, knows: Callable[[str], bool] = lambda peer: False
) -> list[list[str]]:
    """Whom an island greets in some periods, if whoever does not know the job says so."""
    found = []
    for number in range(count):
        now = number * PERIOD_S
        found.append(greetings.due(now, peers))
        assert len(found[-1]) == len(set(found[-1]))
        for peer in found[-1]:
            if knows(peer):
                greetings.answered(peer)
            else:
                greetings.failed(peer, now, is_unknown=True)
    return found


def test_in_a_small_swarm_everybody_is_greeted_at_once() -> None:
    for alive in ([], ["one"]):
        found = Greetings((), random.Random(1)).due(0.0, known(crowd(STRANGERS), alive=alive))
        assert {*found} == {*crowd(STRANGERS), *alive}


def test_islands_of_the_job_are_greeted_in_every_period() -> None:
    swarm, expected, recent = crowd(1000), crowd(5, "expected"), crowd(5, "recent")
    peers = known([*swarm, *expected, *recent], expected=expected, recent=recent, alive=expected)
    found = periods(Greetings(["first"], random.Random(1)), peers, 20, knows=lambda peer: peer not in swarm)
    assert all({*expected, *recent, "first"} <= {*one} for one in found)


@pytest.mark.soak
def test_members_that_train_nothing_are_seldom_greeted_in_a_large_swarm() -> None:
    peers = known(crowd(1000), expected=["one"], alive=["one"])
    found = periods(Greetings((), random.Random(1)), peers, 720, knows=lambda peer: peer == "one")
    assert all(len(one) <= 1 + STRANGERS for one in found)
    asked = [peer for one in found for peer in one if peer != "one"]
    assert {*asked} == {*crowd(1000)}  # nobody is left out
    assert max(map(asked.count, {*asked})) <= 5  # in an hour: after 0, 3, 9, 21 and 45 minutes


def test_an_island_that_hears_nobody_asks_a_thousand_members_within_minutes() -> None:
    found = periods(Greetings((), random.Random(1)), known(crowd(1000)), 100)
    assert all(len(one) <= STRANGERS_ALONE for one in found)
    first = {peer: number for number, one in reversed([*enumerate(found)]) for peer in one}
    assert max(first.values()) * PERIOD_S <= 400


def test_who_does_not_know_the_job_is_asked_again_after_minutes_and_an_hour_at_most() -> None:
    greetings, asked = Greetings((), random.Random(1)), []
    for second in range(0, 20_000, 5):
        if greetings.due(float(second), known(["member"])):
            asked.append(second)
            greetings.failed("member", float(second), is_unknown=True)
    pauses = [after - before for before, after in pairwise(asked)]
    assert pauses[:3] == [UNKNOWN_S, 2 * UNKNOWN_S, 4 * UNKNOWN_S]
    assert pauses[-1] == UNKNOWN_MOST_S


def test_who_is_silent_is_asked_again_soon_and_after_minutes_at_most() -> None:
    greetings = Greetings((), random.Random(1))
    for _ in range(20):
        greetings.failed("member", 0.0, is_unknown=False)
    assert greetings.due(SILENT_MOST_S - 1, known(["member"])) == []
    assert greetings.due(SILENT_MOST_S, known(["member"])) == ["member"]
    greetings.failed("member", 0.0, is_unknown=True)  # it is there now
    assert greetings.due(UNKNOWN_S, known(["member"])) == ["member"]
    greetings.answered("member")
    greetings.failed("member", 0.0, is_unknown=False)
    assert greetings.due(SILENT_S, known(["member"])) == ["member"]


def test_an_acquaintance_that_is_silent_is_greeted_again_and_one_that_left_the_job_is_not() -> None:
    greetings = Greetings(["first"], random.Random(1))
    for peer, is_unknown in (("first", False), ("left", True)):
        greetings.failed(peer, 0.0, is_unknown=is_unknown)
    assert greetings.due(0.0, known(recent=["left"])) == ["first"]
    assert {*greetings.due(UNKNOWN_S, known(recent=["left"]))} == {"first", "left"}


def test_a_member_that_comes_back_to_the_swarm_is_asked_as_any_other() -> None:
    greetings = Greetings((), random.Random(1))
    greetings.failed("member", 0.0, is_unknown=True)
    assert greetings.due(1.0, known(["member"])) == []
    assert greetings.due(2.0, known([])) == []
    assert greetings.due(3.0, known(["member"])) == ["member"]


def test_a_peer_that_islands_name_is_asked_soon() -> None:
    peers = known([*crowd(1000), "named"], expected=["one"], alive=["one"], others=("named",))
    assert "named" in Greetings((), random.Random(1)).due(0.0, peers)


def test_the_names_of_a_liar_cost_one_question_each_and_never_all_that_are_asked() -> None:
    greetings, swarm = Greetings((), random.Random(1)), crowd(1000)
    asked: list[str] = []
    for number in range(30):
        names = tuple(swarm[:16])  # of members that do not train, again and again
        found = greetings.due(number * PERIOD_S, known(swarm, expected=["liar"], alive=["liar"], others=names))
        asked += [peer for peer in found if peer in names]
        assert len([peer for peer in found if peer in names]) <= STRANGERS // 2 + 1  # the lot may name one as well
        for peer in found:
            greetings.failed(peer, number * PERIOD_S, is_unknown=peer != "liar")
    assert sorted(asked) == sorted(swarm[:16])
    assert "stranger" not in greetings.due(0.0, known(swarm, alive=["liar"], others=("stranger",)))  # of no member


def test_of_many_that_wait_for_a_place_or_are_away_some_are_greeted() -> None:
    waiting, away = crowd(200, "waits"), crowd(200, "away")
    peers = known(alive=waiting, recent=away)
    peers = peers._replace(heard={peer: Heard(float(at), 1, HEAD) for at, peer in enumerate(reversed(waiting))})
    greetings = Greetings((), random.Random(1))
    for _ in range(3):
        found = greetings.due(0.0, peers)
        assert {peer for peer in found if peer in waiting} == {*waiting[-MOST_WAITING:]}  # those not heard for longest
        assert len([peer for peer in found if peer in away]) == MOST_AWAY
    assert {peer for _ in range(100) for peer in greetings.due(0.0, peers)} >= {*away}


def test_a_few_islands_are_named() -> None:
    greetings = Greetings((), random.Random(1))
    assert greetings.named(["one", "two"]) == ["one", "two"]
    assert len(greetings.named(crowd(64))) == NAMED

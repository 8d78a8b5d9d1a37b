"""Attacks on measured speeds: a hop that delays replies has no honest hop beside it left out for long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from app.core.span import Span
from app.routing.cost import HOP_S, compute_seconds, links_seconds, overhead_seconds
from app.routing.estimates import AGAIN_S, MeasuredSpeeds
from app.routing.planner import RoutePlanner
from app.routing.reroute import RunningRoute
from app.routing.route import Hop, Route, RouteRequest
from app.swarm.records import Announcement
from tests.app.routing.test_search import member

WHOLE = RouteRequest(Span(0, 8), 200, 20)
EVERY_S = 6.0
Delay = Callable[[Sequence[str], int], float]  # (the route's peers, earlier replies over it) -> seconds a token


async def replies(members: Sequence[Announcement], delay_s: Delay, count: int) -> list[tuple[float, str]]:
    """When replies began, one every few seconds, and over which hops; these keep their word but for the delay."""
    network: Any = SimpleNamespace(peer_id="me", links=lambda: (), source=lambda peer: peer)
    planner = RoutePlanner(network, lambda: members)
    block_s = {one.peer: one.decode_block_s for one in members}
    used: list[tuple[float, str]] = []
    for _ in range(count):
        route = await planner.find((), WHOLE, ())
        peers = [hop.peer for hop in route]
        usual_s = overhead_seconds(route, links_seconds(route, planner.link_s()), dict.fromkeys(peers, HOP_S))
        before = sum(names == "+".join(peers) for _, names in used)
        token_s = usual_s + compute_seconds(route, block_s) + delay_s(peers, before)
        for peer in peers:
            planner.worked(peer)
        planner.record_times(RunningRoute(route, token_s, 0), WHOLE)
        used.append((trio.current_time(), "+".join(peers)))
        await trio.sleep(EVERY_S)
    return used


SMALL_FIRST = (member("x", 0, 1, 800.0), member("y", 0, 1, 400.0), member("honest", 1, 8, 100.0))
LARGE_LAST = (member("honest", 0, 1, 800.0), member("y", 0, 1, 300.0), member("x", 1, 8, 150.0))


@pytest.mark.parametrize("delay_s", [0.02, 0.2, 5.0])
@pytest.mark.parametrize("times", [1, 1000])
async def test_a_small_hop_that_delays_replies_has_the_large_one_left_out_for_no_longer_than_a_minute_or_two(
    delay_s: float, times: int, autojump_clock: MockClock
) -> None:
    """It delays replies to this hop alone, once or always: nearly all of that was put down to the large one."""
    members = [*SMALL_FIRST, member("other", 1, 8, 60.0)]
    used = await replies(members, lambda peers, before: delay_s * (peers == ["x", "honest"] and before < times), 150)
    assert sum("honest" in names for _, names in used) > 0.85 * len(used)
    assert sum(names == "x+honest" for _, names in used) <= 5 or times == 1


async def test_a_large_hop_that_delays_replies_has_the_small_one_left_out_at_first_alone(
    autojump_clock: MockClock,
) -> None:
    members = [*LARGE_LAST, member("other", 1, 8, 100.0)]
    used = await replies(members, lambda peers, before: 0.2 * (peers == ["honest", "x"]), 450)
    assert sum("honest" in names for _, names in used) > 0.85 * len(used)
    assert Counter(names for _, names in used)["honest+x"] <= 6, "and seldom has it another reply to delay"


async def test_a_hop_that_delays_replies_now_and_then_has_fewer_of_them_each_time(autojump_clock: MockClock) -> None:
    """It does well when it is measured again, and delays the next reply."""
    members = [*SMALL_FIRST, member("other", 1, 8, 60.0)]
    used = await replies(members, lambda peers, before: 0.2 * (peers == ["x", "honest"] and before % 2), 450)
    assert sum("honest" in names for _, names in used) > 0.95 * len(used)
    assert Counter(names for _, names in used)["x+honest"] <= 12


async def test_a_hop_that_is_slow_is_left_after_few_replies(autojump_clock: MockClock) -> None:
    """It takes a hundred times as long as it says; it is measured again, but not by the replies of every minute."""
    members = [member("slow", 0, 8, 200.0), member("fine", 0, 8, 60.0)]
    used = await replies(members, lambda peers, before: 0.5 * (peers == ["slow"]), 290)
    begun_at = [at for at, names in used if names == "slow"]
    assert len(begun_at) <= 5
    assert sum(at < AGAIN_S for at in begun_at) <= 2


def route_of(*hops: tuple[str, int, int]) -> Route:
    return tuple(Hop(peer, Span(start, stop)) for peer, start, stop in hops)


def test_one_reply_says_little_of_its_hops_and_no_more_of_large_ones() -> None:
    speeds, route = MeasuredSpeeds(), route_of(("small", 0, 1), ("large", 1, 8))
    believed = {"small": 0.01, "large": 0.01}
    fine_s = 2 * HOP_S + compute_seconds(route, believed)
    speeds.note(route, fine_s, 0.0, believed, 0.0)
    speeds.note(route, 1000.0, 0.0, believed, 0.0)
    after = speeds.block_s(0.0)
    assert compute_seconds(route, after) == pytest.approx(2 * compute_seconds(route, believed))
    assert after["small"] - 0.01 == pytest.approx(7 * (after["large"] - 0.01))
    speeds.note(route, 0.0, 0.0, believed, 1.0)
    assert all(block_s >= 0.01 / 2 for block_s in speeds.block_s(1.0).values())


def test_a_delay_is_put_down_to_the_hops_that_were_never_measured() -> None:
    speeds, route = MeasuredSpeeds(), route_of(("new", 0, 1), ("known", 1, 8))
    believed = {"new": 0.01, "known": 0.01}
    speeds.note(route_of(("known", 1, 8)), HOP_S + 0.07, 0.0, believed, 0.0)
    speeds.note(route, 10.0, 0.0, believed, 1.0)
    after = speeds.block_s(1.0)
    assert after["new"] > 1.0
    assert after["known"] == pytest.approx(0.01, rel=0.01)


def test_seconds_that_one_hop_cost_are_put_down_to_it_alone_each_time() -> None:
    speeds, believed = MeasuredSpeeds(), {"fine": 0.01, "late": 0.01}
    route, fine_s = route_of(("fine", 0, 4), ("late", 4, 8)), 2 * HOP_S + 0.08
    speeds.note(route, fine_s, 0.0, believed, 0.0)
    at, pause_s = 1.0, AGAIN_S
    for _ in range(4):
        speeds.note(route, fine_s, 0.0, believed, at, {route[1]: 1.0})
        assert speeds.block_s(at)["late"] > 0.1
        assert speeds.block_s(at)["fine"] == pytest.approx(0.01)
        assert speeds.to_measure_again(at + pause_s - 1) == "", "its fast tokens excuse nothing"
        assert speeds.to_measure_again(at + pause_s) == "late"
        at += pause_s
        speeds.searched("late", route, at)
        pause_s *= 2


def test_a_hop_that_was_left_counts_as_slower_by_what_it_cost() -> None:
    speeds, hop = MeasuredSpeeds(), Hop("left", Span(0, 4))
    assert speeds.note_lost(hop, 2.0, {"left": 0.01}, 0.0), "it is new"
    assert speeds.block_s(0.0)["left"] == pytest.approx(0.01 + 1.0 / 4)
    assert not speeds.note_lost(hop, 2.0, {"left": 0.01}, 0.0)
    assert speeds.block_s(0.0)["left"] == pytest.approx(0.01 + 1.0 / 4), "one restart hits many replies"
    assert speeds.to_measure_again(AGAIN_S) == "left"
    assert speeds.block_s(AGAIN_S, "left")["left"] == pytest.approx(0.01)
    assert not speeds.note_lost(Hop("other", Span(0, 4)), 0.001, {"other": 0.01}, 0.0)
    assert "other" not in speeds.block_s(0.0), "who cost nearly nothing was not measured by it"


def test_a_route_that_is_as_slow_when_it_is_looked_at_again_counts_as_that_slow() -> None:
    speeds, route, believed = MeasuredSpeeds(), route_of(("hop", 0, 8)), {"hop": 0.001}
    speeds.note(route, HOP_S + 0.008, 0.0, believed, 0.0)
    speeds.note(route, 8.0, 0.0, believed, 20.0)
    assert speeds.block_s(20.0)["hop"] == pytest.approx(0.002, rel=0.01)
    speeds.note(route, 8.0, 0.0, believed, 40.0)
    assert speeds.block_s(40.0)["hop"] > 0.4


def test_a_hop_is_measured_again_without_those_of_the_slow_reply_and_later_each_time() -> None:
    speeds, believed = MeasuredSpeeds(), dict.fromkeys(("x", "y", "honest"), 0.01)
    together, apart = route_of(("x", 0, 4), ("honest", 4, 8)), route_of(("y", 0, 4), ("honest", 4, 8))
    speeds.note(together, 1.0, 0.0, believed, 0.0)
    assert speeds.to_measure_again(AGAIN_S - 1) == ""
    assert speeds.to_measure_again(AGAIN_S) == "x"
    speeds.searched("x", apart, AGAIN_S)
    assert speeds.to_measure_again(AGAIN_S) == "honest", "one that no route is better with keeps no other waiting"
    trial_s = speeds.block_s(AGAIN_S, "honest")
    assert trial_s["honest"] == 0.01 < trial_s["x"]
    speeds.searched("honest", apart, AGAIN_S)
    assert speeds.to_measure_again(2 * AGAIN_S) == "x"
    speeds.searched("x", together, 2 * AGAIN_S)
    assert speeds.to_measure_again(3 * AGAIN_S - 1) == ""
    assert speeds.to_measure_again(3 * AGAIN_S) == "honest", "twice as long"
    speeds.note(apart, 2 * HOP_S + 0.08, 0.0, believed, 3 * AGAIN_S)
    assert speeds.block_s(3 * AGAIN_S)["honest"] == pytest.approx(0.01), "one good reply is enough"
    assert speeds.block_s(3 * AGAIN_S)["x"] > 0.015


def test_a_hop_that_leaves_before_it_is_measured_does_not_count_as_fast() -> None:
    speeds = MeasuredSpeeds()
    speeds.note(route_of(("gone", 0, 8)), 1.0, 0.0, {"other": 0.01, "third": 0.02}, 0.0)
    assert speeds.block_s(0.0)["gone"] >= 0.01

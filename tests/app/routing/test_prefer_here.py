"""Routes through this node's own blocks: preferred while they cost little speed, and never at the cost of a route."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.pieces import at_once
from app.core.span import Span
from app.routing.planner import PrivacyPreferences, RoutePlanner
from app.routing.prefer_here import prefer_here
from app.routing.reroute import RouteComparison
from app.routing.route import KnownCosts, NoRoute, Privacy, Route, RouteRequest
from app.routing.search import find_route
from app.swarm.records import Announcement
from tests.app.routing.test_search import BLOCKS, WHOLE, member, shape, spans


def near(a: str, b: str) -> float:
    """This node is the asker, so that nothing lies between them."""
    return 0.0 if {a, b} <= {"", "me"} else 0.01


def chosen(
    members: list[Announcement], share: float, request: RouteRequest = WHOLE, avoid: tuple[str, ...] = ()
) -> Route:
    comparison = RouteComparison(members, request, near, KnownCosts())
    fastest = find_route(members, request, near, avoid=avoid)
    return at_once(prefer_here(fastest, "me", comparison, avoid, share))


FAST = member("far", 0, BLOCKS, speed=20.0)
ALL_HERE = [("me", 0, BLOCKS)]
ALL_THERE = [("far", 0, BLOCKS)]


@pytest.mark.parametrize(
    ("own", "share", "expected"),
    [
        (member("me", 0, BLOCKS, speed=11.0), 0.0, ALL_THERE),
        (member("me", 0, BLOCKS, speed=11.0), 0.5, ALL_HERE),
        (member("me", 0, BLOCKS, speed=1.0), 0.5, ALL_THERE),  # too slow
        (member("me", 0, BLOCKS, speed=1.0), 1.0, ALL_HERE),  # at any price
        (member("me", 2, 4, speed=20.0), 1.0, [("far", 0, 2), ("me", 2, 4), ("b", 4, BLOCKS)]),
        (member("me", 0, BLOCKS, speed=11.0, kv=5), 1.0, ALL_THERE),  # no room for the session
        (member("me", 0, BLOCKS, speed=11.0, state="paused"), 1.0, ALL_THERE),
    ],
)
def test_own_blocks_are_used_while_they_cost_little(
    own: Announcement, share: float, expected: list[tuple[str, int, int]]
) -> None:
    assert shape(chosen([own, FAST, member("b", 4, BLOCKS, speed=20.0)], share)) == expected


def test_the_middle_of_a_model_is_not_worth_a_route_that_does_not_exist() -> None:
    # Both ends are hosted by the same peer, which can take part only once.
    members = [member("me", 2, 4), FAST]
    assert shape(chosen(members, 1.0)) == ALL_THERE
    assert shape(chosen([member("me", 0, 4), FAST], 1.0)) == [("me", 0, 4), ("far", 4, BLOCKS)]


def test_own_blocks_are_not_worth_a_hop_of_four_bits() -> None:
    rough = replace(member("rough", 0, 4, speed=20.0), quantisation="int4")
    assert shape(chosen([member("me", 4, BLOCKS), rough, FAST], 1.0)) == [("far", 0, 4), ("me", 4, BLOCKS)]
    end = replace(rough, span=Span(4, BLOCKS))
    assert shape(chosen([member("me", 2, 4), FAST, end], 1.0)) == ALL_THERE, "the other one takes part only once"


def test_privacy_and_bans_hold() -> None:
    private = RouteRequest(Span(0, BLOCKS), 100, privacy=Privacy(1, BLOCKS, frozenset({"me", "friend"})))
    members = [member("me", 1, 4), member("friend", 0, BLOCKS, speed=20.0), member("stranger", 0, BLOCKS, speed=30.0)]
    for hop in chosen(members, 1.0, private):
        assert all(private.privacy.allows(hop.peer, block) for block in hop.span.blocks())
    assert shape(chosen([member("me", 0, BLOCKS), FAST], 1.0, avoid=("me",))) == ALL_THERE


@given(st.lists(spans, min_size=1, max_size=4), spans, st.floats(0, 1))
def test_a_preferred_route_is_whole_and_keeps_its_share_of_the_speed(
    drawn: list[tuple[int, int, float]], own: tuple[int, int, float], share: float
) -> None:
    others = [member(f"p{n}", a, b, speed) for n, (a, b, speed) in enumerate(drawn) if a < b]
    members = [*others, *([member("me", *own)] if own[0] < own[1] else [])]
    try:
        fastest = find_route(members, WHOLE, near)
    except NoRoute:
        return
    route = chosen(members, share)
    assert [block for hop in route for block in hop.span.blocks()] == list(range(BLOCKS))
    assert len({hop.peer for hop in route}) == len(route)
    comparison = RouteComparison(members, WHOLE, near, KnownCosts())
    route_s, fastest_s = comparison.token_s(route), comparison.token_s(fastest)
    assert route_s is not None
    assert fastest_s is not None
    assert fastest_s >= (1 - share) * route_s or route == fastest


async def test_the_planner_follows_the_setting_as_it_is_now() -> None:
    network: Any = SimpleNamespace(peer_id="me", links=lambda: (), source=lambda peer: "")
    preferences = PrivacyPreferences()
    members = [member("me", 0, BLOCKS, speed=3.0), member("far", 0, BLOCKS, speed=20.0)]
    planner = RoutePlanner(network, lambda: members, lambda: preferences)
    assert shape(await planner.find((), WHOLE, ())) == ALL_THERE
    preferences = PrivacyPreferences(prefer_here=1.0)
    assert shape(await planner.find((), WHOLE, ())) == ALL_HERE

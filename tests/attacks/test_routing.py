"""Routing over weeks, over large swarms and among liars: bans, routes found in no time, claims that hide nobody."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from trio.testing import MockClock

from app.core.reasons import because
from app.core.span import Span
from app.routing.bans import Bans
from app.routing.cost import BELIEVED_TIMES, HOP_S, believed_seconds, links_seconds
from app.routing.estimates import link_seconds
from app.routing.planner import HIDDEN_EVERY, RoutePlanner
from app.routing.reroute import RunningRoute
from app.routing.route import Hop, KnownCosts, RouteRequest
from app.routing.search import find_route
from app.swarm.records import Announcement, tail

# --- M-4: bans -------------------------------------------------------------------------------------------------------


def test_a_peer_that_fails_for_a_week_is_banned_each_time() -> None:
    """A peer fails every five minutes, 2000 times in a row: each failure bans it, for the longest time at most."""
    longest_s = 300.0
    bans, now = Bans(longest_s=longest_s), 0.0
    why = because("hop_lost", "its stream broke", "peer")
    for _ in range(2000):
        assert bans.ban("peer", now, why)
        assert "peer" in bans.active(now + 0.5)
        now += longest_s + 1
        assert "peer" not in bans.active(now)


# --- H-6: large swarms -----------------------------------------------------------------------------------------------

BLOCKS = 32


def peer(number: int) -> str:
    return f"12D3KooW{number:044d}"


def crowd(count: int, rng: random.Random) -> list[Announcement]:
    """Members that serve 4 to 12 blocks each and tell their round-trip times to twelve others."""
    members = []
    for number in range(count):
        length = rng.randint(4, 12)
        start = rng.randint(0, BLOCKS - length)
        rtts = tuple((tail(peer(rng.randrange(count))), rng.random() / 10) for _ in range(12))
        speed = rng.uniform(50, 100)
        span = Span(start, start + length)
        members.append(Announcement(peer(number), 1, 2**60, "", "serving", span, speed, 500.0, 1 << 30, rtts=rtts))
    return members


def test_a_route_through_a_swarm_of_hundreds_is_found_in_a_moment() -> None:
    """Five hundred members join, real or not: finding one route keeps the event loop for half a second at most."""
    rng = random.Random(1)
    members = crowd(500, rng)
    measured_s = {peer(rng.randrange(len(members))): rng.random() / 10 for _ in range(40)}
    link_s = link_seconds("me", measured_s, members)
    begun_s = time.process_time()  # of this process alone: other work on the machine counts little
    route = find_route(members, RouteRequest(Span(0, BLOCKS), tokens=1000), link_s)
    assert time.process_time() - begun_s < 0.5
    assert (route[0].span.start, route[-1].span.stop) == (0, BLOCKS)


# --- members that announce a crawl ------------------------------------------------------------------------------------


def hosts(**speeds: float) -> list[Announcement]:
    """Members of such speeds that serve all blocks."""
    whole = Span(0, BLOCKS)
    return [Announcement(peer, 1, 2**60, "", "serving", whole, speed, 500.0, 1 << 30) for peer, speed in speeds.items()]


class SlowSwarm:
    """A planner of routes over members, some of which crawl, and how fast each of them is in truth."""

    def __init__(self, members: list[Announcement], homes: Mapping[str, str] | None = None, **truth: float) -> None:
        network: Any = SimpleNamespace(
            peer_id="me", links=lambda: (), source=lambda peer: (homes or {}).get(peer, f"{peer}'s home")
        )
        self.planner = RoutePlanner(network, lambda: members, rng=random.Random(1))
        self._truth = {member.peer: member.decode_tokens_per_s for member in members} | truth

    def measure(self, peer: str) -> None:
        """Note a reply over this member alone; what is read, waited for and sent besides takes no time."""
        route = (Hop(peer, Span(0, BLOCKS)),)
        token_s = links_seconds(route, self.planner.link_s()) + HOP_S + 1 / self._truth[peer]
        self.planner.record_times(RunningRoute(route, token_s, 0), WHOLE)
        self.planner.worked(peer)

    async def used(self, replies: int) -> list[str]:
        """Return the hop of each of so many replies, all of which are measured."""
        peers = []
        for _ in range(replies):
            route = await self.planner.find((), WHOLE, ())
            assert len(route) == 1
            peers.append(route[0].peer)
            self.measure(peers[-1])
        return peers


WHOLE = RouteRequest(Span(0, BLOCKS), tokens=100)
CRAWLERS = {f"crawler{number}": 0.1 for number in range(40)}


async def test_members_that_announce_a_crawl_do_not_make_others_seem_slow(autojump_clock: MockClock) -> None:
    """They are in the majority, and serve nothing: a fast newcomer is preferred to who was measured first."""
    swarm = SlowSwarm(hosts(slow=10.0, fast=100.0, **CRAWLERS))
    swarm.measure("slow")
    assert await swarm.used(3) == ["fast"] * 3


async def test_slow_hops_that_were_measured_hide_a_fast_newcomer_for_a_while_at_most(
    autojump_clock: MockClock,
) -> None:
    """Crawlers claim a crawl and were used once, so no median shows what is usual: one reply in twenty finds out."""
    swarm = SlowSwarm(hosts(slow=10.0, fast=100.0, **CRAWLERS))
    for crawler in ("slow", *CRAWLERS):
        swarm.measure(crawler)
    used = await swarm.used(3 * HIDDEN_EVERY)
    assert used.count("slow") < HIDDEN_EVERY
    assert set(used) == {"slow", "fast"}
    assert used[-1] == "fast", "it was measured as fast as it is"


async def test_liars_gain_little_where_slow_members_hide_others(autojump_clock: MockClock) -> None:
    """Who is tried next is drawn by home: twenty liars of one home are not all tried before an honest newcomer."""
    liars = {f"liar{number}": 1e6 for number in range(20)}
    homes = dict.fromkeys(liars, "the liars' home")
    members = hosts(slow=10.0, fast=100.0, **CRAWLERS, **liars)
    swarm = SlowSwarm(members, homes, **dict.fromkeys(liars, 0.5))
    for crawler in ("slow", *CRAWLERS):
        swarm.measure(crawler)
    used = await swarm.used(12 * HIDDEN_EVERY)
    assert sum(peer in liars for peer in used) <= 12
    assert used.count("fast") > len(used) / 2


@pytest.mark.parametrize("homes", [{}, {f"liar{number}": "one home" for number in range(40)}])
def test_a_crowd_that_claims_to_be_fast_lifts_no_limit_once_others_were_measured(homes: dict[str, str]) -> None:
    members = hosts(a=10.0, b=20.0, c=10.0, **{f"liar{number}": 1e6 for number in range(40)})
    block_s = {member.peer: member.decode_block_s for member in members[:3]}
    believed = believed_seconds(members, WHOLE, KnownCosts(block_s, homes=homes))
    assert believed["liar0"] >= block_s["b"] / BELIEVED_TIMES * 0.999
    crawling = hosts(a=10.0, b=20.0, c=10.0, fast=100.0, **CRAWLERS)
    believed = believed_seconds(crawling, WHOLE, KnownCosts(block_s, homes=homes))
    assert believed["fast"] <= block_s["a"] / BELIEVED_TIMES * 1.001

"""Routing over weeks and over large swarms: bans that never overflow, and routes that are found in no time."""

from __future__ import annotations

import random
import time

from app.core.reasons import because
from app.core.span import Span
from app.routing.bans import Bans
from app.routing.estimates import link_seconds
from app.routing.route import RouteRequest
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

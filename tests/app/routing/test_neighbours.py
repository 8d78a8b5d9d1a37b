"""The peers next to a node on routes, which it watches most closely."""

from __future__ import annotations

from app.core.span import Span
from app.routing.estimates import MOST, route_neighbours
from app.swarm.records import Announcement


def serving(peer: str, start: int, stop: int, state: str = "serving") -> Announcement:
    return Announcement(peer, 0, 0, "", state, Span(start, stop))


MEMBERS = [
    serving("before", 0, 4),
    serving("beside", 4, 8),
    serving("behind", 8, 12),
    serving("around", 0, 12),
    serving("far", 12, 16),
    serving("leaving", 8, 12, "draining"),
]


def test_a_client_watches_its_hops_alone() -> None:
    assert route_neighbours(None, ["far", "before", "far"], MEMBERS) == ["far", "before"]


def test_a_host_watches_those_that_feed_it_and_those_it_feeds() -> None:
    assert route_neighbours(Span(4, 8), ["far"], MEMBERS) == ["far", "before", "behind", "around"]


def test_they_are_few_in_any_swarm() -> None:
    many = [serving(f"peer-{number}", 8, 12) for number in range(100)]
    assert len(route_neighbours(Span(4, 8), ["hop"], many)) == MOST

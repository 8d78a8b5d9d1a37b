"""What this node measured or believes of its peers' speed: links between them, time a block, and whom to watch. Pure.

Link times come from announcements and from this node's own links. A hop's time a block is learned from whole tokens
over known routes: nobody but the hop itself can tell its own share, and it may lie; but routes overlap, and each
token's surplus over what was expected is laid on all hops of its route by their blocks, so that a hop that is slow in
every company stands out soon.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from app.core.network import Link
from app.core.span import Span
from app.routing.cost import HOP_S, UNKNOWN_LINK_S
from app.routing.route import LinkSeconds, Route
from app.swarm.records import MAX_RTTS, Announcement, tail


def link_seconds(own_peer: str, rtt_s: Mapping[str, float], members: Iterable[Announcement]) -> LinkSeconds:
    """One-way seconds between two peers; "" is this node, and `rtt_s` what it measured to others."""
    claims = {member.peer: dict(member.rtts) for member in members if member.rtts}
    here = ("", own_peer)

    def away_s(peer: str) -> float:
        return rtt_s.get(peer, 2 * UNKNOWN_LINK_S) / 2

    def between_s(a: str, b: str) -> float:
        if a == b or (a in here and b in here):
            return 0.0
        if a in here or b in here:
            return away_s(b if a in here else a)
        a_s, b_s = away_s(a), away_s(b)
        said = [
            both_ways_s / 2
            for speaker, other in ((a, b), (b, a))
            if (both_ways_s := claims.get(speaker, {}).get(tail(other))) is not None
        ]
        if not said:
            return max(a_s, b_s)
        least_s = abs(a_s - b_s) if a in rtt_s and b in rtt_s else 0.0
        if len(said) == 1:
            least_s = max(least_s, max(a_s, b_s) / 2)
        return max(*said, least_s)

    return between_s


def rtts_to_tell(
    links: Iterable[Link], hosted: Span | None, members: Sequence[Announcement]
) -> tuple[tuple[str, float], ...]:
    """The round-trip times that an announcement has room for: first to those whose blocks lie beside one's own."""
    measured_rtt_s = {link.peer: link.rtt_s for link in links if link.rtt_s is not None}
    nearest = dict.fromkeys([*route_neighbours(hosted, (), members), *(member.peer for member in members)])
    chosen = [peer for peer in nearest if peer in measured_rtt_s][:MAX_RTTS]
    return tuple(sorted((tail(peer), measured_rtt_s[peer]) for peer in chosen))


_STEP = 0.5  # how far one reply moves the estimates
_LEAST_S = 1e-6
_REMEMBERED = 1024


class MeasuredSpeeds:
    """Seconds that one token takes through one block of each peer."""

    def __init__(self) -> None:
        self._block_s: dict[str, float] = {}

    @property
    def block_s(self) -> Mapping[str, float]:
        """What is known by now."""
        return self._block_s

    def note(self, route: Route, token_s: float, links_s: float, expected_block_s: Mapping[str, float]) -> None:
        """A reply's usual token took this long over a route; `expected` stands in for peers not measured yet."""
        estimates = {hop.peer: self._block_s.pop(hop.peer, expected_block_s.get(hop.peer, _LEAST_S)) for hop in route}
        computed_s = max(token_s - links_s - HOP_S * len(route), 0.0)
        surplus_s = computed_s - sum(estimates[hop.peer] * len(hop.span) for hop in route)
        squares = sum(len(hop.span) ** 2 for hop in route)
        for hop in route:
            moved_s = estimates[hop.peer] + _STEP * surplus_s * len(hop.span) / squares
            self._block_s[hop.peer] = max(moved_s, _LEAST_S)
        while len(self._block_s) > _REMEMBERED:  # the least recently used
            del self._block_s[next(iter(self._block_s))]


MOST = 12


def route_neighbours(hosted: Span | None, hops: Iterable[str], members: Iterable[Announcement]) -> list[str]:
    """The hops of this node's own replies first, then those who serve the blocks just before and behind its own."""
    chosen = dict.fromkeys(hops)
    if hosted is not None:
        beside = (hosted.start - 1, hosted.stop)
        for member in members:
            if member.serves and member.span is not None and any(block in member.span for block in beside):
                chosen.setdefault(member.peer)
    return list(chosen)[:MOST]

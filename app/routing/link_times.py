"""How far peers are apart: what this node measured, what members announce of their links, and what follows. Pure.

This node's own measurements are certain. Between two others there are their claims, of which no more is believed than
these measurements allow: a link cannot be shorter than the difference of its two ends' distances from here, so nobody
gets nearer by claiming it, on the whole way there and back, than it was measured to be. Where both ends speak, the
longer time counts, and one end's word alone does not make a link shorter than half of what would be guessed without.
Without a word, two peers are taken to be as far apart as the farther one is from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from app.core.network import Link
from app.core.span import Span
from app.routing.neighbours import route_neighbours
from app.routing.search import UNKNOWN_LINK_S, LinkSeconds
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

"""Whether a session that runs well should go another way: only for a clear gain that pays for the move. Pure.

What the current route costs is the lesser of what its tokens take in truth and what is expected of it: a hop that says
it is busy is so with this very session, perhaps. The tokens still to come are taken to be as many as came so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from app.core.span import Span
from app.routing.cost import HOP_S, believed_seconds, wait_seconds
from app.routing.route import Hop, KnownCosts, LinkSeconds, Route, RouteRequest
from app.swarm.records import Announcement

CLEAR_GAIN = 1.3  # so many times as fast must the other route be
PAYS_TIMES = 2.0  # so many times the seconds of the move must be won
RECHECK_S = 20.0
LONGEST_RECHECK_S = 600.0
_SET_UP_TRIPS = 4  # there and back, until a new hop has its orders


@dataclass(frozen=True)
class RunningRoute:
    """Where a running session stands: its route, what a token takes there, and the tokens fed so far."""

    route: Route
    token_s: float
    fed: int


@dataclass(frozen=True)
class RouteComparison:
    """All by which a route is judged."""

    members: Sequence[Announcement]
    request: RouteRequest
    link_s: LinkSeconds
    known: KnownCosts

    def token_s(self, route: Route) -> float | None:
        """Seconds that a token is expected to take; None where a hop does not serve its blocks any more."""
        serving = {member.peer: member for member in self.members if member.serves}
        if not all(hop.peer in serving and _covers(serving[hop.peer].span, hop.span) for hop in route):
            return None
        block_s = believed_seconds(list(serving.values()), replace(self.request, prompt_tokens=0), self.known)
        hops_s = sum(
            HOP_S
            + wait_seconds(serving[hop.peer])
            + self.known.penalty_s.get(hop.peer, 0.0)
            + len(hop.span) * block_s[hop.peer]
            for hop in route
        )
        return hops_s + sum(self.link_s(a, b) for a, b in pairwise(["", *(hop.peer for hop in route), ""]))

    def move_s(self, current: Route, new: Route, fed: int) -> float:
        """Seconds until the new hops have cached all tokens so far."""
        by_peer = {member.peer: member for member in self.members}
        fresh = [hop for hop in new if hop not in current]
        reading_s = sum(fed * _share(hop, by_peer[hop.peer]) for hop in fresh)
        return reading_s + 2 * _SET_UP_TRIPS * max((self.link_s("", hop.peer) for hop in fresh), default=0.0)


def is_worth_moving(standing: RunningRoute, new: Route, scales: RouteComparison) -> bool:
    """Whether the rest of the session is clearly better off on the new route, the move included."""
    expected_s, then_s = scales.token_s(standing.route), scales.token_s(new)
    if new == standing.route or expected_s is None or then_s is None:
        return False
    now_s = min(standing.token_s, expected_s)
    generated = standing.fed - scales.request.prompt_tokens
    ahead = min(scales.request.tokens - standing.fed, generated)
    pays = (now_s - then_s) * ahead >= PAYS_TIMES * scales.move_s(standing.route, new, standing.fed)
    return pays and CLEAR_GAIN * then_s <= now_s


class RerouteTimer:
    """When a session looks for a better route: each move makes the next look come later."""

    def __init__(self, now: float) -> None:
        self._every_s = RECHECK_S
        self._at = now + RECHECK_S

    def is_due(self, now: float) -> bool:
        """Whether it is time; the next look is then a whole while away."""
        if now < self._at:
            return False
        self._at = now + self._every_s
        return True

    def moved(self, now: float) -> None:
        """The session went another way: it stays there for twice as long as before, at least."""
        self._every_s = min(2 * self._every_s, LONGEST_RECHECK_S)
        self._at = now + self._every_s


def _covers(span: Span | None, part: Span) -> bool:
    return span is not None and span.start <= part.start and part.stop <= span.stop


def _share(hop: Hop, member: Announcement) -> float:
    """Seconds that a hop takes to read one token of a prompt."""
    assert member.span is not None
    tokens_per_s = max(member.prefill_tokens_per_s, member.decode_tokens_per_s, 1e-3)
    return len(hop.span) / len(member.span) / tokens_per_s

"""Decides if a running session should move to another route: only for a clear gain that pays for the move. Pure.

The current route counts at the lesser of its measured and its expected token time, because a hop that announces itself
as busy may be busy with this very session. The session is assumed to generate as many tokens again as it has so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from app.core.span import Span
from app.routing.cost import (
    LAST_RESORT_TIMES,
    believed_seconds,
    compute_seconds,
    entry_seconds,
    last_resort_blocks,
    links_seconds,
    overhead_seconds,
    prompt_block_seconds,
)
from app.routing.route import Hop, KnownCosts, LinkSeconds, Route, RouteRequest
from app.swarm.records import Announcement
from p2p.rate_limit import backoff_s

CLEAR_GAIN = 1.3  # the new route must be this many times as fast
PAYS_TIMES = 2.0  # the time won must be this many times the seconds of the move
RECHECK_S = 20.0
SLOW_STEP_S, SLOW_STEPS = 1.0, 3  # so many tokens in a row that take so long are looked at at once, on each route
LONGEST_RECHECK_S = 600.0
_SET_UP_TRIPS = 4  # round trips until a new hop is set up


@dataclass(frozen=True)
class RunningRoute:
    """Route of a session, its measured seconds per token, the tokens fed so far, and the seconds lost besides."""

    route: Route
    token_s: float | None  # None: not measured
    fed: int
    lost_s: Mapping[Hop, float] = field(default_factory=dict)  # per token, that each hop may have cost; left ones too


@dataclass(frozen=True)
class RouteComparison:
    """Inputs for comparing routes: members, request, link times, and measured costs."""

    members: Sequence[Announcement]
    request: RouteRequest
    link_s: LinkSeconds
    known: KnownCosts

    @cached_property
    def _serving(self) -> dict[str, Announcement]:
        return {member.peer: member for member in self.members if member.serves}

    @cached_property
    def _ahead(self) -> RouteRequest:
        return replace(self.request, prompt_tokens=0)  # the prompt has been processed

    @cached_property
    def _block_s(self) -> dict[str, float]:
        return believed_seconds([*self._serving.values()], self._ahead, self.known)

    def token_s(self, route: Route) -> float | None:
        """Expected seconds per token; None if a hop no longer serves its blocks."""
        serving = self._serving
        if not all(hop.peer in serving and _covers(serving[hop.peer].span, hop.span) for hop in route):
            return None
        entry_s = entry_seconds([serving[hop.peer] for hop in route], self.known, self._ahead)
        links_s = links_seconds(route, self.link_s, self._ahead.origin, self._ahead.target)
        return overhead_seconds(route, links_s, entry_s) + compute_seconds(route, self._block_s)

    def last_resort_blocks(self, route: Route) -> int:
        """Number of blocks that a route leaves to members that are a last resort."""
        return last_resort_blocks(route, self._serving, self.request)

    def move_s(self, current: Route, new: Route, fed: int) -> float:
        """Seconds until the new hops have cached all tokens so far."""
        by_peer = {member.peer: member for member in self.members}
        fresh = [hop for hop in new if hop not in current]
        reading_s = sum(fed * len(hop.span) * prompt_block_seconds(by_peer[hop.peer]) for hop in fresh)
        return reading_s + 2 * _SET_UP_TRIPS * max((self.link_s("", hop.peer) for hop in fresh), default=0.0)


def is_worth_moving(running: RunningRoute, new: Route, comparison: RouteComparison) -> bool:
    """True if the rest of the session, including the move, is clearly faster on the new route.

    To a route that leaves more blocks to members that are a last resort only if it is faster even so.
    """
    expected_s, then_s = comparison.token_s(running.route), comparison.token_s(new)
    if new == running.route or expected_s is None or then_s is None:
        return False
    if comparison.last_resort_blocks(new) > comparison.last_resort_blocks(running.route):
        then_s *= LAST_RESORT_TIMES
    lost_s = sum(seconds for hop, seconds in running.lost_s.items() if hop in running.route)
    now_s = min((running.token_s or 0.0) + lost_s, expected_s)
    generated = running.fed - comparison.request.prompt_tokens
    ahead = min(comparison.request.tokens - running.fed, generated)
    pays = (now_s - then_s) * ahead >= PAYS_TIMES * comparison.move_s(running.route, new, running.fed)
    return pays and CLEAR_GAIN * then_s <= now_s


class RerouteTimer:
    """Times the search for a better route; each move doubles the interval, up to `LONGEST_RECHECK_S`."""

    def __init__(self, now: float) -> None:
        self._moves = 0
        self._at = now + self._every_s
        self._slow_steps = 0  # in a row

    @property
    def _every_s(self) -> float:
        return backoff_s(RECHECK_S, self._moves + 1, LONGEST_RECHECK_S)

    def is_due(self, now: float) -> bool:
        """True if it is time to search; also schedules the next search."""
        if now < self._at:
            return False
        self._at = now + self._every_s
        return True

    def took(self, token_s: float, now: float) -> None:
        """Note how long a token took: a hop may be far slower than it claims, and the interval is long by then."""
        self._slow_steps = self._slow_steps + 1 if token_s > SLOW_STEP_S else 0
        if self._slow_steps == SLOW_STEPS:
            self._at = now

    def moved(self, now: float) -> None:
        """Double the interval after a move."""
        self._moves += 1
        self._slow_steps = 0
        self._at = now + self._every_s


def _covers(span: Span | None, part: Span) -> bool:
    return span is not None and span.covers(part)

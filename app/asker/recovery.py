"""Decisions after a failure: which hop or link is at fault when an answer is late, and who sends what again. Pure.

`RouteSession._repair` in `app.asker.route_session` carries them out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from app.core.reasons import Reason, because
from app.routing.route import Route
from app.session.frame import CHUNK_ROWS, Frame

# Tokens may be under way for as long as such a link takes: a fifth of 2 Mbit/s, as the rest may go to others.
SLOW_LINK_BYTES_PER_S = 50_000
CROWDED_S = 3.0  # and for so long at least: behind what others send, even few bytes wait in routers
STEP_TOKENS = 64  # of a prompt that a hop reads at once, at least; one that takes longer for fewer counts as stuck


class HopFailed(Exception):
    """A hop cannot be used now; `blameless` if that is not its fault, or was reported already."""

    def __init__(self, peer: str, why: Reason, *, busy: bool = False, blameless: bool = False) -> None:
        super().__init__(why.text)
        self.peer, self.why, self.busy, self.blameless = peer, why, busy, blameless


class HopLoss(NamedTuple):
    """Something was lost on a route; `sender` is the hop that sent it, or empty if the asker did."""

    failure: HopFailed
    sender: str = ""
    stop: int = 0  # the sender says that it has computed the tokens before this position


def longest_quiet_s(row_bytes: int, stuck_s: float) -> float:
    """Seconds for which nothing may arrive over a slow link that carries chunks of a prompt."""
    return stuck_s + CHUNK_ROWS * row_bytes / SLOW_LINK_BYTES_PER_S


class HopProgress:
    """Follows the hops' progress while an answer is late, from their STATE frames.

    A hop's claim counts up to the tokens that were fed. One that claims a token now and then is not waited for without
    end: in all, each hop has `stuck_s` for every `STEP_TOKENS` beyond those that were `cached` before, and once more.
    """

    def __init__(self, now: float, row_bytes: int, stuck_s: float, cached: int = 0) -> None:
        self._row_bytes, self._stuck_s, self._cached = row_bytes, stuck_s, cached
        self._longest_quiet_s = longest_quiet_s(row_bytes, stuck_s)
        self._advanced_at, self._sum = now, -1
        self._looked_at = now
        self._waited_s: dict[str, float] = {}  # for each hop that was the first not to have all tokens

    def loss(
        self,
        route: Route,
        states: Mapping[str, Frame],
        epoch: int,
        fed: int,
        now: float,
        took_at: Mapping[str, float] = MappingProxyType({}),
    ) -> HopLoss | None:
        """Return what was lost between hops that all answer; None while a hop still computes or receives.

        `took_at` are the times at which streams of this asker last took something that had waited, by hop: what was
        sent to such a hop lately is behind other rows.
        """
        progress = sum(min(state.position, fed) + min(state.rows, fed) for state in states.values())
        if progress > self._sum:
            self._advanced_at, self._sum = now, progress
        quiet_s, since_s = now - self._advanced_at, now - self._looked_at
        self._looked_at = now
        before = ""
        for index, hop in enumerate(route):
            state = states[hop.peer]  # `rows` it has received, and cached up to `position`
            if state.epoch != epoch:
                why = because("hop_forgot", "it has forgotten the session", hop.peer)
                return HopLoss(HopFailed(hop.peer, why, blameless=True))
            if state.rows < fed:
                is_coming = quiet_s < self._transfer_s(fed - state.rows)
                is_behind_others = now - took_at.get(hop.peer, -math.inf) < self._longest_quiet_s
                if (is_coming or is_behind_others) and self._may_take(hop.peer, fed, since_s):
                    return None
                return _lost_tokens(before, hop.peer, fed)
            if state.position < fed:
                after = route[index + 1].peer if index + 1 < len(route) else ""
                untaken = max(state.position - states[after].rows, 0) if after else 0
                longest_s = max(self._stuck_s, self._transfer_s(untaken))
                if quiet_s <= longest_s and self._may_take(hop.peer, fed, since_s):
                    return None
                if untaken:  # it may have to wait until its successor has taken what it has computed
                    return _lost_tokens(hop.peer, after, state.position)
                why = because("hop_stuck", "it answers but does not advance", hop.peer)
                return HopLoss(HopFailed(hop.peer, why))
            before = hop.peer
        if quiet_s < CROWDED_S:
            return None  # the answer may be behind what others send
        return HopLoss(HopFailed(before, because("answer_lost", "its answer is lost", before), blameless=True))

    def _transfer_s(self, tokens: int) -> float:
        """Seconds after which some of these tokens have arrived, if a slow link carries them."""
        crossing_s = tokens * self._row_bytes / SLOW_LINK_BYTES_PER_S
        return min(max(crossing_s, CROWDED_S), self._longest_quiet_s)

    def _may_take(self, peer: str, fed: int, since_s: float) -> bool:
        """Count the seconds since the last look as a wait for this hop; False if those are too many in all."""
        waited_s = self._waited_s[peer] = self._waited_s.get(peer, 0.0) + since_s
        return waited_s <= self._stuck_s * (1 + max(fed - self._cached, 0) / STEP_TOKENS)


def _lost_tokens(sender: str, receiver: str, stop: int) -> HopLoss:
    why = because("tokens_lost", "what was sent to it is lost", receiver)
    return HopLoss(HopFailed(receiver, why, blameless=True), sender, stop)


class HopState(NamedTuple):
    """What a hop holds of a session: cached tokens, and kept outputs of positions [kept_from, length)."""

    length: int
    kept_from: int


def cache_sources(old: Route, new: Route, givers: Collection[str]) -> dict[str, str]:
    """For hops that are new on a route, the hops of the old route that can give them their cache.

    A giver leaves the route, has worked until now, and has all blocks of the hop that takes its place.
    """
    staying = {hop.peer for hop in new}
    leaving = [hop for hop in old if hop.peer in givers and hop.peer not in staying]
    sources = {}
    for hop in new:
        source = next((giver.peer for giver in leaving if giver.span.covers(hop.span)), None)
        if hop not in old and source is not None:
            sources[hop.peer] = source
    return sources


class ResumePlan(NamedTuple):
    """What each hop must do, and from which position the asker feeds the first."""

    lengths: tuple[int, ...]  # cached tokens that each hop keeps; it is cut if it has more
    send_from: tuple[int, ...]  # each hop's successor needs outputs from this position on
    feed_from: int


def plan_resume(states: Sequence[HopState], fed: int) -> ResumePlan:
    """Plan the least work after which all hops have cached all tokens and the asker gets the output of the last one.

    A hop that is ahead of its successor sends its kept outputs again. If it kept too few, it is cut back and computes
    them again from its own predecessor's outputs, in the end from the asker's tokens.
    """
    needed = fed - 1  # the asker needs the last output alone
    lengths, send_from = [], []
    for state in reversed(states):
        length = min(state.length, fed)
        if length > needed and state.kept_from > needed:
            length = needed
        lengths.append(length)
        send_from.append(needed)
        needed = length
    return ResumePlan(tuple(reversed(lengths)), tuple(reversed(send_from)), needed)

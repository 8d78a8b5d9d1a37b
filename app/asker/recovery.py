"""What it means that an answer is late: which hop, or which link between two, is at fault. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from app.core.reasons import Reason, because
from app.routing.route import Route
from app.session.wire import Frame

MIN_OVERDUE_S = 1.0
OVERDUE_TIMES = 8.0
SLOW_LINK_BYTES_PER_S = 250_000  # tokens on their way over such a link are not lost yet


class HopFailed(Exception):
    """A hop cannot be used as it is; `blameless` where that is no fault of its own, or it was blamed already."""

    def __init__(self, peer: str, why: Reason, *, busy: bool = False, blameless: bool = False) -> None:
        super().__init__(why.text)
        self.peer, self.why, self.busy, self.blameless = peer, why, busy, blameless


class HopLoss(NamedTuple):
    """What went missing on a route, and the hop that sent it where another hop did."""

    failure: HopFailed
    sender: str = ""


def overdue_s(usual_s: float) -> float:
    """How long to wait for a step that usually takes so long."""
    return max(MIN_OVERDUE_S, OVERDUE_TIMES * usual_s)


class HopProgress:
    """How far the hops of a route have come since an answer is awaited, as their STATE frames tell."""

    def __init__(self, now: float, row_bytes: int, stuck_s: float) -> None:
        self._row_bytes, self._stuck_s = row_bytes, stuck_s
        self._advanced_at, self._sum = now, -1

    def loss(self, route: Route, states: Mapping[str, Frame], epoch: int, fed: int, now: float) -> HopLoss | None:
        """What went missing between hops that all answer; None while somebody is at work or may still receive."""
        progress = sum(state.position + state.rows for state in states.values())
        if progress > self._sum:
            self._advanced_at, self._sum = now, progress
        quiet_s = now - self._advanced_at
        before = ""
        for hop in route:
            state = states[hop.peer]
            if state.epoch != epoch:
                why = because("hop_forgot", "it has forgotten the session", hop.peer)
                return HopLoss(HopFailed(hop.peer, why, blameless=True))
            if state.rows < fed:
                if quiet_s < (fed - state.rows) * self._row_bytes / SLOW_LINK_BYTES_PER_S:
                    return None
                why = because("tokens_lost", "what was sent to it is lost", hop.peer)
                return HopLoss(HopFailed(hop.peer, why, blameless=True), before)
            if state.position < fed:
                why = because("hop_stuck", "it answers but does not advance", hop.peer)
                return HopLoss(HopFailed(hop.peer, why)) if quiet_s > self._stuck_s else None
            before = hop.peer
        return HopLoss(HopFailed(before, because("answer_lost", "its answer is lost", before), blameless=True))


class HopState(NamedTuple):
    """What a hop said it holds: cached tokens, and outputs kept for [kept_from, length)."""

    length: int
    kept_from: int


class ResumePlan(NamedTuple):
    """What each hop must do, and from where the asker feeds the first."""

    lengths: tuple[int, ...]  # cached tokens that each hop may keep; less than it has: cut
    send_from: tuple[int, ...]  # from where each hop's successor needs outputs
    feed_from: int


def plan_resume(states: Sequence[HopState], fed: int) -> ResumePlan:
    """The least work after which the output of token `fed - 1` reaches the asker and every hop has cached all tokens.

    A hop that is ahead of its successor replays what it kept; where it kept too little, it is cut back so that it
    computes those outputs again from its own predecessor, in the end from the asker's tokens.
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

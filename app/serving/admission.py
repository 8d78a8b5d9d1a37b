"""Admission of sessions at a hop: hosted blocks, free cache and places, and the share kept for other askers. Pure.

Also the cost of session frames: a peer whose frames cost more than it earns is read more slowly (`AdmissionLimits`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from app.core.compute import BlockRunner
from app.serving.hop_session import FrameAction, HopSession
from app.session.frame import HopError
from app.session.wire import CACHE_EXCEEDED, EpochOrder, Kind


@dataclass(frozen=True)
class HopLoad:
    """The load of a hop as one asker meets it."""

    sessions: int
    peer_sessions: int  # of the peer that asks
    peers: int  # other askers that have sessions here
    peer_tokens: int  # leased to the peer that asks
    free_tokens: int
    total_tokens: int


@dataclass(frozen=True)
class AdmissionLimits:
    """Limits of what a hop admits."""

    sessions: int = 256
    peer_sessions: int = 64
    reserve: float = 0.25  # of the cache and of the places, kept for askers below their fair share
    # What the frames of one peer may cost (`frame_cost`). If all 64 sessions of an asker lose a hop at once, their
    # recoveries cost a few hundred.
    frames_burst: float = 4000.0
    frames_per_s: float = 1000.0
    copied_bytes: int = 128 * 1024  # of kept outputs: to send so many again costs as much as a control frame
    order_s: float = 0.0001  # of work on the cache: costs as much as a control frame too


TURN_S = 600.0  # for which an asker may hold more than its share of the cache while others find no room
_ORDER_COST = 4.0  # begins an epoch, or has outputs sent again
_DROPPED_COST = 0.25  # an asker can make another hop send it: that hop's rows for other askers must not wait for it


def frame_cost(kind: int, action: FrameAction | None) -> float:
    """The cost of a session frame to this hop, in control frames; `action` is the verdict on hidden states.

    Hidden states that are computed cost nothing here: fairness among those is the batch queue's.
    """
    if kind == Kind.TURN or action in (FrameAction.REPEAT, FrameAction.GAP):
        return _ORDER_COST
    if kind == Kind.DATA:
        return _DROPPED_COST if action is FrameAction.DROP else 0.0
    return 1.0


def why_busy(load: HopLoad, tokens: int, limits: AdmissionLimits) -> HopError | None:
    """The reason to refuse a session of this many tokens for now, or None to admit it."""
    if load.sessions >= limits.sessions:
        return HopError("busy", f"{load.sessions} sessions are open already", "sessions_full")
    if load.peer_sessions >= limits.peer_sessions:
        return HopError("busy", f"{load.peer_sessions} sessions of yours are open already", "asker_sessions_full")
    fair_sessions = limits.sessions / (load.peers + 2)  # for this asker, the others, and one that may still come
    if load.peer_sessions >= fair_sessions and load.sessions >= (1 - limits.reserve) * limits.sessions:
        text = f"the last places are kept for others, {load.peer_sessions} sessions are yours already"
        return HopError("busy", text, "asker_sessions_full")
    if tokens > load.free_tokens:
        text = f"no room for {tokens} tokens, {load.free_tokens} of {load.total_tokens} cache slots are free"
        return HopError("busy", text, "cache_full")
    fair_share = load.total_tokens / (load.peers + 2)
    within_share = load.peer_tokens + tokens <= fair_share
    if load.peer_sessions and not within_share and load.free_tokens - tokens < limits.reserve * load.total_tokens:
        text = f"the last cache slots are kept for others, {load.peer_tokens} are yours already"
        return HopError("busy", text, "cache_reserved")
    return None


def why_not(
    turn: EpochOrder,
    asker: str,
    runner: BlockRunner | None,
    sessions: Iterable[HopSession],
    limits: AdmissionLimits,
    shared: int = 0,
) -> HopError | None:
    """The reason to refuse a session that `asker` wants to open, or None to admit it.

    Resting sessions count as free room: they make way. `shared` tokens of the new session are in the cache already.
    """
    if runner is None or not runner.start <= turn.span.start < turn.span.stop <= runner.stop:
        hosted = "nothing" if runner is None else f"blocks {runner.start}:{runner.stop}"
        text = f"blocks {turn.span} were asked for, but {hosted} is hosted here"
        return HopError("refused", text, "not_hosted")
    if turn.tokens > runner.context_length:
        text = f"{turn.tokens} tokens are above the context of {runner.context_length}"
        return HopError("refused", text, "context_exceeded")
    if turn.tokens > runner.kv_total_tokens:
        text = f"a session of {turn.tokens} tokens is larger than its cache of {runner.kv_total_tokens}"
        return HopError("refused", text, CACHE_EXCEEDED)
    everyone = list(sessions)
    resting = [session.key for session in everyone if session.rests_until is not None]
    sessions = [session for session in everyone if session.rests_until is None]
    own = [session for session in sessions if session.asker == asker]
    others = {session.asker for session in sessions} - {asker}
    tokens = sum(session.turn.tokens for session in own)
    free = runner.kv_free_tokens + (runner.tokens_freed_by(resting) if resting else 0)
    load = HopLoad(len(sessions), len(own), len(others), tokens, free, runner.kv_total_tokens)
    return why_busy(load, turn.tokens - shared, limits)


class CacheTurns:
    """Finds the session that makes way if somebody has held most of the cache for long while others find no room.

    The first session of an asker may take all of a small node's cache, and be as slow as it likes. What counts is for
    how long others have been refused because of that asker, whatever sessions it closed and opened meanwhile. Once it
    has made way, the time begins anew: others could end all its later sessions as soon as they are open.
    """

    def __init__(self) -> None:
        self._in_the_way: dict[str, tuple[float, float]] = {}  # asker -> first and latest time that others were refused

    def makes_way(
        self, asker: str, tokens: int, sessions: Iterable[HopSession], free: int, total: int, now: float
    ) -> HopSession | None:
        """Note that a session of `asker` found no room, and return that of another which is to end for it.

        It is the largest one of an asker above its fair share, which holds more than this asker would.
        """
        in_use = [session for session in sessions if session.rests_until is None]
        held = Counter[str]()
        for session in in_use:
            held[session.asker] += session.turn.tokens
        share = total / (len(held.keys() - {asker}) + 2)
        wanted = held[asker] + tokens
        before, self._in_the_way = self._in_the_way, {}
        for peer, (first, latest) in before.items():
            if now - latest < TURN_S:
                self._in_the_way[peer] = first, latest
        too_long = []
        for peer, leased in held.items():
            if peer != asker and leased > max(share, wanted):
                first, _ = self._in_the_way.get(peer, (now, now))
                self._in_the_way[peer] = first, now
                if now - first >= TURN_S:
                    too_long.append(peer)
        enough = [one for one in in_use if one.asker in too_long and free + one.turn.tokens >= tokens]
        found = max(enough, key=lambda one: (held[one.asker], one.turn.tokens), default=None)
        if found is not None:
            del self._in_the_way[found.asker]
        return found

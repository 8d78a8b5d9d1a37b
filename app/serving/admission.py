"""Admission of sessions at a hop: hosted blocks, free cache and places, the share of each asker, who makes way. Pure.

Also the cost of session frames: a peer whose frames cost more than it earns is read more slowly (`AdmissionLimits`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from app.core.compute import BlockRunner
from app.serving.hop_session import FrameAction, HopSession
from app.session.frame import HopError
from app.session.wire import CACHE_EXCEEDED, EpochOrder, Kind


@dataclass(frozen=True)
class HopLoad:
    """The load of a hop as one asker meets it."""

    sessions: int  # of all; with the places that are kept for the node's own, if another peer asks
    peer_sessions: int  # of the peer that asks
    peers: int  # other askers that have sessions here
    peer_tokens: int  # leased to the peer that asks: whole pages, as in the two below
    free_tokens: int
    total_tokens: int


@dataclass(frozen=True)
class AdmissionLimits:
    """Limits of what a hop admits."""

    sessions: int = 256
    peer_sessions: int = 64
    reserve: float = 0.25  # of the cache and of the places, kept for askers below their fair share
    own_share: float = 1 / 32  # of the places, kept for this node's own replies
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
    """The reason to refuse a session that leases this many more tokens for now, or None to admit it.

    `sessions_full` comes last: nothing but a place is missing where that is the reason.
    """
    fair_sessions = limits.sessions / (load.peers + 2)  # for this asker, the others, and one that may still come
    if load.peer_sessions >= limits.peer_sessions:
        return HopError("busy", f"{load.peer_sessions} sessions of yours are open already", "asker_sessions_full")
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
    if load.sessions >= limits.sessions:
        return HopError("busy", f"the places of all {limits.sessions} sessions are taken", "sessions_full")
    return None


class HopRoom:
    """Who holds what of a hop's places and cache; what rests makes way at once, so it counts as free."""

    def __init__(
        self, runner: BlockRunner, sessions: Iterable[HopSession], limits: AdmissionLimits, own: str = ""
    ) -> None:
        """`own` is the peer id of this node, whose replies make way for nobody."""
        self.runner, self.limits, self._own = runner, limits, own
        self._sessions = list(sessions)
        self._in_use = [session for session in self._sessions if session.rests_until is None]
        self._resting = [session for session in self._sessions if session.rests_until is not None]

    def load(self, asker: str) -> HopLoad:
        """The load as this asker meets it."""
        places = Counter(session.asker for session in self._in_use)
        taken = places.total()
        if asker != self._own:
            taken = self.places.total() + self.limits.sessions - self.places_for_others
        own = places.pop(asker, 0)
        leased = self._leased(asker) if own else 0
        return HopLoad(taken, own, len(places), leased, self.free_after(), self.runner.kv_total_tokens)

    def needed(self, tokens: int, shared: int = 0) -> int:
        """Tokens of cache that a session of so many leases if `shared` of them are in the cache already."""
        page = self.runner.kv_page_tokens
        return -(-tokens // page) * page - shared // page * page

    def free_after(self, ended: Iterable[HopSession] = ()) -> int:
        """Tokens of cache that are free once these sessions have ended."""
        going = [session.key for session in (*self._resting, *ended)]
        return self.runner.kv_free_tokens + (self.runner.tokens_freed_by(going) if going else 0)

    def in_use(self, asker: str) -> list[HopSession]:
        """The sessions in use of an asker."""
        return [session for session in self._in_use if session.asker == asker]

    @property
    def places(self) -> Counter[str]:
        """Number of sessions in use of each asker but this node."""
        return Counter(session.asker for session in self._in_use if session.asker != self._own)

    @property
    def places_for_others(self) -> int:
        """Number of places that are neither this node's own nor kept for it."""
        own = sum(session.asker == self._own for session in self._in_use)
        return self.limits.sessions - max(own, int(self.limits.own_share * self.limits.sessions))

    @property
    def leases(self) -> dict[str, int]:
        """Tokens of cache that are leased to each asker but this node."""
        return {asker: self._leased(asker) for asker in self.places}

    @property
    def tokens_for_others(self) -> int:
        """Tokens of cache that are not leased to this node."""
        return self.runner.kv_total_tokens - self._leased(self._own)

    def _leased(self, asker: str) -> int:
        """Tokens of cache that sessions in use of an asker lease: whole pages, each once if several share it."""
        freed_by = self.runner.tokens_freed_by
        resting = [session.key for session in self._resting if session.asker == asker]
        own = [session.key for session in self._sessions if session.asker == asker]
        return (freed_by(own) if own else 0) - (freed_by(resting) if resting else 0)


def why_not(turn: EpochOrder, asker: str, room: HopRoom | None, shared: int = 0) -> HopError | None:
    """The reason to refuse a session that `asker` wants to open, or None to admit it.

    `room` is None if nothing is hosted; `shared` tokens of the new session are in the cache already.
    """
    runner = None if room is None else room.runner
    if room is None or runner is None or not runner.start <= turn.span.start < turn.span.stop <= runner.stop:
        hosted = "nothing" if runner is None else f"blocks {runner.start}:{runner.stop}"
        text = f"blocks {turn.span} were asked for, but {hosted} is hosted here"
        return HopError("refused", text, "not_hosted")
    if turn.tokens > runner.context_length:
        text = f"{turn.tokens} tokens are above the context of {runner.context_length}"
        return HopError("refused", text, "context_exceeded")
    if turn.tokens > runner.kv_total_tokens:
        text = f"a session of {turn.tokens} tokens is larger than its cache of {runner.kv_total_tokens}"
        return HopError("refused", text, CACHE_EXCEEDED)
    return why_busy(room.load(asker), room.needed(turn.tokens, shared), room.limits)


def fair_share(asker: str, held: Mapping[str, int], total: int) -> float:
    """An asker's share of `total` among those that hold some of it, and one that may still come."""
    return total / (len(held.keys() - {asker}) + 2)


def above_share(asker: str, wanted: int, held: Mapping[str, int], total: int) -> dict[str, int]:
    """Others that hold more than their fair share of `total`, and than this asker would with `wanted` more, by name."""
    most = max(fair_share(asker, held, total), held.get(asker, 0) + wanted)
    return {other: amount for other, amount in held.items() if other != asker and amount > most}


def place_to_free(asker: str, room: HopRoom) -> list[HopSession]:
    """Find the session that makes way at once for an asker that has found no place; empty if there is none.

    It is of the asker above its fair share with the most places: the oldest one for which nothing was computed, else
    the one for which nothing was computed for longest.
    """
    crowding = above_share(asker, 1, room.places, room.places_for_others)
    if not crowding:
        return []
    most = max(crowding, key=lambda other: crowding[other])
    return [min(room.in_use(most), key=lambda one: (one.counters.tokens > 0, one.counters.worked_at))]


class CacheTurns:
    """Finds the sessions that make way if somebody has held most of the cache for long while others find no room.

    The first session of an asker may take all of a small node's cache, and be as slow as it likes. What counts is for
    how long others have been refused because of that asker, whatever sessions it closed and opened meanwhile. Once it
    has made way, the time begins anew: others could end all its later sessions as soon as they are open.
    """

    def __init__(self) -> None:
        self._in_the_way: dict[str, tuple[float, float]] = {}  # asker -> first and latest time that others were refused

    def make_way(self, asker: str, tokens: int, room: HopRoom, now: float) -> list[HopSession]:
        """Note that a session of `asker` that leases `tokens` found no room; return those that are to end for it.

        They are of an asker above its fair share, which holds more than this one would: the largest ones, until there
        is room or nothing but its share is left.
        """
        held, total = room.leases, room.tokens_for_others
        before, self._in_the_way = self._in_the_way, {}
        for peer, (first, latest) in before.items():
            if now - latest < TURN_S:
                self._in_the_way[peer] = first, latest
        crowding = above_share(asker, tokens, held, total)
        for peer in crowding:
            first, _ = self._in_the_way.get(peer, (now, now))
            self._in_the_way[peer] = first, now
        for peer in sorted(crowding, key=lambda peer: -held[peer]):
            if now - self._in_the_way[peer][0] >= TURN_S:
                ended = _enough(room, peer, held[peer] - fair_share(asker, held, total), tokens)
                if ended:
                    del self._in_the_way[peer]
                    return ended
        return []


def _enough(room: HopRoom, asker: str, excess: float, tokens: int) -> list[HopSession]:
    """The largest sessions of an asker without which `tokens` would be free; none if that takes more than its excess.

    The last of them may be larger than what is left of the excess.
    """
    ended: list[HopSession] = []
    free = room.free_after()
    for session in sorted(room.in_use(asker), key=lambda one: -one.turn.tokens):
        ended.append(session)
        freed = room.free_after(ended) - free
        if free + freed >= tokens:
            return ended
        if freed >= excess:
            break
    return []

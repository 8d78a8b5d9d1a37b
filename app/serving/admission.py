"""Admission of sessions at a hop: hosted blocks, free cache and places, the share of each home, who makes way. Pure.

A hop is shared among homes (`app.serving.homes`), and what a home has among its askers: whoever has several identities
at one address gets no more than with one. This node's own replies make way for nobody.

Also the cost of session frames: a peer whose frames cost more than it earns is read more slowly (`FrameBudget`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter

from app.core.compute import BlockRunner
from app.serving.homes import REMEMBERED
from app.serving.hop_session import FrameAction, HopSession
from app.session.frame import HopError
from app.session.wire import CACHE_EXCEEDED, EpochOrder, Kind
from p2p.rate_limit import PeerRateLimit


@dataclass(frozen=True)
class HopLoad:
    """The load of a hop as one asker meets it."""

    sessions: int  # of all; with the places that are kept for the node's own, if another peer asks
    peer_sessions: int  # of the peer that asks
    home_sessions: int  # of its home
    fair_sessions: float  # its home's share of the places
    home_tokens: int  # leased to its home: whole pages, as in the three below
    fair_tokens: float  # its home's share of the cache
    free_tokens: int
    total_tokens: int
    held_back: bool = False  # its home is to stay within its share of the cache


@dataclass(frozen=True)
class AdmissionLimits:
    """Limits of what a hop admits."""

    sessions: int = 256
    peer_sessions: int = 64
    reserve: float = 0.25  # of the cache and of the places, kept for homes below their fair share
    own_share: float = 1 / 32  # of the places, kept for this node's own replies
    # What the frames of one home may cost (`frame_cost`). If all 64 sessions of an asker lose a hop at once, their
    # recoveries cost a few hundred.
    frames_burst: float = 4000.0
    frames_per_s: float = 1000.0
    again_bytes: int = 128 * 1024  # of kept outputs: to send so many again costs as much as a control frame
    order_s: float = 0.0001  # of work on the cache: costs as much as a control frame too


TURN_S = 600.0  # for which a home may hold more than its share of the cache while others find no room
IDLE_S = 60.0  # the same, with sessions for which nothing was computed for so long
MAX_HELD_BACK = 256  # homes
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


class FrameBudget:
    """What frames may cost: all askers of a home together have as much as one that is alone there.

    What one of them spends counts as many times as there are askers of its home that spend something. So each has an
    equal part, and who sends little waits for nobody. That holds for what they order themselves: what others make a
    peer send or repeat, it pays for `alone`.
    """

    def __init__(self, limits: AdmissionLimits, home_of: Callable[[str], str]) -> None:
        self._per_s, self._home_of = limits.frames_per_s, home_of
        self._limit = PeerRateLimit(limits.frames_burst, limits.frames_per_s)
        self._spending: dict[str, dict[str, float]] = {}  # home -> asker -> when it has earned what it spent

    def delay_s(self, asker: str, now: float, cost: float, *, alone: bool = False) -> float:
        """Spend so much for an asker, on credit if need be; returns the seconds after which it is paid for."""
        if cost and not alone:
            cost *= self._share(asker, now, cost)
        return self._limit.delay_s(asker, now, cost)

    def _share(self, asker: str, now: float, cost: float) -> int:
        """Note that an asker spends something; returns how many of its home do."""
        home = self._home_of(asker)
        others = {other: until for other, until in self._spending.get(home, {}).items() if until > now}
        share = len(others.keys() | {asker})
        self._spending[home] = others | {asker: max(others.get(asker, now), now) + share * cost / self._per_s}
        if len(self._spending) > REMEMBERED:
            self._spending = {home: own for home, own in self._spending.items() if max(own.values()) > now}
        return share


def why_busy(load: HopLoad, tokens: int, limits: AdmissionLimits) -> HopError | None:
    """The reason to refuse a session that leases this many more tokens for now, or None to admit it.

    Where `cache_full` or `sessions_full` is the reason, nothing but room or a place is missing.
    """
    if load.peer_sessions >= limits.peer_sessions:
        return HopError("busy", f"{load.peer_sessions} sessions of yours are open already", "asker_sessions_full")
    if load.home_sessions >= load.fair_sessions and load.sessions >= (1 - limits.reserve) * limits.sessions:
        text = f"the last places are kept for others, {load.home_sessions} are taken from your address already"
        return HopError("busy", text, "asker_sessions_full")
    within_share = load.home_tokens + tokens <= load.fair_tokens
    takes_last = load.home_sessions and load.free_tokens - tokens < limits.reserve * load.total_tokens
    if not within_share and (takes_last or load.held_back):
        share = f"{load.home_tokens} cache slots are taken from your address, whose share is {load.fair_tokens:.0f}"
        text = f"no room for {tokens} tokens: {share}"
        return HopError("busy", text, "cache_reserved")
    if tokens > load.free_tokens:
        text = f"no room for {tokens} tokens, {load.free_tokens} of {load.total_tokens} cache slots are free"
        return HopError("busy", text, "cache_full")
    if load.sessions >= limits.sessions:
        return HopError("busy", f"the places of all {limits.sessions} sessions are taken", "sessions_full")
    return None


class HopRoom:
    """Who holds what of a hop's places and cache; what rests makes way at once, so it counts as free."""

    def __init__(
        self,
        runner: BlockRunner,
        sessions: Iterable[HopSession],
        limits: AdmissionLimits,
        own: str = "",
        held_back: Collection[str] = (),
    ) -> None:
        """`own` is the peer id of this node; the homes `held_back` are to stay within their share of the cache."""
        self.runner, self.limits, self._own, self._held_back = runner, limits, own, held_back
        self._sessions = list(sessions)

    def load(self, asker: str, home: str) -> HopLoad:
        """The load as this asker of this home meets it."""
        homes, own = self.homes, asker == self._own
        in_use = [session for session in self._sessions if session.rests_until is None]
        at_home = [session for session in self._sessions if session.home == home]
        places, tokens = self.limits.sessions, self.runner.kv_total_tokens
        return HopLoad(
            sessions=len(in_use) if own else int(sum(homes.places.values()) + places - homes.total_places),
            peer_sessions=sum(session.asker == asker for session in in_use),
            home_sessions=sum(session.home == home for session in in_use),
            fair_sessions=fair_share(home, homes.places, places) if own else homes.fair_places(home),
            home_tokens=self.leased(at_home),
            fair_tokens=fair_share(home, homes.places, tokens) if own else homes.fair_tokens(home),
            free_tokens=self.free_after(),
            total_tokens=tokens,
            held_back=home in self._held_back,
        )

    def needed(self, tokens: int, shared: int = 0) -> int:
        """Tokens of cache that a session of so many leases if `shared` of them are in the cache already."""
        page = self.runner.kv_page_tokens
        return -(-tokens // page) * page - shared // page * page

    def free_after(self, ended: Iterable[HopSession] = ()) -> int:
        """Tokens of cache that are free once these sessions have ended."""
        resting = [session for session in self._sessions if session.rests_until is not None]
        return self.runner.kv_free_tokens + self._freed_by([*resting, *ended])

    def leased(self, sessions: Iterable[HopSession]) -> int:
        """Tokens of cache that those of these sessions lease that are in use: whole pages, each once if several do."""
        sessions = list(sessions)
        return self._freed_by(sessions) - self._freed_by([one for one in sessions if one.rests_until is not None])

    def _freed_by(self, sessions: list[HopSession]) -> int:
        return self.runner.tokens_freed_by([session.key for session in sessions]) if sessions else 0

    @property
    def homes(self) -> Sharing:
        """What homes hold, of all that is neither this node's own nor kept for it."""
        own = [session for session in self._sessions if session.asker == self._own]
        others = [session for session in self._sessions if session.asker != self._own]
        kept_places = int(self.limits.own_share * self.limits.sessions)
        places = self.limits.sessions - max(sum(session.rests_until is None for session in own), kept_places)
        tokens = self.runner.kv_total_tokens - self.leased(own)
        return Sharing(self, others, attrgetter("home"), places, tokens, self.free_after())

    def askers_of(self, home: str) -> Sharing:
        """What the askers of a home hold, of its fair share; nothing of that counts as free."""
        homes = self.homes
        places, tokens = homes.fair_places(home), homes.fair_tokens(home)
        sessions = [session for session in self._sessions if session.home == home and session.asker != self._own]
        return Sharing(self, sessions, attrgetter("asker"), places, tokens, 0)


class Sharing:
    """How much of so many places and tokens of cache is held by each home, or by each asker of one home."""

    def __init__(
        self,
        room: HopRoom,
        sessions: Iterable[HopSession],
        name_of: Callable[[HopSession], str],
        total_places: float,
        total_tokens: float,
        free_tokens: int,
    ) -> None:
        """`name_of` tells who holds a session."""
        self.total_places, self.total_tokens, self.free_tokens = total_places, total_tokens, free_tokens
        self.name_of, self._room = name_of, room
        self._sessions: dict[str, list[HopSession]] = {}  # resting ones too
        for session in sessions:
            self._sessions.setdefault(name_of(session), []).append(session)

    def in_use(self, name: str) -> list[HopSession]:
        """The sessions in use of one of them."""
        return [session for session in self._sessions.get(name, ()) if session.rests_until is None]

    @property
    def places(self) -> dict[str, int]:
        """Number of sessions in use of each that has any."""
        return {name: places for name in self._sessions if (places := len(self.in_use(name)))}

    @property
    def leases(self) -> dict[str, int]:
        """Tokens of cache that are leased to each that has sessions in use."""
        return {name: self._room.leased(self._sessions[name]) for name in self.places}

    def fair_places(self, name: str) -> float:
        """The fair share of the places."""
        return fair_share(name, self.places, self.total_places)

    def fair_tokens(self, name: str) -> float:
        """The fair share of the cache."""
        return fair_share(name, self.places, self.total_tokens)

    def freed_by(self, ended: Iterable[HopSession]) -> int:
        """Tokens of cache that are free in addition once these sessions have ended."""
        return self._room.free_after(ended) - self._room.free_after()


def why_not(turn: EpochOrder, asker: str, home: str, room: HopRoom | None, shared: int = 0) -> HopError | None:
    """The reason to refuse a session that `asker`, of this home, wants to open, or None to admit it.

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
    return why_busy(room.load(asker, home), room.needed(turn.tokens, shared), room.limits)


def fair_share(name: str, held: Mapping[str, int], total: float) -> float:
    """One's share of `total` among those that hold some of it, and one that may still come."""
    return total / (len(held.keys() - {name}) + 2)


def above_share(name: str, wanted: int, held: Mapping[str, int], total: float) -> dict[str, int]:
    """Others that hold more than their fair share of `total`, and than this one would with `wanted` more, by name."""
    most = max(fair_share(name, held, total), held.get(name, 0) + wanted)
    return {other: amount for other, amount in held.items() if other != name and amount > most}


def sessions_in_the_way(
    refusal: HopError, asker: str, home: str, tokens: int, room: HopRoom, turns: CacheTurns, now: float
) -> list[HopSession]:
    """The sessions that are to end so that one of `tokens` can be admitted that was refused; empty if none are.

    Others make way for a home below its share; if it has that, its other askers do.
    """
    if refusal.why == "sessions_full":
        return place_to_free(home, room.homes)
    if refusal.why == "asker_sessions_full":
        return place_to_free(asker, room.askers_of(home))
    if refusal.why == "cache_full":
        return turns.make_way(home, tokens, room.homes, now)
    if refusal.why == "cache_reserved":
        return turns.make_way(asker, tokens, room.askers_of(home), now)
    return []


def place_to_free(name: str, sharing: Sharing) -> list[HopSession]:
    """Find the session that makes way at once for one that has found no place; empty if there is none.

    It is of the one above its fair share with the most places, of its asker with the most: the oldest session for
    which nothing was computed, else the one for which nothing was computed for longest.
    """
    crowding = above_share(name, 1, sharing.places, sharing.total_places)
    if not crowding:
        return []
    sessions = sharing.in_use(max(crowding, key=lambda other: crowding[other]))
    places = Counter(session.asker for session in sessions)
    return [min(sessions, key=lambda one: (-places[one.asker], one.counters.tokens > 0, one.counters.worked_at))]


class CacheTurns:
    """Finds the sessions that make way if somebody holds most of the cache for long while others find no room.

    The first session of a home may take all of a small node's cache, and be as slow as it likes. What counts is for
    how long others have been refused because of that home, whatever sessions it closed and opened meanwhile: `IDLE_S`
    if nothing was computed for a session for as long, else `TURN_S`.

    Once it has made way, the time begins anew: others could end all its later sessions as soon as they are open. But
    while others are refused, and `TURN_S` longer, it gets no more than its share: several homes could take turns.
    """

    def __init__(self) -> None:
        # Of homes, and of askers that are in the way of others of their home.
        self._in_the_way: dict[str, tuple[float, float]] = {}  # first and latest time that others were refused
        self._made_way: dict[str, float] = {}  # latest time that others were refused

    def held_back(self, now: float) -> list[str]:
        """The homes that are to stay within their share."""
        return [home for home, latest in self._made_way.items() if now - latest < TURN_S]

    def make_way(self, name: str, tokens: int, sharing: Sharing, now: float) -> list[HopSession]:
        """Note that a session of `name` that leases `tokens` found no room; return those that are to end for it.

        They are of those above their fair share, which hold more than this one would: the largest ones, until there
        is room or nothing but their share is left.
        """
        crowding = above_share(name, tokens, sharing.leases, sharing.total_tokens)
        self._refused(name, crowding, now)
        going: list[HopSession] = []
        for other in sorted(crowding, key=lambda other: -crowding[other]):
            excess = crowding[other] - sharing.fair_tokens(name)
            going += _as_few(self._may_end(other, sharing, now), excess, sharing)  # the last may be larger than needed
        ended = _as_few(going, tokens - sharing.free_tokens, sharing)
        if sharing.free_tokens + sharing.freed_by(ended) < tokens:
            return []
        for other in {sharing.name_of(session) for session in ended}:
            del self._in_the_way[other]
            self._made_way[other] = now
        while len(self._made_way) > MAX_HELD_BACK:
            del self._made_way[next(iter(self._made_way))]
        return ended

    def _refused(self, name: str, crowding: Iterable[str], now: float) -> None:
        """Note that one was refused because of others, and forget for whom nobody was for `TURN_S`."""
        self._in_the_way = {other: times for other, times in self._in_the_way.items() if now - times[1] < TURN_S}
        for other in crowding:
            self._in_the_way[other] = self._in_the_way.get(other, (now, now))[0], now
        held_back = self.held_back(now)
        self._made_way = {home: now if crowding and home != name else self._made_way[home] for home in held_back}

    def _may_end(self, name: str, sharing: Sharing, now: float) -> list[HopSession]:
        """The sessions of one that may end for others now, in order: the largest of the asker that still has most."""
        in_the_way_s, sessions = now - self._in_the_way[name][0], sharing.in_use(name)
        if in_the_way_s < TURN_S:
            sessions = [one for one in sessions if in_the_way_s >= IDLE_S and one.idle_s(now) >= IDLE_S]
        rank: dict[bytes, int] = {}
        held: Counter[str] = Counter()
        for session in sorted(sessions, key=lambda one: one.turn.tokens):
            held[session.asker] += session.turn.tokens
            rank[session.key] = held[session.asker]  # what its asker still has when all larger ones have ended
        return sorted(sessions, key=lambda one: -rank[one.key])


def _as_few(sessions: list[HopSession], tokens: float, sharing: Sharing) -> list[HopSession]:
    """As few of these sessions, in their order, as free so many tokens; all of them if they do not."""
    count = bisect_left(range(len(sessions)), tokens, key=lambda count: sharing.freed_by(sessions[:count]))
    return sessions[:count]

"""Who is in the swarm, as one node knows it: the latest valid announcement of each member, and whether it lives. Pure.

Whether a member lives is for this node's own contact with it, on its own clock; what others say only makes it look.
The table is bounded, and hard to fill: a member that this node was in contact with is never given up for a stranger,
strangers have a limited number of places, and these are shared fairly among the peers that told of them. A stranger
that does not answer is forgotten, and not taken again from others for a while.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from app.membership.member import Change, ChangeKind, Member, State, kind_of_news, spoken_state
from app.membership.verification import SwarmTerms, check_announcement, statement
from app.membership.wire import KEY_BYTES
from app.swarm.records import Announcement
from p2p.envelope import CLOCK_TOLERANCE_MS

PRESENT = ("alive", "draining")
GONE = ("dead", "left")


@dataclass(frozen=True)
class TableLimits:
    """How many members a table holds, and how long it remembers the gone."""

    members: int = 2048
    strangers: int = 1024  # members that this node was not yet in contact with
    gone: int = 512
    held_off: int = 4096
    gone_kept_s: float = 1800.0
    held_off_s: float = 15.0


@dataclass(slots=True, eq=False)
class _Entry:
    key: bytes
    raw: bytes
    said: Announcement
    state: State
    since: float
    via: str  # who told of it first
    seen_at: float | None = None
    rtt_s: float | None = None
    listed: bool = False  # among those that are present

    def member(self) -> Member:
        return Member(self.said.peer, self.said, self.state, self.seen_at, self.rtt_s, self.raw)


class Table:
    """The members of one swarm without this node itself."""

    def __init__(self, own_peer: str, terms: SwarmTerms, limits: TableLimits | None = None) -> None:
        self._own_peer, self._terms, self._limits = own_peer, terms, limits or TableLimits()
        self._entries: dict[str, _Entry] = {}
        self._peer_of: dict[bytes, str] = {}
        self._strangers: OrderedDict[str, dict[str, None]] = OrderedDict()  # who told -> of whom, the oldest first
        self._stranger_count = 0
        self._gone: dict[str, None] = {}  # the longest gone first
        self._held_off: OrderedDict[str, float] = OrderedDict()
        self._present: tuple[str, ...] | None = None
        self._announcements: tuple[Announcement, ...] | None = None
        self._evicted: list[Change] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, peer: str) -> bool:
        return peer in self._entries

    def get(self, peer: str) -> Member | None:
        """What is known of one member."""
        entry = self._entries.get(peer)
        return entry.member() if entry else None

    def state(self, peer: str) -> State | None:
        """One member's state."""
        entry = self._entries.get(peer)
        return entry.state if entry else None

    def number(self, peer: str) -> int:
        """The number of one member's announcement, or 0."""
        entry = self._entries.get(peer)
        return entry.said.sequence if entry else 0

    def key(self, peer: str) -> bytes:
        """What stands for a known member in a vector."""
        return self._entries[peer].key

    def seen_at(self, peer: str) -> float | None:
        """When this node was last in contact with a member."""
        entry = self._entries.get(peer)
        return entry.seen_at if entry else None

    def members(self) -> tuple[Member, ...]:
        """Every member that is not gone."""
        return tuple(entry.member() for entry in self._entries.values() if entry.state not in GONE)

    def announcements(self) -> tuple[Announcement, ...]:
        """What the members say that are alive or draining; the same object as long as none of it changes."""
        if self._announcements is None:
            self._announcements = tuple(e.said for e in self._entries.values() if e.state in PRESENT)
        return self._announcements

    def present(self) -> tuple[str, ...]:
        """The members that this node was in contact with and holds for alive, sorted; likewise."""
        if self._present is None:
            self._present = tuple(sorted(peer for peer, entry in self._entries.items() if entry.listed))
        return self._present

    def dead(self) -> list[str]:
        """The members that were lost, the longest ago first."""
        return [peer for peer in self._gone if self._entries[peer].state == "dead"]

    def next_stranger(self, besides: Mapping[str, object]) -> str | None:
        """The stranger to get in contact with next: each teller's in turn, so that none is kept waiting by another."""
        for via in list(self._strangers):
            self._strangers.move_to_end(via)
            for peer in self._strangers[via]:
                if peer not in besides:
                    return peer
        return None

    # --- what changes it ---------------------------------------------------------------------------------------------

    def offer(self, raw: bytes, *, sender: str, now: float, now_ms: int) -> Change | None:
        """Take an announcement that `sender` passed on, if it is news; what is not valid raises `EnvelopeError`."""
        envelope = statement(raw)
        peer = envelope.peer
        entry = self._entries.get(peer)
        if peer == self._own_peer or (entry is not None and envelope.sequence <= entry.said.sequence):
            return None
        if sender == peer:
            self._held_off.pop(peer, None)
        elif self._held_off.get(peer, now) > now:
            return None
        if entry is None and not self._has_room(sender):
            return None  # before the signature is checked: a flood costs next to nothing
        said = check_announcement(raw, self._terms, now_ms)
        if entry is None:
            key = envelope.public_key[:KEY_BYTES]
            return None if said.state == "left" else self._welcome(_Entry(key, raw, said, "alive", now, sender))
        before = entry.member()
        kind = _kind_for(entry, said)
        entry.raw, entry.said = raw, said
        if kind == "joined":
            entry.seen_at = entry.rtt_s = None  # it must be met again
            entry.via = sender
        self._enter(entry, spoken_state(said), now)
        return Change(kind, entry.member(), before)

    def seen(self, peer: str, now: float, rtt_s: float | None = None) -> Change | None:
        """This node was in contact with a member just now."""
        entry = self._entries.get(peer)
        if entry is None or entry.state == "left":
            return None
        kind: ChangeKind | None = None
        if entry.state in ("suspect", "dead"):
            kind = "recovered" if entry.state == "suspect" else "joined"
        elif entry.seen_at is None:
            kind = "proven"
        before = entry.member() if kind else None
        entry.seen_at = now
        if rtt_s is not None:
            # The least is the wire, what comes on top is load: fall at once, rise slowly.
            rises = entry.rtt_s is not None and rtt_s > entry.rtt_s
            entry.rtt_s = entry.rtt_s + 0.2 * (rtt_s - entry.rtt_s) if rises and entry.rtt_s is not None else rtt_s
        if kind is None:
            return None
        self._enter(entry, spoken_state(entry.said), now)
        return Change(kind, entry.member(), before)

    def failed(self, peer: str, now: float) -> Change | None:
        """This node tried to reach a member and could not: once makes it suspect, twice makes it dead."""
        entry = self._entries.get(peer)
        if entry is None or entry.state in GONE:
            return None
        before = entry.member()
        if entry.seen_at is None:
            self._hold_off(peer, now)
            self._remove(peer)
            entry.state = "dead"
            return Change("dead", entry.member(), before)
        self._enter(entry, "dead" if entry.state == "suspect" else "suspect", now)
        return Change("dead" if entry.state == "dead" else "suspected", entry.member(), before)

    def drop(self, peer: str, now: float) -> Change | None:
        """Give up a member that misbehaves or is no member any more."""
        entry = self._entries.get(peer)
        if entry is None:
            return None
        before = entry.member()
        self._hold_off(peer, now)
        self._remove(peer)
        entry.state = "left"
        return None if before.state in GONE else Change("left", entry.member(), before)

    def expire(self, now: float, now_ms: int) -> list[Change]:
        """Forget the long gone, and those whose word has run out though they could have renewed it."""
        for peer in [p for p in self._gone if now - self._entries[p].since >= self._limits.gone_kept_s]:
            self._remove(peer)
        stale = [p for p, e in self._entries.items() if e.said.expires_at_ms + CLOCK_TOLERANCE_MS <= now_ms]
        return [change for peer in stale if (change := self.drop(peer, now))]

    def take_evicted(self) -> list[Change]:
        """The strangers that lost their places to others since this was last asked."""
        evicted, self._evicted = self._evicted, []
        return evicted

    # --- comparing with others ---------------------------------------------------------------------------------------

    def vector(self) -> dict[bytes, int]:
        """What this table holds, in short."""
        return {entry.key: entry.said.sequence for entry in self._entries.values() if entry.state not in GONE}

    def newer_than(self, vector: Mapping[bytes, int]) -> Iterator[bytes]:
        """The announcements that the owner of `vector` lacks; only of members that this node knows to be alive."""
        for peer in self.present():
            entry = self._entries[peer]
            if vector.get(entry.key, -1) < entry.said.sequence:
                yield entry.raw

    def wanted_from(self, vector: Mapping[bytes, int]) -> Iterator[bytes]:
        """The keys in `vector` under which its owner has something newer."""
        for key, number in vector.items():
            peer = self._peer_of.get(key)
            if peer is None or self._entries[peer].said.sequence < number:
                yield key

    def peers_of(self, keys: Iterator[bytes]) -> list[str]:
        """The members with these keys, where known."""
        return [peer for key in keys if (peer := self._peer_of.get(key))]

    # --- within ------------------------------------------------------------------------------------------------------

    def _welcome(self, entry: _Entry) -> Change | None:
        if entry.key in self._peer_of:
            return None
        self._make_room()
        peer = entry.said.peer
        self._entries[peer], self._peer_of[entry.key] = entry, peer
        self._enter(entry, spoken_state(entry.said), entry.since)
        return Change("joined", entry.member())

    def _has_room(self, via: str) -> bool:
        if self._stranger_count >= self._limits.strangers:
            return len(self._strangers[self._greediest()]) > len(self._strangers.get(via, ())) + 1
        return len(self._entries) < self._limits.members or bool(self._gone)

    def _make_room(self) -> None:
        if self._stranger_count >= self._limits.strangers:
            evicted = self._entries[next(iter(self._strangers[self._greediest()]))]
            self._remove(evicted.said.peer)
            self._evicted.append(Change("left", evicted.member(), evicted.member()))
        elif len(self._entries) >= self._limits.members:
            self._remove(next(iter(self._gone)))

    def _greediest(self) -> str:
        return max(self._strangers, key=lambda via: len(self._strangers[via]))

    def _enter(self, entry: _Entry, state: State, now: float) -> None:
        peer = entry.said.peer
        if state != entry.state:
            entry.since = now
        entry.state = state
        self._list(entry)
        self._file(entry, peer)
        if len(self._gone) > self._limits.gone:
            self._remove(next(iter(self._gone)))

    def _list(self, entry: _Entry) -> None:
        """Keep the lists of members current, which are made anew only where they change."""
        self._announcements = None
        listed = entry.state in PRESENT and entry.seen_at is not None
        if listed != entry.listed:
            entry.listed, self._present = listed, None

    def _file(self, entry: _Entry, peer: str) -> None:
        """Put a member in the lists that its state belongs to."""
        self._unfile(peer)
        if entry.state in GONE:
            self._gone[peer] = None
        elif entry.seen_at is None:
            self._strangers.setdefault(entry.via, {})[peer] = None
            self._stranger_count += 1

    def _unfile(self, peer: str) -> None:
        self._gone.pop(peer, None)
        via = self._entries[peer].via
        told = self._strangers.get(via, {})
        if peer in told:
            del told[peer]
            self._stranger_count -= 1
            if not told:
                del self._strangers[via]

    def _remove(self, peer: str) -> None:
        self._unfile(peer)
        entry = self._entries.pop(peer)
        del self._peer_of[entry.key]
        self._announcements = None
        if entry.listed:
            entry.listed, self._present = False, None

    def _hold_off(self, peer: str, now: float) -> None:
        self._held_off[peer] = now + self._limits.held_off_s
        self._held_off.move_to_end(peer)
        if len(self._held_off) > self._limits.held_off:
            self._held_off.popitem(last=False)


def _kind_for(entry: _Entry, said: Announcement) -> ChangeKind:
    if said.state == "left":
        return "left"
    if entry.state in GONE:
        return "joined"
    return "recovered" if entry.state == "suspect" else kind_of_news(entry.said, said)

"""The members of a swarm as one node knows them: the latest valid announcement and the state of each. Pure.

Only this node's own contact with a member, timed by its own clock, decides whether the member is alive; reports of
others only cause a probe (`app.membership.failure_detector`). The table is bounded and hard to flood. A *stranger* is
a member that this node has not been in contact with yet: a contacted member is never evicted for a stranger, and
strangers have a limited number of places. A stranger that does not answer is removed, and for `held_off_s` not accepted
again from anybody but itself; a peer that told of several such is not believed about further strangers for a while.

Peer ids are free and addresses are not. So strangers' places are shared fairly among the homes (`app.serving.homes`) of
the peers that passed their announcements on, and then among the peers of a home, and contacted members of one home have
a limited number of places too. Who speaks for itself on a link is met by that: it needs no stranger's place, and takes
one if the table is full.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from app.core.smoothing import Ewma
from app.membership.member import Change, ChangeKind, Member, State, announced_state, kind_of_news
from app.membership.wire import KEY_BYTES
from app.swarm.records import Announcement
from p2p.envelope import CLOCK_TOLERANCE_MS
from p2p.identity import public_key_of
from p2p.rate_limit import PeerRateLimit

PRESENT = ("alive", "draining")
GONE = ("dead", "left")
_RTT_SMOOTHING = 0.2


@dataclass(frozen=True)
class TableLimits:
    """Bounds of a table: numbers of entries, and seconds that entries of gone members are kept."""

    members: int = 2048
    strangers: int = 1024  # members that this node has not been in contact with yet
    of_home: int = 128  # contacted members of one home
    # Strangers that one peer may tell of though they do not answer, at once and each second: each of them is dialled.
    vain_strangers: float = 8.0
    vain_strangers_per_s: float = 0.2
    gone: int = 512  # dead or left
    held_off: int = 4096  # peers whose announcements are accepted from themselves only
    gone_kept_s: float = 1800.0
    held_off_s: float = 15.0
    crowded_s: float = 600.0  # the same for members whose home has no place: others would tell of them for ever


@dataclass(slots=True, eq=False)
class _Entry:
    key: bytes
    announcement: Announcement
    state: State
    since: float  # when it entered this state, on trio's clock
    via: tuple[str, str]  # the peer that first passed its announcement on: its home, and its id
    seen_at: float | None = None
    home: str = ""  # that it had when it was contacted
    rtt: Ewma = field(default_factory=lambda: Ewma(_RTT_SMOOTHING))  # in seconds
    listed: bool = False  # True while it is part of `Table.present()`

    def member(self) -> Member:
        rtt_s = self.rtt.value if self.rtt else None
        return Member(self.announcement.peer, self.announcement, self.state, self.seen_at, rtt_s, self.home)

    def record_rtt(self, rtt_s: float) -> None:
        """Take in a round-trip time; falls count at once and rises slowly: the lowest is the link's, the rest load."""
        if rtt_s < self.rtt.value:
            self.forget_rtt()
        self.rtt.add(rtt_s)

    def forget_rtt(self) -> None:
        self.rtt = Ewma(_RTT_SMOOTHING)


class Table:
    """The members of one swarm, without this node itself."""

    def __init__(self, own_peer: str, limits: TableLimits | None = None) -> None:
        self._own_peer, self._limits = own_peer, limits or TableLimits()
        self._entries: dict[str, _Entry] = {}
        self._peer_of: dict[bytes, str] = {}
        # home -> its peers that told of strangers -> these, oldest first
        self._strangers: OrderedDict[str, OrderedDict[str, dict[str, None]]] = OrderedDict()
        self._stranger_count = 0
        self._vain_limit = PeerRateLimit(self._limits.vain_strangers, self._limits.vain_strangers_per_s)
        self._gone: dict[str, None] = {}  # the longest gone first; an ordered set
        self._met: dict[str, set[str]] = {}  # home -> contacted members that are not gone
        self._held_off: OrderedDict[str, float] = OrderedDict()
        self._present: tuple[str, ...] | None = None
        self._announcements: tuple[Announcement, ...] | None = None
        self._evicted: list[Change] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, peer: str) -> bool:
        return peer in self._entries

    def get(self, peer: str) -> Member | None:
        """Return a member by peer id, None if unknown."""
        entry = self._entries.get(peer)
        return entry.member() if entry else None

    def state(self, peer: str) -> State | None:
        """Return the state of a member, None if unknown."""
        entry = self._entries.get(peer)
        return entry.state if entry else None

    def number(self, peer: str) -> int:
        """Return the sequence number of a member's latest announcement, 0 if unknown."""
        entry = self._entries.get(peer)
        return entry.announcement.sequence if entry else 0

    def key(self, peer: str) -> bytes:
        """Return the first `KEY_BYTES` of a known member's public key, which identify it in vectors."""
        return self._entries[peer].key

    def seen_at(self, peer: str) -> float | None:
        """Return the time of the last own contact with a member (trio's clock), None if there was none."""
        entry = self._entries.get(peer)
        return entry.seen_at if entry else None

    def members(self) -> tuple[Member, ...]:
        """Return every member that is not dead or left, strangers included."""
        return tuple(entry.member() for entry in self._entries.values() if entry.state not in GONE)

    def announcements(self) -> tuple[Announcement, ...]:
        """Return the announcements of contacted members that are alive or draining; the same object until one changes.

        Members that are only known from others do not count: anybody can make up thousands of them.
        """
        if self._announcements is None:
            self._announcements = tuple(entry.announcement for entry in self._entries.values() if entry.listed)
        return self._announcements

    def present(self) -> tuple[str, ...]:
        """Return the sorted ids of contacted members that are alive or draining; the same object until they change."""
        if self._present is None:
            self._present = tuple(sorted(peer for peer, entry in self._entries.items() if entry.listed))
        return self._present

    def homes(self) -> dict[str, str]:
        """Return the home of each member in `present`; nothing if all of them are of one home.

        Then nobody could tell a laboratory behind one relay from a crowd of one machine, and each member is believed.
        """
        homes = {peer: entry.home for peer, entry in self._entries.items() if entry.listed}
        return homes if len(set(homes.values())) > 1 else {}

    def dead(self) -> list[str]:
        """Return the ids of dead members, the longest dead first."""
        return [peer for peer in self._gone if self._entries[peer].state == "dead"]

    def next_stranger(self, besides: Mapping[str, object]) -> str | None:
        """Return a stranger to probe that is not in `besides`, None if there is none.

        Round-robin over the homes of the peers that told of strangers, and over the peers of each home, so that one
        that tells of many does not delay the others.
        """
        for home in list(self._strangers):
            self._strangers.move_to_end(home)
            tellers = self._strangers[home]
            for teller in list(tellers):
                tellers.move_to_end(teller)
                for peer in tellers[teller]:
                    if peer not in besides:
                        return peer
        return None

    # --- changes ------------------------------------------------------------------------------------------------------

    def has_place(self, peer: str, *, sender: str, now: float, home: str = "") -> bool:
        """True if an announcement of `peer` that `sender` passed on could be accepted: known, or room for a stranger.

        `home` is the sender's, "" without a link to it. Of a peer that is held off, only its own words count.
        """
        if sender != peer and self._held_off.get(peer, now) > now:
            return False
        if peer in self._entries:
            return True
        if sender == peer and home:
            has_room = self._has_room() or self._stranger_count > 0
            return has_room and len(self._met.get(home, ())) < self._limits.of_home
        return (sender == peer or self._vain_limit.has_token(sender, now)) and self._has_room_for_stranger(home, sender)

    def update(self, announcement: Announcement, *, sender: str, now: float, home: str = "") -> Change | None:
        """Keep a verified announcement that `sender` passed on, if it is newer and has a place; returns the change.

        Who speaks for itself on a link is to be recorded as `seen` at once: until then it is a stranger beyond their
        number.
        """
        peer = announcement.peer
        if peer == self._own_peer or announcement.sequence <= self.number(peer):
            return None
        if not self.has_place(peer, sender=sender, now=now, home=home):
            return None
        self._held_off.pop(peer, None)
        entry = self._entries.get(peer)
        if entry is None:
            if announcement.state == "left":
                return None
            key = public_key_of(peer)[:KEY_BYTES]
            return self._add(_Entry(key, announcement, "alive", now, (home, sender)))
        before = entry.member()
        kind = _kind_for(entry, announcement)
        entry.announcement = announcement
        if kind == "joined":
            entry.seen_at = None  # a stranger again until it answers a probe
            entry.forget_rtt()
            entry.via = (home, sender)
        self._set_state(entry, announced_state(announcement), now)
        return Change(kind, entry.member(), before)

    def seen(self, peer: str, now: float, rtt_s: float | None = None, home: str = "") -> Change | None:
        """Record a successful contact with a member; returns a change if it was a stranger, suspect or dead.

        One that comes from another home than before is counted there, since it may have called through a relay first;
        it is removed instead if too many members are of that home. `home` is "" without a link.
        """
        entry = self._entries.get(peer)
        if entry is None or entry.state == "left":
            return None
        if entry.seen_at is None or entry.state == "dead" or home not in ("", entry.home):
            if len(self._met.get(home, ())) >= self._limits.of_home:
                return self._turn_away(entry, now, self._limits.crowded_s)
            self._unindex(peer)
            entry.home = home
            self._index(entry, peer)
        kind: ChangeKind | None = None
        if entry.state in ("suspect", "dead"):
            kind = "recovered" if entry.state == "suspect" else "joined"
        elif entry.seen_at is None:
            kind = "proven"
        before = entry.member() if kind else None
        entry.seen_at = now
        if rtt_s is not None:
            entry.record_rtt(rtt_s)
        if kind is None:
            return None
        self._set_state(entry, announced_state(entry.announcement), now)
        return Change(kind, entry.member(), before)

    def failed(self, peer: str, now: float) -> Change | None:
        """Record a failed contact: the first makes a member suspect, the second dead; a stranger is removed at once."""
        entry = self._entries.get(peer)
        if entry is None or entry.state in GONE:
            return None
        before = entry.member()
        if entry.seen_at is None:
            self._vain_limit.take(entry.via[1], now)
            return self._turn_away(entry, now, self._limits.held_off_s)
        self._set_state(entry, "dead" if entry.state == "suspect" else "suspect", now)
        return Change("dead" if entry.state == "dead" else "suspected", entry.member(), before)

    def drop(self, peer: str, now: float) -> Change | None:
        """Remove a peer that misbehaves or is no longer a member."""
        entry = self._entries.get(peer)
        if entry is None:
            return None
        before = entry.member()
        self._hold_off(peer, now + self._limits.held_off_s)
        self._remove(peer)
        entry.state = "left"
        return None if before.state in GONE else Change("left", entry.member(), before)

    def expire(self, now: float, now_ms: int) -> list[Change]:
        """Remove members that have been gone for `gone_kept_s`, and those whose announcement has expired."""
        for peer in [p for p in self._gone if now - self._entries[p].since >= self._limits.gone_kept_s]:
            self._remove(peer)
        stale = [p for p, e in self._entries.items() if e.announcement.expires_at_ms + CLOCK_TOLERANCE_MS <= now_ms]
        return [change for peer in stale if (change := self.drop(peer, now))]

    def take_evicted(self) -> list[Change]:
        """Return, and clear, the changes of strangers that were evicted since the last call."""
        evicted, self._evicted = self._evicted, []
        return evicted

    # --- comparison with another table --------------------------------------------------------------------------------

    def vector(self) -> dict[bytes, int]:
        """Return the sequence number held for each member, by key; what a `swarm.table` call sends."""
        return {entry.key: entry.announcement.sequence for entry in self._entries.values() if entry.state not in GONE}

    def newer_than(self, vector: Mapping[bytes, int]) -> Iterator[bytes]:
        """Yield announcements that the owner of `vector` lacks; only of members in `present`."""
        for peer in self.present():
            entry = self._entries[peer]
            if vector.get(entry.key, -1) < entry.announcement.sequence:
                yield entry.announcement.raw

    def wanted_from(self, vector: Mapping[bytes, int]) -> Iterator[bytes]:
        """Yield the keys for which the owner of `vector` has a newer announcement."""
        for key, number in vector.items():
            peer = self._peer_of.get(key)
            if peer is None or self._entries[peer].announcement.sequence < number:
                yield key

    def peers_of(self, keys: Iterator[bytes]) -> list[str]:
        """Return the ids of the known members among these keys."""
        return [peer for key in keys if (peer := self._peer_of.get(key))]

    # --- internal -----------------------------------------------------------------------------------------------------

    def _turn_away(self, entry: _Entry, now: float, for_s: float) -> Change:
        """Remove a member that does not count, and accept it from nobody but itself for a while."""
        before, peer = entry.member(), entry.announcement.peer
        self._hold_off(peer, now + for_s)
        self._remove(peer)
        entry.state = "dead"
        return Change("dead", entry.member(), before)

    def _add(self, entry: _Entry) -> Change | None:
        if entry.key in self._peer_of:  # another peer's key begins with the same 8 bytes
            return None
        peer = entry.announcement.peer
        is_met_at_once = entry.via[0] and entry.via[1] == peer
        if not self._has_room() or (self._stranger_count >= self._limits.strangers and not is_met_at_once):
            self._evict_stranger()
        elif len(self._entries) >= self._limits.members:
            self._remove(next(iter(self._gone)))
        self._entries[peer], self._peer_of[entry.key] = entry, peer
        self._set_state(entry, announced_state(entry.announcement), entry.since)
        return Change("joined", entry.member())

    def _has_room(self) -> bool:
        return len(self._entries) < self._limits.members or bool(self._gone)

    def _has_room_for_stranger(self, home: str, teller: str) -> bool:
        """True if there is a free place, or one of another home, or of another teller of this home, that has more."""
        if self._stranger_count < self._limits.strangers:
            return self._has_room()
        fullest = self._fullest_home()
        if fullest != home:
            return self._told_of_by(fullest) > self._told_of_by(home) + 1
        tellers = self._strangers[home]
        return max(map(len, tellers.values())) > len(tellers.get(teller, ())) + 1

    def _evict_stranger(self) -> None:
        most = max(self._strangers[self._fullest_home()].values(), key=len)
        evicted = self._entries[next(iter(most))]
        self._remove(evicted.announcement.peer)
        self._evicted.append(Change("left", evicted.member(), evicted.member()))

    def _fullest_home(self) -> str:
        return max(self._strangers, key=self._told_of_by)

    def _told_of_by(self, home: str) -> int:
        return sum(map(len, self._strangers.get(home, {}).values()))

    def _set_state(self, entry: _Entry, state: State, now: float) -> None:
        peer = entry.announcement.peer
        if state != entry.state:
            entry.since = now
        entry.state = state
        self._update_lists(entry)
        self._index(entry, peer)
        if len(self._gone) > self._limits.gone:
            self._remove(next(iter(self._gone)))

    def _update_lists(self, entry: _Entry) -> None:
        """Invalidate the cached results of `announcements` and `present` that this entry changes."""
        self._announcements = None
        listed = entry.state in PRESENT and entry.seen_at is not None
        if listed != entry.listed:
            entry.listed, self._present = listed, None

    def _index(self, entry: _Entry, peer: str) -> None:
        """Put an entry among the gone, the strangers or those of its address, according to its state."""
        self._unindex(peer)
        if entry.state in GONE:
            self._gone[peer] = None
        elif entry.seen_at is None:
            home, teller = entry.via
            self._strangers.setdefault(home, OrderedDict()).setdefault(teller, {})[peer] = None
            self._stranger_count += 1
        elif entry.home:
            self._met.setdefault(entry.home, set()).add(peer)

    def _unindex(self, peer: str) -> None:
        self._gone.pop(peer, None)
        (home, teller), met = self._entries[peer].via, self._met.get(self._entries[peer].home, set())
        if peer in met:
            met.discard(peer)
            if not met:
                del self._met[self._entries[peer].home]
        tellers = self._strangers.get(home, OrderedDict())
        if peer in tellers.get(teller, ()):
            del tellers[teller][peer]
            self._stranger_count -= 1
            if not tellers[teller]:
                del tellers[teller]
            if not tellers:
                del self._strangers[home]

    def _remove(self, peer: str) -> None:
        self._unindex(peer)
        entry = self._entries.pop(peer)
        del self._peer_of[entry.key]
        self._announcements = None
        if entry.listed:
            entry.listed, self._present = False, None

    def _hold_off(self, peer: str, until: float) -> None:
        self._held_off[peer] = until
        self._held_off.move_to_end(peer)
        if len(self._held_off) > self._limits.held_off:
            self._held_off.popitem(last=False)


def _kind_for(entry: _Entry, announcement: Announcement) -> ChangeKind:
    if announcement.state == "left":
        return "left"
    if entry.state in GONE:
        return "joined"
    return "recovered" if entry.state == "suspect" else kind_of_news(entry.announcement, announcement)

"""Decides which members to probe and when. Like SWIM, but only this node's own probes decide a member's state.

Every period a few watched members are probed, in the order of a shuffled list, and all hops next to this node on routes
(`neighbours`) besides; every `random_probe_s` one random member, in case gossip about a death was lost, and ever more
of them at once as long as some turn out to be gone: many can die together, or were never there to stay. A lost link to
a watched member or neighbour, or a signed suspicion from another member, causes a probe at once. A failed probe makes
the member suspect; a second failure makes it dead. Whoever hears of a suspicion probes for itself before passing it on,
so that a false one reaches no further than its first receivers. Every `dead_retry_s` one dead member is probed again,
which heals partitions. Strangers, members only heard of, are probed once before they count.
`app.membership.exchange` makes the calls.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import trio

from app.core.signal import Signal
from app.membership.exchange import MembershipExchange, ProbeOutcome
from app.membership.table import PRESENT
from p2p.rate_limit import PeerRateLimit


@dataclass(frozen=True)
class Timing:
    """Intervals of the membership protocol in seconds, and limits on concurrent probes."""

    period_s: float = 2.0  # between two rounds of probes
    probes_per_period: int = 2
    random_probe_s: float = 15.0  # between two probes of members that are not watched
    retry_s: float = 1.0  # between a member's first failed probe and the second attempt
    dead_retry_s: float = 6.0  # between two probes of members believed dead
    push_delay_s: float = 0.2  # changes within this time are sent in one batch
    compare_s: float = 60.0  # between two comparisons of the table with another member's
    refresh_s: float = 600.0  # after which this node renews its announcement
    lifetime_s: float = 1800.0  # of an announcement
    provide_s: float = 600.0  # between two announcements in the DHT
    strangers_at_once: int = 16
    probes_at_once: int = 64


_MORE_DRAWS = 4  # times as many random members are probed after one that is gone
Sign = Callable[[str, int], bytes]  # (accused peer, number of its announcement) -> signed suspicion


class FailureDetector:
    """Probes the members of a table while `run` runs; `neighbours` are probed in every period."""

    def __init__(self, exchange: MembershipExchange, timing: Timing, rng: random.Random, sign: Sign) -> None:
        self._exchange, self._table, self._timing, self._rng, self._sign = exchange, exchange.table, timing, rng, sign
        self.neighbours: frozenset[str] = frozenset()
        self._watch = WatchSet(exchange.network.peer_id, rng)
        self._held: tuple[frozenset[str], tuple[str, ...]] = (frozenset(), ())
        self._nursery: trio.Nursery | None = None
        self._probing: dict[str, bytes | None] = {}  # peers being probed -> another's suspicion that caused it
        self._meeting: dict[str, None] = {}
        self._round: list[str] = []
        self._drawn: list[str] = []  # random members that are being probed
        self._draws = 1  # random members to probe the next time
        self._draw_at = 0.0
        self._woken = Signal()
        self._check_limit = PeerRateLimit(burst=1, per_s=0.2)  # probes of one member that other peers can cause
        # On lossy links suspicions must not cause ever more suspicions.
        self._accusation_limit = PeerRateLimit(burst=2, per_s=0.02)
        self._reunion_limit = PeerRateLimit(burst=1, per_s=0.2)
        self._slots = trio.CapacityLimiter(timing.probes_at_once)

    async def run(self) -> None:
        """Probe members until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._meet_strangers)
            try:
                await self._probe_periodically()
            finally:
                self._nursery = None

    def watched(self) -> tuple[str, ...]:
        """Return the members that this node probes in turn, besides its neighbours."""
        return self._watch.among(self._table.present(), self._table.homes)

    def contacts(self) -> list[str]:
        """Return the present members that are cheap to reach: the watched ones, and those with an open link."""
        linked = (link.peer for link in self._exchange.network.links())
        peers = dict.fromkeys((*self.watched(), *linked))
        return [peer for peer in peers if self._table.state(peer) in PRESENT]

    def lost_link(self, peer: str) -> None:
        """Probe a watched member or neighbour whose link was lost; links to other members are closed when idle."""
        if peer in self.neighbours or peer in self.watched():
            self.probe(peer)

    def check_liveness(self, peer: str, accusation: bytes | None = None) -> None:
        """Probe a member at once because another peer reported something about it; rate-limited for each member."""
        if peer not in self._probing and self._check_limit.take(peer, trio.current_time()):
            self.probe(peer, accusation)

    def probe(self, peer: str, accusation: bytes | None = None) -> None:
        """Probe a member at once, unless it is being probed already or is not in the table."""
        if self._nursery is not None and peer not in self._probing and peer in self._table:
            self._probing[peer] = accusation
            self._nursery.start_soon(self._probe_twice, peer)

    def wake(self) -> None:
        """Probe strangers now: the table may have new ones."""
        self._woken.notify()

    async def _probe_periodically(self) -> None:
        dead_due_at = self._draw_at = trio.current_time()
        await trio.sleep(self._rng.uniform(0, self._timing.period_s))
        while True:
            now = trio.current_time()
            due = {peer: None for peer in (*self.neighbours, *self._next_members(), *self._random_members(now))}
            if now >= dead_due_at and (dead := self._table.dead()):
                due[self._rng.choice(dead)] = None
                dead_due_at = now + self._timing.dead_retry_s * self._rng.uniform(0.7, 1.3)
            self._keep_links()
            for peer in due:
                self.probe(peer)
            await trio.sleep(self._timing.period_s * self._rng.uniform(0.9, 1.1))

    def _keep_links(self) -> None:
        held = (self.neighbours, self.watched())
        if held != self._held:
            self._held = held
            self._exchange.network.keep_links({*self.neighbours, *self.watched()})

    def _next_members(self) -> Iterable[str]:
        chosen: list[str] = []
        for _ in range(self._timing.probes_per_period):
            if not self._round:
                self._round = list(self.watched())
                self._rng.shuffle(self._round)
            if self._round:
                chosen.append(self._round.pop())
        return chosen

    def _random_members(self, now: float) -> list[str]:
        """Draw members to probe at random, more and at once if some of the last ones are gone."""
        if any(peer in self._probing for peer in self._drawn):
            return []
        if any(self._table.state(peer) not in PRESENT for peer in self._drawn):
            self._draws, self._draw_at = min(_MORE_DRAWS * self._draws, self._timing.probes_at_once), now
        elif self._drawn:
            self._draws = max(self._draws // _MORE_DRAWS, 1)
        self._drawn, present = [], self._table.present()
        if now >= self._draw_at and len(present) > len(self.watched()):
            self._drawn = self._rng.sample(present, min(self._draws, len(present)))
            self._draw_at = now + self._timing.random_probe_s * self._rng.uniform(0.7, 1.3)
        return self._drawn

    async def _probe_twice(self, peer: str) -> None:
        """Probe a member and, if that made it suspect, once more after `retry_s`."""
        try:
            async with self._slots:
                if await self._probe_once(peer):
                    return
            await trio.sleep(self._timing.retry_s * self._rng.uniform(0.8, 1.2))
            if self._table.state(peer) == "suspect":
                async with self._slots:
                    await self._probe_once(peer)
        finally:
            del self._probing[peer]

    async def _probe_once(self, peer: str) -> bool:
        """Probe a member and record the outcome; False if it became suspect."""
        was_dead = self._table.state(peer) == "dead"
        outcome = await self._exchange.probe(peer)
        if outcome is ProbeOutcome.NO_MEMBER:
            self._exchange.drop(peer)
        elif outcome is ProbeOutcome.ALIVE and was_dead and self._reunion_limit.take("", trio.current_time()):
            await self._exchange.compare(peer)  # it may come from the other side of a partition and know members there
        elif outcome is ProbeOutcome.FAILED:
            number = self._table.number(peer)
            change = self._exchange.failed(peer)
            if change is not None and change.kind == "suspected":
                if self._accusation_limit.take(peer, trio.current_time()):
                    self._exchange.accuse(peer, self._probing[peer] or self._sign(peer, number))
                return False
        return True

    async def _meet_strangers(self) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                while len(self._meeting) < self._timing.strangers_at_once:
                    stranger = self._table.next_stranger(self._meeting)
                    if stranger is None:
                        break
                    self._meeting[stranger] = None
                    nursery.start_soon(self._meet, stranger)
                await self._woken.wait()

    async def _meet(self, peer: str) -> None:
        try:
            outcome = await self._exchange.probe(peer)
            if outcome is ProbeOutcome.NO_MEMBER:
                self._exchange.drop(peer)
            elif outcome is not ProbeOutcome.ALIVE or self._table.seen_at(peer) is None:
                # A busy stranger is removed too, and one that has hung up: others will report it again.
                self._exchange.failed(peer)
        finally:
            del self._meeting[peer]
            self.wake()


WATCH_ALL = 32  # members up to which all are watched
BY_COMMON_HASH = 5
BY_PRIVATE_HASH = 5


class WatchSet:
    """The members that one node watches: all of up to `WATCH_ALL`, else about a dozen.

    This keeps the number of links small in a swarm of any size. In a larger swarm a node watches the two members beside
    it on the ring of sorted peer ids, so that every member is watched; `BY_COMMON_HASH` members by a hash of both ids,
    which is the same from both sides, so that most watching is mutual and uses one link; `BY_PRIVATE_HASH` members by a
    hash with this node's secret salt, so that an attacker who picks ids around a victim never has all of its links.
    These are of different homes, so that a crowd of one machine never is all that is watched. A choice depends on the
    two members alone: one that joins or leaves changes little else.
    """

    def __init__(self, own_peer: str, rng: random.Random) -> None:
        self._own = own_peer.encode()
        self._own_peer = own_peer
        self._salt = rng.randbytes(16)
        self._members: Sequence[str] = ()
        self._chosen: tuple[str, ...] = ()
        self._weights: dict[str, tuple[bytes, bytes]] = {}  # (common hash, private hash)

    def among(self, members: Sequence[str], homes: Callable[[], Mapping[str, str]]) -> tuple[str, ...]:
        """Return the watched ones of the sorted `members`; computed again only if `members` is another object.

        `homes` returns the home of each; one that is not in it is a home of its own.
        """
        if members is not self._members:
            self._members = members
            self._chosen = tuple(members) if len(members) <= WATCH_ALL else self._choose(members, homes())
        return self._chosen

    def _choose(self, members: Sequence[str], homes: Mapping[str, str]) -> tuple[str, ...]:
        known = self._weights
        weights = self._weights = {peer: known.get(peer) or self._weigh(peer) for peer in members}
        at = bisect(members, self._own_peer)
        ring = (members[at % len(members)], members[at - 1])
        common = heapq.nsmallest(BY_COMMON_HASH, members, key=lambda peer: weights[peer][0])
        of_home: dict[str, str] = {}  # home -> its first member by the private hash
        for peer in members:
            home = homes.get(peer, peer)
            of_home[home] = min(of_home.get(home, peer), peer, key=lambda one: weights[one][1])
        private = heapq.nsmallest(BY_PRIVATE_HASH, of_home.values(), key=lambda peer: weights[peer][1])
        return tuple(dict.fromkeys((*ring, *common, *private)))

    def _weigh(self, peer: str) -> tuple[bytes, bytes]:
        other = peer.encode()
        pair = self._own + other if self._own < other else other + self._own
        return blake2b(pair, digest_size=8).digest(), blake2b(other, digest_size=8, key=self._salt).digest()

"""Who is looked at, and when: SWIM-like, with this node's own probes alone deciding.

Each period a few of the members that this node watches are probed, every one in its turn by a shuffled list, and all
route neighbours besides; now and then somebody else, lest a death that no gossip told of stays unknown. A lost link to
one of them, or a signed suspicion from another member, makes this node probe at once. A probe that fails makes its
member suspect, and the suspicion is passed on (only now: a false one goes no further than its first hearers); a second
failure makes it dead. The dead are tried again now and then, which is how a partition heals.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import trio

from app.membership.exchange import MembershipExchange, ProbeOutcome
from app.membership.table import PRESENT
from p2p.rate_limit import PeerRateLimit


@dataclass(frozen=True)
class Timing:
    """How often things happen, in seconds."""

    period_s: float = 2.0
    probes_per_period: int = 2
    stray_s: float = 15.0  # between two looks at members that are not watched
    retry_s: float = 1.0  # from a member's first failure to the second look
    dead_retry_s: float = 6.0
    push_delay_s: float = 0.2  # changes that come together go out together
    compare_s: float = 60.0
    refresh_s: float = 600.0
    lifetime_s: float = 1800.0
    provide_s: float = 600.0
    strangers_at_once: int = 16
    looks_at_once: int = 64


Sign = Callable[[str, int], bytes]  # (accused, number) -> a suspicion of this node's own


class FailureDetector:
    """Keeps looking after the members of a table; `run` does."""

    def __init__(self, talk: MembershipExchange, timing: Timing, rng: random.Random, sign: Sign) -> None:
        self._exchange, self._table, self._timing, self._rng, self._sign = talk, talk.table, timing, rng, sign
        self.neighbours: frozenset[str] = frozenset()
        self._watch = WatchSet(talk.network.peer_id, rng)
        self._held: tuple[frozenset[str], tuple[str, ...]] = (frozenset(), ())
        self._nursery: trio.Nursery | None = None
        self._looking: dict[str, bytes | None] = {}  # who is being looked at, and another's suspicion of it
        self._meeting: dict[str, None] = {}
        self._round: list[str] = []
        self._woken = trio.Event()
        self._prompted = PeerRateLimit(burst=1, per_s=0.2)  # looks at one member that others can bring about
        # On a link that loses much, suspicions must not breed suspicions.
        self._accusations = PeerRateLimit(burst=2, per_s=0.02)
        self._reunions = PeerRateLimit(burst=1, per_s=0.2)
        self._slots = trio.CapacityLimiter(timing.looks_at_once)

    async def run(self) -> None:
        """Probe for ever."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._meet_strangers)
            try:
                await self._beat()
            finally:
                self._nursery = None

    def watched(self) -> tuple[str, ...]:
        """The members that this node keeps an eye on, besides its neighbours."""
        return self._watch.among(self._table.present())

    def company(self) -> list[str]:
        """The members at hand: those that are watched, and those that there is a link to anyway."""
        linked = (link.peer for link in self._exchange.network.links())
        at_hand = dict.fromkeys((*self.watched(), *linked))
        return [peer for peer in at_hand if self._table.state(peer) in PRESENT]

    def lost_link(self, peer: str) -> None:
        """The link to a peer was lost; to those that are not watched, links come and go."""
        if peer in self.neighbours or peer in self.watched():
            self.probe(peer)

    def look_at(self, peer: str, accusation: bytes | None = None) -> None:
        """Probe a member at once because somebody else gave reason to."""
        if peer not in self._looking and self._prompted.take(peer, trio.current_time()):
            self.probe(peer, accusation)

    def probe(self, peer: str, accusation: bytes | None = None) -> None:
        """Probe a member at once, unless that is under way."""
        if self._nursery is not None and peer not in self._looking and peer in self._table:
            self._looking[peer] = accusation
            self._nursery.start_soon(self._look, peer)

    def wake(self) -> None:
        """There may be strangers to meet."""
        self._woken.set()

    async def _beat(self) -> None:
        dead_due_at = stray_due_at = trio.current_time()
        await trio.sleep(self._rng.uniform(0, self._timing.period_s))
        while True:
            now = trio.current_time()
            due = {peer: None for peer in (*self.neighbours, *self._next_members())}
            if now >= dead_due_at and (dead := self._table.dead()):
                due[self._rng.choice(dead)] = None
                dead_due_at = now + self._timing.dead_retry_s * self._rng.uniform(0.7, 1.3)
            if now >= stray_due_at and len(self._table.present()) > len(self.watched()):
                due[self._rng.choice(self._table.present())] = None
                stray_due_at = now + self._timing.stray_s * self._rng.uniform(0.7, 1.3)
            self._hold_links()
            for peer in due:
                self.probe(peer)
            await trio.sleep(self._timing.period_s * self._rng.uniform(0.9, 1.1))

    def _hold_links(self) -> None:
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

    async def _look(self, peer: str) -> None:
        try:
            async with self._slots:
                if await self._attempt(peer):
                    return
            await trio.sleep(self._timing.retry_s * self._rng.uniform(0.8, 1.2))
            if self._table.state(peer) == "suspect":
                async with self._slots:
                    await self._attempt(peer)
        finally:
            del self._looking[peer]

    async def _attempt(self, peer: str) -> bool:
        """Probe once; False where the member has become suspect."""
        was_dead = self._table.state(peer) == "dead"
        outcome = await self._exchange.probe(peer)
        if outcome is ProbeOutcome.NO_MEMBER:
            self._exchange.drop(peer)
        elif outcome is ProbeOutcome.ALIVE and was_dead and self._reunions.take("", trio.current_time()):
            await self._exchange.compare(peer)  # it may come from the other side of a partition, and know others there
        elif outcome is ProbeOutcome.FAILED:
            number = self._table.number(peer)
            change = self._exchange.failed(peer)
            if change is not None and change.kind == "suspected":
                if self._accusations.take(peer, trio.current_time()):
                    self._exchange.accuse(peer, self._looking[peer] or self._sign(peer, number))
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
                self._woken = trio.Event()

    async def _meet(self, peer: str) -> None:
        try:
            outcome = await self._exchange.probe(peer)
            if outcome is ProbeOutcome.NO_MEMBER:
                self._exchange.drop(peer)
            elif outcome is not ProbeOutcome.ALIVE:  # a stranger too busy to answer will be told of again
                self._exchange.failed(peer)
        finally:
            del self._meeting[peer]
            self.wake()


WATCH_ALL = 32
BY_COMMON_HASH = 5
BY_PRIVATE_HASH = 5


class WatchSet:
    """The members that one node watches, chosen anew only where the members have changed."""

    def __init__(self, own_peer: str, rng: random.Random) -> None:
        self._own = own_peer.encode()
        self._own_peer = own_peer
        self._salt = rng.randbytes(16)
        self._members: Sequence[str] = ()
        self._chosen: tuple[str, ...] = ()
        self._weights: dict[str, tuple[bytes, bytes]] = {}  # by the common hash, by the private one

    def among(self, members: Sequence[str]) -> tuple[str, ...]:
        """Whom to watch among the (sorted) members."""
        if members is not self._members:
            self._members = members
            self._chosen = tuple(members) if len(members) <= WATCH_ALL else self._choose(members)
        return self._chosen

    def _choose(self, members: Sequence[str]) -> tuple[str, ...]:
        known = self._weights
        weights = self._weights = {peer: known.get(peer) or self._weigh(peer) for peer in members}
        at = bisect(members, self._own_peer)
        ring = (members[at % len(members)], members[at - 1])
        common = heapq.nsmallest(BY_COMMON_HASH, members, key=lambda peer: weights[peer][0])
        private = heapq.nsmallest(BY_PRIVATE_HASH, members, key=lambda peer: weights[peer][1])
        return tuple(dict.fromkeys((*ring, *common, *private)))

    def _weigh(self, peer: str) -> tuple[bytes, bytes]:
        other = peer.encode()
        pair = self._own + other if self._own < other else other + self._own
        return blake2b(pair, digest_size=8).digest(), blake2b(other, digest_size=8, key=self._salt).digest()

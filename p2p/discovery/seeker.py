"""Keeps a node connected: dials configured peers, remembered peers and those that mDNS reports.

Each peer is retried without limit, with pauses that grow from 0.5 s to 60 s, until `ENOUGH_PEERS` were reached
(py-libp2p's bootstrap gives up after three failures). The caller passes in the function that dials.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Iterable
from typing import Literal

import trio

from p2p.addresses import MAX_ADDRESSES_PER_PEER, Address
from p2p.rate_limit import backoff_s

Means = Literal["mdns", "dht", "invite", "remembered", "public"]
MEANS: tuple[Means, ...] = ("mdns", "dht", "invite", "remembered")  # by default: the public directory only if chosen
ENOUGH_PEERS = 8  # connected peers that this node dialled, from which on only sticky ones are dialled
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 60.0
_MAX_WAIT_S = 5.0
MAX_WANTED = 512
MAX_NEIGHBOURS = 128  # that mDNS reported: anybody on the local network can make up peers
DIALS_AT_ONCE = 8
NEIGHBOUR_DIALS = 4  # of these: many that never answer hold up each other only

log = logging.getLogger("shoal.p2p.discovery")

Connect = Callable[[str, list[Address]], Awaitable[bool]]


class Seeker:
    """Dials wanted peers until `ENOUGH_PEERS` were reached; sticky peers are always redialled when lost.

    Peers that connected by themselves do not count: strangers may do so, to keep this node from all others. For the
    same reason those that only mDNS reported count for each other alone.
    """

    def __init__(self, connect: Connect, is_connected: Callable[[str], bool], reached: Callable[[], set[str]]) -> None:
        self._connect = connect
        self._is_connected = is_connected
        self._reached = reached
        self._wanted: dict[str, list[Address]] = {}
        self._sticky: set[str] = set()
        self._neighbours: dict[str, None] = {}  # known from mDNS alone, the oldest first
        self._reported: dict[str, list[Address]] = {}  # by mDNS, for the next dial alone
        self._next_at: dict[str, float] = {}
        self._dials: dict[str, int] = {}  # in a row that did not reach the peer, and the last that did
        self._in_flight: set[str] = set()
        self._changed = trio.Event()

    def want(self, peer: str, addresses: Iterable[Address], *, sticky: bool = False) -> None:
        """Dial `peer` soon, also at `addresses`; a sticky peer is redialled whenever its connection is lost.

        The user named the addresses of sticky peers, so those come first. Beyond `MAX_WANTED` peers the oldest one that
        is not sticky is dropped.
        """
        if peer not in self._wanted and len(self._wanted) >= MAX_WANTED:
            spare = next((name for name in self._wanted if name not in self._sticky), None)
            if spare is None:
                return
            self._forget(spare)
        known = self._wanted.get(peer, [])
        both = (*addresses, *known) if sticky else (*known, *addresses)
        self._wanted[peer] = list(dict.fromkeys(both))[:MAX_ADDRESSES_PER_PEER]
        if sticky:
            self._sticky.add(peer)
            self._neighbours.pop(peer, None)
        now = trio.current_time()
        self._next_at[peer] = min(now, self._next_at.get(peer, now))  # one that is due keeps its turn
        self._dials[peer] = 0
        self._changed.set()

    def want_neighbour(self, peer: str, addresses: Iterable[Address]) -> None:
        """Dial a peer that mDNS reported, also at `addresses`; they are added to one dial alone, as anybody names them.

        Beyond `MAX_NEIGHBOURS` the oldest of these that is not reached gives way, never another peer.
        """
        if peer not in self._wanted:
            if len(self._neighbours) >= MAX_NEIGHBOURS:
                held = self._reached() | self._in_flight
                oldest = next((one for one in self._neighbours if one not in held), None)
                if oldest is None:
                    return
                self._forget(oldest)
            elif len(self._wanted) >= MAX_WANTED:
                return
            self._neighbours[peer] = None
        self._reported[peer] = list(addresses)
        self.want(peer, ())

    def is_sticky(self, peer: str) -> bool:
        """True if `peer` is to be kept connected."""
        return peer in self._sticky

    async def run(self) -> None:
        """Dial the peers that are due, at most `DIALS_AT_ONCE` at a time, until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                self._changed = trio.Event()
                now = trio.current_time()
                for peer in self._due(now)[: DIALS_AT_ONCE - len(self._in_flight)]:
                    self._in_flight.add(peer)
                    nursery.start_soon(self._try, peer)
                with trio.move_on_after(self._wait_s(now)):
                    await self._changed.wait()

    def _due(self, now: float) -> list[str]:
        """Return the peers to dial now, first those that have been due for longest, and of neighbours only a few."""
        due = [
            peer
            for peer in self._wanted
            if peer not in self._in_flight and self._next_at[peer] <= now and not self._is_connected(peer)
        ]
        reached = self._reached()
        if len(reached) >= ENOUGH_PEERS:
            due = [peer for peer in due if peer not in self._neighbours]
        if len(reached.difference(self._neighbours)) >= ENOUGH_PEERS:
            due = [peer for peer in due if peer in self._sticky]
        due.sort(key=self._next_at.__getitem__)
        places = max(NEIGHBOUR_DIALS - len(self._in_flight & self._neighbours.keys()), 0)
        too_many = set([peer for peer in due if peer in self._neighbours][places:])
        return [peer for peer in due if peer not in too_many]

    def _wait_s(self, now: float) -> float:
        waiting = [self._next_at[peer] - now for peer in self._wanted if self._next_at[peer] > now]
        return min([_MAX_WAIT_S, *waiting])

    async def _try(self, peer: str) -> None:
        try:
            known, reported = self._wanted.get(peer, []), self._reported.pop(peer, [])
            half = MAX_ADDRESSES_PER_PEER // 2  # more than `MAX_ADDRESSES_PER_PEER` are not dialled
            reached = await self._connect(peer, [*known[:half], *reported, *known[half:]])
        finally:
            self._in_flight.discard(peer)
        if peer in self._wanted:
            dials = self._dials[peer] = 1 if reached else self._dials[peer] + 1
            pause_s = backoff_s(_FIRST_PAUSE_S, dials, _LONGEST_PAUSE_S)
            self._next_at[peer] = trio.current_time() + pause_s * random.uniform(0.8, 1.2)
        self._changed.set()

    def _forget(self, peer: str) -> None:
        for table in (self._wanted, self._next_at, self._dials, self._neighbours, self._reported):
            table.pop(peer, None)

"""Finds other members of the swarm and lets them find this node.

While a node knows no other member, it asks the peers that it was given, those it knew before, linked peers, and
providers of the rendezvous keys in the DHT; a member answers with its table. Later it still asks linked peers that are
not in the table, and the DHT, from time to time, so that two halves of a swarm that lost each other meet again. Every
member provides this hour's rendezvous key and the next one's (`app.swarm.rendezvous`).
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterable

import trio

from app.core.signal import Signal
from app.membership.exchange import MembershipExchange
from app.membership.failure_detector import Timing
from app.swarm.records import SwarmRecord
from app.swarm.rendezvous import ASK_AT_ONCE, keys_to_ask, keys_to_provide, record_key
from p2p.errors import P2PError
from p2p.rate_limit import backoff_s

log = logging.getLogger("shoal.membership")

LOOK_UP_TIMEOUT_S = 3.0
ASK_TIMEOUT_S = 2.0
CLOCK_POLL_S = 30.0
ASKS_AT_ONCE = 64
ASK_AGAIN_S = 5.0  # before the same peer is asked again; doubles after each round without an answer, up to
ASK_AGAIN_AT_MOST_S = 80.0
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_LOOKS_ALONE = 6  # look-ups after which a node without members pauses for `_LONGEST_PAUSE_S`
_ENOUGH_MEMBERS = 16  # known members from which on one rendezvous key is looked up at a time
_MAX_CANDIDATES = 256
_MAX_ASKED = 4096


class Bootstrap:
    """Looks for other members of one swarm, and announces this node in the DHT; `met` is set once one was contacted."""

    def __init__(
        self,
        exchange: MembershipExchange,
        record: SwarmRecord,
        secret: bytes | None,
        wall: Callable[[], float],
        timing: Timing,
        rng: random.Random,
    ) -> None:
        self._exchange, self._record, self._secret, self._wall = exchange, record, secret, wall
        self._timing, self._rng = timing, rng
        self.met = trio.Event()
        self._candidates: dict[str, None] = {}
        self._wake = Signal()
        self._asked_at: dict[str, float] = {}
        self._rounds_in_vain = 0  # in a row, after which no other member was known
        self._slots = trio.CapacityLimiter(ASKS_AT_ONCE)

    def try_first(self, peers: Iterable[str]) -> None:
        """Add peers that are likely to be members, and ask them now if no other member is known."""
        for peer in peers:
            self.remember(peer)
            self._asked_at.pop(peer, None)
        self._rounds_in_vain = 0
        self._wake.notify()

    def remember(self, peer: str) -> None:
        """Keep a peer to ask later in case the table becomes empty, as it does while a machine sleeps for long."""
        self._candidates.pop(peer, None)
        self._candidates[peer] = None
        if len(self._candidates) > _MAX_CANDIDATES:
            del self._candidates[next(iter(self._candidates))]

    async def run(self) -> None:
        """Look for members and announce this node in the DHT until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._provide)
            nursery.start_soon(self._look_up_periodically)
            await self._seek_members()

    async def _seek_members(self) -> None:
        """Ask linked peers and, while no other member is known, all candidates; often while alone, else every 30 s."""
        rounds = 0  # in a row, after which other members were known
        while True:
            alone = not self._exchange.table.present()
            if not alone:
                self._rounds_in_vain = 0
            linked = [link.peer for link in self._exchange.network.links() if link.peer not in self._exchange.table]
            await self._ask_all([*(self._candidates if alone else ()), *linked])
            rounds = rounds + 1 if self._exchange.table.present() else 0
            pause_s = backoff_s(_FIRST_PAUSE_S, 1 + rounds, _LONGEST_PAUSE_S)
            with trio.move_on_after(pause_s):
                await self._wake.wait()

    async def _look_up_periodically(self) -> None:
        """Look members up in the DHT: often at first and while no other member is known, then every `provide_s`."""
        looks = 0
        while True:
            alone = not self._exchange.table.present()
            longest_s = min(_LONGEST_PAUSE_S, self._timing.provide_s) if alone else self._timing.provide_s
            looks = min(looks + 1, _LOOKS_ALONE) if alone else looks + 1
            await self._look_up()
            pause_s = backoff_s(2 * _FIRST_PAUSE_S, looks, longest_s)
            await trio.sleep(pause_s * self._rng.uniform(0.7, 1.0))

    async def _look_up(self) -> None:
        """Look up rendezvous keys: all while few members are known, as nodes that start together form small groups."""
        keys = keys_to_ask(self._record.name, self._exchange.network.peer_id, self._wall(), self._secret)
        was_alone = not self._exchange.table.present()
        if len(self._exchange.table.present()) >= _ENOUGH_MEMBERS:
            await self._ask_providers([self._rng.choice(keys)])
            return
        for start in range(0, len(keys), ASK_AT_ONCE):
            await self._ask_providers(keys[start : start + ASK_AT_ONCE])
            if was_alone and self._exchange.table.present():
                return

    async def _ask_providers(self, keys: Iterable[bytes]) -> None:
        """Look up these keys and ask their providers; stops at the first answer if no other member was known."""
        alone = not self._exchange.table.present()

        async def look(key: bytes) -> None:
            try:
                found = await self._exchange.network.find_providers(key, timeout_s=LOOK_UP_TIMEOUT_S)
            except P2PError as error:
                log.debug("the DHT lookup failed: %s", error)
                return
            await self._ask_all([peer for peer in found if peer not in self._exchange.table])
            if alone and self._exchange.table.present():
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for key in keys:
                nursery.start_soon(look, key)

    async def _ask_all(self, peers: Iterable[str]) -> None:
        """Compare tables with those peers that are due; stops at the first with a member if none was known."""
        due = self._due(peers)
        alone = not self._exchange.table.present()

        async def ask(peer: str) -> None:
            async with self._slots:
                await self._exchange.compare(peer, ASK_TIMEOUT_S)
                if alone and self._exchange.table.present():
                    nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for peer in due:
                nursery.start_soon(ask, peer)
        if due and not self._exchange.table.present():
            self._rounds_in_vain += 1

    def _due(self, peers: Iterable[str]) -> list[str]:
        """Select the peers that were not asked lately, and mark them as asked now."""
        now = trio.current_time()
        ask_again_s = backoff_s(ASK_AGAIN_S, 1 + self._rounds_in_vain, ASK_AGAIN_AT_MOST_S)
        due = [
            peer
            for peer in dict.fromkeys(peers)
            if peer != self._exchange.network.peer_id and now - self._asked_at.get(peer, -math.inf) >= ask_again_s
        ]
        for peer in due:
            self._asked_at.pop(peer, None)
            self._asked_at[peer] = now
        for peer in list(self._asked_at)[:-_MAX_ASKED]:
            del self._asked_at[peer]
        return due

    async def _provide(self) -> None:
        """Keep this node's rendezvous keys and the swarm's record in the DHT."""
        network, record = self._exchange.network, self._record
        while True:
            keys = self._own_keys()
            try:
                for key in keys:
                    await network.provide(key)
                for pin in (None, record.model_hash):
                    await network.put_value(record_key(record.name, pin, self._secret), record.raw)
            except P2PError as error:
                log.info("%s could not be announced in the DHT: %s", record, error)
            again_at = trio.current_time() + self._timing.provide_s * self._rng.uniform(0.8, 1.0)
            # After the machine slept, its keys are those of a past hour. No event reports a jump of the wall clock,
            # so it is polled.
            while trio.current_time() < again_at and self._own_keys()[0] in keys:  # noqa: ASYNC110
                await trio.sleep(min(CLOCK_POLL_S, again_at - trio.current_time()))

    def _own_keys(self) -> tuple[bytes, ...]:
        return keys_to_provide(self._record.name, self._exchange.network.peer_id, self._wall(), self._secret)

"""How a member and its swarm find each other: peers it was told of, links it has, and the directory's rendezvous.

As long as it is alone a node asks everybody it can: whoever is a member answers with its table. Later it asks, now and
then, linked peers that it does not know as members and the directory, so that two halves of a swarm that lost each
other meet again. Every member makes itself findable under this hour's rendezvous key and the next hour's.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterable

import trio

from app.membership.exchange import MembershipExchange, ProbeOutcome
from app.membership.failure_detector import Timing
from app.swarm.records import SwarmRecord
from app.swarm.rendezvous import ASK_AT_ONCE, keys_to_ask, keys_to_provide, record_key
from p2p.errors import P2PError

log = logging.getLogger("shoal.membership")

LOOK_UP_TIMEOUT_S = 3.0
ASK_TIMEOUT_S = 2.0
LOOK_AT_CLOCK_S = 30.0
ASKS_AT_ONCE = 64
ASK_AGAIN_S = 5.0  # and twice as long after each round in vain, up to
ASK_AGAIN_AT_MOST_S = 80.0
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_COMPANY = 16
_MAX_TOLD = 256
_MAX_ASKED = 4096


class Bootstrap:
    """Looks for other members of one swarm, and lets them find this one."""

    def __init__(
        self,
        talk: MembershipExchange,
        record: SwarmRecord,
        secret: bytes | None,
        wall: Callable[[], float],
        timing: Timing,
        rng: random.Random,
    ) -> None:
        self._exchange, self._record, self._secret, self._wall = talk, record, secret, wall
        self._timing, self._rng = timing, rng
        self.met = trio.Event()
        self._told: dict[str, None] = {}
        self._hurry = trio.Event()
        self._asked_at: dict[str, float] = {}
        self._ask_again_s = ASK_AGAIN_S
        self._slots = trio.CapacityLimiter(ASKS_AT_ONCE)

    def try_first(self, peers: Iterable[str]) -> None:
        """Peers that are likely to be members: ask them now, if this node is alone."""
        for peer in peers:
            self.remember(peer)
            self._asked_at.pop(peer, None)
        self._ask_again_s = ASK_AGAIN_S
        self._hurry.set()

    def remember(self, peer: str) -> None:
        """Somebody to turn to, should this node find itself alone: after a long sleep it has forgotten all others."""
        self._told.pop(peer, None)
        self._told[peer] = None
        if len(self._told) > _MAX_TOLD:
            del self._told[next(iter(self._told))]

    async def run(self) -> None:
        """Seek and be found, for ever."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._provide)
            nursery.start_soon(self._look_up_now_and_then)
            await self._seek_company()

    async def _seek_company(self) -> None:
        """Ask those at hand, often while this node is alone."""
        pause_s = _FIRST_PAUSE_S
        while True:
            alone = not self._exchange.table.present()
            if not alone:
                self._ask_again_s = ASK_AGAIN_S
            at_hand = [link.peer for link in self._exchange.network.links() if link.peer not in self._exchange.table]
            await self._ask_all([*(self._told if alone else ()), *at_hand])
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S) if self._exchange.table.present() else _FIRST_PAUSE_S
            self._hurry = trio.Event()
            with trio.move_on_after(pause_s):
                await self._hurry.wait()

    async def _look_up_now_and_then(self) -> None:
        """Ask the directory: often at first and while this node is alone, then every few minutes."""
        pause_s = _FIRST_PAUSE_S
        while True:
            if not self._exchange.table.present():
                pause_s = min(pause_s, _LONGEST_PAUSE_S / 2)
            await self._look_up()
            pause_s = min(2 * pause_s, self._timing.provide_s)
            await trio.sleep(pause_s * self._rng.uniform(0.7, 1.0))

    async def _look_up(self) -> None:
        """Ask everywhere while few are known: nodes that start together may have met in small groups."""
        keys = keys_to_ask(self._record.name, self._exchange.network.peer_id, self._wall(), self._secret)
        was_alone = not self._exchange.table.present()
        if len(self._exchange.table.present()) >= _COMPANY:
            await self._ask_providers([self._rng.choice(keys)])
            return
        for start in range(0, len(keys), ASK_AT_ONCE):
            await self._ask_providers(keys[start : start + ASK_AT_ONCE])
            if was_alone and self._exchange.table.present():
                return

    async def _ask_providers(self, keys: Iterable[bytes]) -> None:
        """Look up all of these keys and ask whom they lead to; while alone, the first answer is enough."""
        alone = not self._exchange.table.present()

        async def look(key: bytes) -> None:
            try:
                found = await self._exchange.network.find_providers(key, timeout_s=LOOK_UP_TIMEOUT_S)
            except P2PError as error:
                log.debug("the directory gave no answer: %s", error)
                return
            await self._ask_all([peer for peer in found if peer not in self._exchange.table])
            if alone and self._exchange.table.present():
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for key in keys:
                nursery.start_soon(look, key)

    async def _ask_all(self, peers: Iterable[str]) -> None:
        """Compare tables with all of these that were not asked lately; while alone, the first answer is enough."""
        due = self._due(peers)
        alone = not self._exchange.table.present()

        async def ask(peer: str) -> None:
            async with self._slots:
                if await self._exchange.compare(peer, ASK_TIMEOUT_S) is ProbeOutcome.ALIVE and alone:
                    nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for peer in due:
                nursery.start_soon(ask, peer)
        if due and not self._exchange.table.present():
            self._ask_again_s = min(2 * self._ask_again_s, ASK_AGAIN_AT_MOST_S)

    def _due(self, peers: Iterable[str]) -> list[str]:
        now = trio.current_time()
        due = [
            peer
            for peer in dict.fromkeys(peers)
            if peer != self._exchange.network.peer_id and now - self._asked_at.get(peer, -math.inf) >= self._ask_again_s
        ]
        for peer in due:
            self._asked_at.pop(peer, None)
            self._asked_at[peer] = now
        for peer in list(self._asked_at)[:-_MAX_ASKED]:
            del self._asked_at[peer]
        return due

    async def _provide(self) -> None:
        """Be findable, and keep the swarm's record in the directory."""
        network, record = self._exchange.network, self._record
        while True:
            keys = self._own_keys()
            try:
                for key in keys:
                    await network.provide(key)
                for pin in (None, record.model_hash):
                    await network.put_value(record_key(record.name, pin, self._secret), record.raw)
            except P2PError as error:
                log.info("the directory cannot be told of %s now: %s", record, error)
            again_at = trio.current_time() + self._timing.provide_s * self._rng.uniform(0.8, 1.0)
            # A machine that slept wakes in another hour, under whose keys nobody finds it yet.
            while trio.current_time() < again_at and self._own_keys()[0] in keys:  # noqa: ASYNC110 - a clock tells nobody
                await trio.sleep(min(LOOK_AT_CLOCK_S, again_at - trio.current_time()))

    def _own_keys(self) -> tuple[bytes, ...]:
        return keys_to_provide(self._record.name, self._exchange.network.peer_id, self._wall(), self._secret)

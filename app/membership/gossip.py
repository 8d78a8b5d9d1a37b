"""Pushes urgent statements from the gossip queue to a few members at a time, in batches.

`app.membership.gossip_queue` decides what is sent and to whom; this module sends it.
"""

from __future__ import annotations

import random

import trio

from app.membership.exchange import MembershipExchange, ProbeOutcome
from app.membership.failure_detector import FailureDetector
from app.membership.gossip_queue import targets


class Gossip:
    """Sends urgent statements while `run` runs; `farewell` sends the goodbye when this node leaves."""

    def __init__(
        self, exchange: MembershipExchange, delay_s: float, rng: random.Random, detector: FailureDetector
    ) -> None:
        self._exchange, self._delay_s, self._rng, self._detector = exchange, delay_s, rng, detector

    async def run(self) -> None:
        """Push urgent statements until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                await self._exchange.urgent_added.wait_for(lambda: self._exchange.gossip_queue.has_urgent)
                await trio.sleep(self._delay_s)  # collect changes that happen together into one batch
                self._start_batches(nursery)

    async def farewell(self, raw: bytes) -> None:
        """Send this node's last announcement to all contacts, so that they do not take the lost link for a failure."""
        async with trio.open_nursery() as nursery:
            self._start_batches(nursery)
            for peer in self._detector.contacts():
                nursery.start_soon(self._exchange.tell, peer, self._exchange.encode_tell([raw]))

    def _start_batches(self, nursery: trio.Nursery) -> None:
        gossip_queue, present, contacts = (
            self._exchange.gossip_queue,
            self._exchange.table.present(),
            self._detector.contacts(),
        )
        while gossip_queue.has_urgent:
            body = self._exchange.encode_tell(gossip_queue.take_batch())
            for peer in targets(self._exchange.network.peer_id, present, contacts, self._rng):
                nursery.start_soon(self._push, peer, body)

    async def _push(self, peer: str, body: bytes) -> None:
        """Send a batch to a member; if that fails, have the member probed and send to one other contact instead."""
        if await self._exchange.tell(peer, body) is ProbeOutcome.ALIVE:
            return
        self._detector.check_liveness(peer)
        others = [name for name in self._detector.contacts() if name != peer]
        if others:
            await self._exchange.tell(self._rng.choice(others), body)

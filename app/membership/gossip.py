"""Pushes changes to other members as they come, in batches, to a few at a time."""

from __future__ import annotations

import random

import trio

from app.membership.exchange import MembershipExchange, ProbeOutcome
from app.membership.failure_detector import FailureDetector
from app.membership.gossip_queue import targets


class Gossip:
    """Sends out what presses; `run` does, and `farewell` at the end."""

    def __init__(self, talk: MembershipExchange, delay_s: float, rng: random.Random, prober: FailureDetector) -> None:
        self._exchange, self._delay_s, self._rng, self._detector = talk, delay_s, rng, prober

    async def run(self) -> None:
        """Push for ever."""
        async with trio.open_nursery() as nursery:
            while True:
                await self._exchange.pressing.wait()
                await trio.sleep(self._delay_s)  # what happens together travels together
                self._start_batches(nursery)

    async def farewell(self, raw: bytes) -> None:
        """Tell all at hand at once: they lose their links to this node, and should know why."""
        async with trio.open_nursery() as nursery:
            self._start_batches(nursery)
            for peer in self._detector.company():
                nursery.start_soon(self._exchange.tell, peer, self._exchange.telling([raw]))

    def _start_batches(self, nursery: trio.Nursery) -> None:
        self._exchange.pressing = trio.Event()
        gossip_queue, present, company = (
            self._exchange.gossip_queue,
            self._exchange.table.present(),
            self._detector.company(),
        )
        while gossip_queue.pressing:
            body = self._exchange.telling(gossip_queue.take_batch())
            for peer in targets(self._exchange.network.peer_id, present, company, self._rng):
                nursery.start_soon(self._push, peer, body)

    async def _push(self, peer: str, body: bytes) -> None:
        if await self._exchange.tell(peer, body) is ProbeOutcome.ALIVE:
            return
        self._detector.look_at(peer)
        others = [name for name in self._detector.company() if name != peer]
        if others:
            await self._exchange.tell(self._rng.choice(others), body)

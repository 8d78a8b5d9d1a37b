"""Pushes changes to other members as they come, in batches, to a few at a time."""

from __future__ import annotations

import random

import trio

from app.membership.exchange import Outcome, Talk
from app.membership.failure_detector import Prober
from app.membership.gossip_queue import targets


class Pusher:
    """Sends out what presses; `run` does, and `farewell` at the end."""

    def __init__(self, talk: Talk, delay_s: float, rng: random.Random, prober: Prober) -> None:
        self._talk, self._delay_s, self._rng, self._prober = talk, delay_s, rng, prober

    async def run(self) -> None:
        """Push for ever."""
        async with trio.open_nursery() as nursery:
            while True:
                await self._talk.pressing.wait()
                await trio.sleep(self._delay_s)  # what happens together travels together
                self._start_batches(nursery)

    async def farewell(self, raw: bytes) -> None:
        """Tell all at hand at once: they lose their links to this node, and should know why."""
        async with trio.open_nursery() as nursery:
            self._start_batches(nursery)
            for peer in self._prober.company():
                nursery.start_soon(self._talk.tell, peer, self._talk.telling([raw]))

    def _start_batches(self, nursery: trio.Nursery) -> None:
        self._talk.pressing = trio.Event()
        rumours, present, company = self._talk.rumours, self._talk.table.present(), self._prober.company()
        while rumours.pressing:
            body = self._talk.telling(rumours.take_batch())
            for peer in targets(self._talk.network.peer_id, present, company, self._rng):
                nursery.start_soon(self._push, peer, body)

    async def _push(self, peer: str, body: bytes) -> None:
        if await self._talk.tell(peer, body) is Outcome.ALIVE:
            return
        self._prober.look_at(peer)
        others = [name for name in self._prober.company() if name != peer]
        if others:
            await self._talk.tell(self._rng.choice(others), body)

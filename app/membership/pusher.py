"""Pushes changes to other members as they come, in batches, to a few at a time."""

from __future__ import annotations

import random
from collections.abc import Callable

import trio

from app.membership.rumours import targets
from app.membership.talk import Outcome, Talk

FAREWELLS = 64


class Pusher:
    """Sends out what presses; `run` does, and `farewell` at the end."""

    def __init__(self, talk: Talk, delay_s: float, rng: random.Random, on_silent: Callable[[str], None]) -> None:
        self._talk, self._delay_s, self._rng, self._on_silent = talk, delay_s, rng, on_silent

    async def run(self) -> None:
        """Push for ever."""
        async with trio.open_nursery() as nursery:
            while True:
                await self._talk.pressing.wait()
                await trio.sleep(self._delay_s)  # what happens together travels together
                self._start_batches(nursery)

    async def farewell(self, raw: bytes) -> None:
        """Tell as many as possible at once: they lose their links to this node, and should know why."""
        present = self._talk.table.present()
        async with trio.open_nursery() as nursery:
            self._start_batches(nursery)
            for peer in self._rng.sample(present, min(len(present), FAREWELLS)):
                nursery.start_soon(self._talk.tell, peer, self._talk.telling([raw]))

    def _start_batches(self, nursery: trio.Nursery) -> None:
        self._talk.pressing = trio.Event()
        rumours = self._talk.rumours
        while rumours.pressing:
            body = self._talk.telling(rumours.take_batch())
            for peer in targets(self._talk.network.peer_id, self._talk.table.present(), self._rng):
                nursery.start_soon(self._push, peer, body)

    async def _push(self, peer: str, body: bytes) -> None:
        if await self._talk.tell(peer, body) is Outcome.ALIVE:
            return
        self._on_silent(peer)
        others = [name for name in self._talk.table.present() if name != peer]
        if others:
            await self._talk.tell(self._rng.choice(others), body)

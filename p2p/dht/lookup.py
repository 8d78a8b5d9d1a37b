"""Kademlia's iterative look-up: ask the nearest known peers for nearer ones until there are none. No messages here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import trio

from p2p.dht.routing_table import BUCKET_SIZE, peer_position

PARALLEL = 4
SLOW_S = 0.4  # a peer that takes longer no longer holds one of the parallel places
MAX_IN_FLIGHT = 24
MAX_CANDIDATES = 256
_ANSWERS_NOT_TO_WAIT = 8  # with so many answers, a slow peer is no longer waited for

AskPeer = Callable[[str], Awaitable[list[str] | None]]


async def lookup(
    target: int,
    start: Sequence[str],
    ask: AskPeer,
    timeout_s: float,
    is_enough: Callable[[], bool] = lambda: False,
) -> list[str]:
    """The peers nearest to `target` that answered, nearest first.

    `ask` returns the peers that a peer names, or None where it gave no answer; the look-up goes on until the twenty
    nearest have answered or failed, until `is_enough`, or until time is up. Frozen peers give their parallel places
    back after `SLOW_S`, and where enough others answered nobody waits for them.
    """
    walk = _Walk(target, start, ask, is_enough)
    with trio.move_on_after(timeout_s):
        await walk.run()
    return sorted(walk.answered, key=walk.distance)[:BUCKET_SIZE]


class _Walk:
    def __init__(self, target: int, start: Sequence[str], ask: AskPeer, is_enough: Callable[[], bool]) -> None:
        self._target = target
        self._ask = ask
        self._is_enough = is_enough
        self._candidates = dict.fromkeys(start)
        self._asked: set[str] = set()
        self._failed: set[str] = set()
        self._slow: set[str] = set()
        self._holding = 0  # parallel places in use
        self._in_flight = 0
        self._changed = trio.Event()
        self.answered: set[str] = set()

    def distance(self, peer: str) -> int:
        return peer_position(peer) ^ self._target

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                peer = self._next()
                if peer is not None and self._holding < PARALLEL and self._in_flight < MAX_IN_FLIGHT:
                    self._asked.add(peer)
                    self._holding += 1
                    self._in_flight += 1
                    nursery.start_soon(self._visit, peer)
                elif self._is_enough() or (peer is None and not self._awaited()):
                    nursery.cancel_scope.cancel()
                    return
                else:
                    self._changed = trio.Event()
                    await self._changed.wait()

    def _nearest(self) -> list[str]:
        hopeful = (peer for peer in self._candidates if peer not in self._failed)
        return sorted(hopeful, key=self.distance)[:BUCKET_SIZE]

    def _next(self) -> str | None:
        return next((peer for peer in self._nearest() if peer not in self._asked), None)

    def _awaited(self) -> bool:
        """Whether a peer that has not answered yet is worth waiting for."""
        nearest = self._nearest()
        missing = [peer for peer in nearest if peer not in self.answered]
        if len(nearest) - len(missing) < _ANSWERS_NOT_TO_WAIT:
            return bool(missing)
        return any(peer not in self._slow for peer in missing)

    async def _visit(self, peer: str) -> None:
        async with trio.open_nursery() as nursery:
            place = _Place(self, peer)
            nursery.start_soon(place.give_up_when_slow)
            named = await self._ask(peer)
            nursery.cancel_scope.cancel()
        place.leave()
        self._in_flight -= 1
        if named is None:
            self._failed.add(peer)
        else:
            self.answered.add(peer)
            for name in named:
                if len(self._candidates) < MAX_CANDIDATES:
                    self._candidates.setdefault(name)
        self._changed.set()

    def free_place(self, peer: str, *, slow: bool) -> None:
        self._holding -= 1
        if slow:
            self._slow.add(peer)
        self._changed.set()


class _Place:
    """One of the parallel places, left once: at the answer or when the peer turns out to be slow."""

    def __init__(self, walk: _Walk, peer: str) -> None:
        self._walk = walk
        self._peer = peer
        self._held = True

    def leave(self, *, slow: bool = False) -> None:
        if self._held:
            self._held = False
            self._walk.free_place(self._peer, slow=slow)

    async def give_up_when_slow(self) -> None:
        await trio.sleep(SLOW_S)
        self.leave(slow=True)

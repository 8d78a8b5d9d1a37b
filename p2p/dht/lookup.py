"""Kademlia's iterative look-up: query the nearest known peers for nearer ones until no nearer ones turn up.

It knows distances and concurrency only; the caller passes in the function that queries a peer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import trio

from p2p.dht.routing_table import BUCKET_SIZE, peer_position

PARALLEL = 4
SLOW_S = 0.4  # after this, a pending query no longer occupies one of the PARALLEL slots
MAX_IN_FLIGHT = 24
MAX_CANDIDATES = 256
_ENOUGH_ANSWERS = 8  # once this many of the nearest answered, slow peers are not waited for

_VAIN = 2  # named peers that did not answer, more than those that did, after which a node's others are asked last

AskPeer = Callable[[str], Awaitable[list[str] | None]]


async def lookup(
    target: int,
    start: Sequence[str],
    ask: AskPeer,
    timeout_s: float,
    is_enough: Callable[[], bool] = lambda: False,
) -> list[str]:
    """Return up to 20 peers that answered, those nearest to `target` first.

    `ask` returns the peers that the queried peer named, or None if it did not answer. The look-up ends when the 20
    nearest candidates have answered or failed, when `is_enough()` is true, or after `timeout_s`. A peer that is slower
    than `SLOW_S` frees its parallel slot, and is not waited for once `_ENOUGH_ANSWERS` of the nearest have answered.

    A node that lies can invent peers nearer than any honest one. So every candidate counts against the node that named
    it first when it is silent, and the candidates of a node that named several silent ones are asked last.
    """
    state = _Lookup(target, start, ask, is_enough)
    with trio.move_on_after(timeout_s):
        await state.run()
    return sorted(state.answered, key=state.distance)[:BUCKET_SIZE]


class _Lookup:
    """The state of one look-up: candidates, those asked, and those that answered, failed or are slow."""

    def __init__(self, target: int, start: Sequence[str], ask: AskPeer, is_enough: Callable[[], bool]) -> None:
        self._target = target
        self._ask = ask
        self._is_enough = is_enough
        self._candidates: dict[str, str | None] = dict.fromkeys(start)  # -> the peer that named it first
        self._asked: set[str] = set()
        self._failed: set[str] = set()
        self._slow: set[str] = set()
        self._doubted: set[str] = set()
        self._slots_used = 0
        self._in_flight = 0
        self._changed = trio.Event()
        self.answered: set[str] = set()

    def distance(self, peer: str) -> int:
        return peer_position(peer) ^ self._target

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                peer = self._next()
                if peer is not None and self._slots_used < PARALLEL and self._in_flight < MAX_IN_FLIGHT:
                    self._asked.add(peer)
                    self._slots_used += 1
                    self._in_flight += 1
                    nursery.start_soon(self._query, peer)
                elif self._is_enough() or (peer is None and not self._worth_waiting()):
                    nursery.cancel_scope.cancel()
                    return
                else:
                    self._changed = trio.Event()
                    await self._changed.wait()

    def _nearest(self) -> list[str]:
        candidates = (peer for peer in self._candidates if peer not in self._failed)
        return sorted(candidates, key=lambda peer: (self._is_doubtful(peer), self.distance(peer)))[:BUCKET_SIZE]

    def _is_doubtful(self, peer: str) -> bool:
        """True if `peer` has not answered, and the node that named it named several others that are silent."""
        return peer not in self.answered and self._candidates[peer] in self._doubted

    def _judge(self) -> None:
        """Find the nodes that named more silent peers than such that answered, by `_VAIN` or more."""
        balance = Counter(self._candidates[peer] for peer in self._failed | self._slow)
        balance.subtract(self._candidates[peer] for peer in self.answered)
        self._doubted = {source for source, vain in balance.items() if source is not None and vain >= _VAIN}

    def _next(self) -> str | None:
        self._judge()
        unasked = (peer for peer in self._nearest() if peer not in self._asked)
        peer = next(unasked, None)
        return None if peer is None or (self._has_enough() and self._is_doubtful(peer)) else peer

    def _has_enough(self) -> bool:
        return len(self.answered) >= _ENOUGH_ANSWERS

    def _worth_waiting(self) -> bool:
        """True if a query that is still pending is worth waiting for."""
        nearest = self._nearest()
        missing = [peer for peer in nearest if peer not in self.answered]
        if len(nearest) - len(missing) < _ENOUGH_ANSWERS:
            return bool(missing)
        missing = [peer for peer in missing if not self._is_doubtful(peer)]
        return any(peer not in self._slow for peer in missing)

    async def _query(self, peer: str) -> None:
        async with trio.open_nursery() as nursery:
            slot = _Slot(self, peer)
            nursery.start_soon(slot.release_when_slow)
            named = await self._ask(peer)
            nursery.cancel_scope.cancel()
        slot.release()
        self._in_flight -= 1
        if named is None:
            self._failed.add(peer)
            self._slow.discard(peer)
        else:
            self.answered.add(peer)
            self._slow.discard(peer)
            for name in named:
                self._add(name, peer)
        self._changed.set()

    def _add(self, peer: str, source: str) -> None:
        """Take a candidate that `source` named; if there are too many, the worst one that was not asked is dropped."""
        if peer in self._candidates:
            return
        self._candidates[peer] = source
        if len(self._candidates) > MAX_CANDIDATES:
            unasked = [name for name in self._candidates if name not in self._asked]
            del self._candidates[max(unasked, key=lambda name: (self._is_doubtful(name), self.distance(name)))]

    def free_slot(self, peer: str, *, slow: bool) -> None:
        self._slots_used -= 1
        if slow:
            self._slow.add(peer)
        self._changed.set()


class _Slot:
    """One of the parallel slots, released once: when the peer answers or after `SLOW_S`."""

    def __init__(self, lookup: _Lookup, peer: str) -> None:
        self._lookup = lookup
        self._peer = peer
        self._held = True

    def release(self, *, slow: bool = False) -> None:
        if self._held:
            self._held = False
            self._lookup.free_slot(self._peer, slow=slow)

    async def release_when_slow(self) -> None:
        await trio.sleep(SLOW_S)
        self.release(slow=True)

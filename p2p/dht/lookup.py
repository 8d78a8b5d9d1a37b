"""Kademlia's iterative look-up over disjoint paths: query the nearest known peers for nearer ones until there are none.

The peers that a look-up starts from are dealt to `PATHS` paths (S/Kademlia). A peer is queried on one path only, and
the peers it names become candidates of that path alone: a node that lies can mislead its own path, but no other. It
knows distances and concurrency only; the caller passes in the function that queries a peer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import zip_longest

import trio

from p2p.dht.routing_table import BUCKET_SIZE, peer_position

PATHS = 3
PARALLEL = 6
SLOW_S = 0.4  # after this, a pending query no longer occupies one of the PARALLEL slots
MAX_IN_FLIGHT = 24
MAX_CANDIDATES = 128  # of one path
MAX_ASKED = 48  # on one path, so that peers which keep naming nearer ones do not lead it on for ever
_ENOUGH_ANSWERS = 8  # once this many of the nearest answered, slow peers are not waited for

_VAIN = 2  # named peers that did not answer, more than those that did, after which a node's others are asked last

AskPeer = Callable[[str, int], Awaitable[list[str] | None]]  # (peer, number of the path) -> the peers that it named


async def lookup(
    target: int,
    start: Sequence[str],
    ask: AskPeer,
    timeout_s: float,
    is_enough: Callable[[], bool] = lambda: False,
    radius: int = 0,
) -> list[str]:
    """Return up to 20 peers that answered: the nearest to `target` of each path in turn, then the second nearest, …

    `ask` returns the peers that the queried peer named, or None if it did not answer. A path ends when its 20 nearest
    candidates have answered or failed, on whatever path they were queried, or after `MAX_ASKED` queries; the look-up
    ends with the last path, when `is_enough()` is true, or after `timeout_s`. A peer that is slower than `SLOW_S` frees
    its parallel slot, and is not waited for once `_ENOUGH_ANSWERS` of the nearest have answered.

    A node that lies can invent peers nearer than any honest one. So every candidate counts against the node that named
    it first when it is silent, and the candidates of a node that named several silent ones are asked last. The peers of
    `start` within `radius` of the target are neighbours of it, whoever else is named: they are asked first, and the
    result has two of them for each one of the others.
    """
    state = _Lookup(target, start, ask, is_enough, radius)
    with trio.move_on_after(timeout_s):
        await state.run()
    return state.nearest_answered()


def in_turn(rankings: Iterable[Iterable[str]]) -> list[str]:
    """Merge the rankings of several paths: the first of each, then the second of each, each name once."""
    rows = zip_longest(*rankings)
    return list(dict.fromkeys(name for row in rows for name in row if name is not None))


class _Lookup:
    """The state that the paths of one look-up share: the peers queried, and those that answered, failed or are slow."""

    def __init__(
        self, target: int, start: Sequence[str], ask: AskPeer, is_enough: Callable[[], bool], radius: int
    ) -> None:
        self._target = target
        self._ask = ask
        self._is_enough = is_enough
        nearest = sorted(start, key=self.distance)
        self.neighbours = {peer: None for peer in nearest if self.distance(peer) <= radius}  # the nearest first
        count = max(1, min(PATHS, len(nearest)))
        self._paths = [_Path(self, number, nearest[number::count]) for number in range(count)]
        self._slots_used: Counter[int] = Counter()  # by path
        self._in_flight = 0
        self._changed = trio.Event()
        self.asked: set[str] = set()
        self.answered: set[str] = set()
        self.failed: set[str] = set()
        self.slow: set[str] = set()

    def distance(self, peer: str) -> int:
        return peer_position(peer) ^ self._target

    def nearest_answered(self) -> list[str]:
        neighbours = [peer for peer in self.neighbours if peer in self.answered]
        named = in_turn(path.answered() for path in self._paths)
        return in_turn([neighbours[::2], neighbours[1::2], named])[:BUCKET_SIZE]

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                path, peer = self._next()
                has_room = self._slots_used.total() < PARALLEL and self._in_flight < MAX_IN_FLIGHT
                if path is not None and peer is not None and has_room:
                    path.asked += 1
                    self.asked.add(peer)
                    self._slots_used[path.number] += 1
                    self._in_flight += 1
                    nursery.start_soon(self._query, path, peer)
                elif self._is_enough() or (peer is None and not any(path.worth_waiting() for path in self._paths)):
                    nursery.cancel_scope.cancel()
                    return
                else:
                    self._changed = trio.Event()
                    await self._changed.wait()

    def _next(self) -> tuple[_Path | None, str | None]:
        """Return the next peer to query, on the path that has the fewest queries pending."""
        for path in sorted(self._paths, key=lambda path: self._slots_used[path.number]):
            peer = path.next()
            if peer is not None:
                return path, peer
        return None, None

    async def _query(self, path: _Path, peer: str) -> None:
        async with trio.open_nursery() as nursery:
            slot = _Slot(self, path.number, peer)
            nursery.start_soon(slot.release_when_slow)
            named = await self._ask(peer, path.number)
            nursery.cancel_scope.cancel()
        slot.release()
        self._in_flight -= 1
        self.slow.discard(peer)
        if named is None:
            self.failed.add(peer)
        else:
            self.answered.add(peer)
            path.add(named, peer)
        self._changed.set()

    def free_slot(self, number: int, peer: str, *, slow: bool) -> None:
        self._slots_used[number] -= 1
        if slow:
            self.slow.add(peer)
        self._changed.set()


class _Path:
    """One path of a look-up: its candidates, and which of them are worth a query."""

    def __init__(self, lookup: _Lookup, number: int, start: Iterable[str]) -> None:
        self.number = number
        self.asked = 0
        self._lookup = lookup
        self._candidates: dict[str, str | None] = dict.fromkeys(start)  # -> the peer that named it first
        self._doubted: set[str] = set()

    def add(self, named: Iterable[str], source: str) -> None:
        """Take the candidates that `source` named; if there are too many, the worst that were not asked are dropped."""
        for peer in named:
            self._candidates.setdefault(peer, source)
        unasked = [peer for peer in self._candidates if peer not in self._lookup.asked]
        surplus = len(self._candidates) - MAX_CANDIDATES
        for peer in sorted(unasked, key=self._rank)[len(unasked) - surplus :] if surplus > 0 else ():
            del self._candidates[peer]

    def next(self) -> str | None:
        """Return the nearest candidate that nobody has queried yet, if this path still needs its answer."""
        if self.asked >= MAX_ASKED:
            return None
        self._judge()
        peer = next((peer for peer in self._nearest() if peer not in self._lookup.asked), None)
        has_enough = len(self._candidates.keys() & self._lookup.answered) >= _ENOUGH_ANSWERS
        return None if peer is None or (has_enough and self._is_doubtful(peer)) else peer

    def worth_waiting(self) -> bool:
        """True if a query that is still pending is worth waiting for."""
        nearest = self._nearest()
        missing = [peer for peer in nearest if peer not in self._lookup.answered]
        if len(nearest) - len(missing) >= _ENOUGH_ANSWERS:
            missing = [peer for peer in missing if not self._is_doubtful(peer) and peer not in self._lookup.slow]
        return any(peer in self._lookup.asked for peer in missing)

    def answered(self) -> list[str]:
        """Return the candidates that have answered, the nearest first."""
        return sorted(self._candidates.keys() & self._lookup.answered, key=self._lookup.distance)

    def _nearest(self) -> list[str]:
        candidates = (peer for peer in self._candidates if peer not in self._lookup.failed)
        return sorted(candidates, key=self._rank)[:BUCKET_SIZE]

    def _rank(self, peer: str) -> tuple[bool, bool, int]:
        return peer not in self._lookup.neighbours, self._is_doubtful(peer), self._lookup.distance(peer)

    def _is_doubtful(self, peer: str) -> bool:
        """True if `peer` has not answered, and the node that named it named several others that are silent."""
        return self._candidates[peer] in self._doubted and peer not in self._lookup.answered

    def _judge(self) -> None:
        """Find the nodes that named more silent peers than such that answered, by `_VAIN` or more."""
        silent = self._candidates.keys() & (self._lookup.failed | self._lookup.slow)
        balance = Counter(self._candidates[peer] for peer in silent)
        balance.subtract(self._candidates[peer] for peer in self._candidates.keys() & self._lookup.answered)
        self._doubted = {source for source, vain in balance.items() if source is not None and vain >= _VAIN}


class _Slot:
    """One of the parallel slots, released once: when the peer answers or after `SLOW_S`."""

    def __init__(self, lookup: _Lookup, path: int, peer: str) -> None:
        self._lookup = lookup
        self._path = path
        self._peer = peer
        self._held = True

    def release(self, *, slow: bool = False) -> None:
        if self._held:
            self._held = False
            self._lookup.free_slot(self._path, self._peer, slow=slow)

    async def release_when_slow(self) -> None:
        await trio.sleep(SLOW_S)
        self.release(slow=True)

"""Long computations on the event loop in pieces, so that other tasks run in between.

Such a computation is a generator (`engine.pieces`). It needs no thread: one that computes in Python holds the
interpreter's lock, and so keeps the event loop waiting all the same.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from engine.pieces import Pieces as Pieces
from engine.pieces import at_once as at_once

T = TypeVar("T")
Item = TypeVar("Item")
Value = TypeVar("Value")

LONGEST_S = 0.002  # after so long, other tasks run before the next piece
COLLECTOR_OFF_S = 2.0  # at most, however many computations follow each other
CHUNK = 512  # items that `by_chunks` takes at a time


class _CollectorPause:
    """Turns Python's search for circular garbage off while some computation in pieces is under way.

    Prompted by what the computation makes, it would stop everything for 40 ms in a swarm of 10,000 members; and what
    the computation makes is freed without it.
    """

    def __init__(self) -> None:
        self._under_way = 0
        self._off_since: float | None = None  # None: it is on, or somebody else turned it off

    def begin(self, now: float) -> None:
        if not self._under_way and gc.isenabled():
            gc.disable()
            self._off_since = now
        self._under_way += 1

    def end(self) -> None:
        self._under_way -= 1
        if not self._under_way:
            self._turn_on()

    def check(self, now: float) -> None:
        """Turn it on again if it was off for long; it then stays on until nothing is under way."""
        if self._off_since is not None and now - self._off_since > COLLECTOR_OFF_S:
            self._turn_on()

    def _turn_on(self) -> None:
        if self._off_since is not None:
            gc.enable()
            self._off_since = None


_collector = _CollectorPause()


async def in_pieces(pieces: Pieces[T]) -> T:
    """Compute the pieces and return the result; lets other tasks run every `LONGEST_S`, and can be cancelled there.

    What the pieces read may change meanwhile. A computation that ends sooner has no break.
    """
    import trio  # here, because planning computes pieces without an event loop

    begin_s = time.perf_counter()
    _collector.begin(begin_s)
    try:
        while True:
            next(pieces)
            if time.perf_counter() - begin_s > LONGEST_S:
                await trio.lowlevel.checkpoint()
                begin_s = time.perf_counter()
                _collector.check(begin_s)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        pieces.close()
        _collector.end()


def by_chunks(
    function: Callable[[Sequence[Item]], dict[str, Value]], items: Sequence[Item]
) -> Pieces[dict[str, Value]]:
    """Return the union of what `function` makes of each chunk of the items, in pieces."""
    found: dict[str, Value] = {}
    for start in range(0, len(items), CHUNK):
        found |= function(items[start : start + CHUNK])
        yield
    return found

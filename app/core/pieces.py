"""Long computations on the event loop in pieces, so that other tasks run in between.

Such a computation is a generator that yields wherever it may be interrupted, and returns its result. It needs no
thread: one that computes in Python holds the interpreter's lock, and so keeps the event loop waiting all the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Item = TypeVar("Item")
Value = TypeVar("Value")
Pieces = Generator[None, None, T]

LONGEST_S = 0.002  # after so long, other tasks run before the next piece
CHUNK = 512  # items that `by_chunks` takes at a time


def at_once(pieces: Pieces[T]) -> T:
    """Compute all pieces without a break, and return the result."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: T = end.value
            return result


async def in_pieces(pieces: Pieces[T]) -> T:
    """Compute the pieces and return the result; lets other tasks run every `LONGEST_S`, and can be cancelled there.

    What the pieces read may change meanwhile. A computation that ends sooner has no break.
    """
    import trio  # here, because planning computes pieces without an event loop

    begin_s = time.perf_counter()
    try:
        while True:
            next(pieces)
            if time.perf_counter() - begin_s > LONGEST_S:
                await trio.lowlevel.checkpoint()
                begin_s = time.perf_counter()
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        pieces.close()


def by_chunks(
    function: Callable[[Sequence[Item]], dict[str, Value]], items: Sequence[Item]
) -> Pieces[dict[str, Value]]:
    """Return the union of what `function` makes of each chunk of the items, in pieces."""
    found: dict[str, Value] = {}
    for start in range(0, len(items), CHUNK):
        found |= function(items[start : start + CHUNK])
        yield
    return found

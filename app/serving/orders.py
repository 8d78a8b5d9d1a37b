"""Orders that wait for the end of a hop's step: bounded for each asker, and homes take turns. Knows no sessions.

An order is whatever touches the cache (`app.serving.block_server`). Those of one asker are carried out as they came;
the askers of a home take its turns in turn.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import outcome

from app.core.signal import Signal
from app.core.turns import TurnQueue
from p2p.shares import Holder

MAX_ORDERS = 64  # of one asker that wait, beyond which it is read no further
ORDERS_S = 0.01  # for which orders are carried out while a step waits, unless the last step was shorter

Order = Callable[[], Awaitable[None]]
T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Waiting:
    """The orders of one asker."""

    who: Holder  # as when the first of them came, so that they stay in order
    count: int = 0
    taken: Signal = field(default_factory=Signal)


class OrderQueue:
    """Orders of many askers for one step loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Waiting] = {}  # by asker, none without orders
        self._orders = TurnQueue[tuple[_Waiting, Order]]()

    def __len__(self) -> int:
        return sum(own.count for own in self._waiting.values())

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, asker: str, home: str, order: Order) -> None:
        """Add an order behind those of the same asker."""
        own = self._waiting.setdefault(asker, _Waiting(Holder(home, asker)))
        own.count += 1
        self._orders.put(own.who, (own, order))

    def take(self) -> Order:
        """Remove and return the next order; its home's others come after one of every other home."""
        own, order = self._orders.pop(self._orders.first()[0])
        own.count -= 1
        if not own.count:
            del self._waiting[own.who.asker]
        own.taken.notify()
        return order

    async def wait_for_room(self, asker: str) -> None:
        """Return once fewer than `MAX_ORDERS` of an asker wait."""
        while (own := self._waiting.get(asker)) is not None and own.count >= MAX_ORDERS:
            await own.taken.wait()


def timed(function: Callable[..., T], *args: Any) -> tuple[float, outcome.Outcome[T]]:
    """Call a function; returns the seconds that it took, and its result or error."""
    began = time.perf_counter()
    result = outcome.capture(function, *args)
    return time.perf_counter() - began, result

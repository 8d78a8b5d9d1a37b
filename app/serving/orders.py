"""Orders that wait for the end of a hop's step: bounded for each asker, and homes take turns. Knows no sessions.

An order is whatever touches the cache (`app.serving.block_server`). Those of one asker are carried out as they came;
the askers of a home take its turns in turn.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import outcome

from app.core.signal import Signal

MAX_ORDERS = 64  # of one asker that wait, beyond which it is read no further
ORDERS_S = 0.01  # for which orders are carried out while a step waits, unless the last step was shorter

Order = Callable[[], Awaitable[None]]
T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Waiting:
    """The orders of one asker."""

    orders: deque[Order] = field(default_factory=deque)
    taken: Signal = field(default_factory=Signal)


class OrderQueue:
    """Orders of many askers for one step loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Waiting] = {}  # by asker, none without orders
        self._turns: dict[str, deque[str]] = {}  # by home its askers with orders; whose turn it is comes first

    def __len__(self) -> int:
        return sum(len(own.orders) for own in self._waiting.values())

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, asker: str, home: str, order: Order) -> None:
        """Add an order behind those of the same asker."""
        if asker not in self._waiting:
            self._waiting[asker] = _Waiting()
            self._turns.setdefault(home, deque()).append(asker)
        self._waiting[asker].orders.append(order)

    def take(self) -> Order:
        """Remove and return the next order; its home's others come after one of every other home."""
        home = next(iter(self._turns))
        askers = self._turns.pop(home)
        asker = askers.popleft()
        own = self._waiting[asker]
        order = own.orders.popleft()
        if own.orders:
            askers.append(asker)
        else:
            del self._waiting[asker]
        if askers:
            self._turns[home] = askers
        own.taken.notify()
        return order

    async def wait_for_room(self, asker: str) -> None:
        """Return once fewer than `MAX_ORDERS` of an asker wait."""
        while (own := self._waiting.get(asker)) is not None and len(own.orders) >= MAX_ORDERS:
            await own.taken.wait()


def timed(function: Callable[..., T], *args: Any) -> tuple[float, outcome.Outcome[T]]:
    """Call a function; returns the seconds that it took, and its result or error."""
    began = time.perf_counter()
    result = outcome.capture(function, *args)
    return time.perf_counter() - began, result

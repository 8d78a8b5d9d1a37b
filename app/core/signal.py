"""Waking tasks again and again, which a `trio.Event` alone does not do: it is set once and for ever."""

from __future__ import annotations

from collections.abc import Callable

import trio


class Signal:
    """Wakes every task that waits at this moment.

    A task checks its condition and then waits without a checkpoint in between, so no wake-up is lost; `wait_for` does
    both.
    """

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = trio.Event()

    def notify(self) -> None:
        """Wake all tasks that wait now."""
        event, self._event = self._event, trio.Event()
        event.set()

    async def wait(self) -> None:
        """Return after the next `notify`."""
        await self._event.wait()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Return once `condition` holds; it is checked now and after each `notify`."""
        while not condition():
            await self._event.wait()

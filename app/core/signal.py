"""Waking tasks again and again, which a `trio.Event` alone does not do: it is set once and for ever."""

from __future__ import annotations

from collections.abc import Callable

import trio


class Signal:
    """Wakes every task that waits at this moment, and counts how often it did: `version`.

    No wake-up is lost by a task that checks its condition and then waits without a checkpoint in between, which
    `wait_for` does, nor by one that reads `version`, takes its time to look around, and then calls `wait_beyond`.
    """

    __slots__ = ("_event", "version")

    def __init__(self) -> None:
        self._event = trio.Event()
        self.version = 0

    def notify(self) -> None:
        """Wake all tasks that wait now."""
        self.version += 1
        event, self._event = self._event, trio.Event()
        event.set()

    async def wait(self) -> None:
        """Return after the next `notify`."""
        await self._event.wait()

    async def wait_beyond(self, version: int) -> None:
        """Return once `version` is higher than this: at once if there was a `notify` since it was read."""
        if self.version > version:
            await trio.lowlevel.checkpoint()
        else:
            await self._event.wait()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Return once `condition` holds; it is checked now and after each `notify`."""
        while not condition():
            await self._event.wait()

"""One timer task for many sleeping tasks, which makes the delays of thousands of simulated messages cheap.

A `trio.sleep` costs a cancel scope and an exception; here one task sleeps for all and reschedules the others directly.
"""

from __future__ import annotations

import heapq

import trio


class Timer:
    """Lets tasks sleep cheaply while `run` runs in another task."""

    def __init__(self) -> None:
        self._sleepers: list[tuple[float, int, list[trio.lowlevel.Task]]] = []  # time, number, [task]; [] if cancelled
        self._number = 0
        self._sooner = trio.Event()

    async def sleep(self, seconds: float) -> None:
        """Sleep for `seconds`; can be cancelled."""
        sleeper = [trio.lowlevel.current_task()]
        wakes_at = trio.current_time() + seconds
        self._number += 1
        heapq.heappush(self._sleepers, (wakes_at, self._number, sleeper))
        if self._sleepers[0][2] is sleeper:
            self._sooner.set()

        def abort(_: object) -> trio.lowlevel.Abort:
            sleeper.clear()
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    async def run(self) -> None:
        """Wake the sleeping tasks at their times, until cancelled."""
        while True:
            now = trio.current_time()
            while self._sleepers and self._sleepers[0][0] <= now:
                for task in heapq.heappop(self._sleepers)[2]:
                    trio.lowlevel.reschedule(task)
            self._sooner = trio.Event()
            if not self._sleepers:
                await self._sooner.wait()
                continue
            with trio.move_on_at(self._sleepers[0][0]):
                await self._sooner.wait()

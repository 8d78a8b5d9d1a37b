"""One thread for each device: everything that computes on a device runs in its thread."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, TypeVar

import outcome
import trio

T = TypeVar("T")


class DeviceThread:
    """The thread of one device, the same one for as long as the process lives: torch never runs on the event loop.

    On a CPU that is more than order. OpenMP keeps a team of helpers for each thread that ever computed; once the teams
    outnumber the cores, helpers sleep between any two operations, and every step takes a tenth longer.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Run it behind all that waits for this device; a cancelled caller still waits: a step cannot be undone."""
        return await _lasting(self.device).run(function, *args)

    async def run_apart(self, function: Callable[..., T], *args: Any) -> T:
        """Run something long in a thread that ends with it, and its helpers too, while the device goes on."""
        worker = _Worker("shoal apart")
        try:
            return await worker.run(function, *args)
        finally:
            worker.end()


class _Job(NamedTuple):
    function: Callable[..., Any]
    args: tuple[Any, ...]
    task: trio.lowlevel.Task
    loop: trio.lowlevel.TrioToken


class _Worker:
    """A thread that does one job after another for tasks that wait for them."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        Thread(target=self._work, name=name, daemon=True).start()

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        await trio.lowlevel.checkpoint_if_cancelled()
        task, loop = trio.lowlevel.current_task(), trio.lowlevel.current_trio_token()
        self._jobs.put(_Job(function, args, task, loop))
        result: T = await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)
        return result

    def end(self) -> None:
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            result = outcome.capture(job.function, *job.args)
            with suppress(trio.RunFinishedError):
                job.loop.run_sync_soon(trio.lowlevel.reschedule, job.task, result)
            del job, result  # nothing that a step returned stays alive until the next one


@functools.cache
def _lasting(device: str) -> _Worker:
    return _Worker(f"shoal {device}")

"""One thread per device, in which all steps and samples on the device run, one call at a time; loading runs apart.

Two queues: replies go before work that can wait.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, TypeVar

import outcome
import trio

T = TypeVar("T")


class DeviceThread:
    """Runs blocking calls in the thread of one device; the thread lives as long as the process.

    It keeps torch off the event loop, and on a CPU it saves time too: OpenMP keeps a team of worker threads for every
    thread that ever computed, and once there are more workers than cores they sleep between operations, which makes
    every step a tenth slower.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Run `function(*args)` after all calls queued before it.

        A cancelled caller still waits for the result, because a running step cannot be stopped.
        """
        return await _worker_of(self.device).run(function, *args)

    async def run_later(self, function: Callable[..., T], *args: Any) -> T:
        """Run `function(*args)` once no call of `run` waits: for work that can give way between two steps."""
        return await _worker_of(self.device).run(function, *args, later=True)

    async def run_apart(self, function: Callable[..., T], *args: Any) -> T:
        """Run a long call in a temporary thread, beside the device's queue; its OpenMP workers end with it."""
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
    """A thread that runs one job after another for trio tasks that wait for the results."""

    def __init__(self, name: str) -> None:
        self._jobs: deque[_Job] = deque()
        self._later: deque[_Job] = deque()
        self._signals: SimpleQueue[bool] = SimpleQueue()  # True for each job that waits, False to end
        Thread(target=self._work, name=name, daemon=True).start()

    async def run(self, function: Callable[..., T], *args: Any, later: bool = False) -> T:
        await trio.lowlevel.checkpoint_if_cancelled()
        task, loop = trio.lowlevel.current_task(), trio.lowlevel.current_trio_token()
        (self._later if later else self._jobs).append(_Job(function, args, task, loop))
        self._signals.put(True)
        result: T = await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)
        return result

    def end(self) -> None:
        self._signals.put(False)

    def _work(self) -> None:
        while self._signals.get():
            job = (self._jobs or self._later).popleft()
            result = outcome.capture(job.function, *job.args)
            with suppress(trio.RunFinishedError):
                job.loop.run_sync_soon(trio.lowlevel.reschedule, job.task, result)
            del job, result  # so that a step's result is freed now and not when the next job arrives


@functools.cache
def _worker_of(device: str) -> _Worker:
    return _Worker(f"shoal {device}")

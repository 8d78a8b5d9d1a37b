"""One thread per device, in which all steps and samples on the device run, one call at a time; loading runs apart.

Two queues: replies go before work that can wait. While replies come, that work also rests between two calls, so that
the next token seldom meets one under way (`rest_s`). Long work that can wait is a generator: replies go between its
pieces.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from threading import Condition, Thread
from typing import Any, NamedTuple, TypeVar, overload

import outcome
import trio

from app.core.pieces import Pieces

T = TypeVar("T")


BUSY_S = 1.0  # replies count as coming for so long after the last call of one
REST = 2.0  # times a call's own length
SLICE_S = 0.02  # pieces of a generator run in one call for so long, unless a reply waits


def rest_s(took_s: float, since_reply_s: float, *, reply_waits: bool) -> float:
    """Seconds that work which can wait rests after a call of `took_s`: a third of the device's time is left to it.

    `since_reply_s` counts from the last call of a reply to the beginning of this one, which may have kept the next one
    waiting for longer than `BUSY_S`.
    """
    return REST * took_s if reply_waits or since_reply_s < BUSY_S else 0.0


class DeviceThread:
    """Runs blocking calls in the thread of one device; the thread lives as long as the process.

    It keeps torch off the event loop, and on a CPU it saves time too: OpenMP keeps a team of worker threads for every
    thread that ever computed, and once there are more workers than cores they sleep between operations, which makes
    every step a tenth slower.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self._turn = trio.Lock()  # of work that can wait

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Run `function(*args)` after all calls queued before it.

        A cancelled caller still waits for the result, because a running step cannot be stopped.
        """
        return await _worker_of(self.device).run(function, *args)

    @overload
    async def run_later(self, function: Callable[..., Pieces[T]], *args: Any) -> T: ...
    @overload
    async def run_later(self, function: Callable[..., T], *args: Any) -> T: ...
    async def run_later(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function(*args)` once no call of `run` waits, with rests while such calls come.

        If it returns a generator, its pieces run one after another, and its result is returned; a caller that is
        cancelled waits for one piece, after which the generator is closed. Nothing else of this object's work that can
        wait runs meanwhile.
        """
        worker = _worker_of(self.device)
        async with self._turn:
            made = await worker.run(function, *args, later=True)
            if not isinstance(made, Generator):
                return made
            try:
                while not (ended := await worker.run(worker.advance, made, later=True)):
                    pass
                return ended[0]
            finally:
                with trio.CancelScope(shield=True):
                    await worker.run(made.close, later=True)  # in the same thread as its pieces

    async def run_beside(self, function: Callable[..., T], *args: Any) -> T:
        """Run a long call that computes nothing on the device, apart from it; nothing of `run_later` runs meanwhile."""
        async with self._turn:
            return await self.run_apart(function, *args)

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
        self._wake = Condition()
        self._is_ending = False
        self._replied_at = self._rest_until = float("-inf")
        Thread(target=self._work, name=name, daemon=True).start()

    async def run(self, function: Callable[..., T], *args: Any, later: bool = False) -> T:
        await trio.lowlevel.checkpoint_if_cancelled()
        task, loop = trio.lowlevel.current_task(), trio.lowlevel.current_trio_token()
        with self._wake:
            (self._later if later else self._jobs).append(_Job(function, args, task, loop))
            self._wake.notify()
        result: T = await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)
        return result

    def advance(self, pieces: Pieces[Any]) -> tuple[Any, ...]:
        """Run some pieces of a generator in the thread of this worker; return its result once it has ended, else ()."""
        until = time.monotonic() + SLICE_S
        while True:
            try:
                next(pieces)
            except StopIteration as end:
                return (end.value,)
            if self._jobs or time.monotonic() >= until:
                return ()

    def end(self) -> None:
        with self._wake:
            self._is_ending = True
            self._wake.notify()

    def _work(self) -> None:
        while (queue := self._next_queue()) is not None:
            job = queue.popleft()
            begun = time.monotonic()
            result = outcome.capture(job.function, *job.args)
            now = time.monotonic()
            if queue is self._jobs:
                self._replied_at = now
            else:
                rest = rest_s(now - begun, begun - self._replied_at, reply_waits=bool(self._jobs))
                self._rest_until = now + rest
            with suppress(trio.RunFinishedError):
                job.loop.run_sync_soon(trio.lowlevel.reschedule, job.task, result)
            del job, result  # so that a step's result is freed now and not when the next job arrives

    def _next_queue(self) -> deque[_Job] | None:
        """Wait for a job that may run now, and return its queue; None at the end."""
        with self._wake:
            while not self._jobs:
                rest = self._rest_until - time.monotonic() if self._later else None
                if rest is not None and rest <= 0:
                    return self._later
                if self._is_ending:
                    return None
                self._wake.wait(rest)
            return self._jobs


@functools.cache
def _worker_of(device: str) -> _Worker:
    return _Worker(f"shoal {device}")

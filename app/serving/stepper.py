"""The device side of a block server: step after step over all that waits, and what must happen between two steps.

Knows the queue and the runner, not the network. Whatever touches the cache (begin, cut, close) is done here between two
steps, in the order it arrived; nothing else uses the runner while a step is under way.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

import trio

from app.core.compute import BlockRunner, Device, StepOutput, StepWork
from app.serving.batching import BatchLimits, BatchQueue, QueuedTokens
from app.serving.hop_session import HopSession
from app.serving.stats import ServerCounters
from engine.errors import EngineError

log = logging.getLogger("shoal.sessions")


class StepOwner(Protocol):
    """Who has the sessions that a step advances."""

    def session(self, id: bytes) -> HopSession:
        """The session of this id; it exists as long as something of it waits."""

    async def computed(self, item: QueuedTokens, output: StepOutput) -> None:
        """A session's tokens went through the blocks."""

    async def failed(self, item: QueuedTokens, error: Exception) -> None:
        """A session's tokens could not be computed."""

    async def stepped(self, *, bulk: bool) -> None:
        """A step is over and its outputs are on their way."""


class Stepper:
    """Drives one device; `run` must be running."""

    def __init__(self, owner: StepOwner, runner: BlockRunner | None, device: Device, limits: BatchLimits) -> None:
        self.runner = runner
        self.queue = BatchQueue(limits)
        self.counters = ServerCounters()
        self._owner, self._device = owner, device
        self._deferred: deque[Callable[[], Awaitable[None]]] = deque()  # what waits for the end of a step
        self._stepping = False
        self._wake = trio.Event()

    def put(self, work: QueuedTokens) -> None:
        """Queue tokens."""
        self.queue.put(work)
        self._wake.set()

    async def between_steps(self, act: Callable[[], Awaitable[None]]) -> None:
        """Do something that touches the cache, now or as soon as the step under way is over."""
        if self._stepping or self._deferred:
            self.later(act)
        else:
            await act()

    def later(self, act: Callable[[], Awaitable[None]]) -> None:
        """Do it when the driving task comes to it."""
        self._deferred.append(act)
        self._wake.set()

    async def run(self) -> None:
        """Step for ever."""
        while True:
            while self._deferred:
                await self._deferred.popleft()()
            work = self.queue.take(trio.current_time())
            if work is None or isinstance(work, float):
                self._wake = trio.Event()
                with trio.move_on_at(float("inf") if work is None else work):
                    await self._wake.wait()
                continue
            self._stepping = True
            try:
                await self._step(work)
            finally:
                self._stepping = False

    async def _step(self, work: list[QueuedTokens]) -> None:
        runner = self.runner
        assert runner is not None, "no session outlives its runner"
        begin = trio.current_time()
        try:
            outputs = await self._device.run(runner.step, [self._share(item) for item in work])
        except Exception as error:  # torch's errors are of every kind, and must cost the session alone
            if not isinstance(error, EngineError):
                log.exception("a device step failed")
            await self._failed(work, error)
            return
        now = trio.current_time()
        for item, output in zip(work, outputs, strict=True):
            await self._owner.computed(item, output)
        self.queue.done(work, now - begin, now)
        self._count(work, begin, now - begin)
        await self._owner.stepped(bulk=not work[0].urgent)

    def _share(self, item: QueuedTokens) -> StepWork:
        turn = self._owner.session(item.session).turn
        span = turn.span
        return StepWork(item.session, span.start, span.stop, item.position, item.rows, item.data, item.dtype, turn.wire)

    async def _failed(self, work: list[QueuedTokens], error: Exception) -> None:
        """Find the session at fault by stepping each alone; the others go on."""
        if len(work) == 1:
            await self._owner.failed(work[0], error)
            return
        for item in work:
            await self._step([item])

    def _count(self, work: list[QueuedTokens], begin: float, seconds: float) -> None:
        self.counters.stepped(sum(item.rows for item in work), seconds, urgent=work[0].urgent)
        for item in work:
            session = self._owner.session(item.session)
            session.counters.stepped(item.rows, seconds, begin - item.arrived_at, urgent=item.urgent)
            self.counters.served(session.asker, item.rows)

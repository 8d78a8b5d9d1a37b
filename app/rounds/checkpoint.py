"""The checkpoint after a round, written while the island makes the steps of the next one.

It goes to the home folder for this node, and into the store of parts for the others, which also keeps the one before.
One is written at a time: an island whose disk is slower than its rounds waits for the disk, so that no more than two
states are in memory. What fails is raised where the next round waits for it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import trio

from app.core.errors import AppError
from app.core.signal import Signal
from app.training.states import StateStore
from app.training.wire import StatePart

Save = Callable[[], Awaitable[None]]


class CheckpointWriter:
    """Writes the checkpoints of one island."""

    def __init__(self, run: bytes, states: StateStore, *, kept: Sequence[StatePart]) -> None:
        """`kept` are parts of the run in the store that are no part of a checkpoint."""
        self._run, self._states, self._kept = run, states, kept
        self.parts: list[StatePart] = []  # of the newest checkpoint that others can fetch
        self.round = -1  # that goes on from it
        self.at = 0.0  # when it was written
        self._is_writing = False
        self._failure: AppError | OSError | None = None
        self.changed = Signal()

    def start(
        self,
        nursery: trio.Nursery,
        round_number: int,
        states: list[bytes],
        parts: list[StatePart],
        save: Save,
    ) -> None:
        """Write a checkpoint in a task of its own, once `finish` has returned; `save` writes it for this node."""
        assert not self._is_writing, "one checkpoint at a time"
        self._is_writing = True
        nursery.start_soon(self._write, round_number, states, parts, save)

    async def finish(self) -> None:
        """Wait until nothing is being written; raises the `AppError` or `OSError` of what could not be."""
        await self.changed.wait_for(lambda: not self._is_writing)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    async def keep(self, round_number: int, states: Sequence[bytes], parts: list[StatePart]) -> None:
        """Let others fetch the state that a round goes on from; raises `WeightsError`."""
        before = self.parts
        for data in states:
            await self._states.keep(self._run, data)
        self.parts, self.round, self.at = parts, round_number, trio.current_time()
        self.changed.notify()
        await self._states.forget(self._run, [*before, *parts, *self._kept])

    async def _write(self, round_number: int, states: list[bytes], parts: list[StatePart], save: Save) -> None:
        try:
            await save()  # first: a node that is ended now must not lose the round
            await self.keep(round_number, states, parts)
        except (AppError, OSError) as error:
            self._failure = error
        finally:
            self._is_writing = False
            self.changed.notify()

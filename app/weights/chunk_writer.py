"""A thread beside the event loop in which received chunks are checked and written (`part_store.NewPart`).

A dedicated thread, because a trip through trio's thread pool for each chunk costs a fast transfer up to a tenth of its
speed. Hashing and writing release the interpreter lock, so the network keeps running meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

import trio

from app.weights.extents import WeightsError
from app.weights.part_store import NewPart


@dataclass(eq=False)
class _WriteJob:
    new: NewPart
    index: int
    chunks: Sequence[memoryview]
    done: trio.Event = field(default_factory=trio.Event)
    right: bool = False
    failure: WeightsError | None = None

    def run(self) -> None:
        try:
            self.right = all(self.new.take(self.index + number, chunk) for number, chunk in enumerate(self.chunks))
        except WeightsError as error:
            self.failure = error


class ChunkWriter:
    """Writes chunks in the order of their arrival; create it with `opened`."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_WriteJob | None] = SimpleQueue()
        self._token = trio.lowlevel.current_trio_token()

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls) -> AsyncIterator[ChunkWriter]:
        """Run a writer; at the end of the context its thread finishes what is queued and stops."""
        writer = cls()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, writer._work)
            try:
                yield writer
            finally:
                writer._jobs.put(None)

    async def take(self, new: NewPart, index: int, chunks: Sequence[memoryview]) -> bool:
        """Write consecutive chunks starting at `index`, up to the first with a wrong hash; True if all are right.

        Raises `WeightsError` if the disk cannot be written.
        """
        job = _WriteJob(new, index, chunks)
        self._jobs.put(job)
        await job.done.wait()
        if job.failure is not None:
            raise job.failure
        return job.right

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(job.done.set)

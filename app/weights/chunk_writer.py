"""Chunks that arrived, checked and written in one thread beside the loop.

A thread of its own: a trip through a pool of threads for each chunk costs a fast transfer as much as a tenth of all
else. Hashing and writing hold no interpreter lock, so that the network goes on meanwhile.
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
class _Arrived:
    new: NewPart
    index: int
    chunks: Sequence[memoryview]
    done: trio.Event = field(default_factory=trio.Event)
    right: bool = False
    failure: WeightsError | None = None

    def settle(self) -> None:
        try:
            self.right = all(self.new.take(self.index + number, chunk) for number, chunk in enumerate(self.chunks))
        except WeightsError as error:
            self.failure = error


class ChunkWriter:
    """Takes chunks, in the order they come; `opened` makes one."""

    def __init__(self) -> None:
        self._arrived: SimpleQueue[_Arrived | None] = SimpleQueue()
        self._token = trio.lowlevel.current_trio_token()

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls) -> AsyncIterator[ChunkWriter]:
        """An intake whose thread ends with the block, when all that came is settled."""
        intake = cls()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, intake._work)
            try:
                yield intake
            finally:
                intake._arrived.put(None)

    async def take(self, new: NewPart, index: int, chunks: Sequence[memoryview]) -> bool:
        """Write chunks, from `index` on, up to the first that is wrong; whether all are right.

        Raises `WeightsError` where the disk refuses.
        """
        arrived = _Arrived(new, index, chunks)
        self._arrived.put(arrived)
        await arrived.done.wait()
        if arrived.failure is not None:
            raise arrived.failure
        return arrived.right

    def _work(self) -> None:
        while (arrived := self._arrived.get()) is not None:
            arrived.settle()
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(arrived.done.set)

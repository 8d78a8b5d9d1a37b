"""The checkpoint after a round, written while the island makes the steps of the next one.

It goes to the home folder for this node, and into the store of parts for the others, which also keeps the one before.
One is written at a time: an island whose disk is slower than its rounds waits for the disk, so that no more than two
states are in memory. One that cannot be written is not shown to others, and costs itself alone: the island goes on, and
the state after the next round is tried again.

A state that somebody fetches over a slow link is kept longer, one at a time, and with it the merged changes of the
rounds since, with which whoever has it catches up. Both are dropped when whoever fetched it has fetched nothing for a
while, when the changes are so large that a newer state would come sooner, or when the disk gets full: no stranger makes
a node keep more.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import trio

from app.core.errors import AppError
from app.core.signal import Signal
from app.rounds import wire
from app.training.states import StateStore
from app.training.wire import StatePart
from app.weights.extents import WeightsError

log = logging.getLogger("shoal.rounds")
Save = Callable[[], Awaitable[None]]

HELD_S = 180.0  # that somebody who fetches a state may be silent: over a slow link, a request takes minutes
# Bytes of merged changes that are kept, in sizes of a state. While a newcomer takes over a state, and moments as large,
# there are no more of them if a change crosses its link within a round; else it could take no part anyway.
HELD_CHANGES = 2


class MergedChange(NamedTuple):
    """The merged leaves of a round."""

    list_hash: bytes
    leaves: Sequence[bytes]


@dataclass
class _HeldState:
    """A state that somebody fetches, and the changes since: by the hash of the list, and where each leaf begins."""

    parts: list[StatePart]
    asked_at: float
    changes: dict[bytes, tuple[StatePart, list[int]]] = field(default_factory=dict)


class CheckpointWriter:
    """Writes the checkpoints of one island."""

    def __init__(self, run: bytes, states: StateStore, *, kept: Sequence[StatePart]) -> None:
        """`kept` are parts of the run in the store that are no part of a checkpoint."""
        self._run, self._states, self._kept = run, states, kept
        self.parts: list[StatePart] = []  # of the newest checkpoint that others can fetch
        self.round = -1  # that goes on from it
        self.at = 0.0  # when it was written
        self._is_writing = False
        self.unsaved: AppError | OSError | None = None  # why this node does not have the newest state on disk
        self.trouble = ""  # with the newest checkpoint, in words
        self.changed = Signal()
        self._held: _HeldState | None = None

    def start(
        self,
        nursery: trio.Nursery,
        round_number: int,
        states: list[bytes],
        parts: list[StatePart],
        save: Save,
        change: MergedChange | None = None,
    ) -> None:
        """Write a checkpoint in a task of its own, once `finish` has returned; `save` writes it for this node.

        `change` leads to it from the last one; None if another state came in between.
        """
        assert not self._is_writing, "one checkpoint at a time"
        self._is_writing = True
        nursery.start_soon(self._write, round_number, states, parts, save, change)

    async def finish(self) -> None:
        """Wait until nothing is being written."""
        await self.changed.wait_for(lambda: not self._is_writing)

    async def keep(
        self, round_number: int, states: Sequence[bytes], parts: list[StatePart], change: MergedChange | None = None
    ) -> None:
        """Let others fetch the state that a round goes on from; raises `WeightsError`."""
        before = self.parts
        for data in states:
            await self._states.keep(self._run, data)
        await self._hold(before, change if round_number == self.round + 1 else None)
        self.parts, self.round, self.at = parts, round_number, trio.current_time()
        self.changed.notify()
        await self._forget_all_but([*before, *parts])

    async def _forget_all_but(self, parts: Sequence[StatePart]) -> None:
        held = self._held
        more = [] if held is None else [*held.parts, *(part for part, _ in held.changes.values())]
        await self._states.forget(self._run, [*parts, *self._kept, *more])

    async def leaves_of(self, list_hash: bytes, first: int, count: int) -> bytes | None:
        """Return merged leaves of a past round (blobs) if they are kept, for somebody who catches up."""
        held = self._held
        if held is None or list_hash not in held.changes:
            return None
        held.asked_at = trio.current_time()
        part, starts = held.changes[list_hash]
        if first + count >= len(starts):  # the last one is the end
            return None
        return await self._states.read(part, range(starts[first], starts[first + count]))

    async def _hold(self, last: list[StatePart], change: MergedChange | None) -> None:
        """Keep the last state and what leads on from it, if somebody fetches it, or the one that is kept already."""
        now, held = trio.current_time(), self._held or _HeldState(last, self._states.fetched_at(last))
        held.asked_at = max(held.asked_at, self._states.fetched_at(held.parts))
        size_bytes = sum(part.size_bytes for part, _ in held.changes.values())
        most_bytes = HELD_CHANGES * sum(part.size_bytes for part in held.parts)
        if change is None or now - held.asked_at > HELD_S or size_bytes > most_bytes:
            self._held = None
            return
        packed = wire.pack(change.leaves)
        starts = [0, *accumulate(len(size) + len(leaf) for size, leaf in zip(packed[::2], packed[1::2], strict=True))]
        try:
            await self._states.require_room(starts[-1])
            held.changes[change.list_hash] = await self._states.keep(self._run, b"".join(packed)), starts
            self._held = held
        except WeightsError as error:  # this island's own checkpoints need the room
            log.info("nothing is kept for those who catch up: %s", error)
            self._held = None

    async def _write(
        self,
        round_number: int,
        states: list[bytes],
        parts: list[StatePart],
        save: Save,
        change: MergedChange | None,
    ) -> None:
        self.unsaved, is_saved = None, False
        try:
            await save()  # first: a node that is ended now must not lose the round
            is_saved = True
            await self.keep(round_number, states, parts, change)
            self.trouble = ""
        except (AppError, OSError) as error:
            self.unsaved = None if is_saved else error.with_traceback(None)  # the frames hold the state
            self.trouble = f"the state before round {round_number} could not be written, the next one is tried: {error}"
            log.warning("%s", self.trouble)
            await self._forget_all_but(self.parts)  # what was written of it
        finally:
            self._is_writing = False
            self.changed.notify()

"""Checkpoints are written beside the steps, one at a time, and can be fetched once they are written."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from app.rounds.checkpoint import CheckpointWriter
from app.training.states import StateStore, part_of
from p2p.memory.fabric import open_fabric
from tests.app.rounds.island_swarm import LINK, in_place, open_islands
from tests.app.swarms import identity

RUN = bytes(16)


async def test_steps_go_on_while_a_checkpoint_is_written(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_islands(tmp_path, 0, steps=50) as swarm:
        island, written, saved = swarm.nodes[0].island, trio.Event(), list[int]()

        async def slow(entries: list[Any], states: list[bytes]) -> None:
            saved.append(len(entries))
            await written.wait()

        island._settled = slow
        await swarm.until(lambda: island.figures.steps == 10)  # those of the second round
        late = swarm.add(1, has_model=False)
        with trio.move_on_after(60):
            await swarm.until(lambda: island.figures.steps > 10 or late.island.figures.fetched > 0)
        # the third round waits for the disk, and nobody is given a state that is not written
        assert (island.figures.steps, late.island.figures.fetched, saved) == (10, 0, [1])
        written.set()
        await swarm.finished(0, 1)
        assert saved == list(range(1, 11))


@asynccontextmanager
async def open_store(folder: Path) -> AsyncIterator[StateStore]:
    """A store of one node."""
    async with open_fabric(1, LINK) as fabric:
        yield StateStore(fabric.node(identity(0).peer_id), folder, lambda peer: True, in_place)


def parts_in(folder: Path) -> set[bytes]:
    """The parts on disk, without what is noted beside them."""
    return {path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.suffix}


async def nothing() -> None:
    """A checkpoint that is not saved."""


async def test_the_last_two_checkpoints_are_kept(tmp_path: Path, autojump_clock: MockClock) -> None:
    text = b"the text of the job"
    async with open_store(tmp_path) as store, trio.open_nursery() as nursery:
        await store.keep(RUN, text)
        writer = CheckpointWriter(RUN, store, kept=[part_of(text)[0]])
        states = [[f"state {number}".encode()] for number in range(3)]
        for number, state in enumerate(states):
            writer.start(nursery, number, state, [part_of(state[0])[0]], nothing)
            await writer.finish()
            assert (writer.round, writer.parts) == (number, [part_of(state[0])[0]])
        assert parts_in(tmp_path) == {text, *states[1], *states[2]}


async def test_what_could_not_be_written_is_raised_once(tmp_path: Path, autojump_clock: MockClock) -> None:
    async def full() -> None:
        raise OSError(28, "No space left on device")

    async with open_store(tmp_path) as store, trio.open_nursery() as nursery:
        writer = CheckpointWriter(RUN, store, kept=[])
        state = b"state"
        writer.start(nursery, 1, [state], [part_of(state)[0]], full)
        with pytest.raises(OSError, match="No space"):
            await writer.finish()
        assert writer.round == -1  # a state that this node has not saved is not offered to others
        writer.start(nursery, 1, [state], [part_of(state)[0]], nothing)
        await writer.finish()
        assert writer.round == 1

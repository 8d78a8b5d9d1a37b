"""Checkpoints are written beside the steps, one at a time, and can be fetched once they are written."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from app.rounds import wire
from app.rounds.checkpoint import HELD_S, CheckpointWriter, MergedChange
from app.training.states import StateStore, part_of
from app.training.wire import StatePart
from app.weights.extents import WeightsError
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


async def full() -> None:
    """A checkpoint that finds no room on the disk."""
    raise OSError(errno.ENOSPC, "No space left on device")


async def test_a_checkpoint_that_could_not_be_written_costs_itself_alone(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_store(tmp_path) as store, trio.open_nursery() as nursery:
        writer = CheckpointWriter(RUN, store, kept=[])
        for number, save in ((1, nothing), (2, full), (3, nothing)):
            state = f"state {number}".encode()
            writer.start(nursery, number, [state], [part_of(state)[0]], save)
            await writer.finish()
            written = 1 if save is full else number  # a state that this node has not saved is not offered to others
            assert (writer.round, writer.parts) == (written, [part_of(f"state {written}".encode())[0]])
            assert ("No space" in writer.trouble, writer.unsaved is not None) == (save is full, save is full)
        assert parts_in(tmp_path) == {b"state 1", b"state 3"}


async def test_a_state_of_which_a_part_could_not_be_written_leaves_nothing(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store(tmp_path) as store, trio.open_nursery() as nursery:
        writer, keep = CheckpointWriter(RUN, store, kept=[]), store.keep

        async def crowded(run: bytes, data: bytes) -> StatePart:
            if data == b"two":
                raise WeightsError("the disk is full", code="disk_full")
            return await keep(run, data)

        monkeypatch.setattr(store, "keep", crowded)
        for number, state in ((1, [b"one"]), (2, [b"three", b"two"])):
            writer.start(nursery, number, state, [part_of(part)[0] for part in state], nothing)
            await writer.finish()
        assert (writer.round, writer.unsaved) == (1, None)
        assert "the disk is full" in writer.trouble
        assert parts_in(tmp_path) == {b"one"}


STATE = b"s" * 64  # twice as large as a change with the length of its leaf


async def written(writer: CheckpointWriter, number: int, *, fetched: StateStore | None = None) -> None:
    """Write the checkpoint of a round, and let somebody fetch it."""
    state = STATE + bytes([number])
    await writer.keep(number, [state], [part_of(state)[0]], MergedChange(bytes([number]), [bytes([number]) * 28]))
    if fetched is not None:
        await fetched.fetch(RUN, [part_of(state)[0]], [identity(0).peer_id])


@asynccontextmanager
async def fetched_once(folder: Path) -> AsyncIterator[tuple[CheckpointWriter, StateStore]]:
    """A writer whose first checkpoint somebody has fetched, and who did."""
    async with open_fabric(1, LINK) as fabric:
        store, other = (
            StateStore(fabric.node(identity(number).peer_id), folder / str(number), lambda peer: True, in_place)
            for number in range(2)
        )
        store.serve()
        writer = CheckpointWriter(RUN, store, kept=[])
        await written(writer, 0, fetched=other)
        yield writer, other


async def test_a_state_that_is_fetched_is_kept_with_the_changes_since(tmp_path: Path, patient_clock: MockClock) -> None:
    async with fetched_once(tmp_path) as (writer, other):
        for number in range(1, 5):
            await written(writer, number, fetched=other if number == 1 else None)  # one at a time is kept
        states = {STATE + bytes([number]) for number in (0, 3, 4)}
        assert {data for data in parts_in(tmp_path / "0") if data.startswith(STATE)} == states
        for number in range(1, 5):
            leaf = await writer.leaves_of(bytes([number]), 0, 1)
            assert leaf is not None
            assert wire.unpack(leaf, 1) == [bytes([number]) * 28]
        assert await writer.leaves_of(bytes([4]), 0, 2) is None
        assert await writer.leaves_of(bytes([9]), 0, 1) is None


@pytest.mark.parametrize("rounds_s", [1.0, HELD_S])
async def test_a_state_is_not_kept_for_ever(tmp_path: Path, patient_clock: MockClock, rounds_s: float) -> None:
    """Until whoever fetched it has been silent for long, or the changes since are larger than a newer one."""
    async with fetched_once(tmp_path) as (writer, _):
        kept = 0
        for number in range(1, 10):
            await trio.sleep(rounds_s)
            await written(writer, number)
            kept += STATE + bytes([0]) in parts_in(tmp_path / "0")
        assert kept == (5 if rounds_s < HELD_S else 1)  # the changes of five rounds are larger than two states
        assert parts_in(tmp_path / "0") == {STATE + bytes([number]) for number in (8, 9)}


async def test_changes_that_do_not_follow_a_state_are_not_kept_with_it(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    """Whoever has the state could not go on with them: the change in between is missing."""
    async with fetched_once(tmp_path) as (writer, _):
        await written(writer, 2)
        assert await writer.leaves_of(bytes([2]), 0, 1) is None


async def test_a_state_that_nobody_fetches_is_not_kept(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with open_store(tmp_path) as store:
        writer = CheckpointWriter(RUN, store, kept=[])
        for number in range(4):
            await written(writer, number)
        assert parts_in(tmp_path) == {STATE + bytes([number]) for number in (2, 3)}

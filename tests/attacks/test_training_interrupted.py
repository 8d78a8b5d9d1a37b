"""Trouble that passes by itself, in the middle of a training job: a full card, a full disk, a node that is killed."""

from __future__ import annotations

import errno
import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from app.rounds import founding, train_jobs, train_store
from app.rounds.train_jobs import TrainJobs
from engine.errors import DeviceFull
from engine.island import IslandModel
from p2p.platform import write_private
from tests.app.rounds.test_rejoining import found_and_train, run_alone, some_rounds, until, until_status, wish_in


@pytest.fixture(autouse=True)
def _soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that waits for room is tried again at once."""
    monkeypatch.setattr(train_jobs, "MEMORY_AGAIN_S", 0.01)
    monkeypatch.setattr(train_jobs, "MEMORY_AGAIN_MOST_S", 0.01)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 20.00 MiB"),
        (RuntimeError, "[enforce fail at alloc_cpu.cpp:113] data. DefaultCPUAllocator: not enough memory"),
    ],
    ids=["card", "machine"],
)
async def test_memory_that_is_full_for_a_moment_does_not_end_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception], text: str
) -> None:
    step, make, is_full = IslandModel.step, founding.make_model, False
    model: Any = None

    def crowded(self: IslandModel, *args: Any) -> Any:
        if is_full:  # a game has just begun beside it
            raise error(text)
        return step(self, *args)

    def made(*args: Any) -> Any:
        gc.collect()
        assert model() is None  # two of them would need twice the memory
        if is_full:
            raise DeviceFull("the device's memory is full")
        return make(*args)

    async def train(jobs: TrainJobs) -> None:
        nonlocal is_full, model
        await jobs.found(wish_in(tmp_path))
        [running] = jobs.running.values()
        model = weakref.ref(running.island._model)
        await some_rounds(jobs, 1)
        del running
        monkeypatch.setattr(founding, "make_model", made)
        is_full = True
        facts = await until_status(jobs, "paused")
        assert (facts["why"], facts["waiting"][:17]) == ("", "waits for memory:")
        is_full = False
        await some_rounds(jobs, 1)
        facts = await until_status(jobs, "running")
        assert facts["round"] > 1
        assert facts["waiting"] == ""

    monkeypatch.setattr(IslandModel, "step", crowded)
    await run_alone(tmp_path, train)


async def test_a_job_that_is_left_while_its_card_is_full_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, token = trio.Event(), trio.lowlevel.current_trio_token()

    def full(*args: Any) -> Any:
        trio.from_thread.run_sync(reached.set, trio_token=token)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    async def train(jobs: TrainJobs) -> None:
        monkeypatch.setattr(IslandModel, "step", full)
        await jobs.found(wish_in(tmp_path))
        await reached.wait()
        assert (await jobs.leave("fish"))["status"] == "left"
        assert not jobs.running
        assert not jobs._waiting

    await run_alone(tmp_path, train)


class FullDisk:
    """A disk on which no state of a training job can be written while it `is_full`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        monkeypatch.setattr(train_store, "write_private", self.write)

    def write(self, path: Path, data: Any, **how: Any) -> None:
        if path.name == "state" and self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_private(path, data, **how)


async def test_a_disk_that_is_full_for_a_moment_costs_checkpoints_and_not_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(monkeypatch)

    async def train(jobs: TrainJobs) -> None:
        await jobs.found(wish_in(tmp_path))
        await some_rounds(jobs, 1)
        [running] = jobs.running.values()
        island, disk.is_full = running.island, True
        await until(lambda: island.checkpoint.trouble)
        shown, before = island.checkpoint.round, island.standing.round
        await until(lambda: island.standing.round > before + 2)
        assert island.checkpoint.round == shown  # others are not shown what is not on disk
        [facts] = await jobs.facts()
        assert facts["status"] == "running"
        assert "could not be written" in facts["waiting"]
        assert "No space left on device" in facts["waiting"]
        disk.is_full = False
        await until(lambda: island.checkpoint.round > before)
        await until(lambda: not island.checkpoint.trouble)

    await run_alone(tmp_path, train)


async def test_a_job_whose_last_state_finds_no_room_on_the_disk_is_not_finished_before_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, wish = FullDisk(monkeypatch), replace(wish_in(tmp_path), steps=6)

    async def train(jobs: TrainJobs) -> None:
        await jobs.found(wish)
        disk.is_full = True
        facts = await until_status(jobs, "paused")
        assert facts["waiting"].startswith("waits for room on the disk: ")
        disk.is_full = False
        facts = await until_status(jobs, "finished")
        assert (facts["step"], facts["why"]) == (6, "")

    await run_alone(tmp_path, train)


# --- a node that is killed --------------------------------------------------------------------------------------------


async def begin_and_be_killed(folder: Path) -> None:
    """Go on with the job of a node, which is killed before it has made a round."""
    [path] = (folder / "0" / "home" / "trainings").glob("*/facts.json")
    stored = list[bytes]()

    async def begin(jobs: TrainJobs) -> None:
        await until(lambda: jobs.running)
        stored.append(path.read_bytes())

    await run_alone(folder, begin)
    path.write_bytes(stored[0])  # as it was: the end of a node that is not killed is noted


async def test_a_job_with_which_a_node_was_killed_twice_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system whose memory is full kills the node, and all other work of it, each time that the job is begun."""
    wish = replace(wish_in(tmp_path), every=10**4)

    async def found(jobs: TrainJobs) -> None:
        await jobs.found(wish)

    async def wait(jobs: TrainJobs) -> None:
        facts = await until_status(jobs, "paused")
        assert "the node was killed 2 times" in facts["waiting"]
        assert "`shoal train join fish`" in facts["waiting"]
        assert not jobs.running
        await jobs.join("fish")
        assert jobs.running

    async def go_on(jobs: TrainJobs) -> None:
        await until(lambda: jobs.running)

    await run_alone(tmp_path, found)
    for _ in range(2):
        await begin_and_be_killed(tmp_path)
    monkeypatch.setattr(train_jobs, "MEMORY_AGAIN_MOST_S", 3600.0)
    await run_alone(tmp_path, wait)
    await run_alone(tmp_path, go_on)  # it was not killed the last time


async def test_a_round_that_was_made_ends_the_count_of_kills(tmp_path: Path) -> None:
    await found_and_train(tmp_path, wish_in(tmp_path))
    [path] = (tmp_path / "0" / "home" / "trainings").glob("*/facts.json")
    for begun in (0, 1):
        path.write_text(json.dumps({**json.loads(path.read_bytes()), "begun": begun}))
        counts = list[int]()

        async def look(jobs: TrainJobs, counts: list[int] = counts) -> None:
            await until(lambda: jobs.running)
            counts.append(json.loads(path.read_bytes())["begun"])
            await some_rounds(jobs, 1)
            await until(lambda: json.loads(path.read_bytes())["begun"] == 0)

        await run_alone(tmp_path, look)
        assert counts in ([begun + 1], [0])  # the round may be over by then

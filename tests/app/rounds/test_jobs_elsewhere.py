"""Training jobs of a swarm that this node is not in, and those that are over: left, named with it, and removed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import trio

from app.config.home import Home
from app.core.errors import AppError, HomeError
from app.rounds.train_jobs import TrainJobs
from app.rounds.train_store import TrainStore
from p2p.memory.fabric import open_fabric
from tests.app.rounds.test_own_data import Node
from tests.app.rounds.test_rejoining import (
    Work,
    found_and_train,
    run_alone,
    some_rounds,
    until,
    until_status,
    wish_in,
)
from tests.app.swarms import identity

REEF = "reef#1a2b3c4d"


def in_reef(work: Work) -> Work:
    """Do some work in a node whose swarm has a name."""

    async def named(jobs: TrainJobs) -> None:
        jobs._place = replace(jobs._place, swarm_name=REEF)
        await work(jobs)

    return named


async def run_elsewhere(folder: Path, work: Work) -> None:
    """Run the same node in another swarm."""
    async with open_fabric(1) as fabric, trio.open_nursery() as nursery:
        node = Node(fabric, 0, folder / "0", [identity(0).peer_id])
        node.jobs._place = replace(node.jobs._place, swarm="t" * 32, swarm_name="lagoon#5e6f7a8b")
        await nursery.start(node.jobs.run)
        await work(node.jobs)
        nursery.cancel_scope.cancel()


def folders(home: Path) -> list[Path]:
    """The folders of the jobs in a node's home."""
    return list((home / "0" / "home" / "trainings").iterdir())


async def found(folder: Path) -> None:
    """Found a job in the swarm reef, and end the node after some rounds."""

    async def train(jobs: TrainJobs) -> None:
        await jobs.found(wish_in(folder))
        await some_rounds(jobs, 2)

    await run_alone(folder, in_reef(train))


async def test_a_job_of_another_swarm_can_be_given_up_and_removed(tmp_path: Path) -> None:
    async def give_up(jobs: TrainJobs) -> None:
        [facts] = await jobs.facts()
        assert (facts["status"], facts["swarm"], facts["left_s"]) == ("paused", REEF, None)
        assert facts["waiting"] == f"waits until this node is in {REEF} again; `shoal train leave fish` gives it up"
        with pytest.raises(AppError, match="`shoal train leave fish` ends that"):
            await jobs.remove("fish")
        left = await jobs.leave("fish")
        assert (left["status"], left["waiting"], left["left_s"]) == ("left", "", None)
        assert (await jobs.leave("fish"))["status"] == "left"
        assert (await jobs.remove("fish"))["name"] == "fish"
        assert await jobs.facts() == []
        with pytest.raises(AppError, match="no training job is named fish"):
            await jobs.remove("fish")

    await found(tmp_path)
    await run_elsewhere(tmp_path, give_up)
    assert folders(tmp_path) == []


async def test_a_job_that_was_given_up_elsewhere_does_not_begin_in_its_swarm_again(tmp_path: Path) -> None:
    async def give_up(jobs: TrainJobs) -> None:
        await jobs.leave("fish")

    async def look(jobs: TrainJobs) -> None:
        assert not jobs._waiting
        assert not jobs.running
        [facts] = await jobs.facts()
        assert facts["status"] == "left"
        await jobs.join("fish")
        await some_rounds(jobs, 1)

    await found(tmp_path)
    await run_elsewhere(tmp_path, give_up)
    await run_alone(tmp_path, look)


async def test_to_join_a_job_of_another_swarm_names_that_swarm(tmp_path: Path) -> None:
    async def join(jobs: TrainJobs) -> None:
        with pytest.raises(AppError, match=f"^fish is a training job of the swarm {REEF}: join that swarm first"):
            await jobs.join("fish")
        with pytest.raises(AppError, match="no member of this swarm trains a job named cod"):
            await jobs.join("cod")

    await found(tmp_path)
    await run_elsewhere(tmp_path, join)


async def test_a_finished_job_that_is_kept_for_late_members_is_removed(tmp_path: Path) -> None:
    async def train(jobs: TrainJobs) -> None:
        await jobs.found(replace(wish_in(tmp_path), steps=4))
        await until_status(jobs, "finished")
        await until(lambda: jobs._late)
        with pytest.raises(AppError, match="which is finished: `shoal jobs stop fish`"):
            await jobs.leave("fish")
        await jobs.remove("fish")
        await until(lambda: not jobs._server.islands and not jobs._late)
        assert folders(tmp_path) == []
        await jobs.found(replace(wish_in(tmp_path), steps=4))  # the name is free

    await run_alone(tmp_path, train)


async def test_a_job_that_runs_or_waits_is_not_removed(tmp_path: Path) -> None:
    async def train(jobs: TrainJobs) -> None:
        await jobs.found(wish_in(tmp_path))
        with pytest.raises(AppError, match="this node takes part in fish"):
            await jobs.remove("fish")
        await jobs.leave("fish")
        await jobs.join("fish")  # what is on disk may still say that it was left
        with pytest.raises(AppError, match="this node takes part in fish"):
            await jobs.remove("fish")
        await some_rounds(jobs, 1)
        await jobs._place.pause.by_hand(None)
        await until_status(jobs, "paused")
        with pytest.raises(AppError, match="this node takes part in fish"):
            await jobs.remove("fish")

    await run_alone(tmp_path, train)


async def test_a_job_whose_files_cannot_all_be_removed_is_listed_until_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await found_and_train(tmp_path, wish_in(tmp_path))
    store, unlink = TrainStore(Home(tmp_path / "0" / "home")), Path.unlink
    store.leave("fish")

    def held(path: Path, missing_ok: bool = False) -> None:
        if path.name == "state":
            raise PermissionError(13, "a program has it open")
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", held)
        with pytest.raises(HomeError, match="cannot be changed: a program has it open"):
            store.remove("fish")
    assert [job.record.name for job in store.all()] == ["fish"]
    store.remove("fish")
    assert folders(tmp_path) == []

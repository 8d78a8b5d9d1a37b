"""A node goes on with a training job that it left, or that failed here, though nobody else trains it now."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import trio

from app.rounds.founding import TrainWish
from app.rounds.train_jobs import TrainJobs
from p2p.memory.fabric import open_fabric
from tests.app.rounds.test_own_data import Node, made_up
from tests.app.swarms import identity


def wish_in(folder: Path) -> TrainWish:
    """A job that does not end in a test."""
    (folder / "text.txt").write_text(made_up(1))
    return TrainWish(
        "fish", (str(folder / "text.txt"),), model="tiny-random", steps=10**6, every=2, batch=32, length=16,
        licence="MIT",
    )  # fmt: skip


async def run_alone(
    folder: Path, work: Callable[[TrainJobs], Awaitable[None]], memory: Callable[[], int | None] = lambda: None
) -> None:
    """Run a node that is alone, from its start to its end, and do some work with its jobs meanwhile."""
    async with open_fabric(1) as fabric, trio.open_nursery() as nursery:
        node = Node(fabric, 0, folder / "0", [identity(0).peer_id])
        node.jobs._place = replace(node.jobs._place, memory_limit=memory)
        await nursery.start(node.jobs.run)
        await work(node.jobs)
        nursery.cancel_scope.cancel()


async def some_rounds(jobs: TrainJobs, count: int) -> None:
    """Wait until the job has made so many more rounds, and the last one is on disk."""
    [running] = jobs.running.values()
    before = running.island.standing.round
    with trio.fail_after(60):
        while running.island.standing.round < before + count:  # noqa: ASYNC110
            await trio.sleep(0.05)


async def test_a_job_that_was_left_goes_on_after_a_restart_though_nobody_else_trains_it(tmp_path: Path) -> None:
    """`shoal train leave` says that `join` goes on with it."""
    wish, rounds = wish_in(tmp_path), 0

    async def found_and_leave(jobs: TrainJobs) -> None:
        nonlocal rounds
        await jobs.found(wish)
        await some_rounds(jobs, 3)
        rounds = (await jobs.leave("fish"))["round"]

    async def join_again(jobs: TrainJobs) -> None:
        joined = await jobs.join("fish")
        assert joined["round"] >= rounds >= 3
        await some_rounds(jobs, 1)

    await run_alone(tmp_path, found_and_leave)
    await run_alone(tmp_path, join_again)


async def test_a_job_goes_on_once_there_is_memory_again_though_nobody_else_trains_it(tmp_path: Path) -> None:
    """Another program had the memory when the machine was started again."""
    wish, room = wish_in(tmp_path), 1

    async def found(jobs: TrainJobs) -> None:
        await jobs.found(wish)
        await some_rounds(jobs, 3)

    async def go_on(jobs: TrainJobs) -> None:
        nonlocal room
        with trio.fail_after(60):
            while (await jobs.facts())[0]["status"] != "failed":
                await trio.sleep(0.05)
        room = 2**40
        joined = await jobs.join("fish")
        assert joined["round"] >= 3
        await some_rounds(jobs, 1)

    await run_alone(tmp_path, found)
    await run_alone(tmp_path, go_on, lambda: room)


async def test_a_founder_that_is_restarted_before_the_first_round_is_over_goes_on(tmp_path: Path) -> None:
    """It has the model from which the job starts, and nobody else does yet."""
    wish = replace(wish_in(tmp_path), every=200)
    before = 0

    async def found(jobs: TrainJobs) -> None:
        nonlocal before
        await jobs.found(wish)
        [running] = jobs.running.values()
        with trio.fail_after(60):
            while not running.island.figures.steps:  # noqa: ASYNC110
                await trio.sleep(0.01)
        before = running.island.standing.round

    async def go_on(jobs: TrainJobs) -> None:
        with trio.fail_after(60):
            while not jobs.running:  # noqa: ASYNC110
                await trio.sleep(0.05)
        [running] = jobs.running.values()
        with trio.move_on_after(20):
            while not running.island.figures.steps:  # noqa: ASYNC110
                await trio.sleep(0.05)
        assert running.island.figures.steps > 0, await jobs.facts()

    await run_alone(tmp_path, found)
    assert before == 0
    await run_alone(tmp_path, go_on)

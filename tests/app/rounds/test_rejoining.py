"""A node goes on with its training jobs after a restart, from what it has on disk: also alone, also after a failure."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from app.core.errors import AppError
from app.rounds import founding, train_jobs
from app.rounds.founding import TrainWish
from app.rounds.train_jobs import TrainJobs
from engine.island import IslandModel
from p2p.errors import DeadlineExceeded
from p2p.memory.fabric import open_fabric
from tests.app.rounds.test_own_data import Node, made_up, open_nodes, state_files
from tests.app.rounds.test_own_data import wish_in as small_wish
from tests.app.swarms import identity

Work = Callable[[TrainJobs], Awaitable[None]]


def wish_in(folder: Path) -> TrainWish:
    """A job that does not end in a test; its model is drawn from a seed."""
    return replace(small_wish(folder, "text"), every=2, own_data=False)


def wish_with_model(folder: Path) -> TrainWish:
    """A job that does not end in a test and begins with a model that its founder alone has."""
    return replace(wish_in(folder), shape=None, model="tiny-random")


async def run_alone(
    folder: Path, work: Work, memory: Callable[[], int | None] = lambda: None, *, number: int = 0
) -> None:
    """Run a node that is alone, from its start to its end, and do some work with its jobs meanwhile."""
    async with open_fabric(1) as fabric, trio.open_nursery() as nursery:
        node = Node(fabric, number, folder / str(number), [identity(number).peer_id])
        node.jobs._place = replace(node.jobs._place, memory_limit=memory)
        await nursery.start(node.jobs.run)
        await work(node.jobs)
        nursery.cancel_scope.cancel()


async def until(condition: Callable[[], Any]) -> None:
    """Wait in real time, because jobs compute in threads."""
    with trio.fail_after(60):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.01)


async def until_status(jobs: TrainJobs, status: str) -> dict[str, Any]:
    """Return the figures of the only job once it has this status, and waits for something if it is paused."""
    with trio.fail_after(60):
        while True:
            [facts] = await jobs.facts()
            if facts["status"] == status and (status != "paused" or facts["waiting"]):
                return facts
            await trio.sleep(0.01)


async def some_rounds(jobs: TrainJobs, count: int) -> None:
    """Wait until the job runs and has made so many more rounds, and the last one is on disk."""
    await until(lambda: jobs.running)
    [running] = jobs.running.values()
    before = running.island.standing.round
    await until(lambda: running.island.checkpoint.round >= before + count)


async def found_and_train(folder: Path, wish: TrainWish) -> None:
    """Found a job in a node that is alone, and end the node after some rounds."""

    async def found(jobs: TrainJobs) -> None:
        await jobs.found(wish)
        await some_rounds(jobs, 3)

    await run_alone(folder, found)


@pytest.mark.parametrize("own_data", [False, True])
async def test_a_job_that_was_left_goes_on_after_a_restart_though_nobody_else_trains_it(
    tmp_path: Path, own_data: bool
) -> None:
    """`shoal train leave` says that `join` goes on with it."""
    wish, rounds = replace(wish_in(tmp_path), own_data=own_data), 0

    async def found_and_leave(jobs: TrainJobs) -> None:
        nonlocal rounds
        await jobs.found(wish)
        await some_rounds(jobs, 3)
        rounds = (await jobs.leave("fish"))["round"]

    async def join_again(jobs: TrainJobs) -> None:
        assert not jobs.running
        joined = await jobs.join("fish")
        assert joined["round"] >= rounds >= 3
        await some_rounds(jobs, 1)

    await run_alone(tmp_path, found_and_leave)
    await run_alone(tmp_path, join_again)


async def test_a_member_that_joins_again_trains_on_the_text_that_it_named_or_on_another(tmp_path: Path) -> None:
    wish = replace(wish_in(tmp_path), own_data=True)
    for name, seed in (("two.txt", 2), ("three.txt", 3)):
        (tmp_path / name).write_text(made_up(seed))
    async with open_nodes(tmp_path) as nodes:
        await nodes[0].jobs.found(wish)
        await nodes[1].jobs.join("fish", [str(tmp_path / "two.txt")], "CC0-1.0")
        [running] = nodes[1].jobs.running.values()
        await until(lambda: running.island.figures.steps)
        await nodes[1].jobs.leave("fish")

    def said(jobs: TrainJobs) -> tuple[str, str]:
        [running] = jobs.running.values()
        assert running.island.own_data is not None
        return running.island.own_data.source, running.island.own_data.licence

    async def join_again(jobs: TrainJobs) -> None:
        await jobs.join("fish")
        assert said(jobs) == ("two.txt", "CC0-1.0")
        await some_rounds(jobs, 0)
        await jobs.leave("fish")
        await jobs.join("fish", [str(tmp_path / "three.txt")], "MIT")
        assert said(jobs) == ("three.txt", "MIT")

    await run_alone(tmp_path, join_again, number=1)


async def test_a_text_that_comes_too_slowly_is_an_error_with_a_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def too_slow(*args: Any, **more: Any) -> Any:
        raise DeadlineExceeded("next to nothing came")

    async with open_nodes(tmp_path) as nodes:
        await nodes[0].jobs.found(wish_in(tmp_path))
        monkeypatch.setattr(nodes[1].jobs._place.states, "fetch", too_slow)
        with pytest.raises(AppError, match=r"comes too slowly .* try again with `shoal train join fish`"):
            await nodes[1].jobs.join("fish")


async def test_a_job_goes_on_by_itself_once_there_is_memory_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program had the memory when the machine was started again."""
    monkeypatch.setattr(train_jobs, "MEMORY_AGAIN_S", 0.01)
    monkeypatch.setattr(train_jobs, "MEMORY_AGAIN_MOST_S", 0.01)
    room = 1

    async def look(jobs: TrainJobs) -> None:
        facts = await until_status(jobs, "paused")
        assert (facts["why"], facts["waiting"][:17]) == ("", "waits for memory:")

    async def go_on(jobs: TrainJobs) -> None:
        nonlocal room
        await look(jobs)
        room = 2**40
        await some_rounds(jobs, 1)
        facts = await until_status(jobs, "running")
        assert facts["round"] >= 4
        assert facts["waiting"] == ""

    await found_and_train(tmp_path, wish_in(tmp_path))
    await run_alone(tmp_path, look, lambda: room)
    await run_alone(tmp_path, go_on, lambda: room)


async def test_a_job_that_waits_for_memory_can_be_joined_and_left(tmp_path: Path) -> None:
    room = 1

    async def leave(jobs: TrainJobs) -> None:
        await until_status(jobs, "paused")
        assert (await jobs.leave("fish"))["status"] == "left"
        assert not jobs._waiting

    async def join(jobs: TrainJobs) -> None:
        nonlocal room
        assert not jobs._waiting
        with pytest.raises(founding.DoesNotFit):
            await jobs.join("fish")
        await until_status(jobs, "failed")
        room = 2**40
        await jobs.join("fish")
        await some_rounds(jobs, 1)

    async def join_at_once(jobs: TrainJobs) -> None:
        nonlocal room
        await until_status(jobs, "paused")
        with pytest.raises(founding.DoesNotFit):
            await jobs.join("fish")
        await until_status(jobs, "paused")
        room = 2**40
        await jobs.join("fish")
        await some_rounds(jobs, 1)
        assert not jobs._waiting

    await found_and_train(tmp_path, wish_in(tmp_path))
    await run_alone(tmp_path, leave, lambda: room)
    await run_alone(tmp_path, join, lambda: room)
    room = 1
    await run_alone(tmp_path, join_at_once, lambda: room)


async def test_a_job_that_failed_goes_on_though_nobody_else_trains_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("the driver is gone")

    async def fail(jobs: TrainJobs) -> None:
        await until_status(jobs, "failed")

    async def join(jobs: TrainJobs) -> None:
        joined = await jobs.join("fish")
        assert joined["round"] >= 3
        await some_rounds(jobs, 1)

    await found_and_train(tmp_path, wish_in(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(founding, "make_model", broken)
        await run_alone(tmp_path, fail)
    assert state_files(tmp_path / "0") == []
    await run_alone(tmp_path, join)


@pytest.mark.parametrize(
    "content",
    [None, *(pytest.param(content, marks=pytest.mark.soak) for content in (b"", b"\0" * 40)), b'{"status": "runn'],
    ids=["missing", "empty", "zeros", "cut off"],
)
async def test_a_job_whose_figures_were_lost_in_a_power_cut_goes_on(tmp_path: Path, content: bytes | None) -> None:
    async def go_on(jobs: TrainJobs) -> None:
        await some_rounds(jobs, 1)

    await found_and_train(tmp_path, wish_in(tmp_path))
    [path] = (tmp_path / "0" / "home" / "trainings").glob("*/facts.json")
    path.unlink() if content is None else path.write_bytes(content)
    await run_alone(tmp_path, go_on)


async def test_a_text_that_was_lost_here_is_fetched_from_others(tmp_path: Path) -> None:
    async with open_nodes(tmp_path) as nodes:
        await nodes[0].jobs.found(wish_in(tmp_path))
        await nodes[1].jobs.join("fish")
        await nodes[1].jobs.leave("fish")
        [folder] = (tmp_path / "1" / "home" / "trainings").iterdir()
        before = {name: (folder / name).read_bytes() for name in ("tokens", "held")}
        (folder / "held").unlink()
        (folder / "tokens").write_bytes(bytes(len(before["tokens"])))
        await nodes[1].jobs.join("fish")
        assert before == {name: (folder / name).read_bytes() for name in before}


# --- before the first round is over -----------------------------------------------------------------------------------


async def until_steps(jobs: TrainJobs) -> None:
    """Wait until the job runs and has made a step."""
    await until(lambda: jobs.running)
    [running] = jobs.running.values()
    await until(lambda: running.island.figures.steps)
    assert running.island.standing.round == 0


async def test_a_founder_that_is_restarted_before_the_first_round_is_over_goes_on(tmp_path: Path) -> None:
    """It has the model from which the job starts, and nobody else does yet."""
    wish = replace(wish_with_model(tmp_path), every=10**4)

    async def found(jobs: TrainJobs) -> None:
        await jobs.found(wish)
        await until_steps(jobs)

    await run_alone(tmp_path, found)
    await run_alone(tmp_path, until_steps)


async def test_a_founder_without_the_first_state_says_so_and_gets_it_from_a_member(tmp_path: Path) -> None:
    wish = replace(wish_with_model(tmp_path), every=10**4)

    async def wait(jobs: TrainJobs) -> None:
        await until(lambda: jobs.running)
        [running] = jobs.running.values()
        await until(lambda: running.island.figures.waiting)
        assert running.island.figures.waiting.startswith("waits for a member that has the state before round 0")

    async with open_nodes(tmp_path) as nodes:
        await nodes[0].jobs.found(wish)
        await nodes[1].jobs.join("fish")
        [running] = nodes[1].jobs.running.values()
        await until((running.job.folder / "state").exists)
    [first] = (tmp_path / "0" / "home" / "trainings").glob("*/state")
    first.unlink()
    await run_alone(tmp_path, wait)
    async with open_nodes(tmp_path) as nodes:
        await until_steps(nodes[0].jobs)
        [founder], [member] = (node.jobs.running.values() for node in nodes)
        assert (founder.island.figures.fetched, member.island.figures.fetched) == (1, 0)


# --- leaving ----------------------------------------------------------------------------------------------------------


async def test_to_leave_ends_the_fetch_of_a_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_nodes(tmp_path) as nodes:
        await nodes[0].jobs.found(wish_with_model(tmp_path))
        [founder] = nodes[0].jobs.running.values()
        states, began = nodes[1].jobs._place.states, trio.Event()
        fetch = states.fetch

        async def endless(run: bytes, parts: Any, holders: Any, *more: Any, **ways: Any) -> list[bytes]:
            if parts == founder.job.record.parts:
                return await fetch(run, parts, holders, *more, **ways)
            began.set()
            await trio.sleep_forever()
            raise AssertionError

        monkeypatch.setattr(states, "fetch", endless)
        await nodes[1].jobs.join("fish")
        with trio.fail_after(60):
            await began.wait()
            assert (await nodes[1].jobs.leave("fish"))["status"] == "left"


@pytest.mark.parametrize("work", ["step", "loss"])
async def test_to_leave_ends_a_step_or_a_validation_that_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    began, closed = trio.Event(), threading.Event()

    async with open_nodes(tmp_path) as nodes:
        loop = trio.lowlevel.current_trio_token()

        def endless(self: IslandModel, *args: Any) -> Generator[None, None, None]:
            try:
                while True:
                    loop.run_sync_soon(began.set)
                    yield
            finally:
                closed.set()

        monkeypatch.setattr(IslandModel, work, endless)
        await nodes[0].jobs.found(wish_in(tmp_path))
        with trio.fail_after(60):
            await began.wait()
            assert (await nodes[0].jobs.leave("fish"))["status"] == "left"
        assert closed.is_set()


async def test_the_states_of_a_job_that_was_left_are_removed(tmp_path: Path) -> None:
    async with open_nodes(tmp_path) as nodes:
        await nodes[0].jobs.found(wish_in(tmp_path))
        await nodes[1].jobs.join("fish")
        [running] = nodes[1].jobs.running.values()
        await until(lambda: running.island.checkpoint.round >= 0)
        await some_rounds(nodes[1].jobs, 1)
        for number, node in enumerate(nodes):
            assert state_files(tmp_path / str(number))
            await node.jobs.leave("fish")
            assert state_files(tmp_path / str(number)) == []
        await nodes[0].jobs.join("fish")
        [again] = nodes[0].jobs.running.values()
        assert nodes[0].jobs._server.islands == {again.job.record.id: again.island}

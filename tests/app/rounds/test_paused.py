"""Training gives way to the machine's owner as hosting does: it ends when the node is paused, and goes on after it."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from app.core.reasons import because
from app.rounds import founding
from app.rounds.train_jobs import TrainJobs
from tests.app.rounds.test_rejoining import found_and_train, run_alone, some_rounds, until, until_status, wish_in

WAITS = "waits for the end of the pause: paused by hand"


async def test_a_pause_frees_the_memory_of_a_job_and_it_goes_on_after_it(tmp_path: Path) -> None:
    async def train(jobs: TrainJobs) -> None:
        await jobs.found(wish_in(tmp_path))
        await some_rounds(jobs, 2)
        [running] = jobs.running.values()
        model = weakref.ref(running.island._model)
        del running
        await jobs._place.pause.by_hand(None)
        facts = await until_status(jobs, "paused")
        assert (facts["why"], facts["waiting"]) == ("", WAITS)
        gc.collect()
        assert model() is None
        await jobs._place.pause.resume()
        await some_rounds(jobs, 1)
        facts = await until_status(jobs, "running")
        assert facts["round"] > 2
        assert facts["waiting"] == ""

    await run_alone(tmp_path, train)


async def test_a_node_that_is_started_while_paused_trains_once_it_is_not(tmp_path: Path) -> None:
    async def train(jobs: TrainJobs) -> None:
        assert (await until_status(jobs, "paused"))["waiting"] == WAITS
        assert not jobs.running
        await jobs._place.pause.resume()
        await some_rounds(jobs, 1)

    async def pause(jobs: TrainJobs) -> None:
        await some_rounds(jobs, 0)
        await jobs._place.pause.by_hand(None)

    await found_and_train(tmp_path, wish_in(tmp_path))
    await run_alone(tmp_path, pause)
    await run_alone(tmp_path, train)


async def test_a_job_that_is_founded_or_joined_while_paused_begins_after_it(tmp_path: Path) -> None:
    async def train(jobs: TrainJobs) -> None:
        await jobs._place.pause.by_hand(None)
        facts = await jobs.found(wish_in(tmp_path))
        assert (facts["status"], facts["waiting"]) == ("paused", WAITS)
        assert (await jobs.leave("fish"))["status"] == "left"
        assert not jobs._waiting
        for _ in range(2):  # it waits already the second time
            facts = await jobs.join("fish")
            assert (facts["status"], facts["waiting"]) == ("paused", WAITS)
        await jobs._place.pause.resume()
        await some_rounds(jobs, 1)
        assert not jobs._waiting

    await run_alone(tmp_path, train)


async def test_that_nobody_uses_the_blocks_does_not_pause_training(tmp_path: Path) -> None:
    async def train(jobs: TrainJobs) -> None:
        await jobs.found(wish_in(tmp_path))
        jobs._place.pause.by_rule(because("pause_unused", "nobody uses its blocks, so they are unloaded"))
        await some_rounds(jobs, 1)
        jobs._place.pause.by_rule(because("pause_battery", "this machine runs on battery"))
        facts = await until_status(jobs, "paused")
        assert facts["waiting"] == "waits for the end of the pause: this machine runs on battery"
        jobs._place.pause.rule_over()
        await some_rounds(jobs, 1)

    await run_alone(tmp_path, train)


async def test_a_pause_while_a_job_begins_holds_for_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, begun, may_go_on = founding.make_model, trio.Event(), threading.Event()
    token = trio.lowlevel.current_trio_token()

    def slow(*args: Any) -> Any:
        trio.from_thread.run_sync(begun.set, trio_token=token)
        assert may_go_on.wait(60)
        return make(*args)

    async def train(jobs: TrainJobs) -> None:
        await begun.wait()
        await jobs._place.pause.by_hand(None)
        may_go_on.set()
        await until_status(jobs, "paused")
        await until(lambda: not jobs.running and jobs._waiting)
        await jobs._place.pause.resume()
        await some_rounds(jobs, 1)

    await found_and_train(tmp_path, wish_in(tmp_path))
    monkeypatch.setattr(founding, "make_model", slow)
    await run_alone(tmp_path, train)


async def test_a_job_that_is_left_while_it_ends_for_a_pause_is_left(tmp_path: Path) -> None:
    async def train(jobs: TrainJobs) -> None:
        await jobs.found(wish_in(tmp_path))
        await some_rounds(jobs, 1)
        await jobs._place.pause.by_hand(None)
        assert (await jobs.leave("fish"))["status"] == "left"
        assert not jobs.running
        assert not jobs._waiting

    await run_alone(tmp_path, train)


async def test_a_finished_job_that_is_kept_for_late_members_is_not_kept_while_paused(tmp_path: Path) -> None:
    async def train(jobs: TrainJobs) -> None:
        await jobs.found(replace(wish_in(tmp_path), steps=4))
        await until_status(jobs, "finished")
        assert jobs._server.islands
        await jobs._place.pause.by_hand(None)
        await until(lambda: not jobs._server.islands)

    await run_alone(tmp_path, train)

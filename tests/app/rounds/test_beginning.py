"""Training jobs that take long to begin: they are left meanwhile, and other jobs do not wait for them."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from app.core.errors import AppError
from app.rounds import founding, job_text, train_jobs
from app.rounds.train_jobs import TrainJobs
from app.rounds.train_store import JoinWords
from tests.app.rounds.test_own_data import Node, made_up, open_nodes, state_files
from tests.app.rounds.test_rejoining import run_alone, some_rounds, until, until_status, wish_in


class SlowModel:
    """Holds up whoever makes a model, until it may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        make, loop = founding.make_model, trio.lowlevel.current_trio_token()
        self.begun, self.may_go_on = trio.Event(), threading.Event()

        def slow(*args: Any) -> Any:
            loop.run_sync_soon(self.begun.set)
            assert self.may_go_on.wait(60)
            return make(*args)

        monkeypatch.setattr(founding, "make_model", slow)


class SlowText:
    """A node to which a text does not come, and that joins a job nevertheless."""

    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.jobs, self.error = trio.Event(), node.jobs, ""
        self.ended = trio.Event()

        async def never(*args: Any, **more: Any) -> Any:
            self.begun.set()
            await trio.sleep_forever()

        monkeypatch.setattr(node.jobs._place.states, "fetch", never)

    async def join(self, target: str) -> None:
        """Join a job; what it fails with is in `error`."""
        with pytest.raises(AppError) as raised:
            await self.jobs.join(target)
        self.error = str(raised.value)
        self.ended.set()


@pytest.mark.parametrize("how", ["found", "join"])
async def test_a_job_is_left_while_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    errors, left = list[str](), list[str]()

    async def train(jobs: TrainJobs) -> None:
        if how == "join":
            await jobs.found(wish_in(tmp_path))
            await jobs.leave("fish")
        slow = SlowModel(monkeypatch)

        async def begin() -> None:
            with pytest.raises(AppError) as raised:
                await (jobs.found(wish_in(tmp_path)) if how == "found" else jobs.join("fish"))
            errors.append(str(raised.value))

        async def leave() -> None:
            left.append((await jobs.leave("fish"))["status"])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(begin)
            await slow.begun.wait()
            nursery.start_soon(leave)
            await trio.testing.wait_all_tasks_blocked(0.05)
            slow.may_go_on.set()
        assert left == ["left"]
        assert errors == ["fish was left before it began: `shoal train join fish` begins again"]
        assert not jobs.running
        assert (await until_status(jobs, "left"))["round"] == 0
        assert state_files(tmp_path / "0") == []
        await jobs.join("fish")
        await some_rounds(jobs, 1)

    await run_alone(tmp_path, train)


async def test_a_job_is_left_while_its_text_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_nodes(tmp_path) as nodes, trio.open_nursery() as nursery:
        await nodes[0].jobs.found(wish_in(tmp_path))
        slow = SlowText(nodes[1], monkeypatch)
        nursery.start_soon(slow.join, "fish")
        await slow.begun.wait()
        with trio.fail_after(10):
            assert (await slow.jobs.leave("fish"))["status"] == "left"
            await slow.ended.wait()
        assert slow.error.startswith("fish was left before it began")
        assert [(facts["status"], facts["waiting"]) for facts in await slow.jobs.facts()] == [("left", "")]
        assert state_files(tmp_path / "1") == []
        await slow.jobs.remove("fish")
        with pytest.raises(AppError, match="no training job is named fish"):
            await slow.jobs.leave("fish")


async def test_other_jobs_go_on_and_are_removed_while_a_text_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_nodes(tmp_path) as nodes, trio.open_nursery() as nursery:
        await nodes[0].jobs.found(wish_in(tmp_path))
        jobs = nodes[1].jobs
        for name in ("birds", "worms"):
            await jobs.found(replace(wish_in(tmp_path), name=name))
        await jobs.leave("worms")
        slow = SlowText(nodes[1], monkeypatch)
        nursery.start_soon(slow.join, "fish")
        await slow.begun.wait()
        with trio.fail_after(60):
            await jobs._place.pause.by_hand(None)
            await until(lambda: not jobs.running)
            await jobs._place.pause.resume()
            await some_rounds(jobs, 1)
            await jobs.remove("worms")
            assert {facts["name"] for facts in await jobs.facts()} == {"birds", "fish"}
            await jobs.leave("fish")
        await slow.ended.wait()


async def test_a_job_that_begins_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_nodes(tmp_path) as nodes, trio.open_nursery() as nursery:
        await nodes[0].jobs.found(wish_in(tmp_path))
        slow = SlowText(nodes[1], monkeypatch)
        nursery.start_soon(slow.join, "fish")
        await slow.begun.wait()
        with trio.fail_after(10), pytest.raises(AppError, match="this node takes part in fish"):
            await slow.jobs.remove("fish")
        await slow.jobs.leave("fish")
        await slow.jobs.remove("fish")
        assert await slow.jobs.facts() == []


async def test_a_join_ends_when_nobody_that_has_the_text_is_a_member_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_text, "LOOK_S", 0.05)
    is_member: Callable[[str], bool] = lambda peer: not gone  # noqa: E731
    async with open_nodes(tmp_path) as nodes, trio.open_nursery() as nursery:
        gone = False
        await nodes[0].jobs.found(wish_in(tmp_path))
        slow = SlowText(nodes[1], monkeypatch)
        slow.jobs._place = replace(slow.jobs._place, is_member=is_member)
        nursery.start_soon(slow.join, "fish")
        await slow.begun.wait()
        gone = True
        with trio.fail_after(10):
            await slow.ended.wait()
        assert slow.error.startswith("no member that has the text of fish is in the swarm any more: try again with")


async def test_a_job_whose_text_comes_slowly_is_shown_and_what_it_fails_with_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_jobs, "JOIN_S", 0.0)
    monkeypatch.setattr(job_text, "LOOK_S", 0.05)
    async with open_nodes(tmp_path) as nodes:
        gone = False
        await nodes[0].jobs.found(wish_in(tmp_path))
        slow = SlowText(nodes[1], monkeypatch)
        slow.jobs._place = replace(slow.jobs._place, is_member=lambda peer: not gone)
        joined = await slow.jobs.join("fish")
        assert (joined["status"], joined["name"]) == ("paused", "fish")
        with trio.fail_after(60):
            await slow.begun.wait()
        again, [shown] = await slow.jobs.join("fish"), await slow.jobs.facts()
        assert again["waiting"] == shown["waiting"]
        assert re.fullmatch(r"fetches its text \(0 B of [1-9][0-9.]* kB\)", shown["waiting"])
        gone = True
        failed = await until_status(slow.jobs, "failed")
        assert failed["why"].startswith("no member that has the text of fish is in the swarm any more: try again with")
        assert failed["waiting"] == ""


async def until_it_waits(jobs: TrainJobs, words: str) -> None:
    """Wait in real time until the only job says what it waits for."""
    with trio.fail_after(60):
        while (await until_status(jobs, "paused"))["waiting"] != words:  # noqa: ASYNC110
            await trio.sleep(0.01)


@pytest.mark.parametrize("own_data", [False, True])
async def test_a_join_goes_on_after_a_restart_with_what_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_data: bool
) -> None:
    monkeypatch.setattr(job_text, "HOLDERS_AGAIN_S", 0.05)
    (tmp_path / "two.txt").write_text(made_up(2))
    said = ([str(tmp_path / "two.txt")], "CC0-1.0") if own_data else ([], "")
    async with open_nodes(tmp_path) as nodes:
        await nodes[0].jobs.found(replace(wish_in(tmp_path), own_data=own_data))
        with monkeypatch.context() as patched:
            patched.setattr(train_jobs, "JOIN_S", 0.0)
            slow = SlowText(nodes[1], patched)
            await slow.jobs.join("fish", *said)
            with trio.fail_after(60):
                await slow.begun.wait()

    async def wait(jobs: TrainJobs) -> None:
        await until_it_waits(jobs, "waits for a member that has its text")

    await run_alone(tmp_path, wait, number=1)
    async with open_nodes(tmp_path) as nodes:
        await some_rounds(nodes[1].jobs, 1)
        [running] = nodes[1].jobs.running.values()
        own = running.island.own_data
        assert (own and (own.source, own.licence)) == (("two.txt", "CC0-1.0") if own_data else None)
        assert nodes[1].jobs._store.joining(running.job) is None
        await nodes[1].jobs.leave("fish")


async def test_a_job_that_waits_for_its_text_after_a_restart_is_left_and_joined_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_nodes(tmp_path) as nodes:
        await nodes[0].jobs.found(wish_in(tmp_path))
        with monkeypatch.context() as patched:
            patched.setattr(train_jobs, "JOIN_S", 0.0)
            slow = SlowText(nodes[1], patched)
            await slow.jobs.join("fish")
            with trio.fail_after(60):
                await slow.begun.wait()

    async def leave(jobs: TrainJobs) -> None:
        await until_it_waits(jobs, "waits for a member that has its text")
        with trio.fail_after(60):
            assert (await jobs.leave("fish"))["status"] == "left"

    async def look(jobs: TrainJobs) -> None:
        assert [facts["status"] for facts in await jobs.facts()] == ["left"]
        assert not jobs._beginnings

    await run_alone(tmp_path, leave, number=1)
    await run_alone(tmp_path, look, number=1)
    async with open_nodes(tmp_path) as nodes:
        await until(lambda: nodes[0].jobs.running)
        await nodes[1].jobs.join("fish")
        await some_rounds(nodes[1].jobs, 1)


async def test_members_that_had_a_job_stay_known_when_it_is_joined_again(tmp_path: Path) -> None:
    """A search by hash ends with the first member that names it, which may be one that has nothing of it."""
    async with open_nodes(tmp_path) as nodes:
        await nodes[0].jobs.found(wish_in(tmp_path))
        [running] = nodes[0].jobs.running.values()
        for names in (["one"], ["liar", running.island.peer]):
            await nodes[0].jobs._text(running.job).note(names)
        assert {*nodes[0].jobs._store.acquaintances(running.job)} == {"one", "liar"}


async def test_what_was_said_to_join_may_be_damaged(tmp_path: Path) -> None:
    """The files of an own text are then asked for again."""
    async with open_nodes(tmp_path) as nodes:
        await nodes[0].jobs.found(replace(wish_in(tmp_path), own_data=True))
        [running] = nodes[0].jobs.running.values()
        store = nodes[1].jobs._store
        job = store.begin_joining(running.job.raw, JoinWords(("a.txt",), "MIT"))
        assert store.joining(job) == JoinWords(("a.txt",), "MIT")
        for content in (b"", b"{}", b'{"data":7,"licence":""}', b"\0" * 40):
            (job.folder / "joining.json").write_bytes(content)
            assert store.joining(job) == JoinWords()
        with pytest.raises(AppError, match="name yours with --data"):
            await nodes[1].jobs.join("fish")


async def test_a_job_that_is_removed_as_it_finishes_is_not_kept_for_late_members(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its end and the task that answers late members."""

    async def train(jobs: TrainJobs) -> None:
        await jobs.found(replace(wish_in(tmp_path), steps=4))
        [running] = jobs.running.values()
        serve, removed = jobs._serve_the_late, trio.Event()

        async def serve_later(*args: Any) -> None:
            await removed.wait()
            await serve(*args)

        monkeypatch.setattr(jobs, "_serve_the_late", serve_later)
        with trio.fail_after(60):
            await running.ended.wait()
            await jobs.remove("fish")
        removed.set()
        await until(lambda: not jobs._server.islands)

    await run_alone(tmp_path, train)

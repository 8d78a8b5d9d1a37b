"""A fine-tuning job waits for what may pass, such as members that are away or a pause of its node, and then goes on."""

from __future__ import annotations

import gc
import json
import re
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
import trio
from trio.testing import MockClock

from app.config.home import Home
from app.core.network import FrameStream
from app.core.reasons import because
from app.courtesy.pause import PauseControl
from app.routing.route import NoRoute, Route
from app.training.hop import TrainingTerms
from app.training.job_store import JobSource, JobStore, Progress
from app.training.job_view import job_view
from app.training.material import TrainingWish
from app.training.states import StateStore
from app.training.swarm_jobs import JobPlace, SwarmJobs
from app.training.trainer import HopLost, Replicas, _HopGroup
from engine.model.ends import load_ends
from engine.sources.base import ModelSource
from engine.sources.tiny import open_tiny
from engine.swarm_ends import SwarmEnds
from engine.training.adapters import AdapterSettings
from tests.app.hash_model import InlineDevice
from tests.app.training.job_swarm import JobSwarm, in_thread, open_job_swarm
from tests.engine.training import OPTIONS

SPLITS = ((0, 4), (4, 8))
STEPS = 12
HOURS = 3600.0
RECORDS = [{"prompt": f"What is number {n}?", "completion": f"It is {n * 7}."} for n in range(8)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return open_tiny(tmp_path_factory.mktemp("model"))


class Owner:
    """A node that fine-tunes over a swarm, from one start to one end of it."""

    def __init__(self, swarm: JobSwarm, folder: Path) -> None:
        self.swarm, self.home = swarm, Home.open(folder / "home")
        network: Any = swarm.fabric.nodes.get("owner") or swarm.fabric.node("owner")
        source, self.device = swarm.source, InlineDevice()
        self.pause = PauseControl(folder / "pause.json", lambda: None)

        async def training_ends() -> tuple[ModelSource, SwarmEnds]:
            return source, SwarmEnds(source, load_ends(source, OPTIONS), torch.float32)

        async def no_forecast(*args: Any) -> None:
            return None

        async def no_server(stream: FrameStream) -> None:
            raise AssertionError("the owner trains no blocks")

        ends: Any = SimpleNamespace(training_ends=training_ends)
        forecaster: Any = SimpleNamespace(step_s=no_forecast)
        place = JobPlace(
            swarm="s", model="0" * 64, model_name=lambda: "tiny-random", network=network, ends=ends,
            device=self.device, states=StateStore(network, folder / "states", lambda peer: True, in_thread),
            activations=swarm.activations("owner"), routes=lambda blocks, wire: self.route,
            replicas=lambda blocks, wire: Replicas(), own_server=no_server, slow_wire=lambda route, epochs: None,
            forecaster=forecaster, pause=self.pause,
        )  # fmt: skip
        self.jobs = SwarmJobs(self.home, place)

    async def route(self, avoid: frozenset[str]) -> Route:
        return await self.swarm.route(avoid)

    def job_of(self, out: str) -> Any:
        """The job that makes this adapter, as people see it."""
        [job] = [job for job in JobStore(self.home).all() if job.record.out == out]
        return job_view(job, self.jobs.running.get(job.record.id))

    @property
    def job(self) -> Any:
        """The first job."""
        return self.job_of("sevens")

    async def until(self, holds: Callable[[Any], object], within_s: float = 600.0, out: str = "sevens") -> None:
        """Wait until something holds for a job."""
        until = trio.current_time() + within_s
        while not holds(self.job_of(out)):
            assert trio.current_time() < until, f"not within {within_s} s: {self.job_of(out)}"
            await trio.sleep(0.25)

    def end(self, wish: Literal["pause", "stop"]) -> None:
        """Ask of the first job what `shoal jobs` asks."""
        store = JobStore(self.home)
        store.end(store.all()[-1], wish)


@asynccontextmanager
async def started(swarm: JobSwarm, folder: Path) -> AsyncIterator[Owner]:
    """The owner's node, from its start to its end."""
    owner = Owner(swarm, folder)
    async with trio.open_nursery() as nursery:
        await nursery.start(owner.jobs.run)
        yield owner
        nursery.cancel_scope.cancel()


def wish_in(folder: Path, out: str = "sevens") -> TrainingWish:
    data = folder / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, RECORDS)))
    files, adapter = JobSource("", str(data)), AdapterSettings(4, 8.0)
    return TrainingWish(out, files, adapter, epochs=3, batch=2, length=64, rate=1e-3, validation=0.0)


_LOSSES: list[tuple[float, ...]] = []


async def losses_of_one_undisturbed(source: ModelSource, folder: Path) -> tuple[float, ...]:
    if _LOSSES:  # they are the same for all tests
        return _LOSSES[0]
    async with open_job_swarm(source, folder / "one", *SPLITS, delay_s=0.01) as swarm:
        async with started(swarm, folder / "one") as owner:
            await owner.jobs.start(wish_in(folder))
            await owner.until(lambda job: job.status == "finished")
            _LOSSES.append(owner.job.losses)
            return _LOSSES[0]


def goes_on(owner: Owner) -> Callable[[Any], bool]:
    """True once the job waits for nothing and has made another step."""
    before = owner.job.step
    return lambda job: job.status in ("running", "finished") and not job.waiting and job.step > before


@pytest.mark.soak
async def test_a_job_waits_for_hours_for_a_holder_that_is_away(
    source: ModelSource, tmp_path: Path, patient_clock: MockClock
) -> None:
    wanted = await losses_of_one_undisturbed(source, tmp_path)
    async with open_job_swarm(source, tmp_path, *SPLITS, delay_s=0.01) as swarm, started(swarm, tmp_path) as owner:
        await owner.jobs.start(wish_in(tmp_path))
        await owner.until(lambda job: job.step >= 3)
        swarm.kill("n1")  # the lid of a laptop is closed
        await owner.until(lambda job: job.waiting)
        text = "waits for members: no route: nobody serves block 4 now; wait until a member hosts it"
        for _ in range(3):
            await trio.sleep(HOURS)
            assert (owner.job.status, owner.job.why, owner.job.waiting) == ("running", "", text)
        asked = 0

        async def counted(avoid: frozenset[str]) -> Route:
            nonlocal asked
            asked += 1
            return await swarm.route(avoid)

        owner.route = counted  # type: ignore[method-assign]
        await trio.sleep(HOURS)
        assert asked < HOURS / 3, "to wait costs little"
        await swarm.train("n2", 4, 8)
        await owner.until(goes_on(owner), within_s=120)
        await owner.until(lambda job: job.status == "finished")
        assert (owner.job.losses, owner.job.step) == (wanted, STEPS)


async def test_a_job_waits_for_a_holder_that_is_known_and_does_not_answer(
    source: ModelSource, tmp_path: Path, patient_clock: MockClock
) -> None:
    """Others still tell of it, or it is this machine whose network is away."""
    async with open_job_swarm(source, tmp_path, *SPLITS, delay_s=0.01) as swarm, started(swarm, tmp_path) as owner:
        await owner.jobs.start(wish_in(tmp_path))
        await owner.until(lambda job: job.step >= 3)
        swarm.fabric.freeze("n1")
        await owner.until(lambda job: job.waiting, within_s=HOURS)
        opened = swarm.nodes["n0"].server._jobs.keys()
        for _ in range(3):
            await trio.sleep(HOURS / 4)
            assert (owner.job.status, owner.job.waiting[:19]) == ("running", "waits for members: ")
            assert "n1" in owner.job.waiting
            assert len(opened) <= 1
        swarm.fabric.resume("n1")
        await owner.until(goes_on(owner), within_s=120)


@pytest.mark.parametrize("first_is", ["finished", pytest.param("paused", marks=pytest.mark.soak)])
async def test_a_second_job_waits_for_hops_that_train_another_and_begins_after_it(
    source: ModelSource, tmp_path: Path, patient_clock: MockClock, first_is: str
) -> None:
    wanted = await losses_of_one_undisturbed(source, tmp_path)
    async with open_job_swarm(source, tmp_path, *SPLITS, delay_s=0.3) as swarm, started(swarm, tmp_path) as owner:
        first = await owner.jobs.start(wish_in(tmp_path))
        await owner.until(lambda job: job.step >= 1)
        await owner.jobs.start(wish_in(tmp_path, "eights"))
        await owner.until(lambda job: job.waiting, within_s=20, out="eights")
        text = r"waits for members: n[01]: it trains as many jobs as it may: raise `train_jobs` there for more"
        assert re.fullmatch(text, owner.job_of("eights").waiting)
        step = owner.job.step
        await owner.until(lambda job: job.step >= step + 4)
        assert owner.job_of("eights").status == "running"
        assert re.fullmatch(text, owner.job_of("eights").waiting)
        assert owner.jobs.running[first.record.id].trainer.figures.epochs == 1, "it was not disturbed"
        if first_is == "paused":
            owner.end("pause")
        await owner.until(lambda job: job.status == first_is)
        await owner.until(lambda job: job.step >= 1, within_s=120, out="eights")
        await owner.until(lambda job: job.status == "finished", out="eights")
        assert owner.job_of("eights").losses == wanted


async def test_a_job_that_waited_for_long_is_not_ended_by_one_fault(
    source: ModelSource, tmp_path: Path, patient_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_job_swarm(source, tmp_path, *SPLITS, delay_s=0.01) as swarm, started(swarm, tmp_path) as owner:
        await owner.jobs.start(wish_in(tmp_path))
        await owner.until(lambda job: job.step >= 3)
        swarm.fabric.freeze("n1")
        await owner.until(lambda job: job.waiting, within_s=HOURS)
        begin, faults = _HopGroup.open, 0

        async def faulty(group: _HopGroup, route: Route) -> None:
            nonlocal faults
            if faults < 3:
                faults += 1
                raise HopLost("n1", "it lost what it had")
            await begin(group, route)

        monkeypatch.setattr(_HopGroup, "open", faulty)
        swarm.fabric.resume("n1")
        await owner.until(goes_on(owner), within_s=300)
        assert faults == 3


@pytest.mark.parametrize("wish", ["pause", "stop"])
async def test_a_job_that_waits_is_paused_and_stopped_at_once(
    source: ModelSource, tmp_path: Path, patient_clock: MockClock, wish: Literal["pause", "stop"]
) -> None:
    async with open_job_swarm(source, tmp_path, *SPLITS, delay_s=0.01) as swarm, started(swarm, tmp_path) as owner:
        job = await owner.jobs.start(wish_in(tmp_path))
        await owner.until(lambda job: job.step >= 6)
        swarm.kill("n1")
        await owner.until(lambda job: job.waiting)
        for seconds in (0.5, 25.0, 300.0):  # in the middle of looking for a route, and of waiting
            await trio.sleep(seconds)
            owner.end(wish)
            await owner.until(lambda job: job.status != "running", within_s=3.0)
            assert (owner.job.status, owner.job.waiting) == ("paused" if wish == "pause" else "stopped", "")
            assert not owner.jobs.has_jobs
            if wish == "stop":
                assert JobStore(owner.home).load_state(job.record.id) is None
                break
            await owner.jobs.resume(job.record.id)
            await owner.until(lambda job: job.waiting)


@pytest.mark.parametrize("paused_meanwhile", [False, True])
async def test_a_job_that_waited_when_its_node_ended_goes_on_unless_it_was_paused_meanwhile(
    source: ModelSource, tmp_path: Path, patient_clock: MockClock, paused_meanwhile: bool
) -> None:
    async with open_job_swarm(source, tmp_path, *SPLITS, delay_s=0.01) as swarm:
        async with started(swarm, tmp_path) as owner:
            await owner.jobs.start(wish_in(tmp_path))
            await owner.until(lambda job: job.step >= 3)
            swarm.kill("n1")
            await owner.until(lambda job: job.waiting)
        assert (owner.job.status, owner.job.waiting) == ("paused", "")
        if paused_meanwhile:
            owner.end("pause")
        await swarm.train("n2", 4, 8)
        async with started(swarm, tmp_path) as owner:
            if paused_meanwhile:
                await trio.sleep(300)
                assert owner.job.status == "paused"
                assert not owner.jobs.has_jobs
            else:
                await owner.until(lambda job: job.status == "finished")


async def test_a_job_is_paused_with_its_node_and_goes_on_after_it(
    source: ModelSource, tmp_path: Path, patient_clock: MockClock
) -> None:
    wanted = await losses_of_one_undisturbed(source, tmp_path)
    async with open_job_swarm(source, tmp_path, *SPLITS, delay_s=0.01) as swarm:
        async with started(swarm, tmp_path) as owner:
            await owner.jobs.start(wish_in(tmp_path))
            await owner.until(lambda job: job.step >= 3)
            [trainer] = [weakref.ref(running.trainer) for running in owner.jobs.running.values()]
            owner.pause.by_rule(because("pause_battery", "this machine runs on battery"))
            await owner.until(lambda job: job.waiting, within_s=3)
            assert owner.job.waiting == "waits for the end of the pause: this machine runs on battery"
            await trio.sleep(HOURS)
            gc.collect()
            assert trainer() is None, "it is still in memory"
            await owner.pause.by_hand(None)
            await owner.until(lambda job: job.waiting.endswith("paused by hand"), within_s=3)
            owner.pause.rule_over()
            assert (owner.job.status, owner.job.why) == ("running", "")
        async with started(swarm, tmp_path) as owner:  # a restart does not end a person's pause
            await owner.until(lambda job: job.waiting == "waits for the end of the pause: paused by hand")
            await owner.pause.resume()
            await owner.until(lambda job: job.status == "finished")
            assert (owner.job.losses, owner.job.step) == (wanted, STEPS)


async def test_that_nobody_uses_the_blocks_does_not_pause_a_job(
    source: ModelSource, tmp_path: Path, patient_clock: MockClock
) -> None:
    async with open_job_swarm(source, tmp_path, *SPLITS, delay_s=0.01) as swarm, started(swarm, tmp_path) as owner:
        owner.pause.by_rule(because("pause_unused", "nobody uses its blocks, so they are unloaded"))
        await owner.jobs.start(wish_in(tmp_path))
        await owner.until(lambda job: job.status == "finished")


async def test_a_job_that_is_begun_while_its_node_is_paused_waits_and_can_be_stopped(
    source: ModelSource, tmp_path: Path, patient_clock: MockClock
) -> None:
    async with open_job_swarm(source, tmp_path, *SPLITS, delay_s=0.01) as swarm, started(swarm, tmp_path) as owner:
        await owner.pause.by_hand(None)
        job = await owner.jobs.start(wish_in(tmp_path))
        await owner.until(lambda job: job.waiting, within_s=3)
        assert not owner.jobs.running
        await owner.jobs.resume(job.record.id)  # it is on its way already
        owner.end("pause")
        await owner.until(lambda job: job.status == "paused", within_s=3)
        await owner.jobs.resume(job.record.id)
        await owner.until(lambda job: job.waiting, within_s=3)
        owner.end("stop")
        await owner.until(lambda job: job.status == "stopped", within_s=3)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        pytest.param(OSError(28, "No space left on device"), marks=pytest.mark.soak),
    ],
    ids=["memory", "disk"],
)
async def test_a_job_waits_for_memory_and_for_room_on_the_disk(
    source: ModelSource, tmp_path: Path, patient_clock: MockClock, error: Exception
) -> None:
    wanted = await losses_of_one_undisturbed(source, tmp_path)
    async with open_job_swarm(source, tmp_path, *SPLITS, delay_s=0.01) as swarm, started(swarm, tmp_path) as owner:
        run_later, is_full = owner.device.run_later, False

        async def crowded(function: Any, *args: Any) -> Any:
            if is_full:
                raise error
            return await run_later(function, *args)

        owner.device.run_later = crowded  # type: ignore[method-assign]
        await owner.jobs.start(wish_in(tmp_path))
        await owner.until(lambda job: job.step >= 6)
        is_full = True
        await owner.until(lambda job: job.waiting)
        assert owner.job.waiting.startswith(("waits for memory: ", "waits for room on the disk: "))
        assert str(error) in owner.job.waiting
        assert not owner.jobs.running
        for _ in range(3):
            await trio.sleep(HOURS / 18)
            assert (owner.job.status, owner.job.why) == ("running", "")
        is_full = False
        await owner.until(lambda job: job.status == "finished")
        assert (owner.job.losses, owner.job.step) == (wanted, STEPS)


async def test_a_job_that_all_refuse_fails_and_one_whose_data_changed(
    source: ModelSource, tmp_path: Path, patient_clock: MockClock
) -> None:
    async with open_job_swarm(source, tmp_path, (0, 4)) as swarm:
        await swarm.train("n1", 4, 8, TrainingTerms(refuses=lambda owner: "it trains for members it trusts only"))
        async with started(swarm, tmp_path) as owner:

            async def route(avoid: frozenset[str]) -> Route:
                if "n1" in avoid:
                    raise NoRoute(4, " for this job", peers=["n1"])
                return await swarm.route(avoid)

            owner.route = route  # type: ignore[method-assign]
            job = await owner.jobs.start(wish_in(tmp_path))
            await owner.until(lambda job: job.status == "failed")
            assert "it trains for members it trusts only" in owner.job.why
            assert owner.job.waiting == ""
        store = JobStore(owner.home)
        store.save_progress(job.record.id, replace(Progress("running"), step=0))
        (tmp_path / "data.jsonl").write_text(json.dumps(RECORDS[0]))
        async with started(swarm, tmp_path) as owner:
            await owner.until(lambda job: job.status == "failed")
            assert "has changed since it began" in owner.job.why

"""When a job's state is kept: after some steps or some minutes, as long as that takes little of the job's time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from app.training.swarm_jobs import SNAPSHOT_AFTER_S, SNAPSHOT_SHARE
from app.training.trainer import JobHooks, Snapshot, StepDone
from engine.sources.base import ModelSource
from engine.sources.tiny import open_tiny
from tests.app.training.job_swarm import UNHURRIED, CountingDevice, JobSwarm, Losses, batches_of, open_job_swarm


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return open_tiny(tmp_path_factory.mktemp("model"))


class SlowDevice(CountingDevice):
    """A device on which a block takes a while, forwards and to give its state."""

    forward_s = state_s = 0.0  # of one block

    async def run_later(self, function: Callable[..., Any], *args: Any) -> Any:
        name = getattr(function, "__name__", "")
        await trio.sleep({"forward": self.forward_s, "state": self.state_s}.get(name, 0.0))
        return await super().run_later(function, *args)


@asynccontextmanager
async def slow_swarm(
    source: ModelSource, folder: Path, step_s: float = 0.0, state_s: float = 0.0
) -> AsyncIterator[JobSwarm]:
    """One node that trains all blocks slowly."""
    async with open_job_swarm(source, folder, delay_s=0.01) as swarm:
        device = SlowDevice()
        blocks = source.config.n_blocks
        device.forward_s, device.state_s = step_s / blocks / len(batches_of(0)), state_s / blocks
        await swarm.train("hop", 0, 8, device=device)
        yield swarm


async def saved_of(swarm: JobSwarm, steps: int) -> list[int]:
    """Run a job; return the versions of its snapshots."""
    saved: list[int] = []

    async def save(snapshot: Snapshot) -> None:
        saved.append(snapshot.version)

    terms = {"snapshot_share": SNAPSHOT_SHARE, "snapshot_after_s": SNAPSHOT_AFTER_S}
    owner = swarm.owner(patience=UNHURRIED, every=10, terms=terms)
    await owner.run(steps, batches_of, Losses(), JobHooks(on_snapshot=save))
    return saved


async def test_the_state_of_a_job_with_long_steps_is_kept_after_some_minutes(
    source: ModelSource, tmp_path: Path, patient_clock: MockClock
) -> None:
    """Only steps were counted, so that ten of them could be lost, however long they took."""
    async with slow_swarm(source, tmp_path, step_s=90.0) as swarm:
        assert await saved_of(swarm, 6) == [2, 4, 6]


async def test_a_state_that_takes_long_to_keep_is_kept_seldom(
    source: ModelSource, tmp_path: Path, patient_clock: MockClock
) -> None:
    """As much of the time as it costs is a small share, as measured the last time."""
    async with slow_swarm(source, tmp_path, step_s=90.0, state_s=20.0) as swarm:
        # 20 s are 3 % of eleven minutes, in which there are eight steps.
        assert await saved_of(swarm, 12) == [2, 10, 12]


async def test_short_steps_are_kept_as_before(source: ModelSource, tmp_path: Path, patient_clock: MockClock) -> None:
    async with slow_swarm(source, tmp_path, step_s=1.0) as swarm:
        assert await saved_of(swarm, 12) == [10, 12]


async def test_a_state_that_takes_long_to_keep_is_kept_before_a_job_is_stopped_again(
    source: ModelSource, tmp_path: Path, patient_clock: MockClock
) -> None:
    """After five steps were lost it was still not kept, as it had taken long: the job went back to it for ever."""
    async with slow_swarm(source, tmp_path, step_s=1.0, state_s=10.0) as swarm, trio.open_nursery() as nursery:
        made: list[int] = []

        def break_off(step: StepDone) -> None:
            made.append(step.version)
            assert len(made) < 30, "the job does not come forward"
            if len(made) % 7 == 0:
                (job,) = swarm.nodes["hop"].server._jobs.values()
                nursery.start_soon(job.answers.close)

        owner = swarm.owner(patience=UNHURRIED, every=2, terms={"snapshot_share": SNAPSHOT_SHARE})
        await owner.run(12, lambda version: batches_of(version)[:1], break_off)

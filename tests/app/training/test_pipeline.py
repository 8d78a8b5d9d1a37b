"""How busy a step keeps its hops: micro-batches follow each other, so that hops seldom wait. In simulated time.

A hop's share of time without work is its bubble; with m micro-batches over n hops a schedule of one forward and one
backward in turn has (n - 1) / (m + n - 1) of it, 0.2 for 8 over 3.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from app.training.hop import HopJobStats, StepBusy
from engine.sources.base import ModelSource
from engine.sources.tiny import open_tiny
from engine.training.local_trainer import MicroBatch
from tests.app.hash_model import whole_result
from tests.app.training.job_swarm import UNHURRIED, CountingDevice, Losses, batches_of, open_job_swarm

SPANS = ((0, 2), (2, 5), (5, 8))
MICRO_BATCHES, STEPS = 8, 2
SECONDS = {"forward": 1.0, "backward": 3.0}  # of one block and micro-batch; a backward computes the block again


class DeviceTime:
    """Time that passes for devices alone, once everything else waits: disks and deadlines have the real one."""

    def __init__(self) -> None:
        self.now = 0.0
        self._waiting: list[tuple[float, int, trio.Event]] = []
        self._numbers = count()

    async def sleep(self, seconds: float) -> None:
        woken = trio.Event()
        heapq.heappush(self._waiting, (self.now + seconds, next(self._numbers), woken))
        await woken.wait()

    async def run(self) -> None:
        while True:
            await wait_all_tasks_blocked(0.002)
            if self._waiting:
                self.now, _, woken = heapq.heappop(self._waiting)
                woken.set()
            else:
                await trio.sleep(0.001)


class TimedDevice(CountingDevice):
    """Computes one thing at a time, for as long as `SECONDS` says, and adds that up."""

    def __init__(self, time: DeviceTime, pace: float) -> None:
        super().__init__()
        self._time, self._pace, self._turn, self.busy_s = time, pace, trio.Lock(), 0.0

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        seconds = self._pace * SECONDS.get(getattr(function, "__name__", ""), 0.0)
        async with self._turn:
            if seconds:
                await self._time.sleep(seconds)
            self.busy_s += seconds
            return whole_result(function(*args))

    async def run_later(self, function: Callable[..., Any], *args: Any) -> Any:
        return await self.run(function, *args)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return open_tiny(tmp_path_factory.mktemp("model"))


def equal_batches(version: int) -> list[MicroBatch]:
    return [batches_of(version)[0]] * MICRO_BATCHES


async def test_eight_micro_batches_keep_three_hops_busy(source: ModelSource, tmp_path: Path) -> None:
    time = DeviceTime()
    async with open_job_swarm(source, tmp_path) as swarm:
        swarm.nursery.start_soon(time.run)
        devices = []
        for index, (start, stop) in enumerate(SPANS):
            devices.append(TimedDevice(time, 6 / (stop - start)))  # every hop takes equally long
            await swarm.train(f"n{index}", start, stop, device=devices[-1])
        ended: list[float] = []
        losses = Losses({step: lambda: ended.append(time.now) for step in range(1, STEPS + 1)})
        await swarm.owner(patience=UNHURRIED).run(STEPS, equal_batches, losses)
    busy_s = sum(device.busy_s for device in devices)
    assert busy_s == pytest.approx(STEPS * MICRO_BATCHES * len(SPANS) * 6 * 4.0)
    step_s = (ended[-1] - ended[0]) / (STEPS - 1)
    bubble = 1 - busy_s / STEPS / (len(SPANS) * step_s)
    assert 0 < bubble <= 0.25, f"hops wait {bubble:.1%} of a step"


def test_a_hop_counts_its_steps_from_commit_to_commit() -> None:
    busy = StepBusy()
    busy.computed(5.0)
    busy.committed(10.0)  # the first step began when nobody looked
    assert (busy.steps_s, busy.computed_s) == (0.0, 0.0)
    busy.computed(1.0)
    busy.computed(2.0)
    busy.committed(14.0)
    assert (busy.steps_s, busy.computed_s) == (4.0, 3.0)
    busy.computed(1.0)
    busy.interrupted()  # the rest of this step runs on another route
    busy.computed(1.0)
    busy.committed(30.0)
    assert (busy.steps_s, busy.computed_s) == (4.0, 3.0)
    busy.computed(2.0)
    busy.committed(33.0)
    assert (busy.steps_s, busy.computed_s) == (7.0, 5.0)


async def test_hops_know_how_long_they_computed(source: ModelSource, tmp_path: Path) -> None:
    async with open_job_swarm(source, tmp_path, (0, 4), (4, 8)) as swarm:
        seen: list[HopJobStats] = []
        servers = [node.server for node in swarm.nodes.values()]
        losses = Losses({3: lambda: seen.extend(job for server in servers for job in server.jobs)})
        await swarm.owner(patience=UNHURRIED).run(3, equal_batches, losses)
    assert [(job.start, job.stop) for job in seen] == [(0, 4), (4, 8)]
    for job in seen:
        assert 0 < job.computed_s < job.steps_s

"""Replies at a machine that trains: steps that take long leave them their share of the device."""

from __future__ import annotations

import time
from collections.abc import Generator

import pytest
import trio

from app.core.device_thread import DeviceThread
from app.rounds.steps import LocalSteps, RoundTask
from engine.island import IslandModel, IslandTerms
from engine.training.full import FullModel
from engine.training.local_trainer import MicroBatch
from engine.training.optimiser import AdamW, Schedule
from engine.training.outer import Nesterov
from engine.training.parameters import drawn_model
from tests.app.rounds.island_swarm import CPU, SMALL

CALL_S = 0.02  # of a reply
PAUSE_S = 0.01  # between two
SECONDS = 12.0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("step_s", [0.3, 1.2])
async def test_two_thirds_of_the_device_are_left_to_replies_that_come(step_s: float) -> None:
    device, calls = DeviceThread(f"beside steps of {step_s}"), 0

    async def train() -> None:
        while True:
            await device.run_later(time.sleep, step_s)

    async def reply() -> None:
        nonlocal calls
        while True:
            await device.run(time.sleep, CALL_S)
            calls += 1
            await trio.sleep(PAUSE_S)

    with trio.move_on_after(SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(train)
            nursery.start_soon(reply)
    alone = SECONDS / (CALL_S + PAUSE_S)
    assert calls > alone / 3, f"{calls} calls of replies, {alone:.0f} without training"


@pytest.mark.timeout(60)
async def test_a_reply_does_not_wait_for_a_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    terms = IslandTerms(
        Schedule(1e-3, 100, 0), 1.0, AdamW(weight_decay=0.1), Nesterov(), "f32", robust=True, rows=16
    )  # fmt: skip
    model, device = IslandModel(SMALL, drawn_model(SMALL, 1), CPU, terms), DeviceThread("of an island")
    run, micro_s, batches = FullModel.run, 0.25, 16

    def slow(self: FullModel, batch: MicroBatch) -> Generator[None, None, float]:
        time.sleep(micro_s)  # as 1024 rows of a model of 135 million weights take on a computer without a card, or more
        return run(self, batch)

    monkeypatch.setattr(FullModel, "run", slow)
    waited: list[float] = []

    def sequences(step: int) -> list[list[int]]:
        return [[1 + step] * 16] * batches

    async def reply() -> None:
        for _ in range(3):
            await trio.sleep(0.1)
            asked = time.monotonic()
            await device.run(time.sleep, 0.0)
            waited.append(time.monotonic() - asked)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(reply)
        task = RoundTask(3, 0, sequences, lambda made: len(waited) == 3, lambda made: None)
        await LocalSteps(model, device).make(task)
    assert max(waited) < 3 * micro_s, f"a token waited for {max(waited):.1f} s, a whole step of {batches} micro-batches"

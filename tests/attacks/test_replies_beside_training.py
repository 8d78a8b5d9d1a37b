"""Replies at a machine that trains: they do not wait for a whole step of training, which can take minutes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import trio
import trio.testing

from app.core.device_thread import DeviceThread
from app.rounds.steps import LocalSteps, RoundTask
from engine.island import IslandModel, IslandTerms
from engine.training.full import FullBlocks
from engine.training.optimiser import AdamW, Schedule
from engine.training.outer import Nesterov
from engine.training.parameters import drawn_model
from tests.app.rounds.island_swarm import CPU, SMALL

PLENTY = 10_000


async def test_a_reply_waits_for_one_block_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited for all blocks of all micro-batches, so that sessions could not be opened."""
    terms = IslandTerms(
        Schedule(1e-3, 100, 0), 1.0, AdamW(weight_decay=0.1), Nesterov(), "f32", robust=True, rows=16
    )  # fmt: skip
    model, device = IslandModel(SMALL, drawn_model(SMALL, 1), CPU, terms), DeviceThread("of an island")
    begun, go_on, order = threading.Semaphore(0), threading.Semaphore(0), list[str]()
    run = FullBlocks.run

    def gated(self: FullBlocks, *args: Any) -> Any:
        begun.release()
        go_on.acquire()
        order.append("block")
        return run(self, *args)

    monkeypatch.setattr(FullBlocks, "run", gated)
    task = RoundTask(1, 0, lambda step: [[1 + step] * 16] * 4, lambda made: False, lambda made: order.append("step"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(LocalSteps(model, device).make, task)
        await trio.to_thread.run_sync(begun.acquire)
        nursery.start_soon(device.run, order.append, "reply")
        await trio.testing.wait_all_tasks_blocked()
        go_on.release(PLENTY)
    assert order[:3] == ["block", "reply", "block"]
    assert order[-1] == "step"

"""Trouble that passes by itself, in the middle of a training job: a full card, a full disk."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from app.rounds import train_jobs, train_store
from app.rounds.train_jobs import TrainJobs
from engine.island import IslandModel
from tests.app.rounds.test_rejoining import run_alone, some_rounds, wish_in

WAIT_S = 20.0


async def goes_on(jobs: TrainJobs, trouble: list[int]) -> dict[str, Any]:
    """Return the figures of the only job once it makes rounds after the trouble, or as they are after a while."""
    with trio.fail_after(60):
        while not trouble:
            await trio.sleep(0.01)
    [facts] = await jobs.facts()
    met_in = facts["round"]
    with trio.move_on_after(WAIT_S):
        while not (facts["status"] == "running" and facts["round"] > met_in + 1):
            await trio.sleep(0.05)
            [facts] = await jobs.facts()
    return facts


@pytest.mark.timeout(180)
async def test_a_card_that_is_full_for_a_moment_does_not_end_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_jobs, "MEMORY_AGAIN_S", 0.1)
    step, full = IslandModel.step, list[int]()

    def crowded(self: IslandModel, sequences: Any, number: int, seed: bytes | None = None) -> Any:
        if number >= 6 and not full:
            full.append(number)  # a game has just begun beside it
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return step(self, sequences, number, seed)

    async def train(jobs: TrainJobs) -> None:
        await jobs.found(wish_in(tmp_path))
        await some_rounds(jobs, 1)
        monkeypatch.setattr(IslandModel, "step", crowded)
        facts = await goes_on(jobs, full)
        assert facts["status"] == "running", facts["why"]

    await run_alone(tmp_path, train)


@pytest.mark.timeout(180)
async def test_a_disk_that_is_full_for_a_moment_does_not_end_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, full = train_store.write_private, list[int]()

    def crowded(path: Path, data: bytes, **how: Any) -> None:
        if path.name == "state" and len(full) < 1:
            full.append(1)
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data, **how)

    async def train(jobs: TrainJobs) -> None:
        await jobs.found(wish_in(tmp_path))
        await some_rounds(jobs, 1)
        monkeypatch.setattr(train_store, "write_private", crowded)
        facts = await goes_on(jobs, full)
        assert facts["status"] == "running", facts["why"]

    await run_alone(tmp_path, train)

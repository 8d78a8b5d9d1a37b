"""Audits in a job: a holder is asked about all of its blocks, and answers for nothing that another hop did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from app.training.trainer import JobHooks, Replicas
from engine.sources.base import ModelSource
from engine.sources.tiny import open_tiny
from engine.training.local_trainer import MicroBatch
from tests.app.training.job_swarm import ALL, UNHURRIED, Losses, open_job_swarm
from tests.engine.training import micro_batch


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return open_tiny(tmp_path_factory.mktemp("model"))


def alike(version: int) -> list[MicroBatch]:
    """Six equal micro-batches: gradients of the same data stand apart for nothing but lies."""
    ids, labels = micro_batch(2, 7, 1)
    return [MicroBatch(ids % 256, torch.where(labels < 0, labels, labels % 256))] * 6


async def test_a_holder_that_lies_in_some_of_its_blocks_is_found(source: ModelSource, tmp_path: Path) -> None:
    """It was audited for the last blocks that others hold too, and for no others."""

    def lie(blocks: Any) -> None:
        take = blocks.take_sums

        def sums(block: int) -> bytes:
            numbers = torch.frombuffer(bytearray(take(block)), dtype=torch.float32)
            return bytes((numbers * (1.5 if block < 4 else 1.0)).numpy().tobytes())

        blocks.take_sums = sums

    async with open_job_swarm(source, tmp_path, ALL, ALL, (4, 8)) as swarm:
        swarm.nodes["n1"].changes.append(lie)
        owner = swarm.owner(replicas=Replicas(swarm.holders, lambda: frozenset({"n0"})), patience=UNHURRIED)
        await owner.run(12, alike, Losses(), JobHooks(lambda: bool(owner.figures.lost)))
        assert set(owner.figures.left_out) == {"n1"}

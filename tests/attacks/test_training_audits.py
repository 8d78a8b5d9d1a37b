"""Audits in a job: a holder is asked about all of its blocks, and answers for nothing that another hop did."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from app.routing.trust import TrustBook
from app.session.frame import Frame
from app.training.audits import AuditLots, Caution, Suspect
from app.training.hop import HopJob
from app.training.trainer import JobHooks, Replicas
from app.training.wire import Kind, Pass
from engine.sources.base import ModelSource
from engine.sources.tiny import open_tiny
from engine.training.local_trainer import MicroBatch
from tests.app.training.job_swarm import ALL, UNHURRIED, JobSwarm, Losses, open_job_swarm
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
        # If "n2" was on all ways on which it lied, either may be the cause, and one rests.
        assert any("n1" in why and "not what others compute" in why for why in owner.figures.lost)


def spoil_audits(swarm: JobSwarm, name: str, to: str, kind: Kind) -> None:
    """Let a node send another wrong numbers in audits; forwards only if it had no such micro-batch in the same step."""
    server: Any = swarm.nodes[name].server
    honest, seen = server._send, set[tuple[int, int]]()

    async def send(job: HopJob, neighbour: str, frame: Frame, one: Pass, data: bytes) -> None:
        if not one.attempt:
            seen.add((one.version, one.number))
        is_audit = bool(one.attempt) if kind == Kind.BACK else (one.version, one.number) not in seen
        if neighbour == to and frame.kind == kind and is_audit:
            data = (-torch.frombuffer(bytearray(data), dtype=torch.float32)).numpy().tobytes()
        await honest(job, neighbour, frame, one, data)

    server._send = send


async def audited(
    swarm: JobSwarm, batches: Callable[[int], list[MicroBatch]] = alike, enough: float = 1
) -> tuple[Any, TrustBook]:
    """Run a job of `w`, which trains some blocks itself, until `s` was lost, or as many audits found it right."""
    book = TrustBook(clock=lambda: 0.0)
    owner = swarm.owner("w", replicas=Replicas(swarm.holders, frozenset, book), patience=UNHURRIED)
    lots: Any = AuditLots(Caution(), random.Random(1))
    owner._lots = lots
    lots.choose = lambda runs, version: [
        Suspect("s", span) for span, shares in runs.items() if "s" in {share.peer for share in shares}
    ]
    await owner.run(30, batches, Losses(), JobHooks(lambda: bool(owner.figures.lost or book.agreed("s") >= enough)))
    return owner, book


async def test_a_hop_before_a_witness_is_not_asked_if_the_audited_one_holds_its_blocks_too(
    source: ModelSource, tmp_path: Path
) -> None:
    """It spoilt what the owner's own node computed, and the honest holder was left out for good."""
    async with open_job_swarm(source, tmp_path) as swarm:
        for name, span in {"a": (0, 4), "s": ALL, "w": (4, 8)}.items():
            await swarm.train(name, *span)
        spoil_audits(swarm, "a", "w", Kind.FORWARD)
        owner, book = await audited(swarm)
        assert not owner.figures.lost
        assert book.agreed("s")


async def test_a_hop_that_a_witness_needs_is_suspected_as_much_as_the_audited_one(
    source: ModelSource, tmp_path: Path
) -> None:
    """It comes after the witness, whose blocks lie within those of the honest holder."""
    async with open_job_swarm(source, tmp_path) as swarm:
        for name, span in {"c": (4, 8), "s": ALL, "w": (2, 4)}.items():
            await swarm.train(name, *span)
        spoil_audits(swarm, "c", "w", Kind.BACK)
        owner, book = await audited(swarm, lambda version: alike(version)[:1], enough=math.inf)
        assert any("not what others compute" in why for why in owner.figures.lost)
        assert not owner.figures.left_out
        assert 0 < book.doubt("s") <= book.doubt("c") == 0.5

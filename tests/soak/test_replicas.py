"""Several holders of a block: deaths at every point of a step, and liars that begin late. The short form is
`tests/app/training/test_replicas.py`."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from app.routing.trust import TrustBook
from app.training.audits import Caution
from app.training.trainer import JobHooks, StepDone
from engine.sources.base import ModelSource
from engine.sources.tiny import open_tiny
from tests.app.training.job_swarm import ALL, PATIENCE, PLAIN, Losses, batches_of, open_job_swarm
from tests.app.training.test_replicas import (
    ATTACKS,
    check_bad_sums,
    check_close,
    check_death,
    check_shared,
    one_process,
    owner_of,
)
from tests.soak.test_training import restart

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return open_tiny(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("spans", [(ALL, ALL), ((0, 4), (4, 8), (4, 8)), ((0, 3), (1, 6), (2, 8), (5, 8), ALL)])
async def test_holders_share_the_work_and_agree_on_every_bit(
    source: ModelSource, tmp_path: Path, spans: tuple[tuple[int, int], ...]
) -> None:
    await check_shared(source, tmp_path, *spans)


@pytest.mark.parametrize("point", ["forward", "backward", "take_sums", "set_sums", "step", "commit", "state"])
@pytest.mark.parametrize("call", [1, 2, 9])
async def test_a_holder_dies_at_every_point_of_a_step(
    source: ModelSource, tmp_path: Path, point: str, call: int
) -> None:
    if point in ("step", "commit") and call > 2:
        pytest.skip("three steps do not have so many")
    await check_death(source, tmp_path, point, call)


async def test_a_frozen_holder_is_left(source: ModelSource, tmp_path: Path) -> None:
    async with open_job_swarm(source, tmp_path, (0, 4), (4, 8), ALL) as swarm:
        losses = Losses({1: lambda: swarm.fabric.freeze("n1")})
        owner = owner_of(swarm, terms=PLAIN, patience=replace(PATIENCE, probe_s=2.0))
        await owner.run(3, batches_of, losses)
        check_close(losses, one_process(source, 3))
        assert losses.repeated == 0
        assert {hop.peer for hop in owner.route} == {"n0", "n2"}


async def test_two_holders_die_at_once(source: ModelSource, tmp_path: Path) -> None:
    async with open_job_swarm(source, tmp_path, ALL, ALL, ALL) as swarm:

        def kill_two() -> None:
            swarm.kill("n0")
            swarm.kill("n2")

        losses = Losses({2: kill_two})
        await owner_of(swarm, terms=PLAIN).run(4, batches_of, losses)
        check_close(losses, one_process(source, 4))
        assert losses.repeated == 0


async def test_who_alone_holds_a_block_and_dies_takes_the_job_back_to_the_snapshot(
    source: ModelSource, tmp_path: Path
) -> None:
    async with open_job_swarm(source, tmp_path, (0, 4), (4, 8), (4, 8)) as swarm:

        def replace_first() -> None:
            swarm.kill("n0")
            swarm.nursery.start_soon(swarm.train, "n9", 0, 4)

        losses = Losses({3: replace_first})

        def on_step(step: StepDone) -> None:
            losses.steps.pop(step.version, None)  # what is repeated differs by rounding
            losses(step)

        owner = owner_of(swarm, every=2, terms=PLAIN)
        await owner.run(5, batches_of, on_step)
        check_close(losses, one_process(source, 5))
        assert owner.snapshot.version == 5


@pytest.mark.parametrize("seed", range(3))
async def test_holders_are_killed_and_come_back(source: ModelSource, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    async with open_job_swarm(source, tmp_path, (0, 4), (4, 8), (2, 6), ALL) as swarm:
        deaths = {step: f"n{rng.randrange(4)}" for step in range(1, 12) if rng.random() < 0.4}
        after = {step: partial(swarm.nursery.start_soon, restart, swarm, name) for step, name in deaths.items()}
        losses = Losses(dict(after))

        def on_step(step: StepDone) -> None:
            losses.steps.pop(step.version, None)
            losses(step)

        await owner_of(swarm, every=3, terms=PLAIN).run(12, batches_of, on_step)
        check_close(losses, one_process(source, 12))


async def test_neighbours_on_several_ways_that_cannot_reach_each_other(source: ModelSource, tmp_path: Path) -> None:
    async with open_job_swarm(source, tmp_path, (0, 4), (4, 8), (4, 8)) as swarm:
        swarm.separate("n0", "n2")
        losses = Losses()
        await owner_of(swarm, terms=PLAIN).run(2, batches_of, losses)
        check_close(losses, one_process(source, 2))


@pytest.mark.parametrize("attack", ATTACKS)
async def test_a_liar_that_begins_late_is_left_out(source: ModelSource, tmp_path: Path, attack: str) -> None:
    torch.manual_seed(1)
    async with open_job_swarm(source, tmp_path, ALL, ALL, ALL) as swarm:
        swarm.poison("n1", ATTACKS[attack], after=8)
        owner = owner_of(swarm)
        await owner.run(30, batches_of, Losses(), JobHooks(lambda: bool(owner.figures.left_out)))
        assert set(owner.figures.left_out) == {"n1"}
        assert owner.version <= 5 + 20


async def test_of_two_that_differ_a_third_says_who_lied(source: ModelSource, tmp_path: Path) -> None:
    book = TrustBook(clock=lambda: 0.0)
    async with open_job_swarm(source, tmp_path, ALL, ALL, ALL) as swarm:
        swarm.poison("n0", ATTACKS["flipped"])
        owner = owner_of(swarm, book, every=1, terms={"replicas": 2})
        await owner.run(12, batches_of, Losses(), JobHooks(lambda: bool(owner.figures.left_out)))
        assert set(owner.figures.left_out) == {"n0"}
        assert [book.standing(peer).trusted for peer in ("n0", "n1")] == [False, True]


@pytest.mark.parametrize("seed", range(3))
async def test_honest_holders_are_audited_and_never_left_out(source: ModelSource, tmp_path: Path, seed: int) -> None:
    async with open_job_swarm(source, tmp_path, (0, 5), (3, 8), ALL) as swarm:
        owner = owner_of(swarm, terms={"caution": Caution(audit_every=1)})
        await owner.run(12, lambda version: batches_of(1000 * seed + version), Losses())
        assert owner.figures.audits >= 12
        assert not owner.figures.left_out


@pytest.mark.parametrize("spoilt", [lambda data: data[:-4], lambda data: data + bytes(4)], ids=["short", "long"])
async def test_sums_of_another_length_cost_the_holder_its_place(
    source: ModelSource, tmp_path: Path, spoilt: Callable[[bytes], bytes]
) -> None:
    await check_bad_sums(source, tmp_path, spoilt, "not valid")

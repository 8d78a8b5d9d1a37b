"""Jobs through nodes that die all the time, at every point of a step: every step's numbers are those of one process."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest

from engine.sources.base import ModelSource
from engine.sources.tiny import open_tiny
from tests.app.training.job_swarm import JobSwarm, Losses, batches_of, open_job_swarm, undisturbed

pytestmark = pytest.mark.soak

SPLITS = ((0, 2), (2, 6), (6, 8))
STEPS = 20


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return open_tiny(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("victim", ["n0", "n1", "n2"])
@pytest.mark.parametrize("point", ["forward", "backward", "squared_norms", "step", "commit", "state"])
async def test_a_hop_dies_at_every_point_of_a_step(
    source: ModelSource, tmp_path: Path, point: str, victim: str
) -> None:
    wanted, states = undisturbed(source, 2)
    async with open_job_swarm(source, tmp_path, *SPLITS) as swarm:
        await swarm.train("spare", 0, 8)
        swarm.kill_within(victim, point, call=2)
        losses, owner = Losses(), swarm.owner(every=1)
        await owner.run(2, batches_of, losses)
        losses.check(wanted)
        assert dict(enumerate(await owner.final_states())) == states
        assert owner.figures.epochs == 2


async def restart(swarm: JobSwarm, name: str) -> None:
    span = swarm.nodes[name].span
    swarm.kill(name)
    await swarm.train(name, span.start, span.stop)


@pytest.mark.parametrize("seed", range(3))
async def test_hops_are_killed_and_come_back(source: ModelSource, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    wanted, states = undisturbed(source, STEPS)
    async with open_job_swarm(source, tmp_path, *SPLITS, *SPLITS) as swarm:
        deaths = {step: f"n{rng.randrange(6)}" for step in range(1, STEPS) if rng.random() < 0.5}
        after = {step: partial(swarm.nursery.start_soon, restart, swarm, name) for step, name in deaths.items()}
        losses, owner = Losses(dict(after)), swarm.owner(every=3)
        await owner.run(STEPS, batches_of, losses)
        losses.check(wanted)
        assert dict(enumerate(await owner.final_states())) == states

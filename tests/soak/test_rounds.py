"""Training in rounds for a long time: failures in every round, partitions, slow links, and dozens of islands.

The short forms are `tests/app/rounds/test_endurance.py` and `tests/app/rounds/test_islands.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from trio.testing import MockClock

from tests.app.rounds.island_swarm import Lesson, open_islands
from tests.app.rounds.test_endurance import check_broken_member, check_churn, check_failures, check_slower_link
from tests.app.rounds.test_islands import check_partition
from tests.bench import train
from tests.bench.train_network import Speeches

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]


async def test_a_member_fails_in_each_of_two_hundred_rounds(tmp_path: Path, patient_clock: MockClock) -> None:
    await check_failures(tmp_path, rounds=200, restart_every=10)


async def test_a_broken_member_costs_few_of_a_hundred_rounds(tmp_path: Path, patient_clock: MockClock) -> None:
    await check_broken_member(tmp_path, rounds=100, most=13)


@pytest.mark.parametrize("number", range(4))
async def test_a_job_outlives_its_founder_whenever_it_goes(
    tmp_path: Path, number: int, patient_clock: MockClock
) -> None:
    async with open_islands(tmp_path, 0, 1, 2, steps=60) as swarm:
        await swarm.until(lambda: swarm.nodes[1].island.standing.round >= 1 + 2 * number)
        swarm.kill(0)
        late = swarm.add(3, has_model=False)
        await swarm.finished(1, 2, 3)
        assert late.name in swarm.nodes[1].island.log[-1].list.members


@pytest.mark.parametrize("cut", [(1,), (0,), (0, 1), (1, 3), (2, 3, 4)])
async def test_every_partition_heals_to_one_history(
    tmp_path: Path, cut: tuple[int, ...], patient_clock: MockClock
) -> None:
    await check_partition(tmp_path, cut)


async def test_sixty_four_unlike_islands_come_and_go_for_hours(tmp_path: Path, patient_clock: MockClock) -> None:
    print(await check_churn(tmp_path, islands=64, seconds=2 * 3600, churn_s=60))


async def test_a_link_cut_from_100_to_10_mbit_costs_no_loss(tmp_path: Path, autojump_clock: MockClock) -> None:
    data = train.corpus()
    lesson = Lesson(train.CONFIG, train.common(data, 0), Speeches(data.whole, data.held))
    terms = {"batch": train.BATCH, "length": train.LENGTH, "rate": train.RATE, "seed": 0}
    speeds = {"fast": 12.5e6, "slow": 1.25e6, "step_s": 0.01, "steps": 1200}
    losses = {
        most: await check_slower_link(tmp_path, lesson, **speeds, **terms, **more)  # type: ignore[arg-type]
        for most, more in ((50, {"most_every": 50}), (500, {}))
    }
    print(losses)
    assert losses[500] <= 1.02 * losses[50], losses

"""How many steps rounds have: neither a frozen moment nor islands that are away make them long for many rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from app.rounds.island import RoundTiming
from tests.app.rounds.island_swarm import IslandSwarm, members_of, open_islands
from tests.app.rounds.test_slow_exchange import bounds

EVERY = 20
FROZEN_S = 150.0  # longer than any patience of an exchange


def steps_of(swarm: IslandSwarm, number: int = 0) -> list[int]:
    """The steps that each round gave the next one."""
    return [entry.every for entry in swarm.nodes[number].island.log]


async def joint_rounds(swarm: IslandSwarm, count: int) -> None:
    """Wait until so many more rounds are made together."""
    first = swarm.nodes[0].island
    before = members_of(first.log).count(2)
    await swarm.until(lambda: members_of(first.log).count(2) >= before + count, within_s=6000)


async def test_rounds_of_an_island_that_is_left_alone_stay_short(tmp_path: Path, patient_clock: MockClock) -> None:
    """It waited half a minute for the other one, which it took for the cost of an exchange in four rounds."""
    async with open_islands(tmp_path, 0, 1, timing=RoundTiming(), step_s=1.0, **bounds(EVERY)) as swarm:
        first = swarm.nodes[0].island
        await joint_rounds(swarm, 2)
        swarm.kill(1)
        rounds = len(first.log)
        await swarm.until(lambda: len(first.log) >= rounds + 6, within_s=6000)
        assert set(members_of(first.log)[rounds + 1 :]) == {1}
        assert set(steps_of(swarm)) == {EVERY}


@pytest.mark.soak
async def test_rounds_that_a_slow_link_made_long_get_shorter_for_an_island_that_is_alone(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    """What is not merged yet is lost in a pause, and an island alone has nothing to exchange."""
    async with open_islands(tmp_path, 0, 1, timing=RoundTiming(), step_s=1.0, **bounds(EVERY)) as swarm:
        first = swarm.nodes[0].island
        await joint_rounds(swarm, 1)
        for node in swarm.nodes.values():
            node.island.figures.overheads_s = [12.0, 12.0]
        await joint_rounds(swarm, 3)
        assert max(steps_of(swarm)) > 2 * EVERY
        swarm.kill(1)
        rounds = len(first.log)
        await swarm.until(lambda: first.standing.every == EVERY, within_s=6000)
        alone = steps_of(swarm)[rounds:]
        assert alone == sorted(alone, reverse=True)


@pytest.mark.parametrize(
    "moment", ["exchange", *(pytest.param(moment, marks=pytest.mark.soak) for moment in ("steps", "settle"))]
)
async def test_one_frozen_moment_of_all_islands_makes_one_round_longer(
    tmp_path: Path, patient_clock: MockClock, moment: str
) -> None:
    """Machines that sleep, or processes that are stopped, in any part of a round."""
    async with open_islands(tmp_path, 0, 1, timing=RoundTiming(), step_s=1.0, **bounds(EVERY)) as swarm:
        first = swarm.nodes[0].island
        await joint_rounds(swarm, 3)
        assert set(steps_of(swarm)) == {EVERY}
        frozen = freeze_once(swarm, patient_clock, moment)
        await frozen.wait()
        rounds, before_s = len(first.log), first.figures.left_s
        assert before_s
        await swarm.until(lambda: len(first.log) > rounds, within_s=6000)
        assert first.figures.left_s == pytest.approx(before_s, rel=0.1)  # though that round took eight times as long
        await joint_rounds(swarm, 4)
        seen = steps_of(swarm)[rounds:]
        assert max(seen) <= 2 * EVERY, seen
        assert seen[seen.index(max(seen)) :] == sorted(seen[seen.index(max(seen)) :], reverse=True), seen
        await swarm.until(lambda: first.standing.every == EVERY, within_s=6000)


async def test_the_time_to_go_is_not_that_of_an_island_that_went_over_to_another_history(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    """An hour without a step forward would make it years."""
    async with open_islands(tmp_path, 0, 1, timing=RoundTiming(), step_s=1.0, **bounds(EVERY)) as swarm:
        first = swarm.nodes[0].island
        await joint_rounds(swarm, 2)
        known_s, standing = first.figures.left_s, first.standing
        for before in (replace(standing, step=standing.step + 40), replace(standing, round=standing.round - 3)):
            first._measure(before, trio.current_time() - 3600, trio.current_time())
            assert first.figures.left_s == known_s


def freeze_once(swarm: IslandSwarm, clock: MockClock, moment: str) -> trio.Event:
    """Let all time pass at once when an island is at some part of its next round; set when it has."""
    frozen = trio.Event()

    def freezing(function: Callable[..., Any]) -> Callable[..., Any]:
        def frozen_in_it(*args: Any) -> Any:
            if not frozen.is_set():
                frozen.set()
                clock.jump(FROZEN_S)
            return function(*args)

        return frozen_in_it

    for node in swarm.nodes.values():
        island: Any = node.island
        owner, name = {
            "steps": (island._text, "sequence"),
            "exchange": (island._exchange, "run"),
            "settle": (island._steps, "loss"),
        }[moment]
        setattr(owner, name, freezing(getattr(owner, name)))
    return frozen

"""An unplugged network, a suspended laptop and a clock that jumps: nothing crashes, nothing stays stuck, all heals."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from app.membership import Timing
from tests.app.swarms import open_sim

MINUTE_S, HOUR_S = 60.0, 3600.0
SLOW = Timing(period_s=5.0)  # for what takes hours: fewer probes, which are not the point


async def test_one_that_was_unplugged_for_minutes_is_back_soon(autojump_clock: MockClock) -> None:
    async with open_sim() as sim:
        nodes = await sim.grow(6)
        lone, others = nodes[3], [node for node in nodes if node is not nodes[3]]
        sim.fabric.partition([lone.peer], [node.peer for node in others])
        await sim.until(lambda: not lone.knows(), 2 * MINUTE_S)
        await sim.until(lambda: all(lone.peer not in node.knows() for node in others), 2 * MINUTE_S)
        await trio.sleep(10 * MINUTE_S)
        sim.fabric.heal()
        await sim.until(lambda: len(lone.knows()) == 5, 2 * MINUTE_S)
        await sim.until(lambda: all(len(node.knows()) == 5 for node in others), 2 * MINUTE_S)


async def test_a_switch_that_loses_power_for_minutes_parts_nobody_for_good(autojump_clock: MockClock) -> None:
    async with open_sim() as sim:
        nodes = await sim.grow(4)
        sim.fabric.partition(*[[node.peer] for node in nodes])
        await sim.until(lambda: all(not node.knows() for node in nodes), 5 * MINUTE_S)
        await trio.sleep(20 * MINUTE_S)
        sim.fabric.heal()
        await sim.until(lambda: all(len(node.knows()) == 3 for node in nodes), 3 * MINUTE_S)


async def test_laptops_that_slept_through_the_night_find_each_other_again(autojump_clock: MockClock) -> None:
    """All were suspended: the wall clock went on for hours, the clock that timers go by stood still."""
    async with open_sim(timing=SLOW) as sim:
        nodes = await sim.grow(4)
        sim.clock_off_s = {node.number: 9 * HOUR_S for node in nodes}
        await trio.sleep(2 * MINUTE_S)
        await sim.until(lambda: all(len(node.knows()) == 3 for node in nodes), MINUTE_S)
        newcomer = sim.add(9, [nodes[0].peer])
        sim.clock_off_s[9] = 9 * HOUR_S
        await sim.until(lambda: len(newcomer.knows()) == 4, MINUTE_S)
        await trio.sleep(40 * MINUTE_S)
        assert all(len(node.knows()) == 4 for node in sim.nodes.values())


@pytest.mark.soak
async def test_one_laptop_sleeps_while_the_others_go_on(autojump_clock: MockClock) -> None:
    """Its clock is right when it wakes; what it said before is long out of date."""
    async with open_sim() as sim:
        nodes = await sim.grow(5)
        sleeper, others = nodes[2], [node for node in nodes if node is not nodes[2]]
        sim.fabric.freeze(sleeper.peer)
        await trio.sleep(40 * MINUTE_S)  # longer than any statement holds
        assert all(len(node.knows()) == 3 for node in others)
        sim.fabric.resume(sleeper.peer)
        await sim.until(lambda: all(len(node.knows()) == 4 for node in nodes), 2 * MINUTE_S)


async def test_a_clock_that_jumps_and_is_set_right_parts_a_node_for_minutes_at_most(autojump_clock: MockClock) -> None:
    async with open_sim(timing=SLOW) as sim:
        nodes = await sim.grow(4)
        for jump_s in (5 * HOUR_S, -5 * HOUR_S):
            sim.clock_off_s[nodes[1].number] = jump_s
            await trio.sleep(12 * MINUTE_S)  # it says something under the wrong time
            assert all(len(node.knows() - {nodes[1].peer}) == 2 for node in nodes if node is not nodes[1])
            sim.clock_off_s.clear()
            await sim.until(lambda: all(len(node.knows()) == 3 for node in nodes), 3 * MINUTE_S)

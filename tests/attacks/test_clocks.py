"""Peers that lie about the time: they make no node doubt its clock unless they are most of what it is connected to."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from tests.app.membership.test_clocks import HOUR_S, ahead_s
from tests.app.swarms import identity, open_sim


@pytest.mark.soak
async def test_one_liar_with_many_ids_among_several_members_changes_nothing(autojump_clock: MockClock) -> None:
    async with open_sim() as sim:
        nodes = await sim.grow(3)
        for number in range(50, 62):
            sim.fabric.machine_of[identity(number).peer_id] = "the liar's"
            sim.add(number, [node.peer for node in nodes], skew_s=-3 * HOUR_S)
        for _ in range(20):
            await trio.sleep(30)
            assert [ahead_s(sim, node) for node in nodes] == [0.0] * 3


async def test_statements_that_are_passed_on_are_no_clock(autojump_clock: MockClock) -> None:
    """A member that repeats what others said hours ago does not say that it is hours ago."""
    async with open_sim() as sim:
        nodes = await sim.grow(2)
        old = nodes[1].swarm.own.raw
        sim.kill(nodes[1])
        await trio.sleep(1.5 * HOUR_S)
        third = sim.add(2, [nodes[0].peer])
        await sim.until(lambda: third.peer in nodes[0].knows(), 30)
        for _ in range(5):
            nodes[0].swarm._exchange.receive(old, third.peer)
            await trio.sleep(10)
            assert ahead_s(sim, nodes[0]) == 0

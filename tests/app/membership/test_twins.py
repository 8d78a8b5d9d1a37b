"""Two nodes with one identity, as after copying a home: each is told; a restart, a replay or a lie tells nothing."""

from __future__ import annotations

from dataclasses import replace

import trio
from trio.testing import MockClock

from app.membership.twins import MEMORY_S, TwinWatch
from app.swarm.records import Announcement, sign_announcement
from tests.app.membership.test_membership import tell
from tests.app.swarms import SimNode, identity, open_sim


def said_by_twin(node: SimNode, later_ms: int) -> bytes:
    """An announcement under a node's name that it never made."""
    own: Announcement = node.swarm.own
    number = own.sequence + later_ms
    return sign_announcement(
        identity(node.number), replace(own, sequence=number, expires_at_ms=own.expires_at_ms + later_ms)
    )


def test_one_newer_statement_is_no_twin() -> None:
    watch = TwinWatch()
    watch.heard(100, 90, 0.0)
    watch.heard(100, 90, 1.0)  # from another member
    watch.heard(80, 90, 2.0)  # a replay
    assert not watch.is_seen(2.0)
    watch.heard(101, 90, 3.0)
    assert watch.is_seen(3.0)
    assert not watch.is_seen(MEMORY_S + 1)
    watch.heard(102, 90, MEMORY_S + 1)
    assert watch.is_seen(MEMORY_S + 1)


async def test_a_node_whose_twin_goes_on_speaking_knows_of_it(autojump_clock: MockClock) -> None:
    async with open_sim() as sim:
        nodes = await sim.grow(4)
        teller, victim = nodes[:2]
        for expected in (False, True):
            await trio.sleep(60)
            await tell(sim, teller, nodes[2], said_by_twin(victim, 200))
            await trio.sleep(20)  # until it comes round
            assert victim.swarm.has_twin is expected
        assert not any(node.swarm.has_twin for node in nodes if node is not victim)
        await trio.sleep(MEMORY_S)
        assert not victim.swarm.has_twin


async def test_a_node_that_lost_its_number_has_no_twin(autojump_clock: MockClock) -> None:
    async with open_sim() as sim:
        nodes = await sim.grow(4)
        forgetful = sim.add(50, [nodes[0].peer], skew_s=250.0)
        await sim.until(lambda: all(forgetful.peer in node.knows() for node in nodes), 5)
        sim.kill(forgetful)
        again = sim.add(50, [nodes[0].peer])
        await trio.sleep(600)
        assert all(again.peer in node.knows() for node in nodes)
        assert not again.swarm.has_twin

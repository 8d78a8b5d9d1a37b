"""Two hundred nodes on the in-memory network: how fast news travels, and what peace costs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio
from trio.testing import MockClock

from app.span import Span
from tests.app.swarms import Sim, SimNode, open_sim


async def messages_per_s(nodes: list[SimNode], over_s: float) -> float:
    """What one node sends in peace, with the others' answers counted as theirs."""
    before = sum(node.network.traffic.messages_out for node in nodes)
    await trio.sleep(over_s)
    return (sum(node.network.traffic.messages_out for node in nodes) - before) / over_s / len(nodes)


async def spread_s(sim: Sim, nodes: list[SimNode], mover: SimNode) -> float:
    """How long a change takes until the last one knows it."""
    said = mover.swarm.announce(state="serving", span=Span(0, 8))
    others = [node for node in nodes if node is not mover]
    return await sim.until(lambda: all(n.swarm.table.number(mover.peer) >= said.sequence for n in others), 3.0)


async def death_s(sim: Sim, nodes: list[SimNode], victim: SimNode) -> tuple[float, float]:
    """How long a frozen node seems alive: to its route neighbours, and to the last of all."""
    neighbours = nodes[10:14]
    for node in neighbours:
        node.swarm.set_neighbours([victim.peer])
    await trio.sleep(5)
    sim.fabric.freeze(victim.peer)
    soon_s = await sim.until(lambda: all(node.state_of(victim.peer) == "dead" for node in neighbours), 10.0)
    late_s = await sim.until(lambda: all(node.state_of(victim.peer) == "dead" for node in nodes), 30.0 - soon_s)
    return soon_s, soon_s + late_s


@pytest.mark.timeout(240)
async def test_two_hundred_nodes(autojump_clock: MockClock, record_property: Callable[[str, object], None]) -> None:
    async with open_sim() as small:
        few_rate = await messages_per_s(await settled(small, 50), 60)
    async with open_sim() as sim:
        nodes = await settled(sim, 200)
        rate = await messages_per_s(nodes, 30)
        assert rate <= 1.5 * few_rate
        spread = await spread_s(sim, nodes, nodes[3])
        victim = nodes.pop()
        soon_s, late_s = await death_s(sim, nodes, victim)
        newcomer = sim.add(500, [nodes[50].peer])
        known_s = await sim.until(lambda: len(newcomer.knows()) == 199, 1.0)
        figures = {"rate_50": few_rate, "rate_200": rate, "spread_s": spread, "dead_near_s": soon_s}
        for name, value in (figures | {"dead_all_s": late_s, "newcomer_s": known_s}).items():
            record_property(name, round(value, 2))


async def settled(sim: Sim, count: int) -> list[SimNode]:
    """A swarm in which everybody knows everybody and nothing is left to tell."""
    nodes = await sim.grow(count)
    await trio.sleep(30)
    return nodes

"""A large swarm on the in-memory network: how fast news travels, what peace costs, and how few links it takes."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import trio
from trio.testing import MockClock

from app.core.span import Span
from tests.app.swarms import Sim, SimNode, open_sim

MAX_LINKS = 48
FALSE_ALARMS = ("suspected", "dead")

log = logging.getLogger("shoal.tests.figures")
Record = Callable[[str, object], None]


def report(record: Record, **figures: float) -> None:
    """Let a person see the figures too: in the report, and with `--log-cli-level=INFO`."""
    for name, value in figures.items():
        record(name, round(value, 2))
        log.info("%s = %.2f", name, value)


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


async def partition_s(sim: Sim, nodes: list[SimNode], share: int) -> tuple[float, float]:
    """How long until two halves have given each other up, and until everybody knows everybody again."""
    half = {node.peer for node in nodes[:share]}
    sim.fabric.partition(half)

    def lost(node: SimNode) -> int:
        """How many over there seem alive."""
        return sum((peer in half) != (node.peer in half) for peer in node.swarm.table.present())

    # A node or two may learn of a death by the comparing of tables only, which takes a minute.
    apart_s = await sim.until(lambda: sum(lost(node) > 0 for node in nodes) <= len(nodes) // 10, 60)
    await trio.sleep(60)
    sim.fabric.heal()
    return apart_s, await sim.until(lambda: all(len(n.swarm.table.present()) == len(nodes) - 1 for n in nodes), 60)


def most_links(nodes: list[SimNode]) -> int:
    """The links of the node that has most of them."""
    return max(len(node.network.linked) for node in nodes)


def false_alarms(nodes: list[SimNode]) -> int:
    """How often somebody was doubted."""
    return sum(change.kind in FALSE_ALARMS for node in nodes for _, change in node.changes)


async def settled(sim: Sim, count: int) -> list[SimNode]:
    """A swarm in which everybody knows everybody and nothing is left to tell."""
    nodes = await sim.grow(count)
    await trio.sleep(30)
    return nodes


async def live_through(few: int, many: int, record_property: Record) -> None:
    """Let a swarm of `many` live in peace, hear of a change and lose a member; its traffic is compared with `few`'s."""
    async with open_sim() as small:
        few_rate = await messages_per_s(await settled(small, few), 60)
    async with open_sim() as sim:
        nodes = await settled(sim, many)
        rate = await messages_per_s(nodes, 30)
        links = most_links(nodes)
        assert false_alarms(nodes) == 0
        spread = await spread_s(sim, nodes, nodes[3])
        soon_s, late_s = await death_s(sim, nodes, nodes.pop())
        newcomer = sim.add(500, [nodes[len(nodes) // 2].peer])
        known_s = await sim.until(lambda: len(newcomer.knows()) == many - 1, 1.0)
    report(record_property, rate_few=few_rate, rate_many=rate, rate_ratio=rate / few_rate, links=links)
    report(record_property, spread_s=spread, dead_near_s=soon_s, dead_all_s=late_s, newcomer_s=known_s)
    assert rate <= 1.5 * few_rate
    assert links <= MAX_LINKS


@pytest.mark.soak
async def test_fifty_nodes(autojump_clock: MockClock, record_property: Record) -> None:
    await live_through(20, 50, record_property)

"""Two hundred nodes through partitions and hours of churn, and what each of them keeps in memory."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Iterable

import pytest
import trio
from trio.testing import MockClock

from app.core.span import Span
from app.membership import Membership, Timing
from p2p.memory.fabric import DirectoryProfile, LinkProfile
from tests.app.membership.test_scale import (
    MAX_LINKS,
    Record,
    death_s,
    false_alarms,
    live_through,
    most_links,
    partition_s,
    report,
    spread_s,
)
from tests.app.swarms import SimNode, open_sim

pytestmark = pytest.mark.soak


def kept_bytes(roots: Iterable[object], besides: set[int]) -> int:
    """The size of all that can be reached from `roots` through plain containers and our own objects."""
    seen, todo, total = set(besides), list(roots), 0
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, type) or callable(thing) or type(thing).__module__.startswith("trio"):
            continue
        seen.add(id(thing))
        total += sys.getsizeof(thing)
        todo += gc.get_referents(thing)
    return total


def table_bytes(swarm: Membership) -> int:
    """What a membership keeps of the others."""
    exchange, watch = swarm._exchange, swarm._detector._watch
    limits = [exchange._announcement_limit, exchange._urgent_limit]
    return kept_bytes([swarm.table, exchange.gossip_queue, *limits, watch], set())


@pytest.mark.timeout(600)
async def test_two_hundred_nodes(autojump_clock: MockClock, record_property: Record) -> None:
    await live_through(50, 200, record_property)


@pytest.mark.timeout(600)
async def test_memory_is_linear_in_members(autojump_clock: MockClock, record_property: Record) -> None:
    sizes = {}
    for count in (50, 100, 200):
        async with open_sim() as sim:
            nodes = await sim.grow(count)
            await trio.sleep(120)
            sizes[count] = sum(table_bytes(node.swarm) for node in nodes[:10]) / 10
            report(record_property, **{f"kib_{count}": sizes[count] / 1024})
    assert sizes[200] <= 4.4 * sizes[50]
    assert sizes[200] / 200 <= 8192


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("share", [100, 180])
async def test_a_partition_of_two_hundred_heals(share: int, autojump_clock: MockClock, record_property: Record) -> None:
    async with open_sim() as sim:
        nodes = await sim.grow(200)
        apart_s, healed_s = await partition_s(sim, nodes, share)
        report(record_property, apart_s=apart_s, healed_s=healed_s)


@pytest.mark.timeout(1200)
async def test_four_hundred_nodes_keep_few_links_and_nobody_is_taken_for_dead(
    autojump_clock: MockClock, record_property: Record
) -> None:
    async with open_sim() as sim:
        nodes = await sim.grow(400)
        links = 0
        for _ in range(120):
            await trio.sleep(1)
            links = max(links, most_links(nodes))
        assert false_alarms(nodes) == 0
        spread = await spread_s(sim, nodes, nodes[3])
        soon_s, late_s = await death_s(sim, nodes, nodes.pop())
        report(record_property, links=links, spread_s=spread, dead_near_s=soon_s, dead_all_s=late_s)
        assert links <= MAX_LINKS


@pytest.mark.timeout(900)
async def test_an_hour_of_churn(autojump_clock: MockClock, record_property: Record) -> None:
    """Nodes come, crash, leave, freeze and move for an hour; whoever is there is known to nearly everybody."""
    rng = random.Random(7)
    link = LinkProfile(delay_s=0.03, jitter_s=0.03, loss=0.0005)
    async with open_sim(link=link, directory=DirectoryProfile(loss=0.1), timing=Timing(period_s=4.0)) as sim:
        alive: list[SimNode] = await sim.grow(40)
        frozen: list[SimNode] = []
        number, checked, wrong = 40, 0, 0
        for _ in range(60):
            for _ in range(rng.randrange(3)):
                number += 1
                alive.append(sim.add(number, [rng.choice(alive).peer]))
            for _ in range(rng.randrange(3)):
                node = alive.pop(rng.randrange(len(alive)))
                how = rng.choice(("crash", "leave", "freeze"))
                if how == "freeze":
                    sim.fabric.freeze(node.peer)
                    frozen.append(node)
                    continue
                if how == "leave":
                    await node.swarm.leave()
                sim.kill(node)
            if frozen and rng.random() < 0.5:
                node = frozen.pop()
                sim.fabric.resume(node.peer)
                alive.append(node)
            start = rng.randrange(16)
            rng.choice(alive).swarm.announce(state="serving", span=Span(start, start + 8))
            await trio.sleep(60)
            truth = {node.peer for node in alive}
            for node in alive:
                knows = {*node.swarm.table.present()}
                checked += len(truth) - 1
                wrong += len(truth - {node.peer} - knows) + len(knows - truth)
        record_property("wrong", f"{wrong} of {checked}")
        assert wrong <= checked * 0.01
        assert max(len(node.swarm.table) for node in alive) <= 2 * number

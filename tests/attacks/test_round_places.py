"""Peers that say hello and train nothing: they neither hold the places of a job nor hold up its rounds."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import trio
from trio.testing import MockClock

from app.rounds import wire
from app.rounds.island import MAX_PEERS, Island, RoundTiming
from app.rounds.statements import Arrival, MemberList
from p2p.errors import P2PError
from tests.app.rounds.island_swarm import ONE_STEP, TIMING, IslandSwarm, open_islands
from tests.app.swarms import identity

PLACES, IDLE = 8, 10
STEP_S = 2.0


async def say_hello(swarm: IslandSwarm, number: int) -> None:
    """Say hello to all islands in each period, as one that is as far as they are, and do nothing else."""
    network = swarm.fabric.node(identity(1000 + number).peer_id)
    while True:
        for node in list(swarm.nodes.values()):
            values = {"round": node.island.standing.round, "head": node.island.head.hex()}
            try:
                await network.call(node.name, wire.HELLO, wire.request(swarm.record.id, values), timeout_s=1)
            except P2PError:
                pass
        await trio.sleep(TIMING.hello_s / 2)


async def test_idle_peers_neither_hold_places_nor_part_the_islands(tmp_path: Path, patient_clock: MockClock) -> None:
    async with (
        open_islands(tmp_path, 0, 1, step_s=STEP_S, grid=True, islands=PLACES, **ONE_STEP) as swarm,
        trio.open_nursery() as nursery,
    ):
        island = swarm.nodes[0].island
        await swarm.until(lambda: len(island.standing.members) == 2)
        for number in range(IDLE):
            nursery.start_soon(say_hello, swarm, number)
        await swarm.until(lambda: len(island.standing.members) == PLACES)
        before, began = island.standing.round, trio.current_time()
        await swarm.until(lambda: island.standing.round >= before + 8)
        # no round waited for half a minute, and none was made by one of the two alone
        assert trio.current_time() - began < 8 * TIMING.quorum_s / 2
        assert all(len(entry.list.members) == 2 for entry in island.log[before:])
        newcomer = swarm.add(2, step_s=STEP_S, has_model=False)
        await swarm.until(lambda: newcomer.name in island.log[-1].list.members, within_s=120)
        swarm.kill(1)
        await trio.sleep(3 * TIMING.alive_s)
        assert identity(1).peer_id not in island.standing.members
        back = swarm.add(1, step_s=STEP_S, has_model=False)
        await swarm.until(lambda: back.name in island.log[-1].list.members, within_s=60)
        assert not any(node.failure for node in swarm.nodes.values())
        nursery.cancel_scope.cancel()


async def test_an_island_that_is_there_and_never_arrives_comes_last_in_line(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    async with (
        open_islands(tmp_path, 0, 1, step_s=STEP_S, grid=True, islands=3, **ONE_STEP) as swarm,
        trio.open_nursery() as nursery,
    ):
        island, idle = swarm.nodes[0].island, identity(1000).peer_id
        await swarm.until(lambda: len(island.log) > 1)
        nursery.start_soon(say_hello, swarm, 0)
        before = len(island.log)
        await swarm.until(lambda: sum(idle in entry.next for entry in island.log[before:]) > 4)  # nobody else wants it
        newcomer = swarm.add(2, step_s=STEP_S, has_model=False)
        await swarm.until(lambda: newcomer.name in island.log[-1].list.members, within_s=60)
        await swarm.until(lambda: idle not in island.standing.members)
        nursery.cancel_scope.cancel()


async def test_an_island_alone_waits_ever_more_seldom_for_one_that_never_arrives(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    rounds = {**ONE_STEP, "steps": 10**5}
    async with (
        open_islands(tmp_path, 0, step_s=10.0, timing=RoundTiming(), **rounds) as swarm,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(say_hello, swarm, 0)
        await trio.sleep(900)
        assert (
            swarm.nodes[0].island.standing.round > 40
        )  # 89 where nobody says hello, and 13 if it is always waited for
        nursery.cancel_scope.cancel()


async def test_newcomers_that_compute_nothing_do_not_outvote_those_that_do(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    honest, rogues = range(2, 8), (20, 21)
    rounds: dict[str, Any] = {"every": 5, "least_every": 5, "most_every": 5, "steps": 10**5, "islands": 64}
    async with open_islands(tmp_path, 0, step_s=2.0, grid=True, timing=RoundTiming(), **rounds) as swarm:
        for number in honest:
            swarm.add(number, step_s=2.0)
        for number in rogues:
            work_together(swarm.add(number, step_s=0.6).island, {identity(one).peer_id for one in rogues})
        island = swarm.nodes[0].island
        await swarm.until(lambda: len(island.log) > 1, within_s=300)
        wanted = {identity(number).peer_id for number in (0, *honest)}
        assert wanted <= {*island.log[1].list.members}


def work_together(island: Any, rogues: set[str]) -> None:
    """Let an island take every round of its friends for one, and lead as soon as they are all there."""

    def lead_at(standing: Any, began: float, leader: str, *, first: bool) -> float:
        is_first = island.peer == min(rogues)
        return (
            0.0 if not standing.round or (is_first and rogues <= island._arrivals.keys()) else trio.current_time() + 3
        )

    island._counts = lambda entry: True
    island._may_count_at = lambda standing, order: -math.inf if len(order) >= len(rogues) else math.inf
    island._lead_at = lead_at


def hello(island: Island, peer: str) -> None:
    """Greet an island in the name of a peer."""
    fields: dict[str, Any] = {"round": 0, "head": "00" * 32}
    island._note_hello(peer, wire.fields_of(wire.request(b"", fields), "hello"))


async def test_however_many_say_hello_a_newcomer_is_heard_before_long(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_islands(tmp_path, 0, 1, steps=10**5) as swarm:
        node = swarm.nodes[0]
        island, member = node.island, swarm.nodes[1].name
        await swarm.until(lambda: member in island.recent)
        node.scope.cancel()
        heard = 0
        for number in range(16):  # rounds
            island.standing = replace(island.standing, prev=bytes([number]) * 32)
            for ghost in range(MAX_PEERS):
                hello(island, f"ghost{ghost}")
            hello(island, "newcomer")
            for ghost in range(MAX_PEERS, 2 * MAX_PEERS):
                hello(island, f"ghost{ghost}")
            heard += "newcomer" in island.heard
            assert len(island.heard) <= MAX_PEERS
            assert member in island.heard
        assert heard  # in half of the rounds, by lot; whoever came first kept all others out


async def test_who_is_not_there_or_whom_a_few_did_not_reach_is_not_blamed(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    async with open_islands(tmp_path, 0, 1, 2, steps=10**5) as swarm:
        await swarm.until(lambda: swarm.nodes[0].island.recent == {node.name for node in swarm.nodes.values()})
        swarm.nodes[0].scope.cancel()
        island, others = swarm.nodes[0].island, [swarm.nodes[number].name for number in (1, 2)]
        expected = (island.peer, *others, "named")
        island.standing, island.heard = replace(island.standing, members=expected), {}
        last = island.log[-1].list
        alone, two = (replace(last, arrivals=_of(last, island.peer, *others[:count])) for count in (0, 1))
        assert island._missed_after(two) == {}  # they sleep, or somebody named them who never asked for a place
        for peer in (*others, "named"):
            hello(island, peer)
        assert island._missed_after(alone) == {}  # it may be this island that reached nobody
        assert island._missed_after(two).keys() == {others[1], "named"}
        assert island._missed_after(replace(last, arrivals=_of(last, *others))) == {}  # which this island has not seen


def _of(members: MemberList, *peers: str) -> tuple[Arrival, ...]:
    """The arrivals of some members of a list."""
    return tuple(arrival for arrival in members.arrivals if arrival.peer in peers)

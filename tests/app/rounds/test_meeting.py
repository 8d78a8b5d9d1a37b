"""Islands of a job meet in a swarm of hundreds of members that train nothing, and leave these alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from app.rounds import wire
from app.rounds.greetings import STRANGERS, STRANGERS_ALONE
from app.rounds.island import RoundServer
from app.rounds.train_jobs import TrainJobs
from p2p.errors import RemoteError
from tests.app.rounds.island_swarm import ONE_STEP, TIMING, IslandSwarm, open_islands
from tests.app.rounds.test_own_data import open_nodes
from tests.app.rounds.test_rejoining import run_alone, until, wish_in
from tests.app.swarms import identity

CROWD = 300
STEP_S = 2.0
BY_ID = sorted(range(1, 700), key=lambda number: identity(number).peer_id)
LATE, LATER = BY_ID[-2:]  # their ids sort after those of the crowd


@asynccontextmanager
async def open_crowd(folder: Path, step_s: float = STEP_S) -> AsyncIterator[tuple[IslandSwarm, Counter[str]]]:
    """A founder in a swarm of many members that train nothing, and how often each of these was greeted."""
    asked = Counter[str]()
    async with open_islands(folder, **ONE_STEP) as swarm:
        crowd = [identity(number).peer_id for number in BY_ID[:CROWD]]
        everybody = [*crowd, *(identity(number).peer_id for number in (0, LATE, LATER))]
        swarm.peers = lambda: everybody  # type: ignore[method-assign]

        def counted(network: Any) -> Callable[[str, bytes], Any]:
            async def refused(peer: str, body: bytes) -> bytes:
                asked[network.peer_id] += 1
                raise RemoteError("this node takes no part in that job", wire.UNKNOWN)

            return refused

        for peer in crowd:
            network = swarm.fabric.node(peer)
            network.serve(wire.HELLO, counted(network))
        swarm.add(0, step_s=step_s)
        yield swarm, asked


async def test_members_that_train_nothing_are_seldom_greeted(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_crowd(tmp_path, step_s=100.0) as (_, asked):
        began = trio.current_time()
        for _ in range(60):
            before = asked.total()
            await trio.sleep(TIMING.hello_s)
            assert asked.total() - before <= 2 * STRANGERS_ALONE
        periods = (trio.current_time() - began) / TIMING.hello_s
        assert CROWD <= asked.total() <= STRANGERS_ALONE * (periods + 1)
        assert max(asked.values()) == 1  # within minutes


async def test_a_newcomer_meets_the_others_though_the_founder_is_away(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_crowd(tmp_path) as (swarm, _):
        late = swarm.add(LATE, step_s=STEP_S).island
        await swarm.until(lambda: len(late.standing.members) == 2)
        swarm.kill(0)
        await swarm.until(lambda: [*late.standing.members] == [late.peer])
        newcomer = swarm.add(LATER, step_s=STEP_S, has_model=False)
        began = trio.current_time()
        await swarm.until(lambda: newcomer.name in late.log[-1].list.members)
        assert trio.current_time() - began <= 10 + 2 * TIMING.hello_s * CROWD / STRANGERS


async def test_islands_that_have_met_one_meet_all_of_its_job(tmp_path: Path, patient_clock: MockClock) -> None:
    """By the names in hellos: within two periods, where the lot would take dozens."""
    async with open_crowd(tmp_path) as (swarm, _):
        late = swarm.add(LATE, step_s=STEP_S)
        await swarm.until(lambda: {late.name, swarm.nodes[0].name} <= {*late.island.recent})
        newcomer = swarm.add(LATER, step_s=STEP_S, has_model=False, acquaintances=[late.name])
        await trio.sleep(3 * TIMING.hello_s)
        assert {*newcomer.island.heard} == {late.name, swarm.nodes[0].name}


async def test_halves_that_lost_each_other_long_ago_meet_again(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_crowd(tmp_path) as (swarm, _):
        late = swarm.add(LATE, step_s=STEP_S)
        islands = [swarm.nodes[0].island, late.island]
        await swarm.until(lambda: all(len(one.standing.members) == 2 for one in islands))
        swarm.fabric.partition([late.name])
        await swarm.until(lambda: not any(islands[at].peer in islands[1 - at].recent for at in range(2)))
        swarm.fabric.heal()
        await swarm.until(lambda: len({one.head for one in islands}) == 1 and len(islands[0].log[-1].list.members) == 2)


async def test_a_hello_names_only_who_takes_part(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_islands(tmp_path, 0, 1, steps=10**5) as swarm:
        island = swarm.nodes[0].island
        await swarm.until(lambda: len(island.recent) == 2)
        stranger = swarm.fabric.node(identity(7).peer_id)
        body: dict[str, Any] = {"round": 0, "head": "00" * 32}
        for _ in range(2):  # it is heard by then
            answer = await stranger.call(island.peer, wire.HELLO, wire.request(island.record.id, body), timeout_s=5)
        assert wire.fields_of(answer, "hello").values["others"] == [swarm.nodes[1].name]
        for wrong in ("one", [1], ["x" * 200], ["x"] * 17):
            request = wire.request(island.record.id, {**body, "others": wrong})
            with pytest.raises(RemoteError) as caught:
                await stranger.call(island.peer, wire.HELLO, request, timeout_s=5)
            assert caught.value.code == wire.WRONG


async def test_who_is_not_known_as_a_member_yet_is_not_told_that_the_job_is_unknown(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    async with open_islands(tmp_path, 0) as swarm:
        network = swarm.fabric.node(identity(5).peer_id)
        server = RoundServer(network, lambda peer: False)
        server.serve()
        asker = swarm.fabric.nodes[swarm.nodes[0].name]
        body = wire.request(swarm.record.id, {"round": 0, "head": "00" * 32, "count": 1})
        for method, code in ((wire.HELLO, wire.NOT_YET), (wire.LOG, wire.UNKNOWN)):
            with pytest.raises(RemoteError) as caught:
                await asker.call(network.peer_id, method, body, timeout_s=5)
            assert caught.value.code == code


async def test_who_had_the_job_when_a_node_joined_it_is_greeted_first_also_after_a_restart(tmp_path: Path) -> None:
    async with open_nodes(tmp_path) as nodes:
        await nodes[0].jobs.found(wish_in(tmp_path))
        await nodes[1].jobs.join("fish")
        [running] = nodes[1].jobs.running.values()
        assert running.island._greetings._first == {identity(0).peer_id}

    async def check(jobs: TrainJobs) -> None:
        await until(lambda: jobs.running)
        [running] = jobs.running.values()
        assert running.island._greetings._first == {identity(0).peer_id}
        await jobs.leave("fish")
        await jobs.join("fish")  # while nobody else is there to name
        [running] = jobs.running.values()
        assert running.island._greetings._first == {identity(0).peer_id}

    await run_alone(tmp_path, check, number=1)

"""Neither one that leads badly nor a network that was lost parts the islands of a job for good."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from app.rounds.island import Island, RoundTiming
from app.rounds.log import Standing, make_entry, steps_s
from app.rounds.statements import MAX_ATTEMPTS, sign_list
from p2p.memory.fabric import LinkProfile
from tests.app.rounds.island_swarm import ONE_STEP, TIMING, IslandSwarm, open_islands
from tests.app.swarms import identity

LIAR = 3
NOW_MS = 1_800_000_000_000


def lead_in_turn(swarm: IslandSwarm, gives: int) -> None:
    """Let an island lead as soon as it arrives: once all, then each other one alone.

    It gives its change to `gives` of the others while all exchange, and shows each the entry of its own round only.
    """
    island: Island = swarm.nodes[LIAR].island

    async def offer(attempt: int, peers: list[str]) -> None:
        arrivals = [island._arrivals[peer] for peer in (island.peer, *peers)]
        found = sign_list(identity(LIAR), swarm.record.id, attempt, arrivals, NOW_MS)
        island._listed[island.peer] = attempt
        await island._offer(found)
        if len(peers) > gives > 0:
            await trio.sleep(2)
            return
        deadline = trio.current_time() + TIMING.exchange_s
        own = await island._exchanged(found, deadline)
        results = await island._gather(found, own, deadline)
        if results is None or len(results) < len(arrivals) or {one.root for one in results.values()} != {own.root}:
            return
        entry = make_entry(
            identity(LIAR), swarm.record, island.standing, found, results.values(), every=1,
            codec=island.standing.codec, present=island.standing.members, now_ms=NOW_MS,
        )  # fmt: skip
        for peer in peers:
            await island._say(peer, entry.raw)

    async def lead(standing: Standing) -> None:
        others = [peer for peer in island._arrivals if peer != island.peer]
        for attempt, peers in enumerate([others, *([peer] for peer in others)]):
            if island.standing is standing and peers:
                await offer(attempt, peers)
        await trio.sleep(0.1)

    island._lead = lead  # type: ignore[method-assign]
    island._lead_at = lambda *args, **named: trio.current_time()  # type: ignore[method-assign]


@pytest.mark.parametrize("gives", [1, pytest.param(0, marks=pytest.mark.soak)])
async def test_who_leads_with_one_island_after_the_other_does_not_part_them(
    tmp_path: Path, patient_clock: MockClock, gives: int
) -> None:
    """Exchanges with it come to nothing, for one of the others at a time: none of them takes another for the liar."""
    async with open_islands(tmp_path, 0, 1, 2, LIAR, step_s=1.0, **ONE_STEP) as swarm:
        honest = [swarm.nodes[number].island for number in range(3)]
        await swarm.until(lambda: all(len(island.recent) == 4 for island in honest))
        lead_in_turn(swarm, gives)
        # How often it stops a round before all know it depends on who leads then; most rounds take a second and a half.
        rounds, most, end = honest[0].standing.round + 40, 0, trio.current_time() + 240
        while honest[0].standing.round < rounds:
            assert trio.current_time() < end, swarm.words()
            await trio.sleep(1)
            common = honest[0]._heads & honest[1]._heads & honest[2]._heads
            most = max(most, *(len(island._heads - common) for island in honest))
        assert most <= 2, swarm.words()


@pytest.mark.soak
async def test_islands_that_were_all_apart_come_together_again(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_islands(tmp_path, 0, 1, 2, 3, step_s=1.0, **ONE_STEP) as swarm:
        islands = [swarm.nodes[number].island for number in range(4)]
        await swarm.until(lambda: all(len(island.recent) == 4 for island in islands))
        swarm.fabric.partition(*([node.name] for node in swarm.nodes.values()))
        await swarm.until(lambda: all(len(island.log[-1].list.members) == 1 for island in islands))
        await trio.sleep(120)
        swarm.fabric.heal()
        await swarm.until(lambda: all(len(island.log[-1].list.members) == 4 for island in islands), within_s=300)


async def test_islands_that_come_back_one_after_the_other_take_part_again(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    """Three of five were away for some minutes; one has taken the others' history over before the two are there."""
    job: dict[str, Any] = {"every": 12, "least_every": 12, "most_every": 12, "steps": 10**5}
    async with open_islands(tmp_path, 0, 1, 2, 3, 4, step_s=10.0, timing=RoundTiming(), **job) as swarm:
        island = swarm.nodes[0].island
        await swarm.until(lambda: len(island.log) >= 3 and len(island.log[-1].list.members) == 5, within_s=1800)
        await trio.sleep(60)
        away = {
            number: (list(swarm.nodes[number].island.log), swarm.nodes[number].model.states()) for number in (2, 3, 4)
        }
        for number in away:
            swarm.kill(number)
        await trio.sleep(300)

        def start(number: int) -> None:
            back = swarm.add(number, step_s=10.0).island
            back.begin = partial(back.begin, *away[number])  # type: ignore[method-assign]

        start(2)
        await trio.sleep(45)
        start(3)
        start(4)
        await swarm.until(lambda: all(len(node.island.log[-1].list.members) == 5 for node in swarm.nodes.values()))


@pytest.mark.parametrize(("others", "step_s", "fast_s", "rounds"), [(4, 3.0, 0.5, 8), (3, 25.0, 0.4, 7)])
async def test_an_island_that_is_much_faster_than_the_others_takes_part(
    tmp_path: Path, patient_clock: MockClock, others: int, step_s: float, fast_s: float, rounds: int
) -> None:
    """It is done with its steps long before the others, who are there and still make theirs: a card beside CPUs."""
    job: dict[str, Any] = {"every": 12, "least_every": 12, "most_every": 12, "steps": 10**5}
    async with open_islands(tmp_path, timing=RoundTiming(), **job) as swarm:
        for number in range(others):
            swarm.add(number, step_s=step_s)
        fast = swarm.add(others, step_s=fast_s)
        island = swarm.nodes[0].island
        await swarm.until(lambda: len(island.log) >= rounds, within_s=3600)
        counted = [entry.round for entry in island.log[2:] if fast.name in entry.list.members]
        assert len(counted) >= len(island.log) - 3


async def test_as_many_names_that_only_say_hello_part_nobody(tmp_path: Path, patient_clock: MockClock) -> None:
    """They took part once. Whoever leads soon knows that they are waited for in vain, and its followers did not."""
    async with open_islands(tmp_path, 0, 1, 2, 3, step_s=60.0, timing=RoundTiming(), **ONE_STEP) as swarm:
        honest = [swarm.nodes[number].island for number in (0, 1)]
        names = [swarm.nodes[number] for number in (2, 3)]
        await swarm.until(lambda: all(len(island.recent) == 4 for island in honest), within_s=1200)
        for node in names:
            node.device.step_s = 1e9  # type: ignore[attr-defined]

            def own_hello(peer: str, island: Island = node.island) -> dict[str, Any]:
                heard = [island.heard[one.peer] for one in honest if one.peer in island.heard]
                said = island.heard.get(peer) or max(heard, key=lambda one: one.round)
                return {"round": said.round, "head": said.head.hex(), "others": []}

            node.island._own_hello = own_hello  # type: ignore[method-assign]
        before = honest[0].standing.round
        await trio.sleep(1800)
        made = [entry.list.members for entry in honest[0].log[before + 1 :]]
        assert len(made) >= 8
        assert all({*members} >= {island.peer for island in honest} for members in made)


async def test_a_leader_that_does_not_wait_for_slow_islands_has_nobody_with_it(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    """It leads half a minute after a fast one has arrived, and three others still make their steps."""
    job: dict[str, Any] = {"every": 6, "least_every": 6, "most_every": 6, "steps": 10**5}
    async with open_islands(tmp_path, 0, 1, 2, timing=RoundTiming(), step_s=25.0, **job) as swarm:
        fast, liar = swarm.add(3, step_s=0.5), swarm.add(4, step_s=0.5).island
        slow = swarm.nodes[0].island
        await swarm.until(lambda: len(slow.log) >= 3 and len(slow.log[-1].list.members) == 5, within_s=4000)

        def lead_at(standing: Standing, began: float, leader: str, *, first: bool) -> float:
            return liar._arrived_at.get(fast.name, math.inf) + 31 if leader == liar.peer else math.inf

        liar._may_count_at = lambda standing, order: -math.inf  # type: ignore[method-assign]
        liar._is_late = lambda: False  # type: ignore[method-assign]
        liar._lead_at = lead_at  # type: ignore[method-assign]
        before = len(slow.log)
        await trio.sleep(600)
        made = [len(entry.list.members) for entry in slow.log[before:]]
        assert len(made) >= 6
        assert made.count(5) >= len(made) - 1


async def test_a_founder_without_its_disk_goes_on_with_the_others(tmp_path: Path, patient_clock: MockClock) -> None:
    """It can begin the job anew in a moment, while to read the log of the others takes many times as long."""
    far = LinkProfile(delay_s=0.5)
    async with open_islands(tmp_path, 0, 1, 2, profile=far, step_s=2.0, timing=RoundTiming(), **ONE_STEP) as swarm:
        other = swarm.nodes[1].island
        await swarm.until(lambda: len(other.log) > 40, within_s=1200)
        swarm.kill(0)
        await trio.sleep(10)
        founder = swarm.add(0, step_s=2.0).island
        # the founder may have heard of the other's newest round a moment later
        await swarm.until(
            lambda: founder.peer in other.log[-1].list.members and founder._heads == other._heads, within_s=300
        )


async def test_a_list_of_few_keeps_nobody_from_that_of_most(tmp_path: Path, patient_clock: MockClock) -> None:
    """One that comes first in the order of leading lists itself and one other, as soon as that one has arrived."""
    timing = replace(TIMING, exchange_s=60.0)
    async with (
        open_islands(tmp_path, 0, 1, 2, LIAR, step_s=2.0, timing=timing, **ONE_STEP) as swarm,
        trio.open_nursery() as nursery,
    ):
        island, liar = swarm.nodes[0].island, swarm.nodes[LIAR].island
        await swarm.until(lambda: len(island.recent) == 4)
        before, began = island.standing.round, trio.current_time()

        async def lead(standing: Standing) -> None:
            await trio.sleep(0.5)

        liar._lead = lead  # type: ignore[method-assign]

        async def spoil() -> None:
            while True:
                own, attempt = liar._arrivals.get(liar.peer), liar._listed.get(liar.peer, -1) + 1
                theirs = liar._arrivals.get(island.peer)
                if own is not None and theirs is not None and attempt <= MAX_ATTEMPTS:
                    liar._listed[liar.peer] = attempt
                    few = sign_list(identity(LIAR), swarm.record.id, attempt, [own, theirs], NOW_MS)
                    swarm._nursery.start_soon(liar._say, island.peer, few.raw)
                await trio.sleep(0.2)

        nursery.start_soon(spoil)
        await swarm.until(lambda: island.standing.round >= before + 20)
        assert trio.current_time() - began < 20 * 5
        counted = [island.peer in entry.list.members for entry in island.log[before:]]
        assert sum(counted) >= 18, counted
        nursery.cancel_scope.cancel()


async def test_times_that_others_sign_stop_no_round(tmp_path: Path, patient_clock: MockClock) -> None:
    """One makes rounds alone whose steps took a month, as it signs, and then only says hello."""
    async with open_islands(tmp_path, 0, step_s=2.0, **ONE_STEP) as swarm:
        island, liar = swarm.nodes[0].island, swarm.add(LIAR)
        liar.island.timing = replace(TIMING, quorum_s=-1e9, grace_least_s=0.0, grace_most_s=0.0)
        arrive = liar.island._arrive

        async def arrive_late(*args: Any) -> None:
            honest, liar.island._wall_ms = liar.island._wall_ms, lambda: 2 * NOW_MS
            await arrive(*args)
            liar.island._wall_ms = honest

        liar.island._arrive = arrive_late  # type: ignore[method-assign, assignment]
        await swarm.until(lambda: steps_s(swarm.record, island.log, 1) > 1e6)
        liar.device.step_s = 1e9  # type: ignore[attr-defined]
        began, before = trio.current_time(), island.standing.round
        await swarm.until(lambda: island.standing.round >= before + 5)
        most_s = 5 * (TIMING.quorum_s + TIMING.lead_s + TIMING.grace_most_s + 2.0) + 8 * 2.0
        assert trio.current_time() - began < most_s

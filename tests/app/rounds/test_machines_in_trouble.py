"""Islands of several machines of which one ends, is paused, dies or lacks room: the job goes on, and soon.

From the training server of a machine, by what it offers, to the route that the owner finds.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from app.rounds.founding import ROWS, block_needs
from app.rounds.train_jobs import RunningTraining
from app.training import hop, states
from app.training.blame import REST_S
from app.training.hop import JobBlocks
from app.training.trainer import SwarmTrainer
from app.training.wire import JobOrder
from engine.budget import plan_full, unquantised
from engine.full_runner import FullRunner
from engine.sources.hf_config import parse_config
from p2p.memory.fabric import MemoryFabric, open_fabric
from tests.app.rounds.test_machines import SHAPE, JobNode, wish_in

CONFIG = parse_config(dict(SHAPE), "the test", {})
SOON_S = 120.0  # hops forget a silent job after 180 s
part = block_needs(CONFIG, 32)  # (blocks, micro-batches under way) -> bytes


class Helped:
    """Nodes of which the first is too small for its job, and what happens to them."""

    def __init__(self, fabric: MemoryFabric, folder: Path, nodes: list[JobNode]) -> None:
        self.fabric, self.nodes, self._folder = fabric, nodes, folder

    async def found(self, steps: int) -> None:
        """Found a job at the first node."""
        await self.nodes[0].jobs.found(wish_in(self._folder, steps=steps))

    @property
    def running(self) -> RunningTraining:
        [running] = self.nodes[0].jobs.running.values()
        return running

    @property
    def trainer(self) -> SwarmTrainer:
        steps: Any = self.running.island._steps
        trainer: SwarmTrainer = steps.trainer
        return trainer

    @property
    def lost(self) -> list[str]:
        """Why epochs were lost."""
        return list(self.trainer.figures.lost) if self.nodes[0].jobs.running else []

    @property
    def steps(self) -> int:
        """Steps that were made since the job runs."""
        return sum(one.island.figures.steps for one in self.nodes[0].jobs.running.values())

    @property
    def machines(self) -> list[int]:
        """Numbers of the nodes that make the steps."""
        numbers = {node.network.peer_id: number for number, node in enumerate(self.nodes)}
        return [numbers[hop.peer] for hop in self.running.island.machines]

    async def until(self, condition: Callable[[], object], within_s: float = SOON_S) -> None:
        """Wait until something holds; fails where it takes too long."""
        deadline = trio.current_time() + within_s
        while not condition():
            assert trio.current_time() < deadline, f"not within {within_s} s: {self.lost}"
            await trio.sleep(0.05)

    async def status(self) -> str:
        [facts] = await self.nodes[0].jobs.facts()
        return str(facts["status"])


@asynccontextmanager
async def open_helped(folder: Path, *rooms: int) -> AsyncIterator[tuple[Helped, trio.Nursery]]:
    """Nodes that give so many bytes to jobs; the first one is an owner whose machine does not hold a whole model."""
    whole = min(plan_full(CONFIG, unquantised(size), ROWS, 0).total_bytes for size in (2, 4))
    async with open_fabric(1) as fabric, trio.open_nursery() as nursery:
        nodes = [
            JobNode(fabric, at, folder / str(at), whole - 1 if at == 0 else None, room, nodes=len(rooms))
            for at, room in enumerate(rooms)
        ]
        for node in nodes:
            await nursery.start(node.serve)
            await nursery.start(node.jobs.run)
        yield Helped(fabric, folder, nodes), nursery
        nursery.cancel_scope.cancel()


@pytest.mark.soak
async def test_an_owner_whose_own_server_ends_between_two_rounds_waits_for_it(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    async with open_helped(tmp_path, part(3, 3), part(4, 3)) as (helped, nursery):
        owner = helped.nodes[0]
        await helped.found(20)
        find, found = helped.trainer._routes, 0

        async def found_before_it_ends(avoid: frozenset[str]) -> Any:
            nonlocal found
            route = await find(avoid)
            found += 1
            if found == 2:
                owner.serving.cancel()
                await trio.testing.wait_all_tasks_blocked()
            return route

        helped.trainer._routes = found_before_it_ends
        await helped.until(lambda: helped.lost)
        assert await owner.server.room_for(owner.network.peer_id) == 0
        await trio.sleep(60)
        assert await helped.status() == "running"
        made = helped.steps
        await nursery.start(owner.serve)
        await helped.until(lambda: helped.steps > made, 2 * REST_S)
        await helped.until(lambda: not owner.jobs.running, 600)
        assert await helped.status() == "finished"


async def test_a_helper_whose_server_has_ended_is_not_chosen(tmp_path: Path, patient_clock: MockClock) -> None:
    """It had most room, and was asked again and again, for ten minutes each time."""
    async with open_helped(tmp_path, 0, part(4, 3), part(3, 3), part(3, 3)) as (helped, _):
        helped.nodes[1].serving.cancel()
        await trio.testing.wait_all_tasks_blocked()
        await helped.found(10)
        await helped.until(lambda: helped.steps > 1)
        assert helped.machines == [2, 3]
        assert not helped.lost


async def test_a_helper_whose_server_ends_says_so_and_another_takes_its_place(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    async with open_helped(tmp_path, 0, *[part(3, 3)] * 3) as (helped, _):
        await helped.found(400)
        await helped.until(lambda: helped.steps > 6)
        used, made = helped.machines, helped.steps
        helped.nodes[used[0]].serving.cancel()
        await helped.until(lambda: helped.steps > made)
        assert used[0] not in helped.machines
        assert used[1] in helped.machines
        assert [why.partition(": ")[2] for why in helped.lost] == ["this node trains nothing any more"]


async def test_a_survivor_of_a_lost_hop_has_room_at_once_and_keeps_its_states(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    async with open_helped(tmp_path, 0, *[part(3, 3)] * 3) as (helped, _):
        await helped.found(400)
        await helped.until(lambda: helped.steps > 6)
        survivor, dead = helped.machines
        owner, kept = helped.nodes[0], helped.nodes[survivor].network.peer_id
        made, given = helped.steps, owner.states.given_bytes(kept)
        helped.fabric.kill(helped.nodes[dead].network.peer_id)
        await helped.until(lambda: helped.steps > made)
        assert helped.machines == [survivor, 6 - survivor - dead]
        assert owner.states.given_bytes(kept) == given, "it had these states"


async def test_a_job_that_was_paused_for_a_moment_goes_on_at_once(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_helped(tmp_path, part(2, 3), part(4, 3)) as (helped, _):
        owner = helped.nodes[0]
        await helped.found(400)
        await helped.until(lambda: helped.steps > 6)
        await owner.jobs._place.pause.by_hand(None)
        await helped.until(lambda: not owner.jobs.running)
        await helped.until(lambda: not helped.nodes[1].server.jobs)  # it was told
        await owner.jobs._place.pause.resume()
        await helped.until(lambda: helped.steps)


@pytest.mark.soak
async def test_memory_that_is_full_for_a_moment_does_not_cost_a_helper_its_place(
    tmp_path: Path, patient_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_helped(tmp_path, part(2, 3), part(4, 3)) as (helped, _):
        made, full = 0, helped.nodes[1].full
        make = full.make

        def crowded(order: JobOrder, spare_bytes: int) -> Any:
            nonlocal made
            made += 1
            with monkeypatch.context() as moment:
                if made == 3:
                    moment.setattr(full, "room", lambda spare_bytes: 1000)
                return make(order, spare_bytes)

        monkeypatch.setattr(full, "make", crowded)
        await helped.found(25)
        await helped.until(lambda: not helped.nodes[0].jobs.running, 600)
        assert made > 3
        assert await helped.status() == "finished"


# --- the disk ---------------------------------------------------------------------------------------------------------


async def test_a_hop_keeps_as_many_states_as_a_round_needs(
    tmp_path: Path, patient_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What all jobs that train adapters may keep is less than two versions of a few large blocks."""
    monkeypatch.setattr(hop, "MAX_KEPT_BYTES", 1000)
    async with open_helped(tmp_path, part(2, 3), part(4, 3)) as (helped, _):
        await helped.found(10)
        await helped.until(lambda: not helped.nodes[0].jobs.running, 600)
        assert await helped.status() == "finished"


async def test_a_helper_offers_no_more_than_its_disk_has_room_for(
    tmp_path: Path, patient_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    free: dict[Path, int] = {}
    monkeypatch.setattr(states, "disk_free_bytes", lambda folder: free.get(folder, 2**40))
    async with open_helped(tmp_path, 0, 2**40, part(4, 3), part(4, 3)) as (helped, _):
        owner, full = (helped.nodes[at] for at in (0, 1))
        for spare, offered in ((0, 0), (-5, 0), (24_000, 16_000)):
            free[tmp_path / "1" / "states"] = spare
            assert await full.server.room_for(owner.network.peer_id) == offered
        await helped.found(10)
        await helped.until(lambda: helped.steps > 1)
        assert helped.machines == [2, 3]


async def test_a_disk_that_is_full_when_a_round_begins_costs_that_helper_a_rest(
    tmp_path: Path, patient_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    free: dict[Path, int] = {}
    monkeypatch.setattr(states, "disk_free_bytes", lambda folder: free.get(folder, 2**40))
    async with open_helped(tmp_path, 0, *[part(3, 3)] * 3) as (helped, _):
        full = helped.nodes[1].full
        make = full.make

        def filled_up_just_then(order: JobOrder, spare_bytes: int) -> JobBlocks:
            free[tmp_path / "1" / "states"] = 0
            return make(order, spare_bytes)

        monkeypatch.setattr(full, "make", filled_up_just_then)
        await helped.found(10)
        await helped.until(lambda: helped.steps > 1)
        assert helped.machines == [2, 3]
        [why] = helped.lost
        assert "no room on the disk" in why
        assert not helped.trainer._refused


# --- a card -----------------------------------------------------------------------------------------------------------


async def test_the_memory_of_blocks_that_are_gone_counts_as_free(
    tmp_path: Path, patient_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card's allocator keeps it until it is told not to, and its driver counts it as taken."""
    alive, reserved, size = weakref.WeakSet[FullRunner](), 0, 3 * part(4, 3) // 2
    async with open_helped(tmp_path, part(2, 3), 2**40) as (helped, _):
        full = helped.nodes[1].full
        make = full.make

        def made(order: JobOrder, spare_bytes: int) -> JobBlocks:
            nonlocal reserved
            blocks = make(order, spare_bytes)
            assert isinstance(blocks, FullRunner)
            alive.add(blocks)
            reserved = max(reserved, sum(one.memory_bytes for one in alive))
            return blocks

        def release() -> None:
            nonlocal reserved
            gc.collect()
            reserved = sum(one.memory_bytes for one in alive)

        monkeypatch.setattr(full, "make", made)
        monkeypatch.setattr(full, "release", release)
        monkeypatch.setattr(full, "room", lambda spare_bytes: min(spare_bytes, size - reserved))
        await helped.found(25)
        await helped.until(lambda: not helped.nodes[0].jobs.running, 600)
        assert await helped.status() == "finished"
        await helped.nodes[1].server.no_jobs()
        assert not reserved

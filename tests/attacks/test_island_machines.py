"""Machines that help an island, against an owner or a hop that wants more of them than the job needs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from app.core.network import FrameStream
from app.core.span import Span
from app.session.frame import decode_hop_error, new_session_id, plain
from app.training import states, trainer
from app.training.hop import KEPT_VERSIONS, TrainingServer, TrainingTerms
from app.training.states import METHODS, StateStore
from app.training.wire import (
    PROTOCOL,
    Kind,
    StatePart,
    decode,
    encode_open,
    encode_parts,
    full_order,
    most_state_bytes,
)
from app.weights.wire import ChunkRequest
from p2p.memory.fabric import LinkProfile, MemoryFabric, open_fabric
from tests.app.hash_model import InlineDevice
from tests.app.rounds import island_swarm
from tests.app.rounds.island_swarm import in_place
from tests.app.rounds.test_machines import SHAPE
from tests.app.rounds.test_pipeline import Machines, Maker, open_pipeline, steps_of

BLOCKS = Span(1, 3)
ORDER = replace(full_order(SHAPE, blocks=6, optimiser="adamw", weight_decay=0.0, rows=64, wire="f32"), span=BLOCKS)
MEMORY_BYTES = 2**30


class Helper:
    """A machine that trains blocks of others' jobs, with the store of its states."""

    def __init__(self, fabric: MemoryFabric, folder: Path) -> None:
        network: Any = fabric.node("helper")
        self.states = StateStore(network, folder / "helper", lambda peer: True, in_place)
        self.maker, self.terms = Maker(), TrainingTerms(memory_bytes=MEMORY_BYTES)
        self.server = TrainingServer(network, InlineDevice(), self.states, lambda: self.terms, self.maker)

    @property
    def job(self) -> Any:
        [job] = self.server._jobs.values()
        return job


class Owner:
    """The owner of a job, which speaks its protocol."""

    def __init__(self, fabric: MemoryFabric, name: str) -> None:
        self.network: Any = fabric.node(name)
        self.name, self.run = name, new_session_id(name)
        self.stream: FrameStream

    async def open(self, epoch: int = 1, version: int = 0, **order: Any) -> None:
        self.stream = await self.network.open("helper", PROTOCOL)
        await self.stream.send(encode_open(self.run, epoch, version, replace(ORDER, **order)))

    async def answer(self) -> Any:
        with trio.fail_after(20):
            return decode(await self.stream.receive())


@asynccontextmanager
async def open_helper(folder: Path) -> AsyncIterator[tuple[MemoryFabric, Helper]]:
    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        helper = Helper(fabric, folder)
        await nursery.start(helper.server.run)
        yield fabric, helper
        nursery.cancel_scope.cancel()


def named(count: int, size_bytes: int) -> tuple[StatePart, ...]:
    """States that nobody has."""
    return tuple(StatePart(bytes([number]) * 32, size_bytes) for number in range(1, count + 1))


async def test_an_owner_has_a_hop_keep_two_versions_of_its_blocks_and_no_more(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """However large the blocks are; the memory that they take is what the user allows."""
    async with open_helper(tmp_path) as (fabric, helper):
        owner = Owner(fabric, "owner")
        await owner.open()
        assert (await owner.answer()).kind == Kind.READY
        most = most_state_bytes(helper.maker.made[0].sums_bytes)
        assert helper.job.most_kept_bytes == KEPT_VERSIONS * len(BLOCKS) * most
        keep = encode_parts(Kind.KEEP, owner.run, 1, 0, named(2 * len(BLOCKS) + 1, most), ["owner"])
        await owner.stream.send(keep)
        trouble = decode_hop_error(await owner.answer())
        assert (trouble.code, "may keep at most" in trouble.text) == ("failed", True)
        assert not helper.job.kept


async def test_states_larger_than_the_blocks_are_not_even_fetched(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with open_helper(tmp_path) as (fabric, helper):
        owner, asked = Owner(fabric, "owner"), list[str]()

        async def note(peer: str, body: bytes) -> bytes:
            asked.append(peer)
            return b""

        for method in METHODS:
            owner.network.serve(method, note)
        await owner.open(version=1, states=named(len(BLOCKS), 2**30), holders=("owner",))
        trouble = decode_hop_error(await owner.answer())
        assert (trouble.code, "larger than those" in trouble.text, asked) == ("failed", True, [])
        assert not helper.server.jobs


async def test_an_owner_that_leaves_while_its_states_are_fetched_frees_the_memory(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    async with open_helper(tmp_path) as (fabric, helper):
        fabric.node("silent")
        fabric.freeze("silent")
        first, second = Owner(fabric, "first"), Owner(fabric, "second")
        room = await helper.server.room_for("second")
        await first.open(version=1, states=named(len(BLOCKS), 1000), holders=("silent",))
        while not helper.server.jobs or helper.job.blocks is None:  # noqa: ASYNC110
            await trio.sleep(0.001)
        assert await helper.server.room_for("second") == 0
        await first.stream.reset()
        await wait_all_tasks_blocked()
        assert helper.job.blocks is None
        assert await helper.server.room_for("second") == room
        await second.open()
        assert (await second.answer()).kind == Kind.READY
        begun = trio.current_time()
        await second.stream.send(plain(Kind.CLOSE, second.run, 1))
        await helper.server.no_jobs()
        assert trio.current_time() - begun <= 1.1 * trainer.PROBE_EVERY_S * 3  # the first one is forgotten


async def test_a_job_that_ends_gives_its_memory_back_once(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with open_helper(tmp_path) as (fabric, helper):
        released = list[None]()
        helper.maker.release = lambda: released.append(None)  # type: ignore[method-assign]
        for _ in range(3):  # who asks again and again costs nothing
            await helper.server.room_for("owner")
        assert not released
        owner = Owner(fabric, "owner")
        await owner.open()
        assert (await owner.answer()).kind == Kind.READY
        await owner.stream.reset()
        await wait_all_tasks_blocked()
        for _ in range(3):
            assert await helper.server.room_for("owner")
        assert len(released) == 1


# --- hops that take long to begin -------------------------------------------------------------------------------------

STUCK_S, SLOWEST, LINK = 3.0, 10_000, 20_000  # in proportion to 600 s, 1 Mbit/s and a link that is twice as fast


@asynccontextmanager
async def open_slow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Any, Machines]]:
    """An island whose owner has a slow connection to its machines."""
    for module in (states, trainer):
        monkeypatch.setattr(module, "SLOWEST_BYTES_PER_S", SLOWEST)
    monkeypatch.setattr(island_swarm, "PATIENCE", replace(island_swarm.PATIENCE, stuck_s=STUCK_S))
    async with open_pipeline(folder, (0, 2), (2, 4), (2, 4), steps=5) as (swarm, machines):
        for name in machines.alive:
            swarm.fabric.set_link(swarm.nodes[0].name, name, LinkProfile(0.01, bytes_per_s=LINK))
        yield swarm, machines


async def test_a_hop_has_the_time_to_begin_that_its_states_take(
    tmp_path: Path, patient_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had ten minutes, however large they were: no island over home connections could begin."""
    async with open_slow(tmp_path, monkeypatch) as (swarm, _):
        await swarm.finished(0)
        job = steps_of(swarm.nodes[0]).trainer
        assert not job.figures.lost
        assert [hop.peer for hop in job.route] == ["hop0", "hop1"]
        size = sum(state.size_bytes for state in job.snapshot.states[2:])
        assert size / LINK > STUCK_S  # else this shows nothing


@pytest.mark.parametrize("fetches", [False, True])
async def test_a_hop_that_never_begins_holds_an_island_up_for_no_longer_than_its_states_could_take(
    tmp_path: Path, patient_clock: MockClock, monkeypatch: pytest.MonkeyPatch, fetches: bool
) -> None:
    async with open_slow(tmp_path, monkeypatch) as (swarm, machines):
        owner, begun = swarm.nodes[0], list[float]()
        liar = machines.alive["hop1"]
        obtain, network = liar.states.obtain, swarm.fabric.nodes["hop1"]

        async def obtained(run: bytes, parts: tuple[StatePart, ...], holders: tuple[str, ...]) -> None:
            begun.append(trio.current_time())
            if fetches:
                await obtain(run, parts, holders)
            while fetches:
                body = ChunkRequest(parts[0].root, 0, tried=True).encode()
                await network.call(owner.name, METHODS.chunk, body, timeout_s=60.0)
            await trio.sleep_forever()

        monkeypatch.setattr(liar.states, "obtain", obtained)
        lost = steps_of(owner).trainer.figures.lost
        await swarm.until(lambda: lost)
        size = sum(state.size_bytes for state in steps_of(owner).trainer.snapshot.states[2:])
        taken_s = trio.current_time() - begun[0]
        if fetches:
            assert taken_s < 2 * (STUCK_S + size / SLOWEST) + trainer.PROBE_EVERY_S
        else:
            assert STUCK_S <= taken_s < 3 * STUCK_S < STUCK_S + size / SLOWEST
        assert lost[0].startswith("hop1: ")
        await swarm.finished(0)

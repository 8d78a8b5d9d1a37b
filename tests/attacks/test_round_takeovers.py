"""Rounds that members make past the others, up to the last step of the job, take nobody along."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from app.core.canonical_json import canonical
from app.rounds import wire
from app.rounds.island import Island, RoundTiming, hashed
from app.rounds.log import RoundEntry, Standing, follow, make_entry, replay
from app.rounds.record import TrainingRecord
from app.rounds.statements import Arrival, Result, sign_arrival, sign_list, sign_result
from app.training.states import StateStore
from app.training.wire import StatePart
from p2p.errors import P2PError, RemoteError
from p2p.identity import Identity
from p2p.memory.node import MemoryNode
from tests.app.rounds.island_swarm import ONE_STEP, IslandSwarm, in_place, open_islands
from tests.app.swarms import identity

LIAR, NEW = 3, 102
NOW_MS = 1_800_000_000_000


def made_by(record: TrainingRecord, standing: Standing, people: Sequence[Identity], root: bytes) -> RoundEntry:
    """A round of these alone, who claim all that they were to read."""
    tokens = standing.every * record.batch * record.length
    arrivals = [
        sign_arrival(
            one, Arrival(record.id, standing.round, standing.prev, standing.every, tokens, os.urandom(32)), NOW_MS
        )
        for one in people
    ]
    found = sign_list(people[0], record.id, 0, arrivals, NOW_MS)
    said = [
        sign_result(one, Result(record.id, standing.round, found.hash, root, {}, {}), NOW_MS)
        for one in sorted(people, key=lambda one: found.members.index(one.peer_id))
    ]
    return make_entry(
        people[0], record, standing, found, said, every=record.most_every, codec=standing.codec, present=(),
        now_ms=NOW_MS,
    )  # fmt: skip


def to_the_end(
    record: TrainingRecord, entries: Sequence[RoundEntry], people: Sequence[Identity], root: bytes
) -> list[RoundEntry]:
    """A log that goes on with rounds of these alone, up to the last step."""
    entries, standing = list(entries), replay(record, entries)
    while standing.step < record.steps:
        entries.append(made_by(record, standing, people, root))
        standing = follow(record, standing, entries[-1])
    return entries


class Shown:
    """A log that its nodes show to whoever asks, once there is one."""

    def __init__(self, folder: Path) -> None:
        self.entries: list[RoundEntry] = []
        self.parts: list[StatePart] = []  # of the state after them
        self.late_s = 0.0
        self._folder = folder

    @property
    def hello(self) -> dict[str, Any]:
        """What its nodes say of themselves."""
        return {"round": len(self.entries), "head": self.entries[-1].hash.hex()}

    async def answer(self, method: str, peer: str, rest: bytes) -> Any:
        """Answer one of the questions of islands."""
        if not self.entries:
            raise RemoteError("not yet", wire.NOT_YET)
        if method == wire.HELLO:
            return canonical(self.hello)
        await trio.sleep(self.late_s)
        if method == wire.LOG:
            fields = wire.fields_of(rest, "log")
            first = fields.integer("round", 0, 10**7)
            return wire.pack([one.raw for one in self.entries[first : first + fields.integer("count", 1, 64)]])
        if self.parts:
            return canonical({"parts": [[part.root.hex(), part.size_bytes] for part in self.parts]})
        raise RemoteError("not yet", wire.NOT_YET)

    async def go_on(self, swarm: IslandSwarm, nodes: Sequence[MemoryNode], people: Sequence[Identity]) -> None:
        """Go on to the end with rounds of these alone, and have a state of zeros after them."""
        states = [bytes(len(one)) for one in swarm.nodes[0].model.states()]
        root, parts = hashed(states)
        for node in nodes[:2]:
            store = StateStore(node, self._folder / node.peer_id, lambda peer: True, in_place)
            store.serve()
            for state in states:
                await store.keep(b"zeros", state)
        self.entries, self.parts = to_the_end(swarm.record, self.entries, people, root), parts

    def serve(self, node: MemoryNode) -> None:
        """Let a node show it."""
        for method in (wire.HELLO, wire.LOG, wire.PARTS):

            async def answer(peer: str, body: bytes, method: str = method) -> Any:
                return await self.answer(method, peer, wire.read_request(body)[1])

            node.serve(method, answer)


def identities(swarm: IslandSwarm, count: int, shown: Shown) -> list[MemoryNode]:
    """Identities on one machine that show this log."""
    nodes = [swarm.fabric.node(identity(1000 + number).peer_id) for number in range(count)]
    for node in nodes:
        swarm.fabric.machine_of[node.peer_id] = "the attacker's"
        shown.serve(node)
    return nodes


async def greet(swarm: IslandSwarm, nodes: Sequence[MemoryNode], shown: Shown, *, only: str = "") -> None:
    """Say hello to all islands, or one, again and again; before there is a log, with the head of the first island."""
    while True:
        for node in nodes:
            for name in [only] if only else reversed([one.name for one in swarm.nodes.values()]):
                said = shown.hello if shown.entries else hello_of(swarm.nodes[0].island)
                with suppress(P2PError):
                    await node.call(name, wire.HELLO, wire.request(swarm.record.id, said), timeout_s=1)
        await trio.sleep(3)


def hello_of(island: Island) -> dict[str, Any]:
    """What who is as far as an island says of itself."""
    return {"round": island.standing.round, "head": island.head.hex()}


async def test_who_leads_a_round_and_goes_on_alone_takes_nobody_along(tmp_path: Path, patient_clock: MockClock) -> None:
    """It keeps the entry that all have signed back, and shows it with rounds of its own after it."""
    more = {**ONE_STEP, "steps": 20}
    async with open_islands(tmp_path, 0, 1, 2, LIAR, **more) as swarm:
        liar, record, made_up = swarm.nodes[LIAR].island, swarm.record, list[RoundEntry]()
        usual = liar._count

        async def count(standing: Standing, members: Any, results: Any, began: float) -> Any:
            if len(members.members) < 4 or made_up:
                return await usual(standing, members, results, began)
            entry = make_entry(
                identity(LIAR), record, standing, members, results.values(), every=standing.every,
                codec=standing.codec, present=standing.members, now_ms=NOW_MS,
            )  # fmt: skip
            states = [bytes(len(one)) for one in swarm.nodes[LIAR].model.states()]
            root, parts = hashed(states)
            entries = to_the_end(record, [*liar.log, entry], [identity(LIAR)], root)
            made_up.extend(entries[len(liar.log) + 1 :])
            await liar.checkpoint.finish()
            liar._model.load(states)
            await liar._settle(replay(record, entries), entries, states, parts, None)

        liar._count = count  # type: ignore[method-assign]
        for number in range(3):
            await swarm.nodes[number].ended.wait()
        heads = {swarm.nodes[number].island.head for number in range(3)}
        assert len(heads) == 1
        assert made_up
        assert heads.isdisjoint(one.hash for one in made_up)


async def test_names_that_made_no_round_take_nobody_along(tmp_path: Path, patient_clock: MockClock) -> None:
    """As many as the islands say hello until they are named for a round, and sign their own history from there."""
    shown = Shown(tmp_path)
    async with (
        open_islands(tmp_path, 0, 1, 2, islands=20, grid=True, **{**ONE_STEP, "steps": 400}) as swarm,
        trio.open_nursery() as nursery,
    ):
        island, nodes = swarm.nodes[0].island, identities(swarm, 4, shown)
        people = [identity(1000 + number) for number in range(4)]
        nursery.start_soon(greet, swarm, nodes, shown)
        await swarm.until(lambda: {one.peer_id for one in people} <= {*island.standing.members})
        common = list(island.log)
        await swarm.until(lambda: len(island.log) > len(common))
        made = Shown(tmp_path)
        made.entries = common
        await made.go_on(swarm, nodes, people)
        shown.entries, shown.parts, before = made.entries, made.parts, island.standing.round
        await swarm.until(lambda: island.standing.round >= before + 10)
        assert not any(one.hash in {*island._heads} for one in shown.entries[len(common) :])
        nursery.cancel_scope.cancel()


async def test_a_newcomer_believes_no_rounds_that_were_made_past_those_who_are_there(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    """One who was a member goes on alone in its log, and many names repeat that."""
    shown = Shown(tmp_path)
    async with (
        open_islands(tmp_path, 0, 1, 2, LIAR, step_s=100.0, **{**ONE_STEP, "steps": 40}) as swarm,
        trio.open_nursery() as nursery,
    ):
        island = swarm.nodes[0].island
        await swarm.until(lambda: bool(island.log) and len(island.log[-1].list.members) == 4, within_s=2000)
        swarm.kill(LIAR)
        nodes, shown.entries = identities(swarm, 4, shown), list(island.log)
        await shown.go_on(swarm, nodes, [identity(LIAR)])
        nursery.start_soon(greet, swarm, nodes, shown)
        new = swarm.add(NEW, has_model=False, step_s=100.0)
        await swarm.until(lambda: new.name in {*island.log[-1].list.members}, within_s=2000)
        assert not new.island.is_finished
        nursery.cancel_scope.cancel()


async def test_identities_that_answer_late_hold_a_newcomer_up_little(tmp_path: Path, patient_clock: MockClock) -> None:
    shown = Shown(tmp_path)
    async with (
        open_islands(tmp_path, 0, 1, 2, step_s=10.0, timing=RoundTiming(), islands=64, grid=True, **ONE_STEP) as swarm,
        trio.open_nursery() as nursery,
    ):
        island = swarm.nodes[0].island
        await swarm.until(lambda: len(island.log) >= 4 and len(island.log[-1].list.members) == 3, within_s=900)
        shown.entries, shown.late_s = list(island.log[:3]), 0.9 * island.timing.lead_s
        new = swarm.add(NEW, has_model=False, step_s=10.0)
        for node in identities(swarm, 32, shown):
            nursery.start_soon(greet, swarm, [node], shown)
        await swarm.until(lambda: new.name in {*island.log[-1].list.members}, within_s=90)
        nursery.cancel_scope.cancel()


async def test_an_island_looks_once_at_a_history_whose_giver_hangs_up(tmp_path: Path, patient_clock: MockClock) -> None:
    """A link that ended and is dialled again gives nobody a second look, nor two to a home."""
    asked, looks = Counter[str](), list[int]()

    def serve(node: MemoryNode) -> None:
        async def show(peer: str, body: bytes) -> bytes:
            asked[node.peer_id] += 1
            try:
                await trio.sleep(14)
            finally:
                asked[node.peer_id] -= 1
            return b""

        async def greeted(peer: str, body: bytes) -> bytes:
            raise RemoteError("not now", wire.NOT_YET)

        node.serve(wire.LOG, show)
        node.serve(wire.HELLO, greeted)

    async with (
        open_islands(tmp_path, 0, step_s=100.0, timing=RoundTiming(), **ONE_STEP) as swarm,
        trio.open_nursery() as nursery,
    ):
        nodes = identities(swarm, 8, Shown(tmp_path))
        for node in nodes:
            serve(node)
        new = swarm.add(NEW, has_model=False)

        async def greet_and_hang_up(node: MemoryNode) -> None:
            number = 0
            while True:
                number += 1
                said = {"round": 10**6, "head": f"{number:064x}"}
                if not asked[node.peer_id]:
                    with suppress(P2PError):
                        await node.call(new.name, wire.HELLO, wire.request(swarm.record.id, said), timeout_s=2)
                    swarm.fabric.unlink(node.peer_id, new.name, tell=(new.name,))
                looks.append(sum(asked.values()))
                await trio.sleep(0.3)

        for node in nodes:
            nursery.start_soon(greet_and_hang_up, node)
        await trio.sleep(60)
        assert new.failure is None
        assert max(looks) == 1
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("has_model", [True, pytest.param(False, marks=pytest.mark.soak)])
async def test_a_newcomer_takes_no_history_that_one_made_who_was_named_early(
    tmp_path: Path, patient_clock: MockClock, has_model: bool
) -> None:
    """Its namer is away, and two train on; the newcomer has the state before the first round, or none."""
    shown, many = Shown(tmp_path), {**ONE_STEP, "steps": 100}
    async with (
        open_islands(tmp_path, 0, step_s=10.0, timing=RoundTiming(), islands=20, grid=True, **many) as swarm,
        trio.open_nursery() as nursery,
    ):
        island, nodes = swarm.nodes[0].island, identities(swarm, 8, shown)
        early = identity(1000)
        while early.peer_id not in island.standing.members:
            said = wire.request(swarm.record.id, hello_of(island))
            await nodes[0].call(island.peer, wire.HELLO, said, timeout_s=1)
            await trio.sleep(2)
        made = Shown(tmp_path)
        made.entries = list(island.log)
        for number in (1, 2):
            swarm.add(number, step_s=10.0)
        await swarm.until(lambda: len(island.log[-1].list.members) == 3)
        await made.go_on(swarm, nodes, [early])
        swarm.kill(0)
        honest = swarm.nodes[1].island
        await swarm.until(lambda: len(honest.log[-1].list.members) == 2)
        shown.entries, shown.parts = made.entries, made.parts
        new = swarm.add(NEW, step_s=10.0, has_model=has_model)
        nursery.start_soon(partial(greet, swarm, nodes, shown, only=new.name))
        swarm.fabric.partition([new.name, *(node.peer_id for node in nodes)])  # the first look is at who lies
        await trio.sleep(10)
        swarm.fabric.heal()
        await swarm.until(lambda: new.name in {*honest.log[-1].list.members})
        assert not new.island.is_finished
        nursery.cancel_scope.cancel()

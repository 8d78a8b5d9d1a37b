"""Members that only say that they have something of a training job keep nobody out of it, nor come first with it."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from app.manifest.merkle import CHUNK_BYTES
from app.rounds import wire
from app.rounds.job_text import HOLDERS_AGAIN_MOST_S
from app.rounds.moments import MomentsExchange, Offer, Question, Taken, best_offers
from app.rounds.record import sign_training
from app.rounds.train_store import JoinWords
from app.training.states import FETCH_S, METHODS, SILENT_S, part_of
from app.weights.wire import ABSENT
from p2p.errors import RemoteError
from p2p.memory.fabric import LinkProfile, MemoryFabric, MemoryNode, open_fabric
from tests.app.rounds.founded import founded
from tests.app.rounds.test_own_data import Node
from tests.app.rounds.test_rejoining import wish_in
from tests.app.swarms import identity
from tests.app.training.test_states import store
from tests.attacks.test_patience import trickle

MEMBERS, HONEST = 60, 3
JOINER, FOUNDER = identity(0).peer_id, identity(1).peer_id
WITHIN_S = 150.0
MOMENTS_BYTES = 30 * CHUNK_BYTES  # the larger, the longer they are waited for


async def silent(peer: str, body: bytes) -> Any:
    """Never answer."""
    await trio.sleep_forever()


class Job:
    """A job whose founder is gone, with members that have its text, and such that only repeat its record."""

    def __init__(self, fabric: MemoryFabric, folder: Path) -> None:
        self.fabric, self.folder = fabric, folder
        made = founded(wish_in(folder), folder, FOUNDER)
        self.texts = [made.texts[name] for name in made.record.texts]
        self.hashes = {part.root: b"".join(leaves) for part, leaves in map(part_of, self.texts)}
        self.raw, self.id = sign_training(identity(1), made.record), made.record.id.hex()

    async def _named(self, peer: str, body: bytes) -> Any:
        return wire.pack([self.raw])

    async def _named_late(self, peer: str, body: bytes) -> Any:
        await trio.sleep(5)
        return wire.pack([self.raw])

    async def _hashes(self, peer: str, body: bytes) -> Any:
        return self.hashes[bytes(body)]

    async def _lacking(self, peer: str, body: bytes) -> Any:
        raise RemoteError("it is not here", ABSENT)

    async def add_liar(self, name: str, how: str) -> MemoryNode:
        """Add a member that has a link to the joiner, and answers it fast, but with nothing of the text."""
        node = self.fabric.node(name)
        self.fabric.machine_of[name] = "the liars'"
        self.fabric.set_link(JOINER, name, LinkProfile(0.001))
        await self.fabric.dial(node, JOINER)
        node.serve(wire.JOBS, self._named)
        node.serve(METHODS.leaves, {"lacks": self._lacking, "silent": silent}.get(how, self._hashes))
        node.serve(METHODS.chunk, self._lacking if how == "lacks" else silent)
        return node

    async def add_honest(self, name: str) -> None:
        """Add a member that has the text."""
        node = self.fabric.node(name)
        states = store(node, self.folder / name)
        states.serve()
        for text in self.texts:
            await states.keep(b"run", text)
        node.serve(wire.JOBS, self._named_late)


@pytest.mark.parametrize("how", ["lacks", "silent", "withholds", "trickles"])
@pytest.mark.parametrize("liars", [4, 8, 20])
async def test_a_join_by_hash_gets_the_text_beside_members_that_only_repeat_the_record(
    tmp_path: Path, patient_clock: MockClock, liars: int, how: str
) -> None:
    names = [f"member-{number}" for number in range(MEMBERS)]
    async with open_fabric(1) as fabric, trio.open_nursery() as nursery:
        job, joiner = Job(fabric, tmp_path), Node(fabric, 0, tmp_path / "0", names)
        for name in names[:liars]:
            node = await job.add_liar(name, how)
            if how == "trickles":
                nursery.start_soon(trickle, node, JOINER)
        for name in names[liars : liars + HONEST]:
            await job.add_honest(name)
        for name in names[liars + HONEST :]:
            fabric.node(name).serve(wire.JOBS, silent)
        await nursery.start(joiner.jobs.run)
        with trio.fail_after(WITHIN_S):
            await joiner.jobs.join(job.id)
            while not joiner.jobs.running:
                await trio.sleep(1)
                [facts] = await joiner.jobs.facts()
                assert facts["status"] != "failed", facts["why"]
        nursery.cancel_scope.cancel()


async def test_a_join_that_waits_for_members_after_a_restart_does_not_end_with_a_liar(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    async with open_fabric(1) as fabric, trio.open_nursery() as nursery:
        job, joiner = Job(fabric, tmp_path), Node(fabric, 0, tmp_path / "0", ["liar", "honest"])
        joiner.jobs._store.begin_joining(job.raw, JoinWords())
        await job.add_liar("liar", "withholds")
        await nursery.start(joiner.jobs.run)
        await trio.sleep(10 * SILENT_S)
        [facts] = await joiner.jobs.facts()
        assert facts["status"] == "paused", facts["why"]
        await job.add_honest("honest")
        with trio.fail_after(HOLDERS_AGAIN_MOST_S + WITHIN_S):
            while not joiner.jobs.running:  # noqa: ASYNC110
                await trio.sleep(1)
        nursery.cancel_scope.cancel()


class Model:
    """A model without moments, in the place of its device as well."""

    has_moments, moments_bytes = False, [MOMENTS_BYTES]

    def __init__(self) -> None:
        self.taken: list[Taken] = []

    def take_moments(self, moments: Taken) -> None:
        self.taken.append(moments)

    async def run_beside(self, function: Any, *args: Any) -> Any:
        return function(*args)


async def test_members_that_offer_moments_and_are_silent_then_are_given_up_one_after_the_other(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    liars = ["liar-0", "liar-1", "liar-2"]
    async with open_fabric() as fabric:
        honest, model = store(fabric.node("honest"), tmp_path / "honest"), Model()
        honest.serve()
        offer = Offer(5, (1.0, 1.0), (await honest.keep(b"run", bytes(MOMENTS_BYTES)),))
        for liar in map(fabric.node, liars):
            liar.serve(METHODS.leaves, silent)
            liar.serve(METHODS.chunk, silent)
        me, device = fabric.node("me"), cast(Any, model)
        exchange = MomentsExchange(me, b"j" * 32, cast(Any, model), device, store(me, tmp_path / "me"))
        question = Question([*liars, "honest"], dict.fromkeys([*liars, "honest"], offer))
        question.answered.set()
        began = trio.current_time()
        assert await exchange.take(question, dict.fromkeys(liars, 10**9))  # who gave of the state comes first
        assert trio.current_time() - began < (len(liars) + 1) * FETCH_S
        assert len(model.taken) == 1


def test_no_peer_id_puts_the_moments_of_a_member_first() -> None:
    """The lot was a hash of the two peer ids: a member could make ids until its own came first for a newcomer."""
    offers = {peer: Offer(5, (1.0, 1.0), ()) for peer in "abcd"}
    rng = random.Random(0)
    firsts = Counter(best_offers(offers, {}, rng)[0] for _ in range(400))
    assert firsts.keys() == offers.keys()
    assert all(70 < count < 130 for count in firsts.values())

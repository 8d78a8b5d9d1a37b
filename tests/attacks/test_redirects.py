"""Redirects, misused: members that had chunks first, and are slow to pass them on, do not hold up a download."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from app.core.network import Payload
from app.manifest.merkle import CHUNK_BYTES, chunk_count
from app.training.states import METHODS
from app.weights import wire
from app.weights.library import span_parts
from app.weights.wire import MAX_RUN
from p2p.errors import P2PError
from p2p.memory.fabric import MemoryNode, open_fabric
from tests.app.training.test_states import store
from tests.app.weights import models
from tests.app.weights.test_exchange import World, world
from tests.attacks.test_patience import trickle

BLOCKS = 16
PARTS = span_parts(0, BLOCKS)
SLOW = 2  # of three requests in a row: after three without a success the seed is asked to send all itself


class SlowReceiver:
    """A member that asks the seed for every chunk, so that others are sent to it, and gives one run of three."""

    asked = 0  # by all of them together

    def __init__(self, here: World, name: str, among: int, number: int) -> None:
        self._here, self._among, self._number = here, among, number
        self.node: MemoryNode = here.fabric.node(name)
        self.node.serve(wire.CHUNK, self.on_chunk)

    async def on_chunk(self, peer: str, body: bytes) -> Payload:
        request = wire.ChunkRequest.decode(body)
        SlowReceiver.asked += 1
        if SlowReceiver.asked % (SLOW + 1):
            await trio.sleep_forever()
        library = self._here.seed.library
        part = library.part(request.root)
        assert part is not None
        chunks = [library.chunk(part, index) or b"" for index in range(request.index, request.index + request.count)]
        return wire.chunk_answer(*(chunk for chunk in chunks if chunk))

    async def ask_for_all(self) -> None:
        """Ask for the first chunk of each run, again and again: the seed sends others to whom it sent it last."""
        while True:
            number = 0
            for name in PARTS:
                part = self._here.seed.library.by_name[name]
                for index in range(0, chunk_count(part.size_bytes), MAX_RUN):
                    number += 1
                    if number % self._among == self._number:
                        request = wire.ChunkRequest(part.root, index, 1, tried=True)
                        with trio.move_on_after(0.02):  # the rest of the answer is not wanted
                            try:
                                await self.node.call("seed", wire.CHUNK, request.encode(), timeout_s=5)
                            except P2PError:
                                pass
            await trio.sleep(5)


async def fetched_s(here: World, receivers: int) -> float:
    peer = here.peer("newcomer")
    async with trio.open_nursery() as nursery:
        for number in range(receivers):
            slow = SlowReceiver(here, f"slow-{number}", receivers, number)
            nursery.start_soon(slow.ask_for_all)
            nursery.start_soon(trickle, slow.node, "newcomer")
        await trio.sleep(10)
        began = trio.current_time()
        await peer.fetching.fetch(PARTS)
        nursery.cancel_scope.cancel()
    return trio.current_time() - began


@pytest.mark.parametrize("receivers", [0, 3])
async def test_members_that_had_chunks_first_do_not_hold_up_a_download(
    tmp_path: Path, patient_clock: MockClock, monkeypatch: pytest.MonkeyPatch, receivers: int
) -> None:
    large = dataclasses.replace(models.WIDE, n_blocks=BLOCKS, intermediate_size=4096)  # two runs a block
    monkeypatch.setattr(models, "WIDE", large)
    SlowReceiver.asked = 0
    async with world(tmp_path) as here:
        here.holders["seed"] = set(PARTS)
        took_s = await fetched_s(here, receivers)

    assert took_s < 60


async def test_members_that_had_chunks_first_do_not_hold_up_a_training_state(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    """They ask for all of it first and pass nothing on; nobody who trains can wait for three minutes."""
    chunks = 8 * MAX_RUN
    data = bytes(chunks * CHUNK_BYTES)
    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        given = store(fabric.node("holder"), tmp_path / "holder")
        given.serve()
        state = await given.keep(b"run", data)

        async def never(peer: str, body: bytes) -> Payload:
            await trio.sleep_forever()
            raise AssertionError

        for number in range(3):
            slow = fabric.node(f"slow-{number}")
            slow.serve(METHODS.chunk, never)
            for index in range(number * MAX_RUN, chunks, 3 * MAX_RUN):
                await slow.call(
                    "holder", METHODS.chunk, wire.ChunkRequest(state.root, index, 1, tried=True).encode(), timeout_s=5
                )
            nursery.start_soon(trickle, slow, "me")
        mine = store(fabric.node("me"), tmp_path / "me")
        with trio.fail_after(60):
            assert await mine.fetch(b"run", [state], ["holder"], is_patient=True) == [data]
        nursery.cancel_scope.cancel()

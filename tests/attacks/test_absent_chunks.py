"""A member that says it has chunks, and when asked that it lacks them or is busy, does not hold up a download."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from app.core.network import Payload
from app.manifest.merkle import CHUNK_BYTES, leaf_hash
from app.training.states import METHODS
from app.weights import wire
from p2p.errors import Refused, RemoteError
from p2p.memory.fabric import LinkProfile, open_fabric
from tests.app.training.test_states import store
from tests.app.weights.test_exchange import ALL, world
from tests.attacks.test_patience import Withheld, tricklers


@pytest.mark.parametrize("delay_s", [0.002, 0.01])
async def test_a_holder_that_lacks_every_chunk_does_not_hold_up_a_download(
    tmp_path: Path, patient_clock: MockClock, delay_s: float
) -> None:
    """It sends who asks to somebody who is no member first, and who comes back is told that the chunk is not there.

    An answer that costs it nothing would bring the last chunks back to it at once, before others are chosen for them.
    """
    asked = 0
    async with world(tmp_path) as here:

        async def chunk(peer: str, body: bytes) -> Payload:
            nonlocal asked
            asked += 1
            if not wire.ChunkRequest.decode(body).tried:
                return wire.elsewhere_answer("nobody")
            raise RemoteError("it is not here", wire.ABSENT)

        here.liar("empty", lambda peer, body: b"").serve(wire.CHUNK, chunk)
        here.fabric.set_link("seed", "newcomer", LinkProfile(0.02, bytes_per_s=500_000))
        here.fabric.set_link("empty", "newcomer", LinkProfile(delay_s))
        peer = here.peer("newcomer")
        peer.sharing.is_member = lambda other: other != "nobody"
        with trio.move_on_after(200) as waiting:
            await peer.fetching.fetch(ALL)
        missing = set(ALL) - peer.library.held()
        assert not waiting.cancelled_caught, f"{missing} never came; the liar was asked {asked} times"
        assert asked < 100


@pytest.mark.parametrize("after_s", [0.9, 15.0])
async def test_two_fast_holders_that_refuse_the_same_chunks_do_not_hold_up_a_download(
    tmp_path: Path, patient_clock: MockClock, after_s: float
) -> None:
    """They give the other chunks faster than the seed, so that they are chosen for what one of them refused."""
    async with world(tmp_path) as here:

        async def refuse() -> None:
            await trio.sleep(after_s)
            raise Refused("busy")

        withheld = Withheld(here, refuse)
        here.fabric.set_link("seed", "newcomer", LinkProfile(0.03))
        for name in tricklers(2):
            here.liar(name, lambda peer, body: b"").serve(wire.CHUNK, withheld.chunk)
        peer = here.peer("newcomer")
        with trio.move_on_after(300) as waiting:
            await peer.fetching.fetch(ALL)
        assert withheld.owed
        assert not waiting.cancelled_caught, f"{set(ALL) - peer.library.held()} never came"


@pytest.mark.parametrize("is_patient", [False, True])
async def test_a_holder_that_lacks_every_chunk_does_not_hold_up_a_training_state(
    tmp_path: Path, patient_clock: MockClock, is_patient: bool
) -> None:
    data = bytes(6 * CHUNK_BYTES)
    async with open_fabric() as fabric:
        given, empty = store(fabric.node("holder"), tmp_path / "holder"), fabric.node("empty")
        given.serve()
        state = await given.keep(b"run", data)

        async def leaves(peer: str, body: bytes) -> Payload:
            return leaf_hash(bytes(CHUNK_BYTES)) * 6

        async def chunk(peer: str, body: bytes) -> Payload:
            if not wire.ChunkRequest.decode(body).tried:
                return wire.elsewhere_answer("me")
            raise RemoteError("it is not here", wire.ABSENT)

        empty.serve(METHODS.leaves, leaves)
        empty.serve(METHODS.chunk, chunk)
        fabric.set_link("holder", "me", LinkProfile(0.02, bytes_per_s=500_000))
        fabric.set_link("empty", "me", LinkProfile(0.002))
        mine = store(fabric.node("me"), tmp_path / "me")
        with trio.fail_after(120):
            assert await mine.fetch(b"run", [state], ["empty", "holder"], is_patient=is_patient) == [data]

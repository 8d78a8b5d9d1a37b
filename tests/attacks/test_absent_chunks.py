"""A member that says it has chunks, and when asked that it has not, keeps nobody from having them elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from app.core.network import Payload
from app.weights import wire
from p2p.errors import RemoteError
from p2p.memory.fabric import LinkProfile
from tests.app.weights.test_exchange import ALL, world


@pytest.mark.parametrize("delay_s", [0.002, 0.01])
async def test_a_holder_that_lacks_every_chunk_does_not_hold_up_a_download(
    tmp_path: Path, patient_clock: MockClock, delay_s: float
) -> None:
    """It sends who asks to somebody who is no member first, and who comes back is told that the chunk is not there.

    That was no failure, so that the last chunks went back to it at once, before others were chosen for them.
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

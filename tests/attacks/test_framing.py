"""A hop that lies about what it sends is found out itself; the hops after it are not blamed for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio
from trio.testing import MockClock

from app.core.network import FrameStream
from app.serving.hop_session import HopSession
from app.session.wire import PROTOCOL, Kind, decode, header, plain
from tests.app.hash_model import ROW_BYTES, WIDTH, HashRunner, greedy
from tests.app.session_swarm import PROMPT, SessionSwarm, ask, open_swarm

TOKENS = 4
SOON_S = 20.0


async def claims_and_sends_nothing(swarm: SessionSwarm) -> None:
    """The hop begins every epoch, says that it has computed everything, and sends nothing."""

    async def claim(stream: FrameStream) -> None:
        while True:
            frame = decode(await stream.receive())
            if frame.kind == Kind.TURN:
                await stream.send(plain(Kind.READY, frame.session, frame.epoch))
            elif frame.kind == Kind.PROBE:
                await stream.send(plain(Kind.STATE, frame.session, frame.epoch, 2**24, 2**24))

    swarm.fabric.nodes["liar"].accept(PROTOCOL, claim)


async def sends_with_a_gap(swarm: SessionSwarm) -> None:
    """The hop computes well and sends its successor outputs that do not follow those before."""

    async def leave_out(session: HopSession, position: int, data: bytes) -> None:
        head = header(
            Kind.DATA,
            session.id,
            session.epoch,
            position + 7,
            dtype=1,
            rows=len(data) // ROW_BYTES,
            width=WIDTH,
            length=len(data),
        )
        stream = await swarm.fabric.nodes["liar"].open(session.turn.successor, PROTOCOL)
        await stream.send(head + data)

    swarm.servers["liar"]._sender.send = leave_out  # type: ignore[method-assign]


@pytest.mark.parametrize("lie", [claims_and_sends_nothing, sends_with_a_gap])
async def test_a_hop_that_withholds_its_outputs_is_blamed_itself(
    lie: Callable[[SessionSwarm], Awaitable[None]], autojump_clock: MockClock
) -> None:
    async with open_swarm((0, 4), (4, 8), (4, 8)) as swarm:
        await swarm.serve("liar", HashRunner(0, 4), speed=5000.0)
        await lie(swarm)
        asker = await swarm.asker()
        banned: set[str] = set()
        for _ in range(6):
            began_at = trio.current_time()
            stats = await ask(asker, PROMPT, TOKENS)
            assert stats.token_ids == greedy(PROMPT, TOKENS)
            assert trio.current_time() - began_at < SOON_S
            banned |= set(asker.bans.active(trio.current_time()))
        assert banned == {"liar"}

"""Attacks with sessions that begin with the cache of another one: what one asker orders breaks no stream of others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import trio
from trio.testing import MockClock

from app.core.network import FrameStream
from app.core.span import Span
from app.serving.batching import BatchLimits
from app.serving.block_server import ServerSettings
from app.serving.hop_session import HopSession
from app.serving.orders import timed
from app.session.frame import decode_hop_error, header, new_session_id, plain
from app.session.wire import KEEP, PROTOCOL, EpochOrder, Kind, Prefix, decode, encode_turn
from tests.app.hash_model import WIDTH, HashRunner, InlineDevice, greedy
from tests.app.session_swarm import PROMPT, STEP_S, SessionSwarm, open_swarm
from tests.attacks.test_sessions import F32, next_frame, zeros

T = TypeVar("T")
ROWS = 40
FIRST = EpochOrder(Span(0, 4), "", "n1", 64, 0, 0)
LAST = EpochOrder(Span(4, 8), "n0", "", 64, 0, 0)


class HeldForks(InlineDevice):
    """A device that forks a session only once it may go on."""

    def __init__(self) -> None:
        super().__init__(STEP_S)
        self.forks, self.goes_on = trio.Event(), trio.Event()

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        if function is timed:
            self.forks.set()
            await self.goes_on.wait()
        return await super().run(function, *args)


class Attacker:
    """An asker that speaks by hand to the two hops of its route, over which another asker's reply goes too."""

    def __init__(self, first: FrameStream, last: FrameStream) -> None:
        self.first, self.last = first, last

    @classmethod
    async def dial(cls, swarm: SessionSwarm) -> Attacker:
        """Open its streams."""
        node = swarm.fabric.node("attacker")
        return cls(await node.open("n0", PROTOCOL), await node.open("n1", PROTOCOL))

    async def begin(self) -> bytes:
        """Open a session on the route, for which some tokens are computed; returns its id."""
        id = new_session_id("attacker")
        await self.last.send(encode_turn(id, 1, KEEP, LAST))
        await next_frame(self.last, Kind.READY)
        await self.first.send(encode_turn(id, 1, KEEP, FIRST))
        await next_frame(self.first, Kind.READY)
        await self.first.send(zeros(id, 1, 0, ROWS, WIDTH))
        await next_frame(self.last, Kind.DATA)
        return id


@pytest.mark.parametrize("ends", [False, True])
async def test_a_cut_during_a_fork_breaks_no_stream(ends: bool, autojump_clock: MockClock) -> None:
    """A session is cut while the device forks it: the fork sent frames without rows, and its successor hung up."""
    async with open_swarm((0, 4), (4, 8)) as swarm:
        device, asker = HeldForks(), await swarm.asker()
        swarm.servers["n0"]._device = device
        async with asker.reply(PROMPT, 100, max_tokens=100) as reply:
            await anext(reply)
            attacker = await Attacker.dial(swarm)
            id, fork = await attacker.begin(), new_session_id("attacker")
            order = replace(FIRST, prefix=Prefix(id, ROWS, ends))
            await attacker.last.send(encode_turn(fork, 1, KEEP, LAST))
            await attacker.first.send(encode_turn(fork, 1, KEEP, order))
            await device.forks.wait()
            await attacker.first.send(cutting_row(id, 1, 0))
            await attacker.first.send(plain(Kind.PROBE, id, 1))
            assert (await next_frame(attacker.first, Kind.STATE)).revision == 1
            device.goes_on.set()
            ready = await next_frame(attacker.first, Kind.READY)
            assert (ready.session, ready.position) == (fork, ROWS), "the fork has the tokens of before the cut"
            async for _ in reply:
                pass
        assert reply.stats.token_ids == greedy(PROMPT, 100)
        assert reply.stats.recoveries == 0
        assert ready.rows == ROWS, "the outputs of the fork's tokens are gone"


def cutting_row(session: bytes, epoch: int, position: int) -> bytes:
    """A DATA frame of one row that replaces what is cached from a position on."""
    body = bytes(4 * WIDTH)
    place = (Kind.DATA, session, epoch, position)
    return header(*place, dtype=F32, rows=1, width=WIDTH, length=len(body), revision=1) + body


async def test_a_cut_while_outputs_are_sent_again_is_no_trouble(autojump_clock: MockClock) -> None:
    """A session is cut while the first of its kept outputs are sent again: the hop missed the others, and said so."""
    async with open_swarm() as swarm:
        server = await swarm.serve("n0", HashRunner(0, 4), settings=ServerSettings(BatchLimits(chunk_rows=16)))
        await swarm.serve("n1", HashRunner(4, 8))
        asker = await Attacker.dial(swarm)
        id = await asker.begin()
        sender, usual, was_cut = server._sender, server._sender.send, trio.Event()

        async def send_and_wait_for_cut(session: HopSession, position: int, data: bytes | memoryview) -> None:
            await usual(session, position, data)
            await was_cut.wait()

        sender.send = send_and_wait_for_cut  # type: ignore[method-assign]
        await asker.first.send(encode_turn(id, 2, KEEP, FIRST))
        await next_frame(asker.first, Kind.READY)
        await asker.first.send(cutting_row(id, 2, 10))
        await asker.first.send(plain(Kind.PROBE, id, 2))
        assert (await next_frame(asker.first, Kind.STATE)).revision == 1
        was_cut.set()
        await trio.sleep(1)
        await asker.first.send(plain(Kind.PROBE, id, 2))
        answer = decode(await asker.first.receive())
        assert (answer.kind, answer.position) == (Kind.STATE, 11)


@pytest.mark.parametrize(
    ("rows", "width", "dtype", "body"),
    [
        pytest.param(0, WIDTH, F32, b"", id="no rows"),
        pytest.param(2, WIDTH, F32, bytes(4 * WIDTH), id="too little"),
        pytest.param(1, WIDTH, 9, bytes(4 * WIDTH), id="format"),
    ],
)
async def test_rows_that_are_wrong_end_their_session_alone(
    rows: int, width: int, dtype: int, body: bytes, autojump_clock: MockClock
) -> None:
    """A hop sends rows of one session that are not what their header says: those of another one go on beside it."""
    async with open_swarm((4, 8)) as swarm:
        server = swarm.servers["n0"]
        hop = await swarm.fabric.node("hop").open("n0", PROTOCOL)
        sessions: dict[str, tuple[FrameStream, bytes]] = {}
        for name in ("one", "other"):
            stream, id = await swarm.fabric.node(name).open("n0", PROTOCOL), new_session_id(name)
            await stream.send(encode_turn(id, 1, KEEP, replace(LAST, predecessor="hop")))
            await next_frame(stream, Kind.READY)
            sessions[name] = stream, id
        (one, id), (other, other_id) = sessions["one"], sessions["other"]
        head = (Kind.DATA, id, 1, 0)
        await hop.send(header(*head, dtype=dtype, rows=rows, width=width, length=len(body)) + body)
        await hop.send(zeros(other_id, 1, 0, ROWS, WIDTH))
        assert (await next_frame(other, Kind.DATA)).session == other_id
        assert decode_hop_error(await next_frame(one, Kind.TROUBLE)).code == "input"
        await trio.sleep(1)
        assert server.sessions == 1


async def test_only_who_may_send_for_a_session_can_end_it(autojump_clock: MockClock) -> None:
    """A stranger sends wrong rows for a session, as does a hop for an epoch that is over: the session goes on."""
    async with open_swarm((4, 8)) as swarm:
        streams = {name: await swarm.fabric.node(name).open("n0", PROTOCOL) for name in ("asker", "hop", "stranger")}
        id = new_session_id("asker")
        for epoch in (1, 2):
            await streams["asker"].send(encode_turn(id, epoch, KEEP, replace(LAST, predecessor="hop")))
            await next_frame(streams["asker"], Kind.READY)
        for name, epoch in (("stranger", 2), ("hop", 1)):
            await streams[name].send(header(Kind.DATA, id, epoch, 0, dtype=F32, rows=0, width=WIDTH, length=0))
        await trio.sleep(1)
        await streams["hop"].send(zeros(id, 2, 0, ROWS, WIDTH))
        answer = decode(await streams["asker"].receive())
        assert (answer.kind, answer.epoch) == (Kind.DATA, 2)

"""Attacks on the links between hops: who has them broken costs no honest hop its place on routes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio
from trio.testing import MockClock

from app.asker.asker import Asker
from app.core.network import FrameStream
from app.serving.block_server import IDLE_STREAM_S
from app.serving.hop_session import HopSession
from app.session.wire import PROTOCOL as SESSIONS
from p2p.shares import Holder
from tests.app.hash_model import HashRunner, greedy
from tests.app.session_swarm import PROMPT, SessionSwarm, ask, open_swarm


def stands_well(asker: Asker, peer: str) -> bool:
    """True if an asker neither avoids a peer nor remembers that it failed."""
    banned = {*asker.bans.active(trio.current_time()), *asker.bans.failing(trio.current_time())}
    return peer not in banned and asker.planner.book.standing(peer).score == 1.0


async def break_link(swarm: SessionSwarm, sender: str, receiver: str) -> None:
    """The receiver hangs up on the stream that a hop sends it rows on, if there is one."""
    for attended in list(swarm.servers[receiver]._attending):
        if attended.stream.peer == sender:
            await attended.stream.reset()


async def open_link(swarm: SessionSwarm, sender: str, receiver: str) -> None:
    """Somebody has a hop open a stream to another one again."""
    swarm.servers[sender]._sender._outboxes.prepare(receiver, Holder("attacker", "attacker"))
    await trio.sleep(0.1)


@pytest.mark.parametrize("pause_s", [0.0, 0.5])
async def test_a_link_that_breaks_again_and_again_is_no_hops_fault(pause_s: float, autojump_clock: MockClock) -> None:
    """Somebody has the stream between two hops break again and again while a reply goes over it."""
    async with open_swarm((0, 4), (4, 8), delay_s=0.001) as swarm:
        asker = await swarm.asker()
        async with asker.reply(PROMPT, 60, max_tokens=60) as reply:
            for _ in range(20):
                await anext(reply)
                await open_link(swarm, "n0", "n1")
                await break_link(swarm, "n0", "n1")
                await trio.sleep(pause_s)
            async for _ in reply:
                pass
        assert reply.stats.token_ids == greedy(PROMPT, 60)
        assert reply.stats.recoveries <= 2, "then the rows go through the asker, and the link is not used"
        assert stands_well(asker, "n0")
        assert stands_well(asker, "n1")


async def test_the_link_of_a_reply_stays_open_while_nothing_crosses_it(autojump_clock: MockClock) -> None:
    """A prompt that waits its turn for minutes had its next hop close the link, the second time for good."""
    async with open_swarm((0, 4), (4, 8), delay_s=0.001) as swarm:
        asker = await swarm.asker()
        async with asker.reply(PROMPT, 60, max_tokens=60) as reply:
            await anext(reply)
            await trio.sleep(1.5 * IDLE_STREAM_S)
            async for _ in reply:
                pass
        assert reply.stats.token_ids == greedy(PROMPT, 60)
        assert not reply.stats.recoveries


class BreakingStream:
    """A stream that its receiver resets after some messages."""

    def __init__(self, stream: FrameStream, messages: int, broke: Callable[[], None]) -> None:
        self.peer = stream.peer
        self.reset, self.send = stream.reset, stream.send
        self.wait_room, self.is_clear = stream.wait_room, stream.is_clear
        self._stream, self._left, self._broke = stream, messages, broke

    async def receive(self) -> bytes:
        self._left -= 1
        if self._left < 0:
            self._broke()
            await self.reset()
        return await self._stream.receive()

    async def aclose(self) -> None:
        await self._stream.aclose()


class Breaker:
    """A hop that breaks the link from the hop before it, and dies when rows go through the asker instead."""

    def __init__(self, swarm: SessionSwarm, name: str) -> None:
        self._swarm, self._name, self.broken = swarm, name, 0
        swarm.fabric.nodes[name].accept(SESSIONS, self._attend)

    async def _attend(self, stream: FrameStream) -> None:
        if stream.peer != "asker":
            stream = BreakingStream(stream, 3, self._broke)
        await self._swarm.servers[self._name].attend(stream)

    def _broke(self) -> None:
        self.broken += 1
        if self.broken == 2:
            self._swarm.kill(self._name)


async def test_hops_of_one_attacker_cannot_have_another_one_left(autojump_clock: MockClock) -> None:
    """Every hop behind an honest one breaks the link from it, and then fails: the honest one was banned for it."""
    async with open_swarm((0, 4), (4, 8), delay_s=0.001) as swarm:
        breakers = []
        for name in ("b1", "b2", "b3", "b4"):
            swarm.fabric.machine_of[name] = "the attacker's"
            await swarm.serve(name, HashRunner(4, 8), speed=500.0)
            breakers.append(Breaker(swarm, name))
        asker = await swarm.asker()
        stats = await ask(asker, PROMPT, 40)
        assert [breaker.broken for breaker in breakers] == [2] * 4
        assert stats.token_ids == greedy(PROMPT, 40)
        assert stands_well(asker, "n0")
        assert stands_well(asker, "n1")


async def test_a_hop_that_says_that_its_link_broke_harms_no_other(autojump_clock: MockClock) -> None:
    """A hop says after each token that its link to the next one broke: that one keeps its place."""
    async with open_swarm((0, 4), (4, 8), delay_s=0.001) as swarm:
        server = await swarm.serve("liar", HashRunner(0, 4), speed=500.0)
        sender, usual = server._sender, server._sender.send

        async def send_and_lie(session: HopSession, position: int, data: bytes | memoryview) -> None:
            await usual(session, position, data)
            await sender.report_error(session, "link", "the link to the next hop broke")

        sender.send = send_and_lie  # type: ignore[method-assign]
        asker = await swarm.asker()
        for _ in range(3):
            stats = await ask(asker, PROMPT, 10)
            assert stats.token_ids == greedy(PROMPT, 10)
            assert stats.recoveries <= 2
        assert stands_well(asker, "n1")
        assert "liar" not in {hop.peer for hop in stats.route}, "later replies go round the link"
        assert stands_well(asker, "liar"), "nobody knows whose fault it was"


async def test_hops_that_hang_up_after_breaking_their_links_count_as_one_machine(autojump_clock: MockClock) -> None:
    """Three peers of one machine break the link from an honest hop and then leave the asker: their address is gone."""
    async with open_swarm((0, 4), (4, 8), delay_s=0.001) as swarm:
        names = ("b1", "b2", "b3")
        for name in names:
            swarm.fabric.machine_of[name] = "the attacker's"
            await swarm.serve(name, HashRunner(4, 8), speed=500.0)

            async def attend(stream: FrameStream, name: str = name) -> None:
                if stream.peer != "asker":
                    stream = BreakingStream(stream, 3, lambda: None)
                await swarm.servers[name].attend(stream)

            swarm.fabric.nodes[name].accept(SESSIONS, attend)
        await swarm.serve("slower", HashRunner(0, 4), speed=50.0)
        asker = await swarm.asker()
        used = []
        for number in range(8):
            stats = await ask(asker, [number, *PROMPT], 12)
            used.append(stats.route[0].peer)
            for name in names:
                await swarm.fabric.nodes[name].disconnect("asker")
        broken = asker.planner.broken_links.active(trio.current_time())
        assert broken >= {frozenset(("n0", name)) for name in names}, "each of them broke its link"
        assert used[-1] == "n0", "the slower one is used only while its own links are the ones that did not break"

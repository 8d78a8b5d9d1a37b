"""Routes on which no reply ever comes: they visit a hop twice, or a hop on them is asked again and again in vain."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import trio
from trio.testing import MockClock

from app.asker.route_session import RouteSession
from app.core.errors import AppError
from app.core.span import Span
from app.routing.route import RouteRequest
from app.routing.search import find_route
from app.serving.hop_session import HopSession
from app.session.frame import HopError, plain
from app.session.wire import PROTOCOL, Kind, decode, encode_hop_error
from app.swarm.records import Announcement
from p2p.memory.fabric import LinkProfile, MemoryStream
from tests.app.hash_model import HashRunner, InlineDevice, greedy
from tests.app.session_swarm import PROMPT, ask, open_swarm


def member(name: str, start: int, stop: int, tokens_per_s: float) -> Announcement:
    return Announcement(name, 1, 2**60, "", "serving", Span(start, stop), tokens_per_s, 10 * tokens_per_s, 1 << 30)


def test_no_route_visits_a_peer_twice() -> None:
    """Two slow members with large spans have a fast one with a small span inside each: each takes part once at most."""
    members = [
        member("slow1", 0, 10, 2.0),
        member("slow2", 10, 20, 2.0),
        member("fast1", 3, 6, 200.0),
        member("fast2", 13, 16, 200.0),
    ]
    route = find_route(members, RouteRequest(Span(0, 20), 100), lambda a, b: 0.002)
    assert (route[0].span.start, route[-1].span.stop) == (0, 20)
    assert all(one.span.stop == other.span.start for one, other in pairwise(route))
    peers = [hop.peer for hop in route]
    assert len(peers) == len(set(peers)), peers


async def test_slow_and_fast_members_reply_together(autojump_clock: MockClock) -> None:
    """Four healthy nodes of different speeds hold all blocks: a reply comes without any failure."""
    async with open_swarm(delay_s=0.001) as swarm:
        for name, start, stop, speed in (
            ("slow1", 0, 4, 2.0),
            ("slow2", 4, 8, 2.0),
            ("fast1", 1, 3, 400.0),
            ("fast2", 5, 7, 400.0),
        ):
            await swarm.serve(name, HashRunner(start, stop), speed=speed)
        stats = await ask(await swarm.asker(), PROMPT, 8)
        assert (stats.token_ids, stats.recoveries) == (greedy(PROMPT, 8), 0)


@pytest.mark.parametrize("code", ["closed", "gap", "missing", "link", "a new code"])
async def test_a_hop_that_always_has_an_excuse_is_left(code: str, autojump_clock: MockClock) -> None:
    """A hop answers each TURN with trouble that it is not to blame for: the reply soon goes through another one."""
    turns = 0

    async def excuse(stream: MemoryStream) -> None:
        nonlocal turns
        while True:
            frame = decode(await stream.receive())
            if frame.kind == Kind.TURN:
                turns += 1
                await stream.send(encode_hop_error(frame.session, frame.epoch, 0, HopError(code, "not now")))

    async with open_swarm((0, 4), (4, 8), delay_s=0.02) as swarm:
        await swarm.serve("hostile", HashRunner(4, 8), speed=500.0)
        swarm.fabric.nodes["hostile"].accept(PROTOCOL, excuse)
        asker = await swarm.asker()
        with trio.move_on_after(60) as patience:
            stats = await ask(asker, PROMPT, 4)
        assert turns > 0
        assert not patience.cancelled_caught, f"no token and no error after {turns} turns"
        assert stats.token_ids == greedy(PROMPT, 4)
        assert turns < 50


async def test_a_hop_that_has_an_excuse_after_each_token_is_left(autojump_clock: MockClock) -> None:
    """A hop gives a token every 25 s, and asks for a new epoch after each: the reply soon goes through another one."""
    async with open_swarm((0, 4), (4, 8), delay_s=0.02) as swarm:
        server = await swarm.serve("hostile", HashRunner(4, 8), speed=500.0)
        sender, usual, device = server._sender, server._sender.send, swarm.devices["hostile"]
        device.run_later = InlineDevice().run_later  # type: ignore[method-assign]

        async def send_and_excuse(session: HopSession, position: int, data: bytes | memoryview) -> None:
            await usual(session, position, data)
            await sender.report_error(session, "closed", "not now")
            device.seconds = 25.0

        sender.send = send_and_excuse  # type: ignore[method-assign]
        asker = await swarm.asker()
        async with asker.reply(PROMPT, 20, max_tokens=20) as reply:
            async for _ in reply:
                await trio.sleep(0.1)
        assert reply.stats.token_ids == greedy(PROMPT, 20)
        assert reply.stats.route[-1].peer == "n1"
        assert trio.current_time() < 120


async def test_a_reply_over_the_last_holder_that_drains_comes_to_an_end(autojump_clock: MockClock) -> None:
    """The only holder of a block drains patiently and its link breaks once: the reply goes on or fails."""
    async with open_swarm((0, 4), (4, 8), delay_s=0.02) as swarm:
        asker, leaving = await swarm.asker(), swarm.fabric.nodes["n1"]
        with trio.move_on_after(120) as patience:
            async with asker.reply(PROMPT, 50, max_tokens=50) as reply:
                for _ in range(5):
                    await anext(reply)
                swarm.nursery.start_soon(swarm.servers["n1"].drain, 1e9)
                swarm.announcements["n1"] = replace(swarm.announcements["n1"], state="draining")
                await trio.sleep(0.5)
                told = leaving.traffic.messages_in
                await leaving.disconnect("asker")
                try:
                    async for _ in reply:
                        pass
                except AppError:
                    pass
        told = leaving.traffic.messages_in - told
        assert not patience.cancelled_caught, f"no token and no error, but {told} messages to the hop that leaves"
        assert told < 1000


@pytest.mark.parametrize("kind", [Kind.TROUBLE, Kind.READY])
async def test_a_hop_that_has_left_the_route_has_no_say_in_the_next_one(kind: Kind, autojump_clock: MockClock) -> None:
    """A hop says that it leaves, and goes on to speak in each epoch that follows: the reply goes on over the others.

    Trouble must not end their set-up, and READY must not stand for that of a hop that is slower to answer.
    """
    streams: list[MemoryStream] = []

    async def meddle(session: RouteSession) -> None:
        while True:
            epoch = session.epoch  # it could as well send for a thousand of them
            error = encode_hop_error(session.id, epoch, 0, HopError("closed", "not so fast"))
            await streams[0].send(error if kind == Kind.TROUBLE else plain(kind, session.id, epoch))
            await trio.sleep(0.01)

    async with open_swarm((0, 4), (4, 8), (4, 8), delay_s=0.02) as swarm:
        server = await swarm.serve("hostile", HashRunner(4, 8), speed=500.0)

        async def attend(stream: MemoryStream) -> None:
            streams.append(stream)
            await server.attend(stream)

        swarm.fabric.nodes["hostile"].accept(PROTOCOL, attend)
        for slower in ("n1", "n2"):
            swarm.fabric.set_link("asker", slower, LinkProfile(delay_s=0.2))
        asker = await swarm.asker()
        async with asker.reply(PROMPT, 8, max_tokens=8) as reply:
            for _ in range(3):
                await anext(reply)
            session = reply._session
            leaves = HopError("draining", "this node is about to leave")
            await streams[0].send(encode_hop_error(session.id, session.epoch, 0, leaves))
            swarm.nursery.start_soon(meddle, session)
            async for _ in reply:
                pass
        assert reply.stats.token_ids == greedy(PROMPT, 8)
        assert reply.stats.longest_gap_s < 5
        assert not {"n0", "n1", "n2"} & set(asker.bans.active(trio.current_time()))
        assert all(asker.planner.book.standing(peer).score == 1.0 for peer in ("n0", "n1", "n2"))


async def test_a_hop_that_never_answers_costs_all_replies_that_begin_together_one_attempt(
    autojump_clock: MockClock,
) -> None:
    """The fastest member is there and opens no stream: replies do not try it one after the other."""
    async with open_swarm((0, 4), (4, 8)) as swarm:
        await swarm.serve("silent", HashRunner(4, 8), speed=500.0)
        asker = await swarm.asker()
        swarm.fabric.freeze("silent")
        begun_at = trio.current_time()
        async with trio.open_nursery() as nursery:
            for number in range(12):
                nursery.start_soon(ask, asker, [number, *PROMPT], 2, f"owner {number}")
        assert trio.current_time() - begun_at < 12
        swarm.fabric.resume("silent")

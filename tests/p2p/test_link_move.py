"""A link moves to another byte stream in the middle of calls and streams: nothing is lost, doubled or reordered."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from p2p.errors import P2PError, PeerUnreachable
from p2p.host.connection import Stream
from p2p.link.byte_stream import ByteStream
from p2p.link.frames import PREFACE, Frame, Kind, encode
from p2p.link.streams import MessageStream
from p2p.link.switchboard import LIVE_LANE, MOVE
from p2p.network import is_relayed
from p2p.values import BULK
from tests.p2p.network_contract import echo
from tests.p2p.networks import TrioByteStream, WiredNode, WiredWorld, wired_world
from tests.p2p.nodes import make_network, until
from tests.p2p.test_relay import behind_a_relay


def always(stream: ByteStream) -> bool:
    return True


async def send_back(stream: MessageStream) -> None:
    """Return every message of a stream."""
    while True:
        message = await stream.receive()
        await stream.wait_room()
        await stream.send(message)


async def two(world: WiredWorld) -> tuple[WiredNode, WiredNode]:
    a, b = await world.node(), await world.node()
    for node in (a, b):
        node.serve("echo", echo)
        node.accept("echo", send_back)
    return a, b


async def number(stream: MessageStream, count: int) -> None:
    """Send numbered messages of various sizes while reading them back, and check the order."""

    async def send() -> None:
        for place in range(count):
            await stream.wait_room()
            await stream.send(place.to_bytes(4) + bytes(place * 37 % 3000 if place % 50 else 600_000))
            if place % 10 == 0:
                await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        for place in range(count):
            message = await stream.receive()
            assert int.from_bytes(message[:4]) == place
            assert len(message) == 4 + (place * 37 % 3000 if place % 50 else 600_000)


async def test_streams_and_calls_of_both_sides_go_on_through_twenty_moves() -> None:
    async with wired_world() as world:
        a, b = await two(world)
        streams = [await a.open(b.peer_id, "echo"), await b.open(a.peer_id, "echo")]
        [link] = a.links_to(b.peer_id)
        moved = 0

        async def move() -> None:
            nonlocal moved
            for _ in range(20):
                before = link.stream
                a.renew(b.peer_id, always)
                await link.left(before)
                moved += not link.ended

        async def call() -> None:
            for size in range(0, 1_000_000, 50_000):
                assert await a.call(b.peer_id, "echo", bytes(size), timeout_s=60) == bytes(size)
                assert await b.call(a.peer_id, "echo", bytes(size), timeout_s=60) == bytes(size)

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(move)
                nursery.start_soon(call)
                for stream in streams:
                    nursery.start_soon(number, stream, 300)
        assert moved == 20
        assert a.links_to(b.peer_id) == [link]
        assert len(b.links_to(a.peer_id)) == 1


async def test_both_lanes_move_and_only_what_this_side_opened() -> None:
    async with wired_world() as world:
        a, b = await two(world)
        await a.call(b.peer_id, "echo", b"", timeout_s=5)
        await a.call(b.peer_id, "echo", b"", timeout_s=5, priority=BULK)
        before = [link.stream for link in a.links_to(b.peer_id)]
        accepted = [link.stream for link in b.links_to(a.peer_id)]
        b.renew(a.peer_id, always)
        await trio.testing.wait_all_tasks_blocked()
        assert [link.stream for link in b.links_to(a.peer_id)] == accepted
        a.renew(b.peer_id, lambda stream: stream is before[1])
        await trio.testing.wait_all_tasks_blocked()
        after = [link.stream for link in a.links_to(b.peer_id)]
        assert after[0] is before[0]
        assert after[1] is not before[1]
        assert await a.call(b.peer_id, "echo", b"moved", timeout_s=5, priority=BULK) == b"moved"


async def test_a_peer_that_cannot_move_links_gets_a_new_one() -> None:
    async with wired_world() as world:
        a, b = await two(world)
        stream = await a.open(b.peer_id, "echo")
        dial = a._dial

        async def refuse_moves(peer: str, lane: str) -> ByteStream:
            if lane.endswith(MOVE):
                raise PeerUnreachable("the peer does not support this protocol")
            return await dial(peer, lane)

        a._dial = refuse_moves
        a.renew(b.peer_id, always)
        await trio.testing.wait_all_tasks_blocked()
        assert len(a.links_to(b.peer_id)) == 2
        await number(stream, 20)


async def test_the_old_byte_stream_may_go_once_the_link_has_moved() -> None:
    async with wired_world() as world:
        a, b = await two(world)
        stream = await a.open(b.peer_id, "echo")
        [ours], [theirs] = a.links_to(b.peer_id), b.links_to(a.peer_id)
        old, accepted = ours.stream, theirs.stream
        a.renew(b.peer_id, always)
        await ours.left(old)
        await theirs.left(accepted)
        await old.reset()
        await accepted.reset()
        await number(stream, 20)
        # The end of the byte stream that it uses is the end of the link.
        await ours.stream.reset()
        with pytest.raises(P2PError):
            await stream.receive()


@pytest.mark.parametrize("initiated", [True, False])
async def test_a_move_that_nobody_agreed_to_ends_the_link(initiated: bool) -> None:
    async with wired_world() as world:
        a, _ = await two(world)
        switch = encode(Frame(Kind.SWITCH, 0x0C, 0, 0, 0, "00" * 16, b""))
        ours, theirs = trio.testing.memory_stream_pair()
        if initiated:

            async def dial(peer: str, lane: str) -> ByteStream:
                return TrioByteStream(theirs)

            a._dial = dial
            await ours.send_all(PREFACE + switch)
            with pytest.raises(PeerUnreachable):
                await a.call("stranger", "echo", b"", timeout_s=5)
            assert [peer for peer, _ in a.reports] == ["stranger"]
        else:
            world.connect(a, "stranger", LIVE_LANE, TrioByteStream(theirs))
            await ours.send_all(PREFACE + switch)
        await trio.testing.wait_all_tasks_blocked()
        assert a.links_to("stranger") == []


async def test_offers_are_bounded_by_the_links_that_may_move() -> None:
    async with wired_world() as world:
        a, b = await two(world)
        await a.call(b.peer_id, "echo", b"", timeout_s=5)
        refused = 0
        for count in range(3):
            ours, theirs = trio.testing.memory_stream_pair()
            world.connect(b, a.peer_id, LIVE_LANE + MOVE, TrioByteStream(theirs))
            await ours.send_all(bytes([count]) * 16)
            refused += await ours.receive_some(16) != bytes([count]) * 16
        assert refused == 2
        assert len(b._offers) == 1


async def test_a_relayed_link_becomes_direct_in_the_middle_of_a_stream() -> None:
    """Over real connections: the stream goes on after the relay and the relayed connection are gone."""
    async with behind_a_relay() as (relay, hidden, relayed):
        hidden.accept("echo", send_back)
        caller = make_network()
        async with caller.running():
            caller.learn(hidden.peer_id, [str(relayed)])
            stream = await caller.open(hidden.peer_id, "echo")
            [link] = caller._board.links_to(hidden.peer_id)
            assert is_relayed(link.stream)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(number, stream, 400)
                await caller.host.dial(hidden.host.addresses[0], hidden.peer_id)
                await until(lambda: not is_relayed(link.stream))
            assert caller._board.links_to(hidden.peer_id) == [link]
            await relay.stop()
            await until(lambda: not any(c.relayed for c in caller.host.connections()))
            with trio.fail_after(20):
                await number(stream, 50)


async def test_a_link_that_was_being_opened_while_a_direct_connection_came_up_is_direct(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such a link missed the move, and broke with the relayed connection half a minute later."""
    async with behind_a_relay() as (_, hidden, relayed):
        hidden.accept("echo", send_back)
        caller = make_network()
        async with caller.running():
            caller.learn(hidden.peer_id, [str(relayed)])
            open_stream = caller.host.open_stream

            async def open_slowly(peer: str, protocol: str) -> Stream:
                stream = await open_stream(peer, protocol)
                assert is_relayed(stream)
                await caller.host.dial(hidden.host.addresses[0], hidden.peer_id)
                return stream

            monkeypatch.setattr(caller.host, "open_stream", open_slowly)
            stream = await caller.open(hidden.peer_id, "echo")
            [link] = caller._board.links_to(hidden.peer_id)
            assert not is_relayed(link.stream)
            await number(stream, 10)

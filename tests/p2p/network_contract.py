"""What every `app.core.network.Network` must do; tests of an implementation subclass this and give it a `world`."""

from __future__ import annotations

from typing import Protocol

import pytest
import trio
import trio.testing

from app.core.network import MAX_BODY_BYTES, FrameStream, Network, Priority
from p2p.errors import DeadlineExceeded, PeerUnreachable, QueueFull, Refused, RemoteError, StreamClosed, StreamReset

PROTOCOL = "/test/1/echo"


class World(Protocol):
    """A network under test: makes nodes and crashes them."""

    async def node(self) -> Network: ...
    async def kill(self, node: Network) -> None: ...


async def pair(world: World) -> tuple[Network, Network]:
    """Two nodes that know where to dial each other."""
    a, b = await world.node(), await world.node()
    a.learn(b.peer_id, b.addresses())
    b.learn(a.peer_id, a.addresses())
    return a, b


async def echo(peer: str, body: bytes) -> bytes:
    """Answer with the body."""
    await trio.lowlevel.checkpoint()
    return body


async def echo_stream(stream: FrameStream) -> None:
    """Send back what comes."""
    try:
        while True:
            await stream.send(await stream.receive())
    except StreamReset:
        raise
    except StreamClosed:
        return


async def never_reads(stream: FrameStream) -> None:
    """Serve a stream that stays full."""
    await trio.sleep_forever()


async def closed(stream: FrameStream) -> None:
    """Wait for room in vain."""
    with pytest.raises(StreamClosed):
        await stream.wait_room()


async def send_until_full(stream: FrameStream, size: int) -> int:
    """Send messages of one size until the queue refuses; how many bytes went before."""
    for count in range(200_000):
        try:
            await stream.send(bytes(size))
        except QueueFull:
            return count * size
    raise AssertionError("the queue takes everything")


class Stall:
    """A handler that waits for ever and tells when it starts and when it is cancelled."""

    def __init__(self) -> None:
        self.started, self.cancelled = trio.Event(), trio.Event()

    async def __call__(self, peer: str, body: bytes) -> bytes:
        self.started.set()
        try:
            await trio.sleep_forever()
        finally:
            self.cancelled.set()
        return b""


class CallContract:
    async def test_a_call_is_answered_and_the_handler_knows_who_calls(self, world: World) -> None:
        a, b = await pair(world)

        async def handler(peer: str, body: bytes) -> bytes:
            return peer.encode() + b":" + body

        b.serve("who", handler)
        assert await a.call(b.peer_id, "who", b"x", timeout_s=5) == a.peer_id.encode() + b":x"
        assert (
            await a.call(b.peer_id, "who", [b"one ", memoryview(b"two")], timeout_s=5)
            == a.peer_id.encode() + b":one two"
        )

    async def test_both_sides_call_each_other(self, world: World) -> None:
        a, b = await pair(world)
        a.serve("echo", echo)

        async def back(peer: str, body: bytes) -> bytes:
            return await b.call(peer, "echo", body + b"!", timeout_s=5)

        b.serve("back", back)
        assert await a.call(b.peer_id, "back", b"hi", timeout_s=5) == b"hi!"

    async def test_an_exception_costs_that_call_alone_and_says_nothing_of_its_cause(self, world: World) -> None:
        a, b = await pair(world)

        async def broken(peer: str, body: bytes) -> bytes:
            raise KeyError("a private matter")

        b.serve("broken", broken)
        b.serve("echo", echo)
        with pytest.raises(RemoteError) as caught:
            await a.call(b.peer_id, "broken", b"", timeout_s=5)
        assert caught.value.code == "internal"
        assert "private" not in str(caught.value)
        assert await a.call(b.peer_id, "echo", b"still here", timeout_s=5) == b"still here"

    async def test_a_handler_chooses_its_error(self, world: World) -> None:
        a, b = await pair(world)

        async def missing(peer: str, body: bytes) -> bytes:
            raise RemoteError("no session 7 here", code="no_session")

        async def full(peer: str, body: bytes) -> bytes:
            raise Refused("the cache is full")

        b.serve("missing", missing)
        b.serve("full", full)
        with pytest.raises(RemoteError, match="no session 7") as caught:
            await a.call(b.peer_id, "missing", b"", timeout_s=5)
        assert caught.value.code == "no_session"
        with pytest.raises(Refused, match="cache is full"):
            await a.call(b.peer_id, "full", b"", timeout_s=5)

    async def test_an_unknown_method_is_named(self, world: World) -> None:
        a, b = await pair(world)
        with pytest.raises(RemoteError) as caught:
            await a.call(b.peer_id, "nothing", b"", timeout_s=5)
        assert caught.value.code == "unknown_method"

    async def test_a_deadline_ends_the_call_and_cancels_the_remote_handler(self, world: World) -> None:
        a, b = await pair(world)
        stall = Stall()
        b.serve("stall", stall)
        b.serve("echo", echo)
        with pytest.raises(DeadlineExceeded):
            await a.call(b.peer_id, "stall", b"", timeout_s=0.3)
        with trio.fail_after(5):
            await stall.cancelled.wait()
        assert await a.call(b.peer_id, "echo", b"on", timeout_s=5) == b"on"

    async def test_a_cancelled_caller_cancels_the_handler_and_harms_nobody_else(self, world: World) -> None:
        a, b = await pair(world)
        stall, other = Stall(), Stall()
        b.serve("stall", stall)
        b.serve("other", other)
        b.serve("echo", echo)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: a.call(b.peer_id, "stall", bytes(2**20), timeout_s=60))
            with trio.fail_after(5):
                await stall.started.wait()
            nursery.cancel_scope.cancel()
        with trio.fail_after(5):
            await stall.cancelled.wait()
        assert await a.call(b.peer_id, "echo", b"on", timeout_s=5) == b"on"
        assert not other.started.is_set()

    async def test_fifty_calls_at_once_are_answered_in_any_order(self, world: World) -> None:
        a, b = await pair(world)
        arrived: list[int] = []
        release = [trio.Event() for _ in range(51)]
        answers: list[int] = []

        async def last_first(peer: str, body: bytes) -> bytes:
            number = int(body)
            arrived.append(number)
            if len(arrived) == 50:
                release[50].set()
            await release[number + 1].wait()
            return body

        async def ask(number: int) -> None:
            answers.append(int(await a.call(b.peer_id, "last_first", b"%d" % number, timeout_s=20)))
            release[number].set()

        b.serve("last_first", last_first)
        async with trio.open_nursery() as nursery:
            for number in range(50):
                nursery.start_soon(ask, number)
        assert answers == list(range(49, -1, -1))

    async def test_a_big_body_passes_both_ways_and_one_above_the_bound_is_refused_here(self, world: World) -> None:
        a, b = await pair(world)
        b.serve("echo", echo)
        body = bytes(range(256)) * (32 * 2**20 // 256)
        assert await a.call(b.peer_id, "echo", body, timeout_s=60, priority=Priority.BULK) == body
        with pytest.raises(ValueError, match="bound"):
            await a.call(b.peer_id, "echo", [body, body, b"x"], timeout_s=5)
        assert MAX_BODY_BYTES == 2 * len(body)

    async def test_small_calls_pass_while_a_big_one_is_under_way(self, world: World) -> None:
        a, b = await pair(world)
        b.serve("echo", echo)
        done: list[str] = []

        async def big() -> None:
            await a.call(b.peer_id, "echo", bytes(16 * 2**20), timeout_s=60, priority=Priority.PREFILL)
            done.append("big")

        async def small() -> None:
            for _ in range(3):
                await a.call(b.peer_id, "echo", b"s", timeout_s=20)
            done.append("small")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(big)
            await trio.lowlevel.checkpoint()
            nursery.start_soon(small)
        assert sorted(done) == ["big", "small"]

    async def test_a_peer_that_nobody_knows_is_unreachable(self, world: World) -> None:
        a, b = await pair(world)
        await world.kill(b)
        with pytest.raises(PeerUnreachable):
            await a.call(b.peer_id, "echo", b"", timeout_s=20)

    async def test_a_peer_that_dies_ends_calls_and_streams_and_is_reported(self, world: World) -> None:
        a, b = await pair(world)
        stall, lost = Stall(), trio.Event()
        lost_peers: list[str] = []
        failures: list[Exception] = []

        def on_lost(peer: str) -> None:
            lost_peers.append(peer)
            lost.set()

        a.on_link_lost(on_lost)
        b.serve("stall", stall)
        b.accept(PROTOCOL, echo_stream)
        stream = await a.open(b.peer_id, PROTOCOL)

        async def call() -> None:
            with pytest.raises(PeerUnreachable) as caught:
                await a.call(b.peer_id, "stall", b"", timeout_s=60)
            failures.append(caught.value)

        async def read() -> None:
            with pytest.raises(StreamReset) as caught:
                await stream.receive()
            failures.append(caught.value)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            nursery.start_soon(read)
            with trio.fail_after(5):
                await stall.started.wait()
            await world.kill(b)
            with trio.fail_after(20):
                await lost.wait()
        assert lost_peers == [b.peer_id]
        assert len(failures) == 2

    async def test_links_are_listed_and_a_disconnect_is_undone_by_the_next_call(self, world: World) -> None:
        a, b = await pair(world)
        b.serve("echo", echo)
        lost = trio.Event()
        b.on_link_lost(lambda peer: lost.set())
        assert list(a.links()) == []
        assert a.source(b.peer_id) == ""
        await a.call(b.peer_id, "echo", bytes(1000), timeout_s=5)
        assert a.source(b.peer_id)
        (link,) = a.links()
        assert link.peer == b.peer_id
        assert link.bytes_out >= 1000
        assert link.bytes_in >= 1000
        await a.disconnect(b.peer_id)
        with trio.fail_after(5):
            await lost.wait()
        assert await a.call(b.peer_id, "echo", b"again", timeout_s=5) == b"again"


class StreamContract:
    async def test_messages_arrive_in_order(self, world: World) -> None:
        a, b = await pair(world)
        b.accept(PROTOCOL, echo_stream)
        stream = await a.open(b.peer_id, PROTOCOL)
        assert stream.peer == b.peer_id
        for number in range(500):
            await stream.send([b"%d" % number, bytes(number)])
        for number in range(500):
            assert await stream.receive() == b"%d" % number + bytes(number)
        await stream.aclose()

    async def test_a_full_queue_refuses_and_takes_more_once_the_reader_reads(self, world: World) -> None:
        a, b = await pair(world)
        go, received = trio.Event(), trio.Event()
        total = 0

        async def late_reader(stream: FrameStream) -> None:
            nonlocal total
            await go.wait()
            try:
                while True:
                    total += len(await stream.receive())
            except StreamClosed:
                received.set()

        b.accept(PROTOCOL, late_reader)
        stream = await a.open(b.peer_id, PROTOCOL)
        sent = await send_until_full(stream, 100_000)
        assert 2**20 <= sent <= 16 * 2**20
        go.set()
        with trio.fail_after(10):
            await stream.wait_room()
        await stream.send(bytes(20 * 2**20))
        await stream.aclose()
        with trio.fail_after(20):
            await received.wait()
        assert total == sent + 20 * 2**20

    async def test_a_stream_is_clear_once_what_was_sent_has_left(self, world: World) -> None:
        a, b = await pair(world)
        b.accept(PROTOCOL, echo_stream)
        stream = await a.open(b.peer_id, PROTOCOL)
        assert stream.is_clear()
        for _ in range(20):
            await stream.send(bytes(2**18))
            with trio.fail_after(10):
                await stream.wait_room()
            assert stream.is_clear()
            assert len(await stream.receive()) == 2**18

    async def test_who_waits_for_room_hears_that_its_side_was_closed(self, world: World) -> None:
        a, b = await pair(world)
        b.accept(PROTOCOL, never_reads)
        stream = await a.open(b.peer_id, PROTOCOL)
        await send_until_full(stream, 100_000)
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(closed, stream)
                await trio.testing.wait_all_tasks_blocked()
                await stream.aclose()

    async def test_tiny_messages_are_bounded_too(self, world: World) -> None:
        a, b = await pair(world)
        b.accept(PROTOCOL, never_reads)
        stream = await a.open(b.peer_id, PROTOCOL)
        assert await send_until_full(stream, 0) == 0

    async def test_both_sides_may_send_much_before_they_read(self, world: World) -> None:
        a, b = await pair(world)
        seen: list[int] = []

        async def send_then_read(stream: FrameStream) -> None:
            await stream.send(bytes(8 * 2**20))
            seen.append(len(await stream.receive()))

        b.accept(PROTOCOL, send_then_read)
        stream = await a.open(b.peer_id, PROTOCOL)
        with trio.fail_after(20):
            await send_then_read(stream)
            with pytest.raises(StreamClosed):
                await stream.receive()
        assert seen == [8 * 2**20] * 2

    async def test_closing_ends_one_direction_in_order(self, world: World) -> None:
        a, b = await pair(world)

        async def answer_at_the_end(stream: FrameStream) -> None:
            assert {await stream.receive(), await stream.receive()} == {b"1", b"2"}
            with pytest.raises(StreamClosed):
                await stream.receive()
            await stream.send(b"both")

        b.accept(PROTOCOL, answer_at_the_end)
        stream = await a.open(b.peer_id, PROTOCOL)
        await stream.send(b"1", Priority.BULK)
        await stream.send(b"2", Priority.DECODE)
        await stream.aclose()
        with pytest.raises(StreamClosed):
            await stream.send(b"3")
        assert await stream.receive() == b"both"
        with pytest.raises(StreamClosed) as caught:
            await stream.receive()
        assert not isinstance(caught.value, StreamReset)

    async def test_a_reset_is_seen_at_once_by_both(self, world: World) -> None:
        a, b = await pair(world)
        seen = trio.Event()

        async def handler(stream: FrameStream) -> None:
            with pytest.raises(StreamReset):
                await stream.receive()
            with pytest.raises(StreamReset):
                await stream.send(b"x")
            seen.set()

        b.accept(PROTOCOL, handler)
        stream = await a.open(b.peer_id, PROTOCOL)
        await stream.reset()
        with trio.fail_after(5):
            await seen.wait()
        with pytest.raises(StreamReset):
            await stream.receive()

    async def test_an_exception_in_a_stream_handler_resets_that_stream_alone(self, world: World) -> None:
        a, b = await pair(world)
        b.serve("echo", echo)

        async def broken(stream: FrameStream) -> None:
            await stream.receive()
            raise KeyError("a private matter")

        b.accept(PROTOCOL, broken)
        stream = await a.open(b.peer_id, PROTOCOL)
        await stream.send(b"x")
        with pytest.raises(StreamReset):
            await stream.receive()
        assert await a.call(b.peer_id, "echo", b"on", timeout_s=5) == b"on"

    async def test_an_unknown_protocol_is_named_when_opening(self, world: World) -> None:
        a, b = await pair(world)
        with pytest.raises(RemoteError) as caught:
            await a.open(b.peer_id, "/test/1/nothing")
        assert caught.value.code == "unknown_protocol"


class NetworkContract(CallContract, StreamContract):
    """All of it."""

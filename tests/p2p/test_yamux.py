"""A live yamux connection: bytes both ways, cancellation, pauses, and both ways to end."""

from __future__ import annotations

import random
from typing import Any

import pytest
import trio
import trio.testing

from p2p.channel.raw import ConnectionClosed
from p2p.channel.yamux import YamuxConnection
from p2p.channel.yamux_stream import StreamEOF, YamuxStream
from p2p.channel.yamux_table import LINGER_S, MAX_STREAMS
from p2p.channel.yamux_wire import DATA, WINDOW_UPDATE
from p2p.errors import Refused, StreamClosed, StreamReset
from tests.p2p.channels import PAIRS, attacked, close_sockets, connected, echo, secure

__all__ = ["close_sockets"]  # a fixture that every test here uses

MIB = 1 << 20


async def _echoed(connection: YamuxConnection, data: bytes) -> None:
    stream = await connection.open_stream()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.write, data)
        assert await stream.read_exactly(len(data)) == data
    await stream.close()


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("size", [1, 1000, 65_519, 65_536, 3 * MIB + 1])
async def test_every_size_comes_back(kind: str, size: int) -> None:
    async with connected(kind) as ends, trio.open_nursery() as nursery:
        nursery.start_soon(echo, ends.listener)
        await _echoed(ends.dialler, random.Random(size).randbytes(size))
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("kind", PAIRS)
async def test_many_streams_at_once_from_both_sides(kind: str) -> None:
    async with connected(kind) as ends, trio.open_nursery() as answering:
        answering.start_soon(echo, ends.listener)
        answering.start_soon(echo, ends.dialler)
        async with trio.open_nursery() as nursery:
            for number in range(40):
                data = bytes([number]) * (1000 * number + 1)
                nursery.start_soon(_echoed, ends.dialler if number % 2 else ends.listener, data)
        answering.cancel_scope.cancel()


async def test_parts_are_sent_as_one() -> None:
    async with connected() as ends:
        stream = await ends.dialler.open_stream()
        await stream.write_parts([b"a", memoryview(b"bc"), bytearray(b"d"), b""])
        assert await (await ends.listener.accept_stream()).read_exactly(4) == b"abcd"


async def test_half_closed_streams_still_answer() -> None:
    async with connected() as ends:
        stream = await ends.dialler.open_stream()
        await stream.write(b"question")
        await stream.close_write()
        other = await ends.listener.accept_stream()
        assert await other.read() == b"question"
        with pytest.raises(StreamEOF):
            await other.read()
        with pytest.raises(StreamClosed):
            await stream.write(b"more")
        await other.write(b"answer")
        await other.close()
        assert await stream.read() == b"answer"
        with pytest.raises(StreamClosed):
            await stream.read()
        assert not ends.dialler.table.open
        assert not ends.dialler.table.budget.used


async def test_a_reset_is_seen_by_both() -> None:
    async with connected() as ends:
        stream = await ends.dialler.open_stream()
        await stream.write(b"x")
        other = await ends.listener.accept_stream()
        await other.reset()
        with pytest.raises(StreamReset):
            await stream.read()
        with pytest.raises(StreamReset):
            await stream.write(b"y")
        with pytest.raises(StreamReset):
            await other.read()
        assert ends.dialler.is_established


async def test_both_sides_writing_much_before_reading_stops_only_their_stream() -> None:
    """Windows are bounded, so such a stream waits; the connection and its other streams do not."""
    async with connected() as ends:
        left = await ends.dialler.open_stream()
        await left.write(b"!")
        right = await ends.listener.accept_stream()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(left.write, bytes(8 * MIB))
            nursery.start_soon(right.write, bytes(8 * MIB))
            await trio.testing.wait_all_tasks_blocked(0.01)
            async with trio.open_nursery() as answering:
                answering.start_soon(echo, ends.listener)
                await _echoed(ends.dialler, bytes(2 * MIB))
                answering.cancel_scope.cancel()
            await ends.dialler.ping()
            assert await right.read_exactly(8 * MIB + 1)
            assert await left.read_exactly(8 * MIB)


@pytest.mark.parametrize("kind", PAIRS)
async def test_cancelled_writes_never_harm_the_connection(kind: str) -> None:
    async with connected(kind) as ends, trio.open_nursery() as nursery:
        nursery.start_soon(echo, ends.listener)
        chance = random.Random(7)
        for _ in range(100):
            stream = await ends.dialler.open_stream()
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as writing:
                    writing.start_soon(stream.write, bytes(4 * MIB))
                    for _ in range(chance.randrange(12)):
                        await trio.lowlevel.checkpoint()
                    scope.cancel()
            await stream.reset()
        await _echoed(ends.dialler, bytes(MIB))
        assert len(ends.dialler.table.open) <= 1
        nursery.cancel_scope.cancel()


async def test_a_write_cancelled_before_its_first_byte_leaves_the_stream_whole() -> None:
    async with attacked() as (victim, peer):
        stream = await victim.open_stream()
        nothing_left = stream.sending.window
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.write, bytes(nothing_left))
            while nothing_left:
                nothing_left -= sum(len(frame.body) for frame in await peer.receive())
        with trio.move_on_after(0):
            await stream.write(b"never sent")
        assert not stream.is_closed
        await peer.send(WINDOW_UPDATE, 0, stream.stream_id, 10)
        await stream.write(b"sent")
        assert [frame.body for frame in await peer.receive()] == [b"sent"]


async def test_cancelled_reads_lose_nothing() -> None:
    async with connected() as ends:
        stream = await ends.dialler.open_stream()
        await stream.write(b"0")
        other = await ends.listener.accept_stream()
        assert await other.read() == b"0"
        for number in range(50):
            with trio.move_on_after(0):
                await other.read()
            await stream.write(bytes([number]))
            assert await other.read() == bytes([number])


async def test_a_reader_that_pauses_does_not_cost_the_writer(autojump_clock: trio.testing.MockClock) -> None:
    async with connected("memory") as ends:
        stream = await ends.dialler.open_stream()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.write, bytes(4 * MIB))
            other = await ends.listener.accept_stream()
            await trio.sleep(120)
            assert await other.read_exactly(4 * MIB) == bytes(4 * MIB)


async def test_a_reader_that_never_reads_holds_one_window() -> None:
    async with connected() as ends:
        stream = await ends.dialler.open_stream()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.write, bytes(8 * MIB))
            other = await ends.listener.accept_stream()
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert other.receiving.buffered <= other.receiving.window <= MIB
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("how", ["abort", "socket", "close", "cancel"])
async def test_a_frozen_peer_is_let_go_at_once(how: str) -> None:
    """The peer reads nothing; whoever waits for it is freed, however the connection is ended."""
    sessions = await secure(PAIRS["socket"]())
    connection = YamuxConnection(sessions.dialler)
    freed: list[BaseException] = []

    async def wait_for(operation: Any) -> None:
        try:
            await operation()
        except (StreamReset, ConnectionClosed) as error:
            freed.append(error)

    with trio.fail_after(2):
        async with trio.open_nursery() as running:
            running.start_soon(connection.start)
            await connection.event_started.wait()
            streams = [await connection.open_stream() for _ in range(8)]
            async with trio.open_nursery() as nursery:
                for stream in streams:
                    nursery.start_soon(wait_for, lambda stream=stream: stream.write(bytes(64 * MIB)))
                    nursery.start_soon(wait_for, stream.read)
                nursery.start_soon(wait_for, connection.accept_stream)
                nursery.start_soon(wait_for, connection.ping)
                await trio.testing.wait_all_tasks_blocked(0.01)
                if how == "abort":
                    connection.abort()
                elif how == "socket":
                    assert sessions.dialler.pipe.socket is not None
                    sessions.dialler.pipe.socket.close()
                elif how == "close":
                    await connection.close()
                else:
                    running.cancel_scope.cancel()
    if how != "cancel":
        assert len(freed) == 2 * len(streams) + 2
    assert connection.is_ending


async def test_a_connection_that_ends_leaves_the_answers_that_arrived() -> None:
    async with connected() as ends:
        asking = await ends.listener.open_stream()
        await asking.write(b"?")
        answering = await ends.dialler.accept_stream()
        await answering.write(b"last words")
        await answering.close()
        await ends.dialler.close()
        await ends.listener.event_closed.wait()
        assert await asking.read() == b"last words"
        with pytest.raises(StreamEOF):
            await asking.read()
        with pytest.raises(StreamReset):
            await ends.listener.open_stream()
        with pytest.raises(ConnectionClosed):
            await ends.listener.accept_stream()


async def test_a_connection_that_ends_holds_nothing_of_what_the_peer_pushed() -> None:
    async with connected() as ends:
        pushing = await ends.dialler.open_stream()
        await pushing.write(bytes(200_000))
        inbound = await ends.listener.accept_stream()
        await inbound.read(1)
        with trio.fail_after(5):
            while inbound.receiving.buffered < 199_999:
                await trio.testing.wait_all_tasks_blocked()
        await ends.dialler.close()
        await ends.listener.event_closed.wait()
        assert inbound.receiving.buffered == ends.listener.table.budget.unread == 0
        with pytest.raises(StreamReset):
            await inbound.read()


async def test_streams_are_bounded_and_come_back() -> None:
    async with connected() as ends:
        streams = []
        with pytest.raises(Refused):  # noqa: PT012 - which of them is one too many does not matter
            for _ in range(MAX_STREAMS + 1):
                streams.append(await ends.dialler.open_stream())
        assert len(streams) <= MAX_STREAMS
        for stream in streams:
            await stream.reset()
        await ends.dialler.open_stream()


async def test_streams_that_the_peer_never_closes_are_let_go(autojump_clock: trio.testing.MockClock) -> None:
    async with connected("memory") as ends, trio.open_nursery() as nursery:

        async def accept() -> None:
            while True:
                await ends.listener.accept_stream()

        nursery.start_soon(accept)
        for _ in range(100):
            await (await ends.dialler.open_stream()).close()
        await trio.sleep(LINGER_S + 1)
        await ends.dialler.open_stream()
        assert len(ends.dialler.table.open) == 1
        nursery.cancel_scope.cancel()


async def test_the_round_trip_is_measured() -> None:
    async with connected() as ends:
        assert 0 < await ends.dialler.ping() < 1
        assert ends.dialler.rtt() > 0


async def test_urgent_frames_overtake_bulk_on_the_wire() -> None:
    async with attacked() as (victim, peer):
        bulk, decode = await victim.open_stream(), await victim.open_stream()
        bulk.priority, decode.priority = 3, 1
        for stream in (bulk, decode):
            await peer.send(WINDOW_UPDATE, 0, stream.stream_id, 16 * MIB)
        await trio.testing.wait_all_tasks_blocked(0.01)  # the credit has arrived
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bulk.write, bytes(16 * MIB))
            await trio.testing.wait_all_tasks_blocked(0.01)
            nursery.start_soon(decode.write, b"token")
            await trio.testing.wait_all_tasks_blocked(0.01)
            before = 0
            while True:
                frames = [frame for frame in await peer.receive() if frame.kind == DATA]
                if any(frame.stream_id == decode.stream_id for frame in frames):
                    break
                before += sum(len(frame.body) for frame in frames)
            assert before < 4 * MIB  # what the kernel held already, and one batch
            nursery.cancel_scope.cancel()


class StreamConnection:
    """A yamux stream as a raw connection."""

    socket = None
    remote = None

    def __init__(self, stream: YamuxStream, *, is_initiator: bool) -> None:
        self.is_initiator = is_initiator
        self.read, self.write, self.close = stream.read, stream.write, stream.close
        self.abort = lambda: stream.abort("aborted")


async def test_a_connection_runs_over_a_stream_of_another() -> None:
    """As through a relay: no socket of its own."""
    async with connected() as outer:
        left = await outer.dialler.open_stream()
        await left.write(b".")
        right = await outer.listener.accept_stream()
        assert await right.read() == b"."
        inner = await secure((StreamConnection(left, is_initiator=True), StreamConnection(right, is_initiator=False)))
        ends = [YamuxConnection(end) for end in (inner.dialler, inner.listener)]
        async with trio.open_nursery() as nursery:
            for end in ends:
                nursery.start_soon(end.start)
                await end.event_started.wait()
            nursery.start_soon(echo, ends[1])
            await _echoed(ends[0], random.Random(1).randbytes(5 * MIB))
            ends[0].abort()
            await ends[1].event_closed.wait()
            nursery.cancel_scope.cancel()

"""Hostile peers against a live node: it goes on serving, and its memory stays under a bound that each test states."""

from __future__ import annotations

import contextlib
import os

import pytest
import trio

from p2p.channel.noise_session import NoiseSession
from p2p.channel.raw import ConnectionClosed
from p2p.channel.yamux import YamuxConnection
from p2p.channel.yamux_stream import YamuxStream
from p2p.channel.yamux_wire import ACK, DATA, FIN, SYN, WINDOW_UPDATE, pack_header
from p2p.dht import streams as kad
from p2p.dht.wire import Message, Op
from p2p.errors import P2PError
from p2p.host import heartbeat, identify
from p2p.link.frames import WHOLE, Frame, Kind, encode
from p2p.link.switchboard import BULK_LANE, LIVE_LANE
from p2p.nat import reachability
from p2p.protobuf import varint
from tests.p2p.channels import Hostile
from tests.p2p.hostile import MIB, Victim, connection_to, open_lane, open_protocol, raw_session, under_attack, until_cut
from tests.p2p.nodes import until

PROTOCOLS = (LIVE_LANE, BULK_LANE, heartbeat.PROTOCOL, identify.IDENTIFY, identify.PING, "/libp2p/dcutr", kad.PROTOCOL)
TINY_FRAMES = 200_000
PING_PLEASE = b"\x13/multistream/1.0.0\n\x11/ipfs/ping/1.0.0\n"


def frame(kind: int, id: int, arg: int = 0, name: str = "", body: bytes = b"", flags: int = WHOLE) -> bytes:
    return encode(Frame(kind, flags, id, len(body), arg, name, body))


def request(id: int, method: str, body: bytes, flags: int = WHOLE) -> bytes:
    return frame(Kind.REQUEST, id, 60_000, method, body, flags)


async def test_garbage_and_huge_lengths_at_every_layer() -> None:
    """Memory: 32 MiB."""
    async with under_attack(grows_by=32 * MIB) as victim:
        for garbage in (b"\xff" * 4096, b"\xff\xff\xff\xff\x7f", b"\x13/multistream/1.0.0\n\x07/noise\n\xff\xff"):
            await knock(victim, garbage)
        for raw in (
            os.urandom(512),
            pack_header(DATA, SYN, 1, 2**32 - 1),
            pack_header(WINDOW_UPDATE, SYN, 1, 2**32 - 1) * 1000,
        ):
            async with raw_session(victim) as hostile:
                with contextlib.suppress(ConnectionClosed):
                    await hostile.session.write(raw)
                    while True:
                        await hostile.session.receive()
        huge = (b"\xff" * 8192, b"\x01\xff\xff" + bytes(4096), os.urandom(100_000))
        for protocol in PROTOCOLS:
            for garbage in huge:
                async with connection_to(victim) as connection:
                    with contextlib.suppress(P2PError):
                        await until_cut(await open_protocol(connection, protocol), garbage, 4)


async def knock(victim: Victim, garbage: bytes) -> None:
    """Bytes before any handshake."""
    socket = await trio.open_tcp_stream(victim.address.host, victim.address.port)
    with contextlib.suppress(trio.BrokenResourceError), trio.move_on_after(1):
        await socket.send_all(garbage)
        while await socket.receive_some():
            pass
    await trio.aclose_forcefully(socket)


async def test_malformed_calls_are_refused_and_their_sender_is_dropped() -> None:
    """Memory: 16 MiB."""
    bodies = (b"{", b"[" * 50_000, b'{"version":1,"address":7}', b'{"version": 1' + b"0" * 5000 + b"}")
    async with under_attack(grows_by=16 * MIB) as victim, connection_to(victim) as connection:
        lane = await open_lane(connection)
        with trio.fail_after(20), contextlib.suppress(P2PError):
            for id in range(1, 100_000, 2):
                await lane.write(request(id, reachability.METHOD, bodies[id // 2 % len(bodies)]))
            pytest.fail("it was never dropped")
        with trio.fail_after(5):
            await connection.event_closed.wait()


async def test_floods_of_directory_requests_end_with_the_connection() -> None:
    """Memory: 16 MiB; one attacker sends what cannot be read, the other what costs most to answer."""
    malformed = b"\x02\xff\xff"
    dear = Message(Op.GET_PROVIDERS, os.urandom(34)).encode()
    async with under_attack(grows_by=16 * MIB) as victim:
        for flood in (malformed, varint(len(dear)) + dear):
            async with connection_to(victim) as connection:
                with trio.fail_after(60):
                    async with trio.open_nursery() as nursery:
                        for _ in range(16):  # at once: one after another, a busy machine is too slow for a flood
                            nursery.start_soon(send_requests, connection, flood)
                        await connection.event_closed.wait()
                        nursery.cancel_scope.cancel()


async def send_requests(connection: YamuxConnection, request: bytes) -> None:
    """Send the same to the directory again and again, until the connection has ended."""
    with contextlib.suppress(P2PError):
        while True:
            stream = await open_protocol(connection, kad.PROTOCOL)
            await stream.write(request)
            await stream.reset()


async def test_tiny_frames_about_nothing() -> None:
    """Memory: 24 MiB; each attacker is cut off, and comes back under another name."""
    empty = [
        frame(Kind.CANCEL, 1),
        frame(Kind.CREDIT, 9, 1),
        frame(Kind.PONG, 2),
        frame(Kind.CLOSE, 4),
        frame(Kind.MESSAGE, 7),
    ]
    async with under_attack(grows_by=24 * MIB) as victim:
        sent = 0
        while sent < TINY_FRAMES:
            async with connection_to(victim) as connection:
                lane = await open_lane(connection)
                taken = await until_cut(lane, b"".join(empty) * 200, 1000)
                assert taken < 1000, "it was never cut off"
                sent += 1000 * (taken + 1)


@pytest.mark.parametrize(
    "tiny",
    [
        pack_header(WINDOW_UPDATE, 0, 1, 1),
        pack_header(WINDOW_UPDATE, ACK, 1, 0),
        pack_header(WINDOW_UPDATE, FIN, 1, 0),
        b"".join(pack_header(WINDOW_UPDATE, SYN, id, 0) for id in range(3, 100_003, 2)),
    ],
    ids=["credit", "acknowledgements", "ends", "streams beyond the limit"],
)
async def test_tiny_frames_of_the_multiplexer_cut_the_sender_off(tiny: bytes) -> None:
    """Memory: 16 MiB."""
    async with under_attack(grows_by=16 * MIB) as victim, raw_session(victim) as hostile:
        await hostile.send(WINDOW_UPDATE, SYN, 1, 0)
        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(flood, hostile.session, tiny * max(1, 12_000 // len(tiny)))
                await keep_reading(hostile)
                nursery.cancel_scope.cancel()


async def flood(session: NoiseSession, data: bytes) -> None:
    with contextlib.suppress(ConnectionClosed):
        while True:
            await session.write(data)


async def test_tiny_frames_that_mean_something() -> None:
    """Memory: 16 MiB; a byte a frame into a stream that is read."""
    async with under_attack(grows_by=16 * MIB) as victim, raw_session(victim) as hostile:
        await hostile.send(WINDOW_UPDATE, SYN, 1, 0)
        await hostile.send(DATA, 0, 1, len(PING_PLEASE), PING_PLEASE)
        one, sent = (pack_header(DATA, 0, 1, 1) + b"x") * 1000, 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_reading, hostile)
            while sent < TINY_FRAMES // 2:
                await hostile.session.write(one)
                sent += 1000
            nursery.cancel_scope.cancel()


async def keep_reading(hostile: Hostile) -> None:
    """Until the victim hangs up."""
    with contextlib.suppress(ConnectionClosed):
        while True:
            await hostile.receive()


async def test_streams_that_nobody_serves_cut_the_sender_off() -> None:
    """Memory: 24 MiB. Refusals pile up unread, then everything is cancelled again and again."""
    async with under_attack(grows_by=24 * MIB) as victim, connection_to(victim) as connection:
        lane = await open_lane(connection)
        openings = b"".join(frame(Kind.OPEN, id, name="/no/such") for id in range(1, 100_001, 2))
        await until_cut(lane, openings, 1)
        cancels = b"".join(frame(Kind.CANCEL, id) for id in range(1, 8001, 2))
        await until_cut(lane, cancels, 10)
        with trio.fail_after(10):
            await connection.event_closed.wait()


async def test_a_peer_that_asks_much_and_reads_nothing() -> None:
    """Memory: 48 MiB for four peers of eight links each, in every priority."""
    async with under_attack(grows_by=48 * MIB) as victim, trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(ask_and_never_read, victim)


async def ask_and_never_read(victim: Victim) -> None:
    async with connection_to(victim) as connection:
        with contextlib.suppress(P2PError), trio.move_on_after(3):
            async with trio.open_nursery() as nursery:
                for number in range(8):
                    lane = await open_lane(connection, (LIVE_LANE, BULK_LANE)[number % 2])
                    nursery.start_soon(ask_for_much, lane)


async def ask_for_much(lane: YamuxStream) -> None:
    body = bytes(100_000)
    with contextlib.suppress(P2PError):
        for id in range(1, 4001, 2):
            await lane.write(request(id, "echo", body, WHOLE | id // 2 % 4))


async def test_windows_filled_on_many_connections() -> None:
    """Memory: 96 MiB where a node may hold 32 MiB of unread bytes; the attackers send 40 x 30 MiB.

    Some connections may hold all 32 MiB when the others come, each of which may then fill its share, 32 MiB together;
    every connection has a read buffer of 256 KiB and its plaintext, 24 MiB for forty. That makes 88.
    """
    async with under_attack("--unread", str(32 * MIB), grows_by=96 * MIB) as victim, trio.open_nursery() as nursery:
        for _ in range(40):
            nursery.start_soon(fill_windows, victim)


async def fill_windows(victim: Victim) -> None:
    """Streams that want an echo and never let it come, each with its window full."""
    with trio.move_on_after(4):
        async with raw_session(victim) as hostile:
            with contextlib.suppress(ConnectionClosed):
                for id in range(1, 61, 2):
                    await hostile.send(WINDOW_UPDATE, SYN, id, 0)
                    await read_until_credited(hostile, id)
                    await hostile.send(DATA, 0, id, len(PING_PLEASE), PING_PLEASE)
                    await hostile.send(DATA, 0, id, MIB - 4096, bytes(MIB - 4096))
                await trio.sleep_forever()


async def read_until_credited(hostile: Hostile, id: int) -> None:
    """Until the stream's window holds a MiB."""
    credit = 256 << 10
    while credit < MIB:
        for kind, _, stream_id, length, _ in await hostile.receive():
            credit += length if (kind, stream_id) == (WINDOW_UPDATE, id) else 0


async def test_a_heartbeat_that_races() -> None:
    """Memory: 16 MiB."""
    hello = b'{"version":1,"addresses":["/ip4/10.0.0.1/tcp/1"]}'
    message = b"\x01" + len(hello).to_bytes(2, "big") + hello
    async with under_attack(grows_by=16 * MIB) as victim, connection_to(victim) as connection:
        stream = await open_protocol(connection, heartbeat.PROTOCOL)
        with trio.fail_after(20):
            assert await until_cut(stream, message * 50, 10_000) < 10_000


async def test_half_open_handshakes_leave_no_files_behind() -> None:
    """Memory: 24 MiB; 300 of them, at each of which something else is missing."""
    starts = (b"", b"\x13/multistream/1.0.0\n", b"\x13/multistream/1.0.0\n\x07/noise\n\x00\x20" + bytes(31))
    async with under_attack(grows_by=24 * MIB) as victim:
        before = victim.files
        sockets = []
        for number in range(300):
            with contextlib.suppress(trio.BrokenResourceError, OSError):  # refused at once, with so many under way
                socket = await trio.open_tcp_stream(victim.address.host, victim.address.port)
                sockets.append(socket)
                await socket.send_all(starts[number % len(starts)])
        await until(lambda: victim.files <= before + 2, 15)
        for socket in sockets:
            await trio.aclose_forcefully(socket)
        async with connection_to(victim) as connection:
            assert connection.is_established


async def test_writes_cancelled_anywhere_leave_the_link_whole() -> None:
    """Memory: 96 MiB; fifty big calls are given up at every stage."""
    async with under_attack(grows_by=96 * MIB) as victim:
        before = victim.friend.links()[0]
        for number in range(50):
            with trio.move_on_after(number * 0.0008):
                await victim.friend.call(victim.peer, "echo", bytes(2 * MIB), timeout_s=10, priority=2)
        after = victim.friend.links()
        assert [link.peer for link in after] == [before.peer]
        big = os.urandom(3 * MIB)
        assert await victim.friend.call(victim.peer, "echo", big, timeout_s=20) == big

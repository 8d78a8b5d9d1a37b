"""A live host: ports, crashes, simultaneous dials, and peers that mean harm while others are served."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import trio
import trio.testing
from trio.testing import MockClock

from p2p.addresses import Address, parse_address
from p2p.channel import multistream
from p2p.errors import P2PError, PeerUnreachable, Refused, StreamClosed
from p2p.host import heartbeat
from p2p.host.admission import Admission, ConnectionLimits
from p2p.host.connection import Connection, Stream
from p2p.host.host import Host
from p2p.host.listening import PortTaken
from p2p.host.turns import Turns
from p2p.identity import Identity
from tests.p2p.channels import connected, far_pair
from tests.p2p.nodes import GENEROUS, make_host, make_network, until

ECHO = "/test/1/echo"


async def echo(stream: Stream) -> None:
    while data := await stream.read(65536):
        await stream.write(data)
    await stream.close()


@asynccontextmanager
async def running(*hosts: Host) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        for host in hosts:
            host.handle(ECHO, echo)
            await nursery.start(host.run)
        yield
        for host in hosts:
            await host.goodbye()
        nursery.cancel_scope.cancel()


async def ask_echo(asker: Host, answerer: Host, text: bytes = b"hello") -> bytes:
    connection = await asker.connect(answerer.peer_id, answerer.addresses)
    stream = await connection.open_stream(ECHO)
    await stream.write(text)
    answer = await multistream.read_exactly(stream, len(text))
    await stream.close()
    return answer


async def raw_socket(host: Host) -> trio.SocketStream:
    address = host.listening[0]
    return await trio.open_tcp_stream(address.host, address.port)


# --- ports and addresses ---------------------------------------------------------------------------------------------


async def test_both_families_are_listened_on_and_dialled() -> None:
    a, b = make_host(listen=("/ip4/127.0.0.1/tcp/0", "/ip6/::1/tcp/0")), make_host()
    async with running(a, b):
        assert {address.kind for address in a.listening} == {"ip4", "ip6"}
        for kind in ("ip4", "ip6"):
            where = [address for address in a.addresses if address.kind == kind]
            connection = await b.dial(where[0], a.peer_id)
            assert connection.address.kind == kind
            # The deny list must see who comes over IPv6, too.
            seen = [c for c in a.connections() if c.address.kind == kind]
            assert seen
            assert seen[0].address.host == where[0].host


async def test_an_explicit_port_that_is_taken_is_an_error_that_says_so() -> None:
    first = make_host()
    async with running(first):
        taken = str(first.listening[0])
        second = make_host(listen=(taken,))
        with pytest.raises(PortTaken, match=f"{first.listening[0].port}.*in use"):
            await second.run()


async def test_the_default_port_falls_back_to_a_free_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as blocker:
        blocker.bind(("0.0.0.0", 0))
        blocker.listen()
        monkeypatch.setattr("p2p.host.listening.DEFAULT_PORT", blocker.getsockname()[1])
        host = make_host(listen=())
        async with running(host):
            ports = {address.port for address in host.listening}
            assert len(ports) == 1
            assert ports != {blocker.getsockname()[1]}
            assert all(address.host not in ("0.0.0.0", "::") for address in host.addresses)


async def test_a_host_that_crashed_comes_back_on_its_port_with_its_name(caplog: pytest.LogCaptureFixture) -> None:
    host, friend = make_host(), make_host()
    async with running(host, friend):
        assert await ask_echo(friend, host) == b"hello"
        port = host.listening[0].port
        assert host._nursery is not None
        with caplog.at_level(logging.CRITICAL, "shoal"):
            host._nursery.start_soon(_boom)
            with trio.fail_after(5):
                while True:
                    try:
                        if await ask_echo(friend, host, b"again") == b"again":
                            break
                    except P2PError:
                        await trio.sleep(0.05)
        assert host.listening[0].port == port


async def _boom() -> None:
    raise RuntimeError("a defect in a service task")


async def test_a_connection_that_is_still_closing_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saying goodbye takes up to half a second; whoever asks meanwhile is dialled anew."""
    a, b = make_host(), make_host()
    async with running(a, b):
        old = await b.connect(a.peer_id, a.addresses)
        close, goes_on = old.muxed.session.close, trio.Event()

        async def closes_late() -> None:
            await goes_on.wait()
            await close()

        monkeypatch.setattr(old.muxed.session, "close", closes_late)
        (other,) = a.connections_to(b.peer_id)
        other.abort()
        await until(lambda: not old.is_open)
        assert not old.closed.is_set()
        assert await ask_echo(b, a) == b"hello"
        goes_on.set()


# --- dialling --------------------------------------------------------------------------------------------------------


async def test_dials_at_the_same_time_share_one_connection() -> None:
    a, b = make_host(), make_host()
    async with running(a, b):
        found = set()

        async def connect() -> None:
            found.add(await a.connect(b.peer_id, b.addresses))

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(connect)
        assert len(found) == 1
        assert len(b.connections()) == 1


async def test_a_system_that_shares_no_ports_dials_from_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows forbids to bind the port of an exclusive listener (WSAEACCES), so nobody on the internet was dialled."""

    async def bind(*_: object) -> None:
        raise PermissionError(errno.EACCES, "access to a socket in a way forbidden by its access permissions")

    a, b = make_host(), make_host()
    async with running(a, b):
        monkeypatch.setattr("trio._socket._SocketType.bind", bind)
        connection = await a.dial(b.listening[0], b.peer_id, source_port=a.listening[0].port)
        assert connection.peer == b.peer_id


async def test_a_caller_that_gives_up_does_not_end_the_dial_of_the_others() -> None:
    a, b = make_host(), make_host()
    async with running(a, b), trio.open_nursery() as nursery:
        done = trio.Event()

        async def patient() -> None:
            await a.connect(b.peer_id, b.addresses)
            done.set()

        with trio.CancelScope() as impatient:
            impatient.cancel()
            await a.connect(b.peer_id, b.addresses)
        nursery.start_soon(patient)
        with trio.fail_after(5):
            await done.wait()


async def test_a_peer_is_tried_at_every_address_and_again_at_once() -> None:
    a, b = make_host(), make_host()
    async with running(a):
        with pytest.raises(PeerUnreachable):
            await a.connect(b.peer_id, [parse_address("/ip4/127.0.0.1/tcp/1")])
        async with running(b):
            # No negative cache: a peer that was just unreachable is dialled as soon as it is there.
            dead = [parse_address(f"/ip4/127.0.0.1/tcp/{port}") for port in (1, 2, 3)]
            assert (await a.connect(b.peer_id, [*dead, *b.addresses])).peer == b.peer_id


async def test_somebody_else_at_the_address_is_not_the_peer() -> None:
    a, impostor, victim = make_host(), make_host(), make_host()
    async with running(a, impostor):
        with pytest.raises(PeerUnreachable):
            await a.connect(victim.peer_id, [address.of(None) for address in impostor.addresses])
        assert a.connection(victim.peer_id) is None


async def test_a_node_does_not_dial_itself() -> None:
    a = make_host()
    async with running(a):
        with pytest.raises(Refused, match="itself"):
            await a.connect(a.peer_id, a.addresses)


async def test_denied_peers_and_networks_are_refused_both_ways() -> None:
    villain = make_host()
    careful = make_host(deny=(villain.peer_id, "127.66.0.0/16"))
    async with running(villain, careful):
        with pytest.raises(Refused, match="deny list"):
            await careful.connect(villain.peer_id, villain.addresses)
        with pytest.raises(P2PError):
            await ask_echo(villain, careful)
        with pytest.raises(Refused, match="denied network"):
            await careful.dial(Address("ip4", "127.66.0.1", 1), villain.peer_id)
        assert careful.connections() == []


async def test_peers_at_one_address_get_no_more_connections_if_this_node_dials_them() -> None:
    """One machine has any number of peer ids, and a node dials whoever is named to it."""
    node, friend = make_host(replace(GENEROUS, connections_per_ip=2)), make_host(listen=["/ip6/::1/tcp/0"])
    others = [make_host() for _ in range(3)]
    async with running(node, friend, *others):
        for other in others[:2]:
            assert await ask_echo(node, other) == b"hello"
        with pytest.raises(PeerUnreachable, match="too many connections open"):
            await ask_echo(node, others[2])
        assert await ask_echo(node, friend) == b"hello"
        await node.disconnect(others[0].peer_id)
        await until(lambda: node.admission.connections_open == 2)
        assert await ask_echo(node, others[2]) == b"hello"


async def test_peers_that_come_from_an_address_do_not_keep_this_node_from_dialling_there() -> None:
    node, friend = make_host(replace(GENEROUS, connections_per_ip=1)), make_host()
    others = [make_host() for _ in range(2)]
    async with running(node, friend, *others):
        assert await ask_echo(others[0], node) == b"hello"
        with pytest.raises(P2PError):
            await ask_echo(others[1], node)
        assert await ask_echo(node, friend) == b"hello"


async def test_a_dial_without_room_says_nothing_about_the_address() -> None:
    node, friend, other = make_host(replace(GENEROUS, connections_per_ip=1)), make_host(), make_host()
    async with running(node, friend, other):
        assert await ask_echo(node, friend) == b"hello"
        await node.disconnect(friend.peer_id)
        await until(lambda: node.admission.connections_open == 0)
        assert await ask_echo(node, other) == b"hello"
        with pytest.raises(PeerUnreachable, match="too many connections"):
            await ask_echo(node, friend)
        assert friend.peer_id in [peer for peer, _, _ in node.book.proven_peers()]


async def test_a_peer_that_returns_replaces_its_old_connections() -> None:
    a, b = make_host(), make_host()
    async with running(a, b):
        for _ in range(6):
            await b.dial(a.addresses[0], a.peer_id)
        await until(lambda: len(a.connections()) <= GENEROUS.connections_per_peer)
        assert await ask_echo(b, a) == b"hello"


# --- harm ------------------------------------------------------------------------------------------------------------


async def test_a_handshake_over_a_filled_line_or_a_satellite_is_in_time(autojump_clock: MockClock) -> None:
    """A round trip takes two seconds there, and the handshake three of them."""
    dialling, listening, address = make_host(), make_host(), parse_address("/ip4/198.51.100.7/tcp/7464")
    ends = far_pair(1.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(listening._establish, ends[1], address, None)
        connection = await dialling._establish(ends[0], address.of(listening.peer_id), listening.peer_id)
    assert connection.peer == listening.peer_id


async def test_what_was_not_sent_of_an_aborted_connection_is_dropped() -> None:
    """Else the kernel keeps it for a peer that does not read; that it is dropped shows as a reset at the other end."""
    dialling, listening = make_host(), make_host()
    async with running(dialling, listening):
        connection = await dialling.dial(listening.addresses[0], listening.peer_id)
        await until(lambda: listening.connection(dialling.peer_id) is not None)
        accepted = listening.connections()[0]
        connection.abort()
        with trio.fail_after(5):
            await accepted.closed.wait()
        assert str(accepted.muxed._ending).startswith("the connection was lost")


async def test_a_handler_that_raises_costs_its_stream_alone(caplog: pytest.LogCaptureFixture) -> None:
    a, b = make_host(), make_host()

    async def broken(stream: Stream) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_boom)

    b.handle("/test/1/broken", broken)
    async with running(a, b):
        connection = await a.connect(b.peer_id, b.addresses)
        healthy = await connection.open_stream(ECHO)
        with caplog.at_level(logging.CRITICAL, "shoal"):
            for _ in range(20):
                stream = await connection.open_stream("/test/1/broken")
                with pytest.raises(P2PError):
                    await multistream.read_exactly(stream, 1)
        await healthy.write(b"on")
        assert await multistream.read_exactly(healthy, 2) == b"on"
        assert connection.is_open


async def test_half_open_handshakes_time_out_and_leave_room_for_others() -> None:
    limits = ConnectionLimits(
        handshakes=8, handshakes_per_ip=8, handshake_timeout_s=2.0, accepts_per_ip_s=1e6, accepts_per_ip_burst=10_000
    )
    host, friend = make_host(limits), make_host()
    async with running(host, friend):
        assert await ask_echo(friend, host) == b"hello"
        silent = [await raw_socket(host) for _ in range(50)]
        assert await ask_echo(friend, host, b"meanwhile") == b"meanwhile"
        with trio.fail_after(30):
            for stream in silent:
                await read_to_the_end(stream)
        await until(lambda: host.admission.handshakes_in_flight == 0)
        newcomer = make_host()
        async with running(newcomer):
            assert await ask_echo(newcomer, host) == b"hello"


async def read_to_the_end(stream: trio.SocketStream) -> None:
    async with stream:
        try:
            while await stream.receive_some():
                pass
        except trio.BrokenResourceError:
            pass


GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\xff" * 4096,
    b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f" + bytes(100),  # a line of nine exabytes
    b"\x13/multistream/1.0.0\n" + b"\x07/noise\n" + bytes(200),
    b"\x13/multistream/1.0.0\n" + b"\x07/noise\n" + b"\xff\xff" + os.urandom(70_000),
    b"\x13/multistream/1.0.0\n" + b"\x03na\n" * 5000,
    b"",
]


async def test_garbage_before_the_handshake_is_dropped_while_others_are_served() -> None:
    host, friend = make_host(), make_host()
    async with running(host, friend):
        before = psutil.Process().memory_info().rss
        for _ in range(20):
            for garbage in GARBAGE:
                stream = await raw_socket(host)
                try:
                    await stream.send_all(garbage)
                    await stream.send_eof()
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    pass
                await stream.aclose()
            assert await ask_echo(friend, host) == b"hello"
        assert psutil.Process().memory_info().rss - before < 32 << 20


async def test_garbage_on_every_protocol_costs_at_most_the_sender_its_connection() -> None:
    victim, friend = make_network("dht"), make_network()
    async with victim.running(), friend.running():

        async def shout(peer: str, body: bytes) -> bytes:
            return body.upper()

        victim.serve("shout", shout)
        friend.learn(victim.peer_id, victim.addresses())
        opened = 0
        for protocol in victim.host.protocols:
            for garbage in (*GARBAGE, os.urandom(200_000)):
                attacker = make_host()  # a new one each time: the last one is held off
                async with running(attacker):
                    connection = await attacker.connect(victim.peer_id, victim.host.addresses)
                    with contextlib.suppress(P2PError):  # some refuse at once, whatever is said
                        stream = await connection.open_stream(protocol)
                        opened += 1
                        await stream.write(garbage)
                        await stream.close()
            assert await friend.call(victim.peer_id, "shout", b"still here", timeout_s=5) == b"STILL HERE"
        assert opened >= (len(victim.host.protocols) - 1) * (len(GARBAGE) + 1)


async def test_a_line_that_claims_to_be_huge_is_never_allocated() -> None:
    ours, theirs = trio.testing.memory_stream_pair()

    class Bytes:
        async def read(self, n: int | None = None) -> bytes:
            assert n is not None
            assert n <= multistream.MAX_LINE_BYTES
            return bytes(await ours.receive_some(n))

        async def write(self, data: bytes) -> None:
            await ours.send_all(data)

    await theirs.send_all(b"\xff\xff\xff\xff\x7f" + b"x" * 1000)
    with pytest.raises(P2PError, match="at most 256"):
        await multistream.choose(Bytes(), {ECHO})


async def test_too_many_streams_are_refused_and_the_connection_lives() -> None:
    host = make_host(ConnectionLimits(streams_per_connection=10, accepts_per_ip_burst=1000))
    greedy, friend = make_host(), make_host()
    async with running(host, greedy, friend):
        connection = await greedy.connect(host.peer_id, host.addresses)
        refused = 0
        kept = []
        for _ in range(40):
            try:
                kept.append(await connection.open_stream(ECHO))
            except P2PError:
                refused += 1
        assert len(kept) == 10
        assert refused == 30
        assert connection.is_open
        assert await ask_echo(friend, host) == b"hello"


async def test_streams_that_nobody_serves_are_taken_no_faster_than_others_and_those_get_their_turns() -> None:
    """A stream of an unknown protocol costs its opener a few bytes, and this node a task and a negotiation."""
    per_s, burst = 50, 10
    host = make_host(replace(GENEROUS, streams_per_ip_s=per_s, streams_per_ip_burst=burst))
    friend, flooders = make_host(), [make_host() for _ in range(4)]
    refused = 0

    async def flood(connection: Connection) -> None:
        nonlocal refused
        while True:
            with pytest.raises(P2PError):
                await connection.open_stream("/unknown/1")
            refused += 1

    async with running(host, friend, *flooders), trio.open_nursery() as nursery:
        begin = trio.current_time()
        for flooder in flooders:
            connection = await flooder.connect(host.peer_id, host.addresses)
            for _ in range(8):
                nursery.start_soon(flood, connection)
        await until(lambda: refused > 3 * burst)
        asked = [await ask_echo(friend, host) for _ in range(3)]
        taken_s = trio.current_time() - begin
        nursery.cancel_scope.cancel()
    assert asked == [b"hello"] * 3
    assert refused <= burst + per_s * taken_s + 2 * len(flooders)


async def test_two_hundred_identities_leave_nothing_behind() -> None:
    host, friend = make_host(), make_host()
    async with running(host, friend):
        friend_connection = await friend.connect(host.peer_id, host.addresses)
        tasks = trio.lowlevel.current_statistics().tasks_living
        before = psutil.Process().memory_info().rss
        started = threading.active_count()
        address = host.addresses[0]
        for _ in range(10):
            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(_come_and_go, address)
            assert await ask_echo(friend, host) == b"hello"
        assert friend_connection.is_open
        await until(lambda: len(host.connections()) == 1)
        # An inbound slot that is never given back would shut everybody out in the end.
        assert host.admission.connections_open == 1
        assert host.admission.handshakes_in_flight == 0
        assert trio.lowlevel.current_statistics().tasks_living - tasks < 10
        assert threading.active_count() <= started  # an idle worker of trio may end meanwhile
        assert psutil.Process().memory_info().rss - before < 48 << 20


async def _come_and_go(address: Address) -> None:
    stranger = make_host()
    async with trio.open_nursery() as nursery:
        await nursery.start(stranger.run)
        try:
            connection = await stranger.dial(address, address.peer or "")
            await connection.close()
        except (P2PError, OSError):
            pass
        nursery.cancel_scope.cancel()


async def test_a_stranger_that_stays_silent_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "IDLE_S", 0.2)
    network, stranger = make_network(), make_host()
    async with network.running(), running(stranger):
        connection = await stranger.connect(network.peer_id, network.host.addresses)
        with trio.fail_after(5):
            await connection.closed.wait()


async def test_a_peer_whose_heartbeat_waits_behind_its_other_bytes_is_not_silent(autojump_clock: MockClock) -> None:
    """On a slow uplink a ping can wait for longer than silence is tolerated, while data arrives all the time."""
    async with connected("memory") as ends, trio.open_nursery() as nursery:
        raw = ends.sessions.raw[1]
        address = parse_address("/ip4/198.51.100.7/tcp/7464")
        connection = Connection(ends.listener, raw, address, Turns(Admission()), max_streams=1)

        async def wait(n: int) -> None:
            await trio.sleep_forever()

        async def send_other_bytes() -> None:
            for _ in range(20):
                await trio.sleep(10)
                await ends.dialler.ping()

        nursery.start_soon(send_other_bytes)
        starved: Any = SimpleNamespace(peer=connection.peer, connection=connection, read=wait)
        begun = trio.current_time()
        with pytest.raises(StreamClosed, match="silent"):
            await heartbeat.Heartbeat(lambda connection: heartbeat.Hello(), lambda *heard: None)._listen(starved)
        assert trio.current_time() - begun == pytest.approx(200 + heartbeat.SILENCE_S, abs=0.1)


def test_the_hello_of_a_stranger_is_checked() -> None:
    peer = Identity.generate().peer_id
    hello = heartbeat.Hello((parse_address("/ip4/10.0.0.1/tcp/7464").of(peer),), None, True)
    assert heartbeat.Hello.decode(hello.encode(), peer) == hello
    for body in (
        b"",
        b"{",
        b"[]",
        b'{"version": 2}',
        b'{"version": 1, "addresses": [1]}',
        b'{"version":1,"addresses":{}}',
    ):
        with pytest.raises(P2PError):
            heartbeat.Hello.decode(body, peer)
    many = b'{"version":1,"addresses":[%s]}' % b",".join(b'"/ip4/10.0.0.%d/tcp/1"' % n for n in range(1, 200))
    assert len(heartbeat.Hello.decode(many, peer).addresses) == 16


async def test_bytes_that_a_handler_leaves_unread_count_no_longer_than_it_runs() -> None:
    """Else a peer could fill the count of unread bytes without sending more than one stream's worth at a time."""

    async def brief(stream: Stream) -> None:
        await stream.write(b"!")
        await stream.close()

    a, b = make_host(), make_host()
    async with running(a, b):
        a.handle("/test/1/brief", brief)
        connection = await b.connect(a.peer_id, a.addresses)
        for _ in range(3):
            stream = await connection.open_stream("/test/1/brief")
            await stream.write(bytes(1 << 18))
            assert await stream.read(1) == b"!"
            await stream.close()
        assert await ask_echo(b, a) == b"hello"  # so all that was sent before has arrived
        (accepted,) = a.connections()
        await until(lambda: not accepted.muxed.table.budget.unread)
        assert accepted.muxed.table.budget._node.total == 0

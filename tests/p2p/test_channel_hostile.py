"""Peers that mean harm, at the level of the channel: each loses its connection or its stream, and costs little."""

from __future__ import annotations

import contextlib
import socket
import time
import tracemalloc
from typing import Any

import pytest
import trio
import trio.testing

from p2p.channel.noise import HANDSHAKE_DEADLINE_S
from p2p.channel.noise_records import _nonce
from p2p.channel.raw import ConnectionClosed
from p2p.channel.upgrade import channel_of
from p2p.channel.yamux import ACCEPT_BACKLOG, YamuxConnection
from p2p.channel.yamux_flow import CONNECTION_WINDOW_BYTES, FIRST_WINDOW_BYTES, MAX_CONTROL_BYTES
from p2p.channel.yamux_table import MAX_INBOUND
from p2p.channel.yamux_wire import DATA, FIN, PING, RST, SYN, WINDOW_UPDATE, pack_header
from p2p.errors import PeerUnreachable, WrongSecret
from p2p.host.address_book import AddressBook
from p2p.host.host import Host, HostConfig
from p2p.identity import Identity
from tests.p2p.channels import Hostile, attacked, close_sockets
from tests.p2p.nodes import GENEROUS, LOOPBACK
from tests.p2p.test_host import ask_echo, raw_socket, running

__all__ = ["close_sockets"]  # a fixture that every test here uses

KIB, MIB = 1 << 10, 1 << 20


async def _until_dropped(victim: YamuxConnection, attack: Any) -> None:
    """Go on until the victim has had enough, which must be soon."""
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:

            async def go_on() -> None:
                with contextlib.suppress(ConnectionClosed):
                    await attack()

            nursery.start_soon(go_on)
            await victim.event_closed.wait()
            nursery.cancel_scope.cancel()


async def _listen(peer: Hostile) -> None:
    with contextlib.suppress(ConnectionClosed):
        while True:
            await peer.receive()


async def test_more_than_the_window_costs_the_connection() -> None:
    async with attacked() as (victim, peer):
        await peer.send(WINDOW_UPDATE, SYN, 1, 0)
        stream = await victim.accept_stream()

        async def attack() -> None:
            for _ in range(FIRST_WINDOW_BYTES // (64 * KIB) + 1):
                await peer.send(DATA, 0, 1, 64 * KIB, bytes(64 * KIB))

        await _until_dropped(victim, attack)
        assert stream.receiving.buffered <= FIRST_WINDOW_BYTES


@pytest.mark.parametrize(
    "frame",
    [
        bytes([7]) * 12,
        pack_header(DATA, 0, 1, 17 * MIB),
        pack_header(DATA, SYN, 1, 2 * MIB) + b"x",
        pack_header(WINDOW_UPDATE, SYN, 1, 0) * 2,
        pack_header(DATA, 0, 0, 1) + b"x",
    ],
    ids=["not yamux", "oversized", "over the window", "opened twice", "stream 0"],
)
async def test_one_bad_frame_costs_the_connection(frame: bytes) -> None:
    async with attacked() as (victim, peer):
        await _until_dropped(victim, lambda: peer.session.write(frame))


@pytest.mark.parametrize(
    "frame",
    [
        pack_header(PING, SYN, 0, 7),
        pack_header(WINDOW_UPDATE, 0, 99, 0),
        pack_header(DATA, 0, 99, 1) + b"x",
        pack_header(WINDOW_UPDATE, FIN, 99, 0),
        pack_header(PING, 2, 0, 4),
    ],
    ids=["pings", "credit for no stream", "data for no stream", "ends of no stream", "answers to no ping"],
)
@pytest.mark.parametrize("reads", [True, False])
async def test_a_flood_of_frames_that_do_nothing_costs_the_connection(frame: bytes, reads: bool) -> None:
    async with attacked() as (victim, peer), trio.open_nursery() as nursery:
        if reads:
            nursery.start_soon(_listen, peer)

        async def attack() -> None:
            while True:
                await peer.session.write(frame * 200)

        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        await _until_dropped(victim, attack)
        peak = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.stop()
        assert peak < 4 * MIB
        nursery.cancel_scope.cancel()


async def test_a_flood_of_records_without_content_costs_the_connection() -> None:
    async with attacked() as (victim, peer):
        sealer = peer.session._sealer

        async def attack() -> None:
            while True:
                for _ in range(200):
                    tag = sealer._aead.encrypt(_nonce(sealer._number, sealer._big_endian), b"", None)
                    sealer._number += 1
                    await peer.session.pipe.send(len(tag).to_bytes(2, "big") + tag)

        await _until_dropped(victim, attack)


async def test_streams_opened_without_end_are_refused() -> None:
    async with attacked() as (victim, peer), trio.open_nursery() as nursery:
        nursery.start_soon(_listen, peer)

        async def accept() -> None:
            while True:
                await victim.accept_stream()

        nursery.start_soon(accept)
        for number in range(1000):
            await peer.send(WINDOW_UPDATE, SYN, 2 * number + 1, 0)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert len(victim.table.open) <= MAX_INBOUND
        assert victim.table.budget.used <= CONNECTION_WINDOW_BYTES
        assert victim.is_established
        await victim.open_stream()  # this side still has streams of its own
        nursery.cancel_scope.cancel()


async def test_streams_that_nobody_accepts_are_refused() -> None:
    async with attacked() as (victim, peer):
        for number in range(ACCEPT_BACKLOG + 20):
            await peer.send(WINDOW_UPDATE, SYN, 2 * number + 1, 0)
        refused = 0
        while refused < 20:
            refused += sum(bool(frame.flags & RST) for frame in await peer.receive())
        assert len(victim.table.open) == ACCEPT_BACKLOG


async def test_streams_opened_and_reset_in_haste_cost_the_connection() -> None:
    async with attacked() as (victim, peer), trio.open_nursery() as nursery:
        nursery.start_soon(_listen, peer)

        async def attack() -> None:
            number = 1
            while True:
                await peer.session.write(
                    b"".join(
                        pack_header(WINDOW_UPDATE, SYN, i, 0) + pack_header(WINDOW_UPDATE, RST, i, 0)
                        for i in range(number, number + 200, 2)
                    )
                )
                number += 200

        await _until_dropped(victim, attack)
        assert len(victim.table.open) == 0
        nursery.cancel_scope.cancel()


async def test_tiny_frames_that_nobody_reads_cost_no_more_than_the_window() -> None:
    async with attacked() as (victim, peer):
        await peer.send(WINDOW_UPDATE, SYN, 1, 0)
        stream = await victim.accept_stream()
        many = (pack_header(DATA, 0, 1, 1) + b"x") * 1000
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(30):
            await peer.session.write(many)
        while stream.receiving.buffered < 30_000:
            await trio.lowlevel.checkpoint()
        held = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert held < 256 * KIB
        assert await stream.read_exactly(30_000) == b"x" * 30_000


async def test_tiny_frames_do_not_starve_others() -> None:
    """Others get a turn at least every thousand frames, however many come at once."""
    async with attacked() as (victim, peer):
        await peer.send(WINDOW_UPDATE, SYN, 1, 0)
        stream = await victim.accept_stream()
        frames, turns, most = 50_000, 0, 0

        async def flood() -> None:
            for _ in range(10):
                await peer.session.write((pack_header(DATA, 0, 1, 1) + b"x") * (frames // 10))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(flood)
            while stream.receiving.buffered < frames:
                before = stream.receiving.buffered
                await trio.lowlevel.checkpoint()
                turns += 1
                most = max(most, stream.receiving.buffered - before)
        assert most <= 1024
        assert turns >= frames // 1000


async def test_a_peer_that_asks_and_never_reads_costs_a_bounded_queue() -> None:
    async with attacked("memory") as (victim, peer), trio.open_nursery() as nursery:

        async def accept() -> None:
            while True:
                await victim.accept_stream()

        nursery.start_soon(accept)
        for number in range(MAX_INBOUND + 500):
            await peer.send(WINDOW_UPDATE, SYN, 2 * number + 1, 0)
        queued = sum(len(part) for part in victim._sender.outbox.take(0))
        assert queued <= MAX_CONTROL_BYTES
        nursery.cancel_scope.cancel()


# A live host, with honest peers beside the hostile ones.


def _host(secret: bytes | None = None, heard: list[Any] | None = None) -> Host:
    identity = Identity.generate()
    channel = channel_of(identity, secret=secret, on_failure=heard.append if heard is not None else None)
    return Host(identity, channel, HostConfig(LOOPBACK, limits=GENEROUS), AddressBook())


async def test_a_host_serves_others_while_it_is_attacked() -> None:
    host, honest = _host(), _host()
    async with running(host, honest):
        await honest.connect(host.peer_id, host.addresses)
        attackers = []
        for garbage in (
            b"",
            b"GET / HTTP/1.1\r\n\r\n",
            b"\xff" * 4096,
            b"\x13/multistream/1.0.0\n\x07/noise\n\x00\x20",
        ):
            for _ in range(5):
                attacker = await raw_socket(host)
                attackers.append(attacker)
                with contextlib.suppress(trio.BrokenResourceError):
                    await attacker.send_all(garbage)
        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                for size in (1, 1000, 200 * KIB):
                    nursery.start_soon(_check_echo, honest, host, size)
        for attacker in attackers:
            attacker.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            await attacker.aclose()
        await _check_echo(honest, host, 1000)


async def _check_echo(asker: Host, answerer: Host, size: int) -> None:
    assert await ask_echo(asker, answerer, bytes(size)) == bytes(size)


@pytest.mark.parametrize("secret", [b"another secret....", None], ids=["wrong", "missing"])
async def test_a_private_host_refuses_by_name(secret: bytes | None) -> None:
    heard: list[Any] = []
    member, outsider = _host(b"the secret of us", heard), _host(secret, heard)
    async with running(member, outsider):
        begun = time.perf_counter()
        with pytest.raises(PeerUnreachable, match="another swarm secret, or none"):
            await outsider.connect(member.peer_id, member.addresses)
        assert time.perf_counter() - begun < HANDSHAKE_DEADLINE_S / 2  # nobody waits until it is over
        assert len(heard) == 2
        assert all(isinstance(error, WrongSecret) and "secret" in str(error) for error in heard)


async def test_members_of_a_private_swarm_talk() -> None:
    host, member = _host(b"the secret of us"), _host(b"the secret of us")
    async with running(host, member):
        await _check_echo(member, host, 200 * KIB)

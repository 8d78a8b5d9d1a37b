"""Our host against peers that are not ours, each in a process of its own, both dialling and dialled; and courtesies."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from libp2p.identity.identify.pb.identify_pb2 import Identify

from p2p.addresses import Address, parse_address
from p2p.channel import multistream
from p2p.channel.upgrade import channel_of
from p2p.host.address_book import AddressBook
from p2p.host.connection import Connection
from p2p.host.host import Host, HostConfig
from p2p.host.identify import AGENT, IDENTIFY, PING, StandardProtocols
from p2p.host.messages import address_bytes, address_from_bytes, receive_bytes
from p2p.identity import Identity, key_message
from tests.p2p.foreign_directory import INSTALL_S, js_folder
from tests.p2p.nodes import GENEROUS, LOOPBACK
from tests.p2p.stock_peer import CHUNK, pattern
from tests.p2p.stock_peer import ECHO as THEIR_ECHO
from tests.p2p.test_host import echo, running

ECHO = str(THEIR_ECHO)
KIB, MIB = 1 << 10, 1 << 20
SIZES = [1, 12, 65_519, 256 * KIB, MIB + 1]
MANY = [1000 + number for number in range(24)]


class Peer:
    """A foreign peer: its address, and a way to make it dial."""

    def __init__(self, command: list[str], cwd: Path | None = None) -> None:
        self._process = subprocess.Popen(command, cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address: str = self._hear()["address"]

    def _hear(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def dial(self, address: str, sizes: list[int]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"dial": address, "sizes": sizes}) + "\n")
        self._process.stdin.flush()
        return self._hear()

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def stock_peer() -> Iterator[Peer]:
    peer = Peer([sys.executable, "-m", "tests.p2p.stock_peer"])
    yield peer
    peer.stop()


@pytest.fixture(scope="module")
def js_peer() -> Iterator[Peer]:
    folder = js_folder()
    peer = Peer(["node", "peer.mjs"], cwd=folder)
    yield peer
    peer.stop()


def our_host(identity: Identity | None = None) -> Host:
    identity = identity or Identity.generate()
    host = Host(identity, channel_of(identity), HostConfig(LOOPBACK, limits=GENEROUS), AddressBook())
    StandardProtocols(host, identity)
    host.handle(ECHO, echo)
    return host


def cipher_of(connection: Connection) -> type:
    return type(connection.muxed.session._sealer._aead)


async def dial(host: Host, address: Address, sizes: list[int]) -> Connection:
    """Connect, and have all of `sizes` echoed at once."""
    assert address.peer is not None
    connection = await host.connect(address.peer, [address])
    async with trio.open_nursery() as nursery:
        for size in sizes:
            nursery.start_soon(ask_echo, connection, size)
    return connection


async def ask_echo(connection: Connection, size: int) -> None:
    stream, sent = await connection.open_stream(ECHO), pattern(size)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.write, sent)
        for at in range(0, size, CHUNK):
            piece = sent[at : at + CHUNK]
            assert await multistream.read_exactly(stream, len(piece)) == piece
    await stream.close()


async def check_both_ways(foreign: Peer, sizes: list[int]) -> None:
    ours = our_host()
    async with running(ours):
        connection = await dial(ours, parse_address(foreign.address), sizes)
        assert cipher_of(connection) is ChaCha20Poly1305
    dialled = our_host()  # another one: a stock host takes a connection that just ended for an open one
    async with running(dialled):
        assert await trio.to_thread.run_sync(foreign.dial, str(dialled.addresses[0]), sizes) == {"ok": True}


@pytest.mark.parametrize("sizes", [SIZES, MANY, [64 * MIB]], ids=["sizes", "many streams", "64 MiB"])
async def test_py_libp2p(stock_peer: Peer, sizes: list[int]) -> None:
    await check_both_ways(stock_peer, sizes)


@pytest.mark.timeout(INSTALL_S + 60)
@pytest.mark.parametrize("sizes", [SIZES, MANY, [64 * MIB]], ids=["sizes", "many streams", "64 MiB"])
async def test_js_libp2p(js_peer: Peer, sizes: list[int]) -> None:
    await check_both_ways(js_peer, sizes)


async def test_two_of_ours_choose_the_faster_cipher() -> None:
    one, other = our_host(), our_host()
    async with running(one, other):
        assert cipher_of(await dial(one, other.addresses[0], SIZES)) is AESGCM


async def test_identify_and_ping() -> None:
    identity = Identity.generate()
    a, b = our_host(), our_host(identity)
    async with running(a, b):
        connection = await a.connect(b.peer_id, b.addresses)
        said = await receive_bytes(await connection.open_stream(IDENTIFY), 8192)
        assert said is not None
        read = Identify.FromString(said)
        assert [address_from_bytes(data).port for data in read.listen_addrs] == [b.listening[0].port]
        assert address_from_bytes(read.observed_addr).host == "127.0.0.1"
        assert ECHO in read.protocols
        theirs = Identify(
            protocol_version="ipfs/0.1.0",
            agent_version=AGENT,
            public_key=key_message(identity.public_key),
            listen_addrs=[address_bytes(address.of(None)) for address in b.addresses],
            observed_addr=read.observed_addr,
            protocols=b.protocols,
        )
        assert said == theirs.SerializeToString()
        stream = await connection.open_stream(PING)
        for number in range(3):
            await stream.write(bytes([number]) * 32)
            assert await multistream.read_exactly(stream, 32) == bytes([number]) * 32


@pytest.mark.parametrize("protocol", [IDENTIFY, PING])
async def test_half_a_courtesy_harms_nobody(protocol: str) -> None:
    a, b = our_host(), our_host()
    async with running(a, b):
        connection = await a.connect(b.peer_id, b.addresses)
        stream = await connection.open_stream(protocol)
        await stream.write(b"half")
        await stream.close()
        assert (await connection.open_stream(ECHO)).protocol == ECHO

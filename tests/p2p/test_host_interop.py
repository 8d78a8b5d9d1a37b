"""Our host against hosts that are not ours, each in a process of its own, whoever dials; and the courtesies."""

from __future__ import annotations

import pytest
import trio
from libp2p.identity.identify.pb.identify_pb2 import Identify

from p2p.addresses import parse_address
from p2p.channel import multistream
from p2p.channel.upgrade import channel_of
from p2p.host.address_book import AddressBook
from p2p.host.host import Host, HostConfig
from p2p.host.identify import IDENTIFY, PING, StandardProtocols
from p2p.host.protobuf import address_from_bytes, receive_message
from p2p.identity import Identity
from tests.p2p.nodes import GENEROUS, LOOPBACK
from tests.p2p.stock_peer import ECHO as THEIR_ECHO
from tests.p2p.stock_peer import pattern
from tests.p2p.test_host import echo, running
from tests.p2p.test_interop import Peer, js_peer, stock_peer

__all__ = ["js_peer", "stock_peer"]  # fixtures

ECHO = str(THEIR_ECHO)
SIZES = [1, 1000, 300_000]


def our_host() -> Host:
    identity = Identity.generate()
    host = Host(identity, channel_of(identity), HostConfig(LOOPBACK, limits=GENEROUS), AddressBook())
    StandardProtocols(host, identity)
    host.handle(ECHO, echo)
    return host


async def check_both_ways(foreign: Peer) -> None:
    ours = our_host()
    async with running(ours):
        address = parse_address(foreign.address)
        assert address.peer is not None
        connection = await ours.connect(address.peer, [address])
        for size in SIZES:
            stream = await connection.open_stream(ECHO)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stream.write, pattern(size))
                assert await multistream.read_exactly(stream, size) == pattern(size)
            await stream.close()
    dialled = our_host()  # another one: a stock host takes a connection that just ended for an open one
    async with running(dialled):
        assert await trio.to_thread.run_sync(foreign.dial, str(dialled.addresses[0]), SIZES) == {"ok": True}


async def test_py_libp2p(stock_peer: Peer) -> None:
    await check_both_ways(stock_peer)


async def test_js_libp2p(js_peer: Peer) -> None:
    await check_both_ways(js_peer)


async def test_identify_and_ping() -> None:
    a, b = our_host(), our_host()
    async with running(a, b):
        connection = await a.connect(b.peer_id, b.addresses)
        said = await receive_message(await connection.open_stream(IDENTIFY), Identify)
        assert {address_from_bytes(data).port for data in said.listen_addrs} == {b.listening[0].port}
        assert address_from_bytes(said.observed_addr).host == "127.0.0.1"
        assert ECHO in said.protocols
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

"""Our host and an unpatched py-libp2p host speak with each other, whoever dials."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.host.ping import PingService
from libp2p.peer.peerinfo import info_from_p2p_addr
from multiaddr import Multiaddr

from p2p import multistream
from p2p.addressbook import AddressBook
from p2p.host import Host, HostConfig
from p2p.identify import IDENTIFY, Courtesies
from p2p.identity import Identity
from p2p.upgrade import channel_of
from tests.p2p.nodes import GENEROUS, LOOPBACK
from tests.p2p.test_host import ECHO, running


async def stock_echo(stream: Any) -> None:
    try:
        while data := await stream.read(65536):
            await stream.write(data)
    except Exception:
        await stream.close()  # libp2p's end of a stream is an exception


def our_host() -> Host:
    identity = Identity.generate()
    host = Host(identity, channel_of(identity), HostConfig(LOOPBACK, limits=GENEROUS), AddressBook())
    Courtesies(host, identity)
    return host


@pytest.mark.parametrize("size", [1, 1000, 1 << 20])
async def test_we_dial_them(size: int) -> None:
    stock = new_host(key_pair=create_new_key_pair())
    stock.set_stream_handler(TProtocol(ECHO), stock_echo)
    ours = our_host()
    async with stock.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]), running(ours):
        from p2p.addresses import parse_address

        address = parse_address(str(stock.get_addrs()[0]))
        connection = await ours.connect(str(stock.get_id()), [address])
        stream = await connection.open_stream(ECHO)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.write, bytes(size))
            assert await multistream.read_exactly(stream, size) == bytes(size)
        await ours.disconnect(str(stock.get_id()))


async def test_they_dial_us_identify_and_ping() -> None:
    stock = new_host(key_pair=create_new_key_pair())
    ours = our_host()
    async with stock.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]), running(ours):
        await stock.connect(info_from_p2p_addr(Multiaddr(str(ours.addresses[0]))))
        peer = info_from_p2p_addr(Multiaddr(str(ours.addresses[0]))).peer_id
        stream = await stock.new_stream(peer, [TProtocol(ECHO)])
        await stream.write(b"hello")
        assert await stream.read(5) == b"hello"
        assert len(await PingService(stock).ping(peer, ping_amt=2)) == 2
        with trio.fail_after(5):
            while IDENTIFY not in stock.get_peerstore().get_protocols(peer):  # noqa: ASYNC110
                await trio.sleep(0.02)
        assert ECHO in stock.get_peerstore().get_protocols(peer)

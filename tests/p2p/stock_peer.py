"""An unpatched py-libp2p host for the interoperation test, in a process of its own.

It echoes every stream, and dials and checks echoes when told to: it prints its address, then answers one JSON line on
stdin with one JSON line on stdout. Nothing of `p2p` is imported here.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import trio
from libp2p import new_host
from libp2p.custom_types import TProtocol
from libp2p.peer.peerinfo import info_from_p2p_addr
from multiaddr import Multiaddr

ECHO = TProtocol("/interop/echo")
CHUNK = 64 << 10


def pattern(size: int) -> bytes:
    """Bytes that tell where they belong."""
    return (bytes(range(251)) * (size // 251 + 1))[:size]


async def answer(stream: Any) -> None:
    """Echo until the other side ends; an exception here would take a stock host down."""
    try:
        while True:
            await stream.write(await stream.read(CHUNK))
    except Exception:
        await stream.close()


async def echo(host: Any, peer: Any, size: int) -> None:
    """Send `size` bytes on a new stream and check that they come back."""
    stream = await host.new_stream(peer, [ECHO])
    sent = pattern(size)

    async def write() -> None:
        for at in range(0, size, CHUNK):
            await stream.write(sent[at : at + CHUNK])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        at = 0
        while at < size:
            chunk = await stream.read(min(CHUNK, size - at))
            if chunk != sent[at : at + len(chunk)]:
                raise ValueError(f"byte {at} differs")
            at += len(chunk)
    await stream.close()


async def dial(host: Any, address: str, sizes: list[int]) -> None:
    """Connect, and echo all of `sizes` at once."""
    info = info_from_p2p_addr(Multiaddr(address))
    await host.connect(info)
    async with trio.open_nursery() as nursery:
        for size in sizes:
            nursery.start_soon(echo, host, info.peer_id, size)
    await host.disconnect(info.peer_id)


async def main() -> None:
    """Serve, and obey stdin."""
    host = new_host()
    async with host.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]):
        host.set_stream_handler(ECHO, answer)
        _say(address=str(host.get_addrs()[0]))
        async for line in trio.wrap_file(sys.stdin):
            try:
                order = json.loads(line)
                await dial(host, order["dial"], order["sizes"])
                _say(ok=True)
            except Exception as error:
                _say(ok=False, error=repr(error))


def _say(**message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    trio.run(main)

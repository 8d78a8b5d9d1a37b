"""A TCP proxy on loopback that makes the way longer: every byte arrives half a round trip after it was sent."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

_READ_BYTES = 256 << 10


async def _carry(source: trio.SocketStream, target: trio.SocketStream, delay_s: float) -> None:
    """Bytes one way; the way itself holds as many as are in flight."""
    send, receive = trio.open_memory_channel[tuple[float, bytes]](math.inf)

    async def deliver() -> None:
        async for at, data in receive:
            await trio.sleep_until(at)
            await target.send_all(data)
        await target.send_eof()

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(deliver)
            async with send:
                while data := await source.receive_some(_READ_BYTES):
                    send.send_nowait((trio.current_time() + delay_s, data))
    except* (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
        await trio.aclose_forcefully(source)
        await trio.aclose_forcefully(target)


@asynccontextmanager
async def delay_proxy(port: int, rtt_s: float) -> AsyncIterator[int]:
    """The port of a proxy to `port` on this machine."""

    async def handle(client: trio.SocketStream) -> None:
        async with await trio.open_tcp_stream("127.0.0.1", port) as server, client, trio.open_nursery() as nursery:
            nursery.start_soon(_carry, client, server, rtt_s / 2)
            nursery.start_soon(_carry, server, client, rtt_s / 2)

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, handle, 0)
        yield listeners[0].socket.getsockname()[1]
        nursery.cancel_scope.cancel()

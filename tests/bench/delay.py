"""A TCP proxy on loopback that makes the way longer: every byte arrives half a round trip after it was sent.

It also counts what it carries.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import trio

_READ_BYTES = 256 << 10


@dataclass
class DelayProxy:
    """A port that leads to another one, and how much went through it in both directions."""

    port: int = 0
    carried_bytes: int = 0


async def _carry(source: trio.SocketStream, target: trio.SocketStream, delay_s: float, proxy: DelayProxy) -> None:
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
                    proxy.carried_bytes += len(data)
                    send.send_nowait((trio.current_time() + delay_s, data))
    except* (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
        await trio.aclose_forcefully(source)
        await trio.aclose_forcefully(target)


@asynccontextmanager
async def delay_proxy(port: int, rtt_s: float) -> AsyncIterator[DelayProxy]:
    """A proxy to `port` on this machine."""
    proxy = DelayProxy()

    async def handle(client: trio.SocketStream) -> None:
        try:
            server = await trio.open_tcp_stream("127.0.0.1", port)
        except OSError:  # nobody listens there yet, or any more
            await trio.aclose_forcefully(client)
            return
        async with server, client, trio.open_nursery() as nursery:
            nursery.start_soon(_carry, client, server, rtt_s / 2, proxy)
            nursery.start_soon(_carry, server, client, rtt_s / 2, proxy)

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, handle, 0, host="127.0.0.1"))
        proxy.port = listeners[0].socket.getsockname()[1]
        yield proxy
        nursery.cancel_scope.cancel()

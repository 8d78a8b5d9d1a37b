"""A TCP proxy on loopback that makes the way longer: every byte arrives half a round trip after it was sent.

It also counts what it carries, and can be narrow: so many bytes a second both ways together, over all connections.
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
    bytes_per_s: float = math.inf
    free_at: float = 0.0  # when all that came so far has gone through

    def passage(self, size: int, now: float) -> float:
        """When so many more bytes will have gone through."""
        self.carried_bytes += size
        self.free_at = max(self.free_at, now) + size / self.bytes_per_s
        return self.free_at


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
                    through_at = proxy.passage(len(data), trio.current_time())
                    send.send_nowait((through_at + delay_s, data))
                    await trio.sleep_until(through_at)
    except* (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
        await trio.aclose_forcefully(source)
        await trio.aclose_forcefully(target)


@asynccontextmanager
async def delay_proxy(port: int, rtt_s: float, bytes_per_s: float = math.inf) -> AsyncIterator[DelayProxy]:
    """A proxy to `port` on this machine."""
    proxy = DelayProxy(bytes_per_s=bytes_per_s)

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

"""Directory messages on libp2p streams: one request on a stream of its own, and the serving of others' requests.

`p2p.dht.wire` defines the messages and `p2p.dht.directory` answers them. Every stream has deadlines, and every peer a
rate: one that floods this node with requests is reported to the caller.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio

from p2p.dht.wire import MAX_ANSWER_BYTES, MAX_REQUEST_BYTES, Message, Op
from p2p.errors import DeadlineExceeded, P2PError, ProtocolError, StreamClosed
from p2p.host.connection import Stream
from p2p.host.host import Host
from p2p.host.messages import receive_bytes, send_bytes
from p2p.rate_limit import LogLimit, PeerRateLimit

PROTOCOL = "/shoal/kad/1.0.0"
IDLE_S = 20.0  # between two requests on one stream
ANSWER_S = 10.0  # for the peer to read an answer
BURST_REQUESTS = 512  # that one peer may send at once
REQUESTS_PER_S = 64.0  # and how many a second after that
_MALFORMED_COST = 32  # requests that a malformed one counts as

log = logging.getLogger("shoal.p2p.dht")
log.addFilter(LogLimit())  # peers can cause these lines

Handle = Callable[[str, bytes], Awaitable[bytes]]


async def ask(host: Host, protocol: str, peer: str, request: Message, timeout_s: float) -> bytes | None:
    """Send one request to `peer`, connecting first if needed, and return the answer; None if the stream ended instead.

    Raises `P2PError`, among them `DeadlineExceeded` after `timeout_s`.
    """
    stream = None
    try:
        with trio.fail_after(timeout_s):
            stream = await host.open_stream(peer, protocol)
            await send_bytes(stream, request.encode())
            if request.op is Op.ADD_PROVIDER:
                await stream.close()  # others do not answer it but end the stream too; py-libp2p then resets it
            try:
                return await receive_bytes(stream, MAX_ANSWER_BYTES)
            except StreamClosed:
                return None
    except trio.TooSlowError:
        raise DeadlineExceeded(f"{peer} did not answer a directory request within {timeout_s:g} s") from None
    finally:
        if stream is not None:
            await stream.reset()


class RequestServer:
    """Answers the directory requests of peers with `handle`; calls `on_flood` with a peer that sends too many."""

    def __init__(self, handle: Handle, on_flood: Callable[[str], None]) -> None:
        self._handle = handle
        self._on_flood = on_flood
        self._rates = PeerRateLimit(BURST_REQUESTS, REQUESTS_PER_S)

    async def serve(self, stream: Stream) -> None:
        """Answer the requests on one stream until the peer ends it; raises `P2PError`, which resets the stream."""
        try:
            while True:
                with trio.fail_after(IDLE_S):
                    body = await receive_bytes(stream, MAX_REQUEST_BYTES)
                if body is None:
                    await stream.close()
                    return
                self._count(stream.peer)
                await stream.connection.in_turn(self._answer, stream, body)
        except ProtocolError:
            for _ in range(_MALFORMED_COST):
                self._count(stream.peer)
            raise

    async def _answer(self, stream: Stream, body: bytes) -> None:
        answer = await self._handle(stream.peer, body)
        with trio.fail_after(ANSWER_S):
            await send_bytes(stream, answer)

    def _count(self, peer: str) -> None:
        if not self._rates.take(peer, trio.current_time()):
            self._on_flood(peer)
            raise P2PError(f"{peer} floods this node with directory requests")

"""An asker's streams to the hops of its sessions: one to each peer, shared by all sessions.

Knows streams, not sessions' rules: frames go to the session they name, and the end of a stream to all that use it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

import trio

from app.core.errors import RecordError
from app.core.network import FrameStream, Network, Payload, Priority
from app.session.outbound import OutboundFrame, PeerOutbox
from app.session.wire import PROTOCOL, Frame, decode
from p2p.errors import P2PError, QueueFull, StreamClosed

log = logging.getLogger("shoal.asker")

LOOP_MESSAGES = 4096


class Listener(Protocol):
    """A session that hears from its hops."""

    async def heard(self, peer: str, frame: Frame) -> None: ...
    def lost(self, peer: str) -> None: ...


class HopLink:
    """The stream to one hop."""

    def __init__(self, stream: FrameStream, nursery: trio.Nursery) -> None:
        self.peer = stream.peer
        self.outbox = PeerOutbox(stream, nursery)
        self.listeners: dict[bytes, Listener] = {}

    async def send(self, session: bytes, *parts: bytes, priority: Priority = Priority.CONTROL) -> None:
        """Send one frame; what cannot be sent shows as a lost hop."""
        await self.outbox.push(OutboundFrame(parts, priority))

    async def read(self) -> None:
        """Hand out frames until the stream ends."""
        try:
            while True:
                frame = decode(await self.outbox.stream.receive())
                listener = self.listeners.get(frame.session)
                if listener is not None:
                    await listener.heard(self.peer, frame)
        except RecordError as error:
            log.warning("%s sent a bad frame, its stream is closed: %s", self.peer, error)
            await self.outbox.stream.reset()
        except P2PError:
            pass
        finally:
            self.outbox.broken = True
            for listener in list(self.listeners.values()):
                listener.lost(self.peer)


class HopLinks:
    """The streams to all hops; a node's own block server is reached without the network."""

    def __init__(
        self, network: Network, nursery: trio.Nursery, own_server: Callable[[FrameStream], Awaitable[None]] | None
    ) -> None:
        self._network, self._nursery, self._own_server = network, nursery, own_server
        self._links: dict[str, HopLink] = {}
        self._opening: dict[str, trio.Lock] = {}

    async def to(self, peer: str, *, timeout_s: float) -> HopLink:
        """The open link to a peer; raises `P2PError` where it cannot be had."""
        link = self._links.get(peer)
        if link is not None and not link.outbox.broken:
            return link
        async with self._opening.setdefault(peer, trio.Lock()):
            link = self._links.get(peer)
            if link is None or link.outbox.broken:
                link = self._links[peer] = HopLink(await self._open(peer, timeout_s), self._nursery)
                self._nursery.start_soon(link.read)
            return link

    def is_open(self, peer: str) -> bool:
        """Whether there is a link that needs no opening."""
        link = self._links.get(peer)
        return link is not None and not link.outbox.broken

    def prepare(self, peer: str, *, timeout_s: float) -> None:
        """Open a link for later, while nobody waits for it."""
        if not self.is_open(peer):
            self._nursery.start_soon(self._prepare, peer, timeout_s)

    async def _prepare(self, peer: str, timeout_s: float) -> None:
        try:
            await self.to(peer, timeout_s=timeout_s)
        except P2PError as error:
            log.info("%s cannot be reached for a better route: %s", peer, error)

    async def _open(self, peer: str, timeout_s: float) -> FrameStream:
        if peer == self._network.peer_id and self._own_server is not None:
            here, there = loop_streams(peer)
            self._nursery.start_soon(self._attend, self._own_server, there)
            return here
        return await self._network.open(peer, PROTOCOL, timeout_s=timeout_s)

    async def _attend(self, server: Callable[[FrameStream], Awaitable[None]], stream: LoopStream) -> None:
        """As a network does it: the stream ends with its handler, so that nobody goes on asking one that is gone."""
        try:
            await server(stream)
        finally:
            with trio.CancelScope(shield=True):
                await stream.reset()


class LoopStream:
    """One end of a stream within this process."""

    def __init__(
        self, peer: str, out: trio.MemorySendChannel[bytes], incoming: trio.MemoryReceiveChannel[bytes]
    ) -> None:
        self.peer = peer
        self._out, self._in = out, incoming

    async def send(self, message: Payload, priority: Priority = Priority.DECODE) -> None:
        """Pass one message."""
        body = bytes(message) if isinstance(message, bytes | bytearray | memoryview) else b"".join(message)
        try:
            self._out.send_nowait(body)
        except trio.WouldBlock:
            raise QueueFull("this node's own block server does not keep up") from None
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise StreamClosed("this node's own block server has stopped") from None

    async def wait_room(self) -> None:
        """Let the other end run."""
        await trio.sleep(0.001)

    async def receive(self) -> bytes:
        """The next message."""
        try:
            return await self._in.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError):
            raise StreamClosed("this node's own block server has stopped") from None

    async def aclose(self) -> None:
        """End this side."""
        await self._out.aclose()

    async def reset(self) -> None:
        """End both sides."""
        await self._out.aclose()
        await self._in.aclose()


def loop_streams(peer: str) -> tuple[LoopStream, LoopStream]:
    """Two ends of a stream from a node to itself."""
    there_out, here_in = trio.open_memory_channel[bytes](LOOP_MESSAGES)
    here_out, there_in = trio.open_memory_channel[bytes](LOOP_MESSAGES)
    return LoopStream(peer, here_out, here_in), LoopStream(peer, there_out, there_in)

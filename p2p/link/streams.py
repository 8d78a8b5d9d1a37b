"""Message streams: long-lived, two-way, bounded by a window of bytes that the reader has not consumed.

A stream belongs to a `p2p.link.link.PeerLink`, which feeds it what arrives and carries what it sends. It never blocks
the link: whatever does not fit the window breaks the rules and costs the sender its stream.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import trio

from p2p.errors import P2PError, QueueFull, StreamClosed, StreamReset
from p2p.link.frames import Kind
from p2p.link.outbox import Outgoing, spoken
from p2p.values import DECODE, MESSAGE_COST_BYTES, WINDOW_BYTES, Payload, buffers_of, fits_window


class StreamCarrier(Protocol):
    """What a stream needs of its link."""

    @property
    def peer(self) -> str: ...
    def post(self, message: Outgoing) -> None: ...
    def has_room(self, priority: int) -> bool: ...
    async def written(self) -> None: ...
    def consumed(self, size: int) -> None: ...
    def stream_done(self, stream: MessageStream, *, broken: bool) -> None: ...


class MessageStream:
    """One end of a stream of messages."""

    def __init__(self, carrier: StreamCarrier, id: int) -> None:
        self.id = id
        self.handler_done = False
        self.opened = trio.Event()  # set once the peer accepted, or the stream failed
        self._carrier = carrier
        self._inbox: deque[bytes] = deque()
        self._outstanding = 0  # sent and not credited
        self._arrived = 0  # arrived and not credited
        self._eaten = 0  # consumed and not credited
        self._held = 0  # bytes that the node's quota counts for this stream
        self._lowest_priority = 0
        self._sent_close = self._got_close = False
        self._failure: P2PError | None = None
        self._readable = trio.Event()
        self._writable = trio.Event()

    @property
    def peer(self) -> str:
        """The peer at the other end."""
        return self._carrier.peer

    @property
    def done(self) -> bool:
        """Whether nothing more will pass either way."""
        return self._failure is not None or (self._sent_close and self._got_close and not self._inbox)

    @property
    def failure(self) -> P2PError | None:
        """What broke the stream, if anything did."""
        return self._failure

    async def send(self, message: Payload, priority: int = DECODE) -> None:
        """Queue one message, or raise `QueueFull` at once; never waits."""
        parts, size = buffers_of(message)
        self._check_sendable()
        cost = size + MESSAGE_COST_BYTES
        if not fits_window(self._outstanding, cost) or not self._carrier.has_room(priority):
            raise QueueFull(f"{self.peer} has not taken {self._outstanding} bytes yet; slow down or drop the message")
        self._outstanding += cost
        self._lowest_priority = max(self._lowest_priority, priority)
        self._carrier.post(Outgoing(Kind.MESSAGE, self.id, priority, parts, size))

    async def wait_room(self) -> None:
        """Wait until a message of any size would be taken."""
        await trio.lowlevel.checkpoint()
        while self._failure is None and self._outstanding >= WINDOW_BYTES // 2:
            await self._writable.wait()
        while self._failure is None and not self._carrier.has_room(self._lowest_priority):
            await self._carrier.written()
        self._check_sendable()

    async def receive(self) -> bytes:
        """The next message."""
        if self._inbox:
            await trio.lowlevel.checkpoint()
        while not self._inbox:
            if self._failure is not None:
                raise self._failure
            if self._got_close:
                raise StreamClosed(f"{self.peer} closed the stream")
            await self._readable.wait()
        message = self._inbox.popleft()
        if not self._inbox and not self._got_close and self._failure is None:
            self._readable = trio.Event()
        self._consume(len(message) + MESSAGE_COST_BYTES)
        if self._got_close:
            self._finish_if_done()
        return message

    async def aclose(self) -> None:
        """End this side after what was queued."""
        if not self._sent_close and self._failure is None:
            self._sent_close = True
            # In the last queue this stream used, hence behind everything it sent.
            self._carrier.post(Outgoing(Kind.CLOSE, self.id, self._lowest_priority))
            self._finish_if_done()
        await trio.lowlevel.checkpoint()

    async def reset(self) -> None:
        """Break both directions at once and drop what is queued."""
        self.abort("reset", "the other side reset the stream")
        await trio.lowlevel.checkpoint()

    def abort(self, code: str, text: str) -> None:
        """Break the stream from this side, telling the peer why."""
        if not self.done:
            self.fail(StreamReset(f"the stream with {self.peer} was reset here: {text}"))
            self._carrier.post(spoken(Kind.RESET, self.id, code, text))

    def fits(self, cost: int) -> bool:
        """Whether a message that begins to arrive keeps to the window."""
        return not self._got_close and fits_window(self._arrived, cost)

    def arrive(self, cost: int) -> None:
        """Account for a message that begins to arrive."""
        self._arrived += cost

    def hold(self, size: int) -> None:
        """Bytes of a message have arrived, and the node's quota counts them until they are consumed."""
        self._held += size

    def deliver(self, message: bytes) -> None:
        """Hand over a whole message that arrived."""
        if self.handler_done:  # nobody will read it
            self._consume(len(message) + MESSAGE_COST_BYTES)
            return
        self._inbox.append(message)
        self._readable.set()

    def credit(self, size: int) -> bool:
        """The peer consumed this much; False where it claims more than was sent."""
        if size > self._outstanding:
            return False
        self._outstanding -= size
        self._writable.set()
        self._writable = trio.Event()
        return True

    def remote_closed(self) -> None:
        """The peer will send no more."""
        self._got_close = True
        self._readable.set()
        self._finish_if_done()

    def abandon(self) -> None:
        """Drop what nobody will read any more."""
        self.handler_done = True
        while self._inbox:
            self._consume(len(self._inbox.popleft()) + MESSAGE_COST_BYTES)
        self._finish_if_done()

    def fail(self, failure: P2PError) -> None:
        """The stream is broken; what arrived before is dropped with it."""
        if self._failure is None:
            self._failure = failure
            self._inbox.clear()
            self._carrier.consumed(self._held)
            self._held = 0
            self._readable.set()
            self._writable.set()
            self.opened.set()
            self._carrier.stream_done(self, broken=True)

    def _consume(self, cost: int) -> None:
        self._eaten += cost
        self._held -= cost
        self._carrier.consumed(cost)
        if self._eaten >= WINDOW_BYTES // 2 and not self._got_close:
            self._arrived -= self._eaten
            self._carrier.post(Outgoing(Kind.CREDIT, self.id, 0, arg=self._eaten))
            self._eaten = 0

    def _finish_if_done(self) -> None:
        if self._failure is None and self.done:
            self._carrier.stream_done(self, broken=False)

    def _check_sendable(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._sent_close:
            raise StreamClosed(f"this side of the stream with {self.peer} is closed")

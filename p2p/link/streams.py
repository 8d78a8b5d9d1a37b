"""Message streams: long-lived, two-way, bounded by a window of bytes that the reader has not consumed.

A stream belongs to a `p2p.link.link.PeerLink`, which delivers the messages that arrive and sends those that leave. A
slow reader never blocks the link: a peer that sends more than the window breaks the protocol.
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
    """The methods of a link that its streams use."""

    @property
    def peer(self) -> str: ...
    def post(self, message: Outgoing) -> None: ...
    def has_room(self, priority: int) -> bool: ...
    def is_nearly_sent(self, id: int, priority: int) -> bool: ...
    async def written(self) -> None: ...
    def consumed(self, size: int) -> None: ...
    def stream_done(self, stream: MessageStream, *, broken: bool) -> None: ...


class MessageStream:
    """One end of a stream of messages."""

    def __init__(self, carrier: StreamCarrier, id: int) -> None:
        self.id = id
        self.handler_done = False
        self.opened = trio.Event()  # set once the peer has accepted, or the stream has failed
        self._carrier = carrier
        self._inbox: deque[bytes] = deque()
        self._outstanding = 0  # bytes sent that the peer has not credited
        self._arrived = 0  # bytes arrived that this side has not credited
        self._uncredited = 0  # bytes consumed that this side has not credited
        self.held = 0  # bytes that the node's quota counts for this stream
        self._lowest_priority = 0
        self._sent_close = self._got_close = False
        self._failure: P2PError | None = None
        self._readable = trio.Event()
        self._writable = trio.Event()

    @property
    def peer(self) -> str:
        """The peer id of the other end."""
        return self._carrier.peer

    @property
    def done(self) -> bool:
        """True if no more messages can be sent or received."""
        return self._failure is not None or (self._sent_close and self._got_close and not self._inbox)

    @property
    def _ends(self) -> bool:
        """True if no more messages can be sent."""
        return self._sent_close or self._failure is not None

    @property
    def failure(self) -> P2PError | None:
        """The error that broke the stream, or None."""
        return self._failure

    async def send(self, message: Payload, priority: int = DECODE) -> None:
        """Queue one message without waiting.

        Raises `QueueFull` if the window or the link's queue is full, `StreamClosed` or `StreamReset` if it has ended.
        """
        parts, size = buffers_of(message)
        self._check_sendable()
        cost = size + MESSAGE_COST_BYTES
        if not fits_window(self._outstanding, cost, priority) or not self._carrier.has_room(priority):
            raise QueueFull(f"{self.peer} has {self._outstanding} unread bytes; slow down or drop the message")
        self._outstanding += cost
        self._lowest_priority = max(self._lowest_priority, priority)
        self._carrier.post(Outgoing(Kind.MESSAGE, self.id, priority, parts, size))

    def is_clear(self, priority: int = DECODE) -> bool:
        """True if next to nothing of this priority that was sent on this stream still waits for the link."""
        return self._carrier.is_nearly_sent(self.id, priority)

    async def wait_room(self, priority: int = DECODE) -> None:
        """Wait until `send` would accept a message of this priority, and the stream is clear.

        Raises `StreamClosed` or `StreamReset`.
        """
        await trio.lowlevel.checkpoint()
        while not self._ends and self._outstanding >= WINDOW_BYTES // 2:
            await self._writable.wait()
        while not self._ends and not (self._carrier.has_room(priority) and self.is_clear(priority)):
            await self._carrier.written()
        self._check_sendable()

    async def receive(self) -> bytes:
        """Wait for the next message; raises `StreamClosed` at the end, `StreamReset` if the stream broke."""
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
        """Close this side once all queued messages are sent."""
        if not self._sent_close and self._failure is None:
            self._sent_close = True
            self._writable.set()
            # With the lowest priority this stream has used, hence behind everything it sent.
            self._carrier.post(Outgoing(Kind.CLOSE, self.id, self._lowest_priority))
            self._finish_if_done()
        await trio.lowlevel.checkpoint()

    async def reset(self) -> None:
        """Break both directions at once and drop queued messages."""
        self.abort("reset", "the other side reset the stream")
        await trio.lowlevel.checkpoint()

    def abort(self, code: str, text: str) -> None:
        """Break the stream and send the peer the reason."""
        if not self.done:
            self.fail(StreamReset(f"this side reset the stream with {self.peer}: {text}"))
            self._carrier.post(spoken(Kind.RESET, self.id, code, text))

    def fits(self, cost: int) -> bool:
        """True if an arriving message of `cost` bytes is within the window."""
        return not self._got_close and fits_window(self._arrived, cost)

    def arrive(self, cost: int) -> None:
        """Count a message of `cost` bytes, whose first chunk has arrived, against the window."""
        self._arrived += cost

    def hold(self, size: int) -> None:
        """Note `size` arrived bytes that the node's quota counts until they are consumed."""
        self.held += size

    def deliver(self, message: bytes) -> None:
        """Give a complete message to the reader."""
        if self.handler_done:  # there is no reader any more
            self._consume(len(message) + MESSAGE_COST_BYTES)
            return
        self._inbox.append(message)
        self._readable.set()

    def credit(self, size: int) -> bool:
        """Free `size` bytes of the window, which the peer consumed; False if that is more than was sent."""
        if size > self._outstanding:
            return False
        self._outstanding -= size
        self._writable.set()
        self._writable = trio.Event()
        return True

    def remote_closed(self) -> None:
        """Note that the peer sends no more messages."""
        self._got_close = True
        self._readable.set()
        self._finish_if_done()

    def abandon(self) -> None:
        """Drop unread and later messages: the handler has ended."""
        self.handler_done = True
        while self._inbox:
            self._consume(len(self._inbox.popleft()) + MESSAGE_COST_BYTES)
        self._finish_if_done()

    def fail(self, failure: P2PError) -> None:
        """Break the stream with `failure` and drop unread messages; later calls do nothing."""
        if self._failure is None:
            self._failure = failure
            self._inbox.clear()
            self._readable.set()
            self._writable.set()
            self.opened.set()
            self._end(broken=True)

    def _consume(self, cost: int) -> None:
        self._uncredited += cost
        self.held -= cost
        self._carrier.consumed(cost)
        if self._uncredited >= WINDOW_BYTES // 2 and not self._got_close:
            self._arrived -= self._uncredited
            self._carrier.post(Outgoing(Kind.CREDIT, self.id, 0, arg=self._uncredited))
            self._uncredited = 0

    def _finish_if_done(self) -> None:
        if self._failure is None and self.done:
            self._end(broken=False)

    def _end(self, *, broken: bool) -> None:
        self._carrier.consumed(self.held)  # of a message too whose rest does not come
        self.held = 0
        self._carrier.stream_done(self, broken=broken)

    def _check_sendable(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._sent_close:
            raise StreamClosed(f"this side of the stream with {self.peer} is closed")

"""A stream from a node to itself: a reply over this node's own blocks needs no network, and no task that reads.

A message is handed to the other end in the task that sends it, once that end has said who takes its messages
(`each_message`). A token of a reply over own blocks thus wakes two tasks less.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable

import trio

from app.core.network import FrameStream, Payload, Priority
from app.core.signal import Signal
from p2p.errors import QueueFull, StreamClosed

MAX_MESSAGES = 4096  # that wait at one end

Take = Callable[[bytes], Awaitable[None]]


async def each_message(stream: FrameStream, take: Take) -> None:
    """Have `take` called with each message in order, never twice at once, until the stream ends or `take` raises.

    Raises what `take` raised, or a `P2PError` at the end of the stream.
    """
    if isinstance(stream, LoopStream):
        await stream.hand_to(take)
    while True:
        await take(await stream.receive())


class LoopStream:
    """One end of a stream between two parts of the same node; `loop_streams` makes a pair."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self._other: LoopStream | None = None  # None: closed
        self._arrived: deque[bytes] = deque()
        self._take: Take | None = None
        self._is_taking = False
        self._changed = Signal()  # a message came without a `_take`, or the stream ended, or `_take` failed
        self._failure: Exception | None = None  # of `_take`

    def join(self, other: LoopStream) -> None:
        """Connect this end with the other."""
        self._other = other

    async def send(self, message: Payload, priority: Priority = Priority.DECODE) -> None:
        """Hand one message to the other end; raises `QueueFull` if it does not keep up."""
        other = self._other
        if other is None or self._is_over:
            raise StreamClosed("the other part of this node has stopped")
        body = bytes(message) if isinstance(message, bytes | bytearray | memoryview) else b"".join(message)
        if len(other._arrived) >= MAX_MESSAGES:
            raise QueueFull("another part of this node does not keep up")
        other._arrived.append(body)
        await other._hand_on()

    def is_clear(self, priority: Priority = Priority.DECODE) -> bool:
        """True: the other end takes what is sent at once."""
        return True

    async def wait_room(self, priority: Priority = Priority.DECODE) -> None:
        """Let the other end run for a moment."""
        await trio.sleep(0.001)

    async def receive(self) -> bytes:
        """Return the next message; raises `StreamClosed` at the end."""
        await trio.lowlevel.checkpoint()
        while not self._arrived:
            if self._is_over:
                raise StreamClosed("the other part of this node has stopped")
            await self._changed.wait()
        return self._arrived.popleft()

    async def hand_to(self, take: Take) -> None:
        """Have `take` called with each message by whoever sends it; raises as `each_message` does."""
        self._take = take
        try:
            await self._hand_on()
            while self._failure is None and not self._is_over:
                await self._changed.wait()
                await self._hand_on()
        finally:
            self._take = None
        raise self._failure or StreamClosed("the other part of this node has stopped")

    async def aclose(self) -> None:
        """Close this side: the other end still gets what was sent."""
        self._end()

    async def reset(self) -> None:
        """Close both sides."""
        self._arrived.clear()
        self._end()

    @property
    def _is_over(self) -> bool:
        return self._other is None or self._other._other is None

    def _end(self) -> None:
        other, self._other = self._other, None
        self._changed.notify()
        if other is not None:
            other._changed.notify()

    async def _hand_on(self) -> None:
        """Let `_take` have what has arrived; a message that arrives meanwhile waits for its turn."""
        if self._take is None:
            self._changed.notify()
        if self._take is None or self._is_taking:
            return
        self._is_taking = True
        try:
            while self._arrived and self._take is not None and self._failure is None:
                await self._take(self._arrived.popleft())
        except Exception as error:  # the receiver's affair, not the sender's
            self._failure = error
            self._changed.notify()
        finally:
            self._is_taking = False
            if self._arrived:  # the sender was cancelled: the receiver's own task takes the rest
                self._changed.notify()


def loop_streams(peer: str) -> tuple[LoopStream, LoopStream]:
    """Return the two ends of a stream from a node to itself."""
    here, there = LoopStream(peer), LoopStream(peer)
    here.join(there)
    there.join(here)
    return here, there

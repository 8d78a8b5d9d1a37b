"""Flow control of one yamux connection, without I/O: what to send next, and how much a peer may make this node buffer.

`ReceiveHalf` and `SendHalf` are the two directions of one stream, `SendQueue` chooses between the streams of a
connection, `WindowBudget` bounds the sum of its receive windows, and `UnreadBytes` the buffers of all connections.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

import trio

from p2p.channel.yamux_wire import ACK, BASE_WINDOW_BYTES, DATA, HEADER_BYTES, PING, pack_header
from p2p.errors import ProtocolError
from p2p.priority_turns import PriorityTurns
from p2p.values import PRIORITIES, Buffer, append_piece

FIRST_WINDOW_BYTES: Final = 1 << 20  # lets 4 MiB cross a long link in three round trips
MAX_WINDOW_BYTES: Final = 16 << 20
FRAME_BYTES: Final = 64 << 10  # largest frame body while other streams of the same priority wait
# Bytes encrypted at once, the longest that a more urgent stream waits. A chunk of `p2p.link` fits with its header.
BATCH_BYTES: Final = (256 << 10) + 1024
MAX_CONTROL_BYTES: Final = 48 << 10
MAX_PONGS: Final = 16
_LARGE_PIECE_BYTES: Final = 16 << 10
_MIN_EPOCH_S: Final = 0.005


class ReceiveHalf:
    """The receiving direction of a stream: unread bytes, and the credit that the peer has left."""

    __slots__ = ("_chunks", "_consumed", "_epoch_at", "_head", "budget", "buffered", "credit", "window")

    def __init__(self, budget: WindowBudget) -> None:
        self.budget = budget
        self.window = self.credit = BASE_WINDOW_BYTES
        self.buffered = 0
        self._chunks: deque[Buffer] = deque()
        self._head = 0  # bytes of the first chunk that were read
        self._consumed = 0  # bytes read and not yet credited
        self._epoch_at = 0.0

    def open_window(self) -> int:
        """Enlarge the window of a new stream; returns the credit to grant beyond the base window."""
        extra = self.budget.grow(FIRST_WINDOW_BYTES - self.window)
        self.window += extra
        self.credit += extra
        return extra

    @property
    def used(self) -> bool:
        """True if any byte has ever arrived."""
        return self.credit < self.window or self._consumed > 0 or self._epoch_at > 0

    def announce(self, length: int) -> None:
        """Subtract a frame of `length` bytes from the peer's credit; raises `ProtocolError` if it has less."""
        if length > self.credit:
            raise ProtocolError(f"sent {length} bytes with {self.credit} bytes of window left")
        self.credit -= length

    def push(self, piece: bytes, now: float) -> None:
        """Buffer a piece for the reader."""
        if self._consumed + self.buffered < self.window // 8:
            self._epoch_at = now  # the first few bytes say nothing about the speed of a transfer
        append_piece(self._chunks, piece)
        self.buffered += len(piece)
        self.budget.hold(len(piece))

    def pop(self, limit: int) -> bytes:
        """Remove and return up to `limit` buffered bytes, all of them if it is negative.

        A large piece at the front is returned alone and uncopied, even if that is less than `limit`.
        """
        size = self.buffered if limit < 0 else min(limit, self.buffered)
        chunks, head = self._chunks, self._head
        first = chunks[0]
        available = len(first) - head
        if limit >= 0 and _LARGE_PIECE_BYTES <= available < size:
            size = available
        if size < available:
            self._head = head + size
            taken = bytes(memoryview(first)[head : head + size])
        elif size == available:
            taken = bytes(first) if not head else bytes(memoryview(first)[head:])
            chunks.popleft()
            self._head = 0
        else:
            taken = self._join(size)
        self.buffered -= size
        self.budget.let_go(size)
        self._consumed += size
        return taken

    def _join(self, size: int) -> bytes:
        parts: list[bytes | bytearray | memoryview] = [memoryview(self._chunks.popleft())[self._head :]]
        missing, self._head = size - len(parts[0]), 0
        while missing:
            chunk = self._chunks[0]
            if len(chunk) > missing:
                parts.append(memoryview(chunk)[:missing])
                self._head = missing
                break
            parts.append(self._chunks.popleft())
            missing -= len(chunk)
        return b"".join(parts)

    def credit_due(self, now: float, rtt_s: float) -> int:
        """Return the credit to grant now: the bytes read, once they are half the window, plus growth of the window.

        If half a window arrived within two round trips, the window limits the sender. It then doubles (or quadruples,
        if the bytes came within half a round trip), provided that the reader keeps up.
        """
        if self._consumed < self.window // 2:
            return 0
        granted, self._consumed = self._consumed, 0
        epoch_at, self._epoch_at = self._epoch_at, now
        keeps_up = self.buffered <= self.window // 2
        if keeps_up and now - epoch_at < max(2 * rtt_s, _MIN_EPOCH_S):
            factor = 4 if now - epoch_at < rtt_s / 2 else 2
            extra = self.budget.grow(min((factor - 1) * self.window, MAX_WINDOW_BYTES - self.window))
            self.window += extra
            granted += extra
        self.credit += granted
        return granted

    def discard(self) -> None:
        """Drop all unread bytes."""
        self._chunks.clear()
        self.budget.let_go(self.buffered)
        self.buffered = self._head = 0


class SendHalf:
    """The sending direction of a stream: the rest of the pending write, and the credit for it. Copies no buffers."""

    __slots__ = ("_parts", "credited", "left", "priority", "queued", "started", "stream_id", "taken", "window")

    def __init__(self, stream_id: int) -> None:
        self.stream_id = stream_id
        self.priority = 1
        self.window = BASE_WINDOW_BYTES
        self.credited = -1  # the window after the last credit
        self.left = 0
        self.started = False  # some of the pending write has been sent
        self.queued = False
        self.taken = trio.Event()  # set when all of the pending write has been sent
        self._parts: deque[memoryview] = deque()

    def load(self, parts: Iterable[memoryview]) -> None:
        """Make `parts` the pending write."""
        self._parts.extend(parts)
        self.left = sum(len(part) for part in self._parts)
        self.started = False
        self.taken = trio.Event()

    def unload(self) -> None:
        """Drop the rest of the pending write."""
        self._parts.clear()
        self.left = 0

    @property
    def ready(self) -> bool:
        """True if there are bytes to send and credit for them."""
        return self.left > 0 and self.window > 0

    def take(self, limit: int) -> list[bytes | memoryview]:
        """Return one DATA frame, header and buffers, with a body of at most `limit` bytes."""
        size = missing = min(limit, self.left, self.window)
        frame: list[bytes | memoryview] = [pack_header(DATA, 0, self.stream_id, size)]
        while missing:
            part = self._parts[0]
            if len(part) > missing:
                frame.append(part[:missing])
                self._parts[0] = part[missing:]
                break
            frame.append(self._parts.popleft())
            missing -= len(part)
        self.left -= size
        self.window -= size
        self.started = True
        if not self.left:
            self.taken.set()
        return frame


class SendQueue:
    """Everything that a connection has to send: control frames first, then by priority, round-robin within one.

    More urgent streams leave a share to the others (`p2p.priority_turns`).
    """

    __slots__ = ("_control", "_pongs", "_ready", "_turns")

    def __init__(self) -> None:
        self._control = bytearray()
        self._turns = PriorityTurns(PRIORITIES)
        self._pongs = 0
        self._ready: tuple[deque[SendHalf], ...] = tuple(deque() for _ in range(PRIORITIES))

    @property
    def empty(self) -> bool:
        """True if there is nothing to send."""
        return not self._control and not any(self._ready)

    def control(self, frame: bytes) -> None:
        """Queue a frame without a body; raises `ProtocolError` if the peer causes more of them than it reads."""
        if len(self._control) >= MAX_CONTROL_BYTES:
            raise ProtocolError("floods this node with frames to answer and does not read the answers")
        self._control += frame

    def pong(self, number: int) -> None:
        """Queue the answer to a ping, unless `MAX_PONGS` wait already."""
        if self._pongs < MAX_PONGS:
            self._pongs += 1
            self.control(pack_header(PING, ACK, 0, number))

    def offer(self, half: SendHalf) -> None:
        """Queue a stream if it has both bytes and credit and is not queued yet."""
        if half.ready and not half.queued:
            half.queued = True
            self._ready[half.priority].append(half)

    def take(self, limit: int = BATCH_BYTES) -> list[bytes | memoryview]:
        """Remove and return the next batch: buffers of about `limit` bytes."""
        parts: list[bytes | memoryview] = []
        if self._control:
            parts.append(bytes(self._control))
            self._control.clear()
            self._pongs = 0
        room = limit
        while room > 0:
            waiting = [priority for priority, queue in enumerate(self._ready) if queue]
            if not waiting:
                break
            priority = self._turns.choose(waiting, limit)
            queue = self._ready[priority]
            half = queue.popleft()
            half.queued = False
            if not half.ready:  # its write was cancelled while it was queued
                continue
            frame = half.take(min(room, FRAME_BYTES) if queue else room)
            parts += frame
            size = HEADER_BYTES + sum(len(part) for part in frame[1:])
            room -= size
            self._turns.sent(priority, size, limit)
            self.offer(half)
        return parts


CONNECTION_WINDOW_BYTES: Final = 64 << 20
UNREAD_BYTES: Final = 512 << 20  # of all connections of a node together
GROWN_WINDOW_BYTES: Final = 48 << 20  # growth stops here, so that new streams always find their base window


class UnreadBytes:
    """The unread bytes of all connections of a node.

    The windows of one connection are bounded, but a hundred connections would add up to too much. So if the sum is
    above `limit`, a connection that holds more than an equal share of it and receives yet more is ended.
    """

    __slots__ = ("connections", "limit", "total")

    def __init__(self, limit: int = UNREAD_BYTES) -> None:
        self.limit = limit
        self.total = 0
        self.connections = 0


class WindowBudget:
    """The sum of a connection's receive windows: the most that its peer can make this node buffer."""

    __slots__ = ("_node", "unread", "used")

    def __init__(self, node: UnreadBytes | None = None) -> None:
        self.used = 0
        self.unread = 0
        self._node = node or UnreadBytes()
        self._node.connections += 1

    def hold(self, size: int) -> None:
        """Count arrived bytes; raises `ProtocolError` if this connection must end to make room."""
        node = self._node
        self.unread += size
        node.total += size
        if node.total > node.limit and self.unread > node.limit // node.connections:
            raise ProtocolError(f"makes this node hold {self.unread} unread bytes while memory is short")

    def let_go(self, size: int) -> None:
        """Stop counting bytes that were read or dropped."""
        self.unread -= size
        self._node.total -= size

    def leave(self) -> None:
        """Remove an ended connection from the node's sum; what its readers still hold no longer counts."""
        self._node.total -= self.unread
        self._node.connections -= 1
        self._node = UnreadBytes()
        self._node.total = self.unread
        self._node.connections = 1

    def admit(self) -> bool:
        """Reserve a base window for a new stream; False if there is no room."""
        if self.used + BASE_WINDOW_BYTES > CONNECTION_WINDOW_BYTES:
            return False
        self.used += BASE_WINDOW_BYTES
        return True

    def grow(self, wanted: int) -> int:
        """Reserve up to `wanted` bytes more for a stream's window; returns how many were granted."""
        granted = max(0, min(wanted, GROWN_WINDOW_BYTES - self.used))
        self.used += granted
        return granted

    def release(self, window: int) -> None:
        """Release the window of a closed stream."""
        self.used -= window

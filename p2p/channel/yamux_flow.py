"""Flow control of one yamux connection, without I/O: what may be sent next, and how much a peer may make us hold.

`ReceiveHalf` and `SendHalf` are the two directions of one stream, `SendQueue` chooses between streams; `yamux_budget`
is the purse that receive windows are paid from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

import trio

from p2p.channel.yamux_wire import ACK, BASE_WINDOW_BYTES, DATA, HEADER_BYTES, PING, pack_header
from p2p.errors import ProtocolError

FIRST_WINDOW_BYTES: Final = 1 << 20  # lets 4 MiB cross a long link in three round trips
MAX_WINDOW_BYTES: Final = 16 << 20
FRAME_BYTES: Final = 64 << 10  # a stream's turn: what one frame carries when others wait
# What is sealed at once: a more urgent stream waits no longer than this. A link's chunk fits with its header.
BATCH_BYTES: Final = (256 << 10) + 1024
MAX_CONTROL_BYTES: Final = 48 << 10
MAX_PONGS: Final = 16
PRIORITIES: Final = 4
_SMALL_PIECE_BYTES: Final = 2048
_LARGE_PIECE_BYTES: Final = 16 << 10
_MIN_EPOCH_S: Final = 0.005


class ReceiveHalf:
    """Bytes that arrived and were not read, and the credit the peer still has."""

    __slots__ = ("_chunks", "_consumed", "_epoch_at", "_head", "budget", "buffered", "credit", "window")

    def __init__(self, budget: WindowBudget) -> None:
        self.budget = budget
        self.window = self.credit = BASE_WINDOW_BYTES
        self.buffered = 0
        self._chunks: deque[bytes | bytearray] = deque()
        self._head = 0  # bytes of the first chunk already read
        self._consumed = 0  # bytes read and not yet given back as credit
        self._epoch_at = 0.0

    def open_window(self) -> int:
        """The credit to grant beyond the base window when the stream opens."""
        extra = self.budget.grow(FIRST_WINDOW_BYTES - self.window)
        self.window += extra
        self.credit += extra
        return extra

    @property
    def used(self) -> bool:
        """Whether anything ever arrived."""
        return self.credit < self.window or self._consumed > 0 or self._epoch_at > 0

    def announce(self, length: int) -> None:
        """Spend the peer's credit for a frame of `length` bytes; raises `ProtocolError` where it has less."""
        if length > self.credit:
            raise ProtocolError(f"sent {length} bytes with {self.credit} bytes of window left")
        self.credit -= length

    def push(self, piece: bytes, now: float) -> None:
        """Keep a piece for the reader; small ones are joined, so that a flood of them costs no more than its bytes."""
        chunks = self._chunks
        if self._consumed + self.buffered < self.window // 8:
            self._epoch_at = now  # a trickle before the flood says nothing about the flood's speed
        if not chunks or len(piece) > _SMALL_PIECE_BYTES:
            chunks.append(piece)
        else:
            tail = chunks[-1]
            if type(tail) is bytearray and len(tail) < FRAME_BYTES:
                tail += piece
            else:
                chunks.append(bytearray(piece))
        self.buffered += len(piece)
        self.budget.hold(len(piece))

    def pop(self, limit: int) -> bytes:
        """Up to `limit` buffered bytes (all of them where it is negative); a large piece is handed on as it came."""
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
        """Credit to grant now: what was read, in halves of the window, and more where the window limits the sender.

        Half a window that arrives within two round trips means that the sender could keep more in flight; the window
        doubles then (or quadruples, where it came in one burst), provided that the reader keeps up with what arrived.
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
        """Forget what nobody will read."""
        self._chunks.clear()
        self.budget.let_go(self.buffered)
        self.buffered = self._head = 0


class SendHalf:
    """What one write still has to send, and the credit for it; buffers are referred to, never copied."""

    __slots__ = ("_parts", "credited", "left", "priority", "queued", "started", "stream_id", "taken", "window")

    def __init__(self, stream_id: int) -> None:
        self.stream_id = stream_id
        self.priority = 1
        self.window = BASE_WINDOW_BYTES
        self.credited = -1  # the window after the last credit
        self.left = 0
        self.started = False  # some of the pending write has left already
        self.queued = False
        self.taken = trio.Event()  # set when the pending write has left
        self._parts: deque[memoryview] = deque()

    def load(self, parts: Iterable[memoryview]) -> None:
        """Make `parts` the pending write."""
        self._parts.extend(parts)
        self.left = sum(len(part) for part in self._parts)
        self.started = False
        self.taken = trio.Event()

    def unload(self) -> None:
        """Forget the pending write."""
        self._parts.clear()
        self.left = 0

    @property
    def ready(self) -> bool:
        """Whether there is something to send and credit to send it with."""
        return self.left > 0 and self.window > 0

    def take(self, limit: int) -> list[bytes | memoryview]:
        """One DATA frame of at most `limit` bytes of body."""
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
    """Everything a connection has to send, most urgent first, streams of one priority in turn."""

    __slots__ = ("_control", "_pongs", "_ready")

    def __init__(self) -> None:
        self._control = bytearray()
        self._pongs = 0
        self._ready: tuple[deque[SendHalf], ...] = tuple(deque() for _ in range(PRIORITIES))

    @property
    def empty(self) -> bool:
        """Whether there is nothing to send."""
        return not self._control and not any(self._ready)

    def control(self, frame: bytes) -> None:
        """Queue a header-only frame; raises `ProtocolError` where the peer asks for more answers than it reads."""
        if len(self._control) >= MAX_CONTROL_BYTES:
            raise ProtocolError("floods this node with frames to answer and does not read the answers")
        self._control += frame

    def pong(self, number: int) -> None:
        """Answer a ping, unless many answers wait already."""
        if self._pongs < MAX_PONGS:
            self._pongs += 1
            self.control(pack_header(PING, ACK, 0, number))

    def offer(self, half: SendHalf) -> None:
        """Let a stream take part as soon as it has both bytes and credit."""
        if half.ready and not half.queued:
            half.queued = True
            self._ready[half.priority].append(half)

    def take(self, limit: int = BATCH_BYTES) -> list[bytes | memoryview]:
        """The next batch, of about `limit` bytes."""
        parts: list[bytes | memoryview] = []
        if self._control:
            parts.append(bytes(self._control))
            self._control.clear()
            self._pongs = 0
        room = limit
        while room > 0:
            queue = next((queue for queue in self._ready if queue), None)
            if queue is None:
                break
            half = queue.popleft()
            half.queued = False
            if not half.ready:  # its write was cancelled while it waited
                continue
            frame = half.take(min(room, FRAME_BYTES) if queue else room)
            parts += frame
            room -= HEADER_BYTES + sum(len(part) for part in frame[1:])
            self.offer(half)
        return parts


CONNECTION_WINDOW_BYTES: Final = 64 << 20
UNREAD_BYTES: Final = 512 << 20  # of all connections of a node together
GROWN_WINDOW_BYTES: Final = 48 << 20  # growth stops here, so that new streams always find their base window


class UnreadBytes:
    """What all connections of a node hold for readers that have not read yet.

    Each connection's windows are bounded, but a hundred connections' windows together are not. So where the sum is too
    large, a connection that holds more than its share of it, and is sent yet more, has to go.
    """

    __slots__ = ("connections", "limit", "total")

    def __init__(self, limit: int = UNREAD_BYTES) -> None:
        self.limit = limit
        self.total = 0
        self.connections = 0


class WindowBudget:
    """The sum of a connection's receive windows, which is all a peer can make us buffer on it."""

    __slots__ = ("_node", "unread", "used")

    def __init__(self, node: UnreadBytes | None = None) -> None:
        self.used = 0
        self.unread = 0
        self._node = node or UnreadBytes()
        self._node.connections += 1

    def hold(self, size: int) -> None:
        """Bytes arrived; raises `ProtocolError` where this connection has to go to make room."""
        node = self._node
        self.unread += size
        node.total += size
        if node.total > node.limit and self.unread > node.limit // node.connections:
            raise ProtocolError(f"makes this node hold {self.unread} unread bytes while memory is short")

    def let_go(self, size: int) -> None:
        """Bytes were read, or nobody will read them."""
        self.unread -= size
        self._node.total -= size

    def leave(self) -> None:
        """The connection ended: what it still holds is its readers' own affair."""
        self._node.total -= self.unread
        self._node.connections -= 1
        self._node = UnreadBytes()
        self._node.total = self.unread
        self._node.connections = 1

    def admit(self) -> bool:
        """Take a base window for a new stream, if there is room for one."""
        if self.used + BASE_WINDOW_BYTES > CONNECTION_WINDOW_BYTES:
            return False
        self.used += BASE_WINDOW_BYTES
        return True

    def grow(self, wanted: int) -> int:
        """Take up to `wanted` bytes more for a stream that makes good use of its window."""
        granted = max(0, min(wanted, GROWN_WINDOW_BYTES - self.used))
        self.used += granted
        return granted

    def release(self, window: int) -> None:
        """Give a closed stream's window back."""
        self.used -= window

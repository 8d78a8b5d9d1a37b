"""Queues of the messages that one link has to send, one for each priority. Pure; the link's writer takes from it.

A message of higher priority overtakes between chunks, and leaves a share to the others (`p2p.priority_turns`); messages
of one priority keep their order. Chunks are so large that one takes a moment: small ones on slow links, where an urgent
message would wait for seconds behind a large one.
A queue below its bound of `QUEUE_BYTES` accepts one more message of any size.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

from p2p.link.frames import CHUNK_BYTES, FIRST, LAST, MAX_TEXT_BYTES, SMALLEST_CHUNK_BYTES, Kind, encode_header
from p2p.priority_turns import PriorityTurns
from p2p.values import MESSAGE_COST_BYTES, PRIORITIES, Buffer

QUEUE_BYTES = 8 * 2**20
COALESCE_BYTES = 16 * 1024  # small messages in a queue are written together, up to this size
MAX_URGENT_ANSWERS = 2048  # an honest peer waits for half as many at most; each takes half a KiB
_URGENT_ANSWERS = frozenset((Kind.PONG, Kind.ERROR, Kind.OPENED, Kind.RESET))
CHUNK_S = 0.05  # that a chunk may take, unless it is of the smallest size
_FIRST_CHUNK_BYTES = 32 * 1024  # of a link whose speed is not known yet


class Outgoing:
    """One message to be sent, and how many of its bytes the writer has taken."""

    __slots__ = ("arg", "dropped", "id", "kind", "left", "name", "parts", "priority", "sent", "size")

    def __init__(
        self,
        kind: int,
        id: int,
        priority: int,
        parts: Sequence[Buffer] = (),
        size: int = 0,
        name: bytes = b"",
        arg: int = 0,
    ) -> None:
        self.kind, self.id, self.priority = kind, id, priority
        self.parts, self.size, self.name, self.arg = parts, size, name, arg
        self.sent = 0
        self.dropped = False
        self.left: Callable[[], None] | None = None  # called once the writer took its last chunk, or it was dropped

    def next_chunk(self, chunk_bytes: int = CHUNK_BYTES) -> tuple[list[Buffer], int, bool]:
        """Return the buffers of the next frame, its length, and True if it is the last one."""
        if not self.sent and self.size <= chunk_bytes:
            header = encode_header(
                self.kind, self.priority | FIRST | LAST, self.id, self.size, self.size, self.arg, self.name
            )
            return [header, *self.parts], len(header) + self.size, True
        start, self.sent = self.sent, min(self.sent + chunk_bytes, self.size)
        last = self.sent == self.size
        flags = self.priority | (FIRST if start == 0 else 0) | (LAST if last else 0)
        name = self.name if start == 0 else b""
        header = encode_header(self.kind, flags, self.id, self.sent - start, self.size, self.arg, name)
        return [header, *self._cut(start, self.sent)], len(header) + self.sent - start, last

    def _cut(self, start: int, stop: int) -> list[memoryview]:
        pieces, offset = [], 0
        for part in self.parts:
            view = memoryview(part).cast("B")
            low, high = max(start - offset, 0), min(stop - offset, len(view))
            if low < high:
                pieces.append(view[low:high])
            offset += len(view)
            if offset >= stop:
                break
        return pieces


def spoken(kind: int, id: int, code: str, text: str) -> Outgoing:
    """Build an error or reset frame with its code and text, cut at `MAX_TEXT_BYTES`."""
    body = text.encode()[:MAX_TEXT_BYTES]
    return Outgoing(kind, id, 0, (body,), len(body), code.encode())


class Outbox:
    """Bounded queues of outgoing messages, one for each priority."""

    def __init__(self) -> None:
        self._queues: tuple[deque[Outgoing], ...] = tuple(deque() for _ in range(PRIORITIES))
        self._queued = [0] * PRIORITIES
        self._answers = 0  # urgent ones
        self._turns = PriorityTurns(PRIORITIES)
        # Indexed by id: a peer decides how often messages are dropped, and each search would cost this node time.
        self._by_id: dict[int, dict[Outgoing, None]] = {}
        self._of_id: Counter[tuple[int, int]] = Counter()  # bytes queued, by id and priority
        self._chunk_bytes = CHUNK_BYTES
        self._fits_chunks = False
        self._run_bytes, self._run_s = 0, 0.0  # written without a pause, since the size of chunks was last looked at

    def has_room(self, priority: int) -> bool:
        """True if the queue of this priority accepts one more message of any size."""
        return self._queued[priority] < QUEUE_BYTES

    def is_nearly_sent(self, id: int, priority: int) -> bool:
        """True if less than a chunk waits of what was queued with this id and priority."""
        return self._of_id[id, priority] < self._chunk_bytes

    def overrun(self) -> bool:
        """True if so many control messages that answer the peer wait that it cannot be reading."""
        return self._answers > MAX_URGENT_ANSWERS

    def put(self, message: Outgoing) -> None:
        """Queue a message. Callers that can be refused must check `has_room` first; this never refuses."""
        self._queues[message.priority].append(message)
        self._count(message, message.size + MESSAGE_COST_BYTES)
        self._answers += message.kind in _URGENT_ANSWERS
        self._by_id.setdefault(message.id, {})[message] = None

    def allow_small_chunks(self) -> None:
        """Cut messages as the link's speed asks for from now on; to be called when the peer is known to accept that."""
        if not self._fits_chunks:
            self._fits_chunks, self._chunk_bytes = True, _FIRST_CHUNK_BYTES

    def wrote(self, size: int, took_s: float) -> None:
        """Fit the size of chunks to the time that it took to write so many bytes.

        Small messages count together while others wait behind them: alone, each may just be left to the system.
        """
        if not self._fits_chunks:
            return
        self._run_bytes, self._run_s = self._run_bytes + size, self._run_s + took_s
        if self._run_bytes >= self._chunk_bytes:
            if self._run_s > CHUNK_S:
                self._chunk_bytes = max(self._chunk_bytes // 2, SMALLEST_CHUNK_BYTES)
            elif self._run_s < CHUNK_S / 4:
                self._chunk_bytes = min(2 * self._chunk_bytes, CHUNK_BYTES)
        elif self.urgency() is not None:
            return
        self._run_bytes, self._run_s = 0, 0.0

    def urgency(self) -> int | None:
        """Return the priority of the most urgent message, or None if nothing waits."""
        return next(iter(self._waiting()), None)

    def next_priority(self) -> int | None:
        """Return the priority whose turn it is, or None if nothing waits."""
        waiting = self._waiting()
        return self._turns.choose(waiting, self._chunk_bytes) if waiting else None

    def _waiting(self) -> list[int]:
        """The priorities of which messages wait, the most urgent first."""
        waiting = []
        for priority, queue in enumerate(self._queues):
            while queue and queue[0].dropped:
                self._forget(queue.popleft())
            if queue:
                waiting.append(priority)
        return waiting

    def take(self, priority: int | None = None) -> tuple[list[Buffer], int]:
        """Return the buffers to write next and their length: one chunk, or several small messages of one priority.

        It is the priority whose turn it is, unless another one that waits is named.
        """
        if priority is None:
            priority = self.next_priority()
        if priority is None:
            return [], 0
        batch, size = self._take_of(priority)
        self._turns.sent(priority, size, self._chunk_bytes)
        return batch, size

    def _take_of(self, priority: int) -> tuple[list[Buffer], int]:
        queue = self._queues[priority]
        batch, size, done = queue[0].next_chunk(self._chunk_bytes)
        if not done:
            return batch, size
        self._forget(queue.popleft())
        while queue and size + queue[0].size < COALESCE_BYTES:
            message = queue.popleft()
            self._forget(message)
            if not message.dropped:
                frame, length, _ = message.next_chunk()
                batch += frame
                size += length
        return batch, size

    def drop(self, id: int) -> None:
        """Drop the queued messages with this id, and the rest of one that is partly sent."""
        for message in self._by_id.pop(id, ()):
            message.dropped = True
            message.parts = ()  # frees the buffers now; the message itself leaves when the queue reaches it
            self._count(message, -message.size)
            message.size = 0

    def _count(self, message: Outgoing, size: int) -> None:
        key = message.id, message.priority
        self._queued[message.priority] += size
        self._of_id[key] += size
        if not self._of_id[key]:
            del self._of_id[key]

    def _forget(self, message: Outgoing) -> None:
        self._count(message, -message.size - MESSAGE_COST_BYTES)
        self._answers -= message.kind in _URGENT_ANSWERS
        of_id = self._by_id.get(message.id)
        if of_id is not None:
            of_id.pop(message, None)
            if not of_id:
                del self._by_id[message.id]
        if message.left is not None:
            message.left()

"""The open streams and unanswered pings of one yamux connection, and their limits. No I/O: `yamux` acts on them."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

import trio

from p2p.channel.yamux_flow import ReceiveHalf, UnreadBytes, WindowBudget

MAX_STREAMS: Final = 256  # opened by both sides together
MAX_INBOUND: Final = 192  # opened by the peer, so that it cannot use up all of them
LINGER_S: Final = 60.0  # that a peer may leave a stream open after this side has closed it
IDLE_FRAMES: Final = 2000  # frames without effect that are tolerated at once ...
IDLE_FRAMES_PER_S: Final = 200  # ... and a second after that
UNKNOWN_RTT_S: Final = 0.1
_REAP_FROM: Final = 64


class TableEntry(Protocol):
    """The attributes of a stream that the table uses."""

    stream_id: int
    is_initiator: bool
    receiving: ReceiveHalf
    closed_at: float | None


EntryT = TypeVar("EntryT", bound=TableEntry)


class StreamTable(Generic[EntryT]):
    """The open streams of a connection, within `MAX_STREAMS`, `MAX_INBOUND` and the window budget."""

    def __init__(self, unread: UnreadBytes | None = None) -> None:
        self.budget = WindowBudget(unread)
        self.open: dict[int, EntryT] = {}
        self._inbound = 0

    def admit(self, *, inbound: bool) -> bool:
        """Reserve a window for one more stream; False if a limit is reached."""
        if len(self.open) >= MAX_STREAMS or (inbound and self._inbound >= MAX_INBOUND):
            return False
        return self.budget.admit()

    def add(self, stream: EntryT) -> None:
        """Add an admitted stream."""
        self.open[stream.stream_id] = stream
        self._inbound += not stream.is_initiator

    def remove(self, stream: EntryT) -> bool:
        """Remove a stream that has ended and release its window; False if it was not in the table."""
        if self.open.get(stream.stream_id) is not stream:
            return False
        del self.open[stream.stream_id]
        self._inbound -= not stream.is_initiator
        self.budget.release(stream.receiving.window)
        return True

    def overdue(self, now: float) -> list[EntryT]:
        """Return streams that the peer left open for `LINGER_S` after this side closed; none while few are open."""
        if len(self.open) < _REAP_FROM:
            return []
        return [s for s in self.open.values() if s.closed_at is not None and s.closed_at < now - LINGER_S]


class PingBook:
    """The unanswered pings of a connection, and the last measured round-trip time in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.rtt_s: float | None = None
        self._now = now
        self._waiting: dict[int, tuple[float, trio.Event]] = {}

    def begin(self) -> tuple[int, trio.Event]:
        """Register a new ping; returns its number, and the event that its answer sets.

        The number is random: a peer that could guess it would answer before the ping arrives and seem to be near.
        """
        number, answered = secrets.randbits(32), trio.Event()
        self._waiting[number] = (self._now(), answered)
        return number, answered

    def answer(self, number: int) -> bool:
        """Process an answer and measure the round-trip time; False if no ping has this number."""
        asked = self._waiting.pop(number, None)
        if asked is None:
            return False
        self.rtt_s = max(self._now() - asked[0], 1e-6)
        asked[1].set()
        return True

    def forget(self, number: int) -> None:
        """Drop a ping whose caller no longer waits."""
        self._waiting.pop(number, None)

    def release_all(self) -> None:
        """Wake all callers that wait for an answer: the connection has ended."""
        for _, answered in self._waiting.values():
            answered.set()

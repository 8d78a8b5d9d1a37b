"""The books of one yamux connection: which streams are open, and which pings are out.

Pure values and decisions; the connection does what they say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

import trio

from p2p.channel.yamux_flow import ReceiveHalf, UnreadBytes, WindowBudget

MAX_STREAMS: Final = 256  # of both sides together
MAX_INBOUND: Final = 192  # so that a peer cannot take all of them
LINGER_S: Final = 60.0  # how long a peer may leave a stream open that this side has closed
IDLE_FRAMES: Final = 2000  # frames that achieve nothing: this many at once are forgiven ...
IDLE_FRAMES_PER_S: Final = 200  # ... and this many a second ever after
UNKNOWN_RTT_S: Final = 0.1
_REAP_FROM: Final = 64


class TableEntry(Protocol):
    """What the table needs to know of a stream."""

    stream_id: int
    is_initiator: bool
    receiving: ReceiveHalf
    closed_at: float | None


EntryT = TypeVar("EntryT", bound=TableEntry)


class StreamTable(Generic[EntryT]):
    """The open streams, within their limits."""

    def __init__(self, unread: UnreadBytes | None = None) -> None:
        self.budget = WindowBudget(unread)
        self.open: dict[int, EntryT] = {}
        self._inbound = 0

    def admit(self, *, inbound: bool) -> bool:
        """Set a window aside for one more stream, if there may be one."""
        if len(self.open) >= MAX_STREAMS or (inbound and self._inbound >= MAX_INBOUND):
            return False
        return self.budget.admit()

    def add(self, stream: EntryT) -> None:
        """Keep an admitted stream."""
        self.open[stream.stream_id] = stream
        self._inbound += not stream.is_initiator

    def remove(self, stream: EntryT) -> bool:
        """Let go of a stream that has ended; whether it was known."""
        if self.open.get(stream.stream_id) is not stream:
            return False
        del self.open[stream.stream_id]
        self._inbound -= not stream.is_initiator
        self.budget.release(stream.receiving.window)
        return True

    def overdue(self, now: float) -> list[EntryT]:
        """Streams that this side closed long ago and the peer still keeps open, once there are many."""
        if len(self.open) < _REAP_FROM:
            return []
        return [s for s in self.open.values() if s.closed_at is not None and s.closed_at < now - LINGER_S]


class PingBook:
    """The pings that were not answered yet, and the round-trip time that the last answer gave."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.rtt_s: float | None = None
        self._now = now
        self._number = 0
        self._waiting: dict[int, tuple[float, trio.Event]] = {}

    def begin(self) -> tuple[int, trio.Event]:
        """A new ping's number, and the event of its answer."""
        self._number = (self._number + 1) & 0xFFFFFFFF
        answered = trio.Event()
        self._waiting[self._number] = (self._now(), answered)
        return self._number, answered

    def answer(self, number: int) -> bool:
        """Take an answer in; whether anybody asked."""
        asked = self._waiting.pop(number, None)
        if asked is None:
            return False
        self.rtt_s = max(self._now() - asked[0], 1e-6)
        asked[1].set()
        return True

    def forget(self, number: int) -> None:
        """Nobody waits for this answer any more."""
        self._waiting.pop(number, None)

    def release_all(self) -> None:
        """Wake everybody: there will be no answers."""
        for _, answered in self._waiting.values():
            answered.set()

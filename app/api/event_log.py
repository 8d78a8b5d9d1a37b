"""The node's event log: a bounded list of notes, and one wake-up for any change of state.

A follower that is woken reads the state itself, so many changes between two reads cost one read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from app.core.signal import Signal
from app.core.wall_clock import wall_ms

KEPT_NOTES = 500


@dataclass(frozen=True)
class LoggedEvent:
    """One logged event, numbered from 1 in each run of the node."""

    number: int
    at_ms: int
    kind: str  # state, swarm, peer, setting, problem, knock
    text: str


class EventLog:
    """Keeps the latest `KEPT_NOTES` notes, and lets followers wait for the next change."""

    def __init__(self, now_ms: Callable[[], int] = wall_ms) -> None:
        self._now_ms = now_ms
        self._notes: deque[LoggedEvent] = deque(maxlen=KEPT_NOTES)
        self._last_number = 0
        self._changed = Signal()
        self.closed = False

    @property
    def version(self) -> int:
        """Number of changes so far."""
        return self._changed.version

    def touch(self) -> None:
        """Wake all followers: something that they can see has changed."""
        self._changed.notify()

    def note(self, kind: str, text: str) -> None:
        """Log one event, and wake all followers."""
        self._last_number += 1
        self._notes.append(LoggedEvent(self._last_number, self._now_ms(), kind, text))
        self.touch()

    def notes_after(self, number: int) -> list[LoggedEvent]:
        """Return the kept notes that are newer than the note with this number."""
        return [note for note in self._notes if note.number > number]

    def close(self) -> None:
        """Wake all followers and mark the log as closed: the node is stopping."""
        self.closed = True
        self.touch()

    async def wait_beyond(self, version: int) -> None:
        """Wait until something changed after `version`, or the log is closed."""
        await self._changed.wait_for(lambda: self.version > version or self.closed)

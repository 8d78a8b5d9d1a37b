"""What happened in the node, for whoever follows it: a bounded log of notes, and one wake-up for any change.

Followers look at the state themselves when they are woken, so that many changes between two looks cost one look.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import trio

KEPT_NOTES = 500


@dataclass(frozen=True)
class LoggedEvent:
    """One thing that happened, numbered from 1 in this run of the node."""

    number: int
    at_ms: int
    kind: str  # state, swarm, peer, setting, problem, knock
    text: str


class EventLog:
    """The node's notes, and waiting for the next change."""

    def __init__(self, now_ms: Callable[[], int] = lambda: time.time_ns() // 10**6) -> None:
        self._now_ms = now_ms
        self._notes: deque[LoggedEvent] = deque(maxlen=KEPT_NOTES)
        self._numbers = 0
        self._changed = trio.Event()
        self.version = 0
        self.closed = False

    def touch(self) -> None:
        """Something a follower can see has changed."""
        self.version += 1
        self._changed.set()
        self._changed = trio.Event()

    def note(self, kind: str, text: str) -> None:
        """Write down what happened, and wake the followers."""
        self._numbers += 1
        self._notes.append(LoggedEvent(self._numbers, self._now_ms(), kind, text))
        self.touch()

    def notes_after(self, number: int) -> list[LoggedEvent]:
        """The kept notes that a follower who saw `number` has not seen."""
        return [note for note in self._notes if note.number > number]

    def close(self) -> None:
        """The node is leaving: every follower is woken and finds the feed closed."""
        self.closed = True
        self.touch()

    async def wait_beyond(self, version: int) -> None:
        """Return once something changed after `version`, or the feed is closed."""
        while self.version <= version and not self.closed:
            await self._changed.wait()

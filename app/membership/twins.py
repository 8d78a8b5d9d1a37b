"""Whether another node signs with this node's key, as a copy of its home or of its identity does. Pure.

Members keep the newer of two announcements, so the twins undo each other's without end, and each connection ends at one
of them. A node that restarted may hear a newer statement of its own past too, but once: it outbids that.
"""

from __future__ import annotations

from collections import deque

MEMORY_S = 1200.0  # members renew their announcements within ten minutes or so
ENOUGH = 2  # statements that this node did not make


class TwinWatch:
    """What was heard lately that this node's key signed and this node did not."""

    def __init__(self) -> None:
        self._heard: deque[tuple[int, float]] = deque(maxlen=ENOUGH)

    def heard(self, number: int, own: int, at: float) -> None:
        """Record an announcement under this node's name; `own` is the highest number that this node gave or outbid."""
        if number > own and all(number > before for before, _ in self._heard):
            self._heard.append((number, at))

    def is_seen(self, at: float) -> bool:
        """True if there is a twin, as far as is known."""
        return len(self._heard) == ENOUGH and at - self._heard[0][1] < MEMORY_S

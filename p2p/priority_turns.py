"""Turns of priorities: what is urgent goes first, and leaves a share to what waits behind it.

Pure; knows no queues: `p2p.link.outbox` and `p2p.channel.yamux_flow` ask it which of theirs sends next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

PASSING_TURNS: Final = 7  # of more urgent priorities, after which one that waits has a turn


class PriorityTurns:
    """Chooses the priority that sends next: the most urgent one that waits, or a less urgent one whose turn it is.

    A priority has a turn after the more urgent ones have sent `PASSING_TURNS` times as much as a turn while it waited:
    without end they would stop it for good. So the least urgent one gets an eighth, and the one above an eighth of the
    rest. Turns are counted in bytes: streams of one priority share them.
    """

    __slots__ = ("_passed_bytes", "_waiting")

    def __init__(self, priorities: int) -> None:
        # Of each priority: sent by more urgent ones while it waited, less `PASSING_TURNS` times what it sent itself.
        self._passed_bytes = [0] * priorities
        self._waiting: Sequence[int] = ()

    def choose(self, waiting: Sequence[int], turn_bytes: int) -> int:
        """Return which of the priorities that have something to send, the most urgent first, sends next."""
        self._waiting = waiting
        for priority in range(len(self._passed_bytes)):
            if priority not in waiting or priority == waiting[0]:
                self._passed_bytes[priority] = 0  # nothing passes it
        due = [one for one in waiting if self._passed_bytes[one] >= PASSING_TURNS * turn_bytes]
        return due[-1] if due else waiting[0]

    def sent(self, priority: int, size: int, turn_bytes: int) -> None:
        """Count what the chosen priority sent; what waits saves up no more than two turns."""
        for one in self._waiting:
            if one > priority:
                self._passed_bytes[one] = min(self._passed_bytes[one] + size, 2 * PASSING_TURNS * turn_bytes)
            elif one == priority:
                self._passed_bytes[one] -= PASSING_TURNS * size

"""Log lines that peers can bring about, so few that nobody fills a disk with them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

BURST = 20.0
PER_S = 0.2


@dataclass
class _Line:
    tokens: float
    at: float
    left_out: int = 0


class LogLimit(logging.Filter):
    """Lets some warnings of each kind through at once, then one every few seconds, which says how many it stands for.

    A kind is a message before its arguments are put in, so there are as many as there are lines in the program.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lines: dict[str, _Line] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is written."""
        if record.levelno < logging.WARNING:
            return True
        now, kind = self._clock(), str(record.msg)
        line = self._lines.setdefault(kind, _Line(BURST, now))
        line.tokens = min(BURST, line.tokens + (now - line.at) * PER_S)
        line.at = now
        if line.tokens < 1:
            line.left_out += 1
            return False
        line.tokens -= 1
        if line.left_out:
            record.msg = f"{kind} (and {line.left_out} more like it)"
            line.left_out = 0
        return True

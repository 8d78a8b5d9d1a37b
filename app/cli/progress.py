"""Progress of a download: a bar on a terminal, a line for every quarter elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from app.core.units import format_size

_WIDTH = 30
_REDRAW_S = 0.1
_LINE_EVERY = 0.25  # of the whole


class ProgressBar:
    """Called with (bytes done, total bytes) as often as the caller likes; prints only when due."""

    def __init__(self, label: str, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._label = label
        self._stream = stream
        self._clock = clock
        self._started_at = clock()
        self._drawn_at = float("-inf")
        self._line_due = 0.0
        self._open = False

    def __call__(self, done: int, total: int) -> None:
        """Print the progress if it is due."""
        share = min(1.0, done / total) if total else 1.0
        draw = self._draw_bar if self._stream.isatty() else self._print_line
        draw(share, f"{format_size(done)} of {format_size(total)}{self._rate(done)}")

    def finish(self) -> None:
        """End the bar's line, so that later output starts on a new one."""
        if self._open:
            self._stream.write("\n")
            self._stream.flush()
            self._open = False

    def _draw_bar(self, share: float, amount: str) -> None:
        now = self._clock()
        if share < 1 and now - self._drawn_at < _REDRAW_S:
            return
        self._drawn_at = now
        bar = "#" * int(share * _WIDTH)
        # The escape sequence at the end erases the rest of a longer line.
        self._stream.write(f"\r{self._label} [{bar:<{_WIDTH}}] {share:4.0%}  {amount}\x1b[K")
        self._stream.flush()
        self._open = True

    def _print_line(self, share: float, amount: str) -> None:
        if share < self._line_due:
            return
        self._line_due = share - share % _LINE_EVERY + _LINE_EVERY
        self._stream.write(f"{self._label}: {share:.0%}, {amount}\n")
        self._stream.flush()

    def _rate(self, done: int) -> str:
        elapsed_s = self._clock() - self._started_at
        return f", {format_size(int(done / elapsed_s))}/s" if elapsed_s >= 1 else ""

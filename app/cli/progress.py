"""Progress of a command: a line of a terminal that is drawn again, and a download's bar in it.

Elsewhere than on a terminal, a download prints a line for every quarter.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from typing import TextIO

from app.core.units import format_size

_WIDTH, _LEAST_WIDTH = 30, 5  # of the bar; with less room there is none
_REDRAW_S = 0.1
_LINE_EVERY = 0.25  # of the whole


class LiveLine:
    """A line of a terminal that is drawn again in place; on any other stream nothing is drawn."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._is_open = stream, False
        self.is_terminal = stream.isatty()

    @property
    def room(self) -> int:
        """Cells of the line; one is left free, as in a line that wraps only the last row could be drawn again."""
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns
        except (OSError, ValueError):
            columns = 0
        return (columns or shutil.get_terminal_size().columns) - 1

    def draw(self, words: str) -> None:
        """Replace what the line shows; what does not fit is left out."""
        if not self.is_terminal:
            return
        # The escape sequence at the end erases the rest of a longer line.
        self._stream.write(f"\r{words[: self.room]}\x1b[K")
        self._stream.flush()
        self._is_open = True

    def finish(self, *, erase: bool = False) -> None:
        """End the line, so that later output starts on a new one, or `erase` it."""
        if self._is_open:
            self._stream.write("\r\x1b[K" if erase else "\n")
            self._stream.flush()
            self._is_open = False


class ProgressBar:
    """Called with (bytes done, total bytes) as often as the caller likes; prints only when due."""

    def __init__(self, label: str, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._label = label
        self._stream, self._line = stream, LiveLine(stream)
        self._clock = clock
        self._started_at = clock()
        self._drawn_at = float("-inf")
        self._line_due = 0.0

    def __call__(self, done: int, total: int) -> None:
        """Print the progress if it is due."""
        share = min(1.0, done / total) if total else 1.0
        draw = self._draw_bar if self._line.is_terminal else self._print_line
        draw(share, f"{format_size(done)} of {format_size(total)}{self._rate(done)}")

    def finish(self) -> None:
        """End the bar's line, so that later output starts on a new one."""
        self._line.finish()

    def _draw_bar(self, share: float, amount: str) -> None:
        now = self._clock()
        if share < 1 and now - self._drawn_at < _REDRAW_S:
            return
        self._drawn_at = now
        figures = f" {share:4.0%}  {amount}"
        room = max(0, self._line.room - len(figures))
        label = self._label[:room]
        width = min(_WIDTH, room - len(label) - len(" []"))
        bar = f" [{'#' * int(share * width):<{width}}]" if width >= _LEAST_WIDTH else ""
        self._line.draw(f"{label}{bar}{figures}")

    def _print_line(self, share: float, amount: str) -> None:
        if share < self._line_due:
            return
        self._line_due = share - share % _LINE_EVERY + _LINE_EVERY
        self._stream.write(f"{self._label}: {share:.0%}, {amount}\n")
        self._stream.flush()

    def _rate(self, done: int) -> str:
        elapsed_s = self._clock() - self._started_at
        return f", {format_size(int(done / elapsed_s))}/s" if elapsed_s >= 1 else ""

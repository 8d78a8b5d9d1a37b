"""The end of the terminal that the dashboard runs in: closed window, lost connection, or a signal to end.

A terminal that is gone is read without end by Textual's input thread, which takes a whole core, and SIGHUP reaches only
a process whose controlling terminal it was.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable


class TerminalWatch:
    """Knows whether the terminal is still there, if there was one."""

    def __init__(self) -> None:
        self._was_there = _is_terminal()

    @property
    def is_gone(self) -> bool:
        """True once the terminal was closed."""
        return self._was_there and not _is_terminal()


def on_end_signal(leave: Callable[[], object]) -> None:
    """Call `leave` for a signal that asks the dashboard to end, so that it keeps what a person has typed."""
    loop = asyncio.get_running_loop()
    for name in ("SIGHUP", "SIGTERM"):
        if hasattr(signal, name):
            try:
                loop.add_signal_handler(getattr(signal, name), leave)
            except (NotImplementedError, RuntimeError, ValueError):  # Windows, or not in the main thread
                return


def _is_terminal() -> bool:
    try:
        return sys.__stdin__ is not None and os.isatty(sys.__stdin__.fileno())
    except (OSError, ValueError):  # closed, or replaced by something without a number
        return False

"""The terminal, on every system: standard streams, escape codes, line editing, and characters that fonts lack.

Imported by every command, so it imports nothing heavy. The dashboard's own use of the terminal is Textual's.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any

_STDOUT, _STDERR = -11, -12  # Windows' numbers of the standard handles
_ESCAPE_CODES = 0x0004  # ENABLE_VIRTUAL_TERMINAL_PROCESSING


def prepare() -> None:
    """Make the standard streams usable: present, never failing on a character, and understanding escape codes."""
    provide_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a console that has no "°" shows "?" instead of failing
    if sys.platform == "win32":
        ctypes: Any = importlib.import_module("ctypes")
        enable_escape_codes(ctypes.windll.kernel32, ctypes.c_ulong, ctypes.byref)


def provide_streams() -> None:
    """Replace missing standard streams by the null device: a service on Windows has no console, so they are None."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # open until the process ends


def enable_escape_codes(kernel: Any, number: Any, reference: Any) -> None:
    """Have Windows' old console understand colours and cursor movements; does nothing where there is no console.

    `kernel` is kernel32, `number` and `reference` are ctypes' `c_ulong` and `byref`.
    """
    for handle in (kernel.GetStdHandle(_STDOUT), kernel.GetStdHandle(_STDERR)):
        mode = number()
        if kernel.GetConsoleMode(handle, reference(mode)):
            kernel.SetConsoleMode(handle, mode.value | _ESCAPE_CODES)


def edit_lines() -> None:
    """Give `input` line editing and history, and have a pasted text with several lines arrive as one."""
    try:
        readline: Any = importlib.import_module("readline")
    except ImportError:
        return  # Python on native Windows has no `readline`; the console there edits lines itself
    if "libedit" in (getattr(readline, "__doc__", None) or ""):
        return  # the library of macOS, which has another syntax and no such setting
    with contextlib.suppress(OSError):
        readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off


@contextlib.contextmanager
def without_echo() -> Iterator[None]:
    """Have the terminal of stdout not show what is typed: an Enter would move the cursor away from rows drawn again.

    What is typed waits for the next `input`, and Ctrl-C works as ever. Does nothing on Windows, which shows keys only
    when they are read, nor in the background, where a process that changes the terminal is stopped.
    """
    try:
        termios: Any = importlib.import_module("termios")
    except ImportError:
        yield
        return
    terminal = before = None
    with contextlib.suppress(OSError, termios.error):  # stdout is no terminal
        terminal = sys.stdout.fileno()
        if os.tcgetpgrp(terminal) == os.getpgrp():
            before = termios.tcgetattr(terminal)
            quiet = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
            termios.tcsetattr(terminal, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        if before is not None:
            with contextlib.suppress(termios.error):  # the terminal was closed
                termios.tcsetattr(terminal, termios.TCSANOW, before)


def can_show(text: str) -> bool:
    """True if the terminal's encoding has all characters of `text`; whether its font has them nobody can ask."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True

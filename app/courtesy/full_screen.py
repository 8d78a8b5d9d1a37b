"""Tells if a program fills the screen, as games and films do, by what the desktop offers.

On Linux `xprop` asks the X server, which under Wayland knows the programs that use X, as most games do. Parsing is
separate from running the command, so that it can be tested on any machine.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from typing import Any

from engine.device.sensors import Unavailable

_TIMEOUT_S = 2.0
_FULL_SCREEN = (2, 3, 4)  # of Windows: an application fills the screen; a game does; a presentation


def full_screen() -> bool:
    """True if the active program fills the screen; raises `Unavailable` if this desktop does not tell."""
    if sys.platform == "win32":
        return _windows()
    if sys.platform == "darwin" or not os.environ.get("DISPLAY"):
        raise Unavailable("this desktop does not report programs that fill the screen")
    window = active_window(_xprop("-root", "_NET_ACTIVE_WINDOW"))
    return window is not None and fills_screen(_xprop("-id", window, "_NET_WM_STATE"))


def active_window(text: str) -> str | None:
    """Parse the id of the active window from the output of `xprop -root _NET_ACTIVE_WINDOW`; None if there is none."""
    match = re.search(r"window id # (0x[0-9a-f]{1,8})\b", text)
    return match[1] if match and int(match[1], 16) else None


def fills_screen(text: str) -> bool:
    """Parse the state of a window from the output of `xprop -id ID _NET_WM_STATE`."""
    return re.search(r"\b_NET_WM_STATE_FULLSCREEN\b", text) is not None


def _xprop(*arguments: str) -> str:
    try:
        done = subprocess.run(["xprop", *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except FileNotFoundError:
        raise Unavailable("the program xprop is not installed") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable("the X server does not answer") from error
    return done.stdout


def _windows() -> bool:
    libraries: Any = ctypes
    state = ctypes.c_int()
    if libraries.windll.shell32.SHQueryUserNotificationState(ctypes.byref(state)) != 0:
        raise Unavailable("Windows does not report programs that fill the screen")
    return state.value in _FULL_SCREEN

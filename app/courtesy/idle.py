"""Measures the time since this machine was last used, by whatever the operating system offers.

Each method is one function that returns seconds, or None if it cannot tell. Parsing is separate from running the
commands, so that every system's output can be tested on any machine.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from engine.device.sensors import Unavailable

_TIMEOUT_S = 2.0  # for one command
_NS = 10**9


def idle_s() -> float:
    """Seconds since keyboard, mouse or a terminal was last used; raises `Unavailable` if no method can tell."""
    methods = {"darwin": (_macos,), "win32": (_windows,)}.get(sys.platform, (_screen, _terminals))
    answers = [answer for answer in (_or_none(ask) for ask in methods) if answer is not None]
    if not answers:
        raise Unavailable("this system does not report when it was last used")
    return max(0.0, min(answers))  # the most recent use counts


def _or_none(ask: Callable[[], float | None]) -> float | None:
    try:
        return ask()
    except (OSError, ValueError, AttributeError, subprocess.SubprocessError):
        return None


# --- Linux -----------------------------------------------------------------------------------------------------------


def _screen() -> float | None:
    """Idle seconds of the desktop: from GNOME, else X11, else logind."""
    for ask in (_gnome, _x11, _logind):
        answer = _or_none(ask)
        if answer is not None:
            return answer
    return None


def _gnome() -> float | None:
    name, path = "org.gnome.Mutter.IdleMonitor", "/org/gnome/Mutter/IdleMonitor/Core"
    return parse_gnome(_output("busctl", "--user", "call", name, path, name, "GetIdletime"))


def parse_gnome(text: str) -> float | None:
    """Parse `busctl`'s output of a 64-bit number of milliseconds, `t 1234`; return seconds."""
    match = re.fullmatch(r"t (\d{1,18})", text.strip())
    return int(match[1]) / 1000 if match else None


class _ScreenSaverInfo(ctypes.Structure):
    _fields_ = [
        ("window", ctypes.c_ulong),
        ("state", ctypes.c_int),
        ("kind", ctypes.c_int),
        ("until_ms", ctypes.c_ulong),
        ("idle_ms", ctypes.c_ulong),
        ("mask", ctypes.c_ulong),
    ]


def _x11() -> float | None:
    if not os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        return None  # under Wayland, X sees only part of the input
    x11, xss = ctypes.CDLL("libX11.so.6"), ctypes.CDLL("libXss.so.1")
    x11.XOpenDisplay.restype = ctypes.c_void_p
    x11.XDefaultRootWindow.restype = ctypes.c_ulong
    display = ctypes.c_void_p(x11.XOpenDisplay(None))
    if not display:
        return None
    try:
        info, root = _ScreenSaverInfo(), ctypes.c_ulong(x11.XDefaultRootWindow(display))
        return info.idle_ms / 1000 if xss.XScreenSaverQueryInfo(display, root, ctypes.byref(info)) else None
    finally:
        x11.XCloseDisplay(display)


def _logind() -> float | None:
    names = [
        line.split()[0] for line in _output("loginctl", "list-sessions", "--no-legend").splitlines() if line.split()
    ]
    if not names:
        return None
    properties = ("--property=Type", "--property=IdleHint", "--property=IdleSinceHint")
    return parse_logind(_output("loginctl", "show-session", *names[:32], *properties), time.time())


def parse_logind(text: str, now_s: float) -> float | None:
    """Idle seconds of the most recently used session with a screen; text sessions are left to `_terminals`."""
    idle: list[float] = []
    for session in text.split("\n\n"):
        values = dict(line.split("=", 1) for line in session.splitlines() if "=" in line)
        if values.get("Type") not in ("x11", "wayland", "mir"):
            continue
        if values.get("IdleHint") == "no":
            idle.append(0.0)
        elif values.get("IdleHint") == "yes" and values.get("IdleSinceHint", "").isdecimal():
            idle.append(max(0.0, now_s - int(values["IdleSinceHint"]) / 10**6))
    return min(idle, default=None)


def _terminals() -> float | None:
    """Idle seconds of the terminals: typing into one updates its access time."""
    times = []
    for user in psutil.users():
        device = Path("/dev") / (user.terminal or "")
        if user.terminal and device.is_char_device():
            times.append(device.stat().st_atime)
    return time.time() - max(times) if times else None


# --- macOS and Windows -----------------------------------------------------------------------------------------------


def _macos() -> float | None:
    return parse_ioreg(_output("ioreg", "-c", "IOHIDSystem", "-d", "4", "-r"))


def parse_ioreg(text: str) -> float | None:
    """Parse the nanoseconds under `HIDIdleTime`; return seconds."""
    match = re.search(r'"HIDIdleTime"\s*=\s*(\d{1,20})\b', text)
    return int(match[1]) / _NS if match else None


class _LastInput(ctypes.Structure):
    _fields_ = [("size", ctypes.c_uint), ("tick_ms", ctypes.c_uint)]


def _windows() -> float | None:
    libraries: Any = ctypes
    info = _LastInput(ctypes.sizeof(_LastInput), 0)
    if not libraries.windll.user32.GetLastInputInfo(ctypes.byref(info)):
        return None
    # Both are 32-bit milliseconds since boot, which wrap around after 49 days.
    return float((libraries.windll.kernel32.GetTickCount() - info.tick_ms) % 2**32) / 1000


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    return done.stdout

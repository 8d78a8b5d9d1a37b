"""How long nobody has used this machine, by whichever of its means the system has.

Each means is one function that returns seconds, or None where it cannot tell. The parsing is apart from the asking, for
each system's words are known beforehand and its machines are not at hand.
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

_PATIENCE_S = 2.0
_NS = 10**9


def idle_s() -> float:
    """Seconds since somebody last used keyboard, mouse or terminal; raises `Unavailable` where nobody tells."""
    means = {"darwin": (_macos,), "win32": (_windows,)}.get(sys.platform, (_screen, _terminals))
    answers = [answer for answer in (_tried(ask) for ask in means) if answer is not None]
    if not answers:
        raise Unavailable("this system does not tell when somebody last used it")
    return max(0.0, min(answers))  # whatever was used last counts


def _tried(ask: Callable[[], float | None]) -> float | None:
    try:
        return ask()
    except (OSError, ValueError, AttributeError, subprocess.SubprocessError):
        return None


# --- Linux -----------------------------------------------------------------------------------------------------------


def _screen() -> float | None:
    """The desktop's own word: GNOME's, X's, else what the desktop told logind."""
    for ask in (_gnome, _x11, _logind):
        answer = _tried(ask)
        if answer is not None:
            return answer
    return None


def _gnome() -> float | None:
    name, path = "org.gnome.Mutter.IdleMonitor", "/org/gnome/Mutter/IdleMonitor/Core"
    return parse_gnome(_output("busctl", "--user", "call", name, path, name, "GetIdletime"))


def parse_gnome(text: str) -> float | None:
    """Milliseconds as `busctl` writes a 64-bit number: `t 1234`."""
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
        return None  # X beside Wayland sees only a part of what is typed
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
    """The least idle of the sessions with a screen; of the others the terminals tell better."""
    idle: list[float] = []
    for session in text.split("\n\n"):
        said = dict(line.split("=", 1) for line in session.splitlines() if "=" in line)
        if said.get("Type") not in ("x11", "wayland", "mir"):
            continue
        if said.get("IdleHint") == "no":
            idle.append(0.0)
        elif said.get("IdleHint") == "yes" and said.get("IdleSinceHint", "").isdecimal():
            idle.append(max(0.0, now_s - int(said["IdleSinceHint"]) / 10**6))
    return min(idle, default=None)


def _terminals() -> float | None:
    """A terminal's access time moves when somebody types into it."""
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
    """Nanoseconds under `HIDIdleTime`."""
    match = re.search(r'"HIDIdleTime"\s*=\s*(\d{1,20})\b', text)
    return int(match[1]) / _NS if match else None


class _LastInput(ctypes.Structure):
    _fields_ = [("size", ctypes.c_uint), ("tick_ms", ctypes.c_uint)]


def _windows() -> float | None:
    libraries: Any = ctypes
    info = _LastInput(ctypes.sizeof(_LastInput), 0)
    if not libraries.windll.user32.GetLastInputInfo(ctypes.byref(info)):
        return None
    # Both count milliseconds since the start of the system in 32 bits, and begin anew after 49 days.
    return float((libraries.windll.kernel32.GetTickCount() - info.tick_ms) % 2**32) / 1000


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=True)
    return done.stdout

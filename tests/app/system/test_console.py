"""The terminal on other systems, by fakes: Windows' console, missing streams, other libraries for line editing."""

from __future__ import annotations

import io
import sys
from types import ModuleType
from typing import Any

import pytest

from app.system import console


class Number:
    """A number of ctypes, which is passed by reference."""

    def __init__(self) -> None:
        self.value = 0


class Kernel:
    """Windows' kernel32 with a console on some handles, each with the mode that it begins with."""

    def __init__(self, modes: dict[int, int]) -> None:
        self.modes = modes

    def GetStdHandle(self, which: int) -> int:
        return which

    def GetConsoleMode(self, handle: int, mode: Number) -> int:
        mode.value = self.modes.get(handle, 0)
        return int(handle in self.modes)

    def SetConsoleMode(self, handle: int, mode: int) -> int:
        self.modes[handle] = mode
        return 1


def same(value: Any) -> Any:
    """ctypes' `byref`: the fake takes the number itself."""
    return value


def test_windows_console_understands_escape_codes() -> None:
    kernel = Kernel({-11: 0x3, -12: 0x7})
    console.enable_escape_codes(kernel, Number, same)
    assert kernel.modes == {-11: 0x7, -12: 0x7}  # what was set stays set


def test_a_pipe_on_windows_is_left_alone() -> None:
    kernel = Kernel({})
    console.enable_escape_codes(kernel, Number, same)
    assert kernel.modes == {}


def test_on_windows_the_console_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel({-11: 0})
    ctypes = ModuleType("ctypes")
    vars(ctypes).update(windll=type("Dll", (), {"kernel32": kernel}), c_ulong=Number, byref=same)
    monkeypatch.setitem(sys.modules, "ctypes", ctypes)
    monkeypatch.setattr(sys, "platform", "win32")
    console.prepare()
    assert kernel.modes == {-11: 4}


def test_a_service_without_a_console_has_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    console.prepare()
    try:
        assert sys.stdin.read() == ""
        sys.stdout.write("nobody reads this\n")
    finally:
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            stream.close()


def test_a_character_that_the_console_lacks_does_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="cp1252", write_through=True))
    console.prepare()
    sys.stdout.write("87 °C ≋ █\n")
    assert raw.getvalue().rstrip() == b"87 \xb0C ? ?"


@pytest.mark.parametrize(("encoding", "shown"), [("utf-8", True), ("cp437", True), ("cp1252", False), ("ascii", False)])
def test_what_a_terminal_can_show(monkeypatch: pytest.MonkeyPatch, encoding: str, shown: bool) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    assert console.can_show("█░") is shown


@pytest.mark.parametrize(
    ("doc", "bound"),
    [("Importing this module enables command line editing using GNU readline.", True), ("… using libedit …", False)],
)
def test_line_editing(monkeypatch: pytest.MonkeyPatch, doc: str, bound: bool) -> None:
    said: list[str] = []
    readline = ModuleType("readline", doc)
    vars(readline)["parse_and_bind"] = said.append
    monkeypatch.setitem(sys.modules, "readline", readline)
    console.edit_lines()
    assert said == ["set enable-bracketed-paste on"] * bound


def test_without_a_library_for_line_editing_the_console_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "readline", None)
    console.edit_lines()

"""The sensors: parsing each system's output, and reading this machine's."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from app.config.settings import Settings
from app.courtesy.full_screen import active_window, fills_screen
from app.courtesy.idle import parse_gnome, parse_ioreg, parse_logind
from app.courtesy.rules import RULES
from app.courtesy.sensors import machine_sources, running_programs
from app.courtesy.watch import look_once
from engine.device.sensors import ProcessorShare, Unavailable

NOW_S = 1_800_000_000.0


def session(kind: str, hint: str, since_s: float = 0) -> str:
    return f"Type={kind}\nIdleHint={hint}\nIdleSinceHint={int(since_s * 10**6)}\n"


@pytest.mark.parametrize(
    ("sessions", "idle_s"),
    [
        ([session("wayland", "yes", NOW_S - 90)], 90.0),
        ([session("x11", "no")], 0.0),
        ([session("x11", "yes", NOW_S - 90), session("wayland", "yes", NOW_S - 30)], 30.0),
        ([session("tty", "no")], None),
        ([session("x11", "yes", NOW_S + 5)], 0.0),
        (["Type=x11\nIdleHint=yes\nIdleSinceHint=soon\n", "nonsense"], None),
        ([], None),
    ],
)
def test_what_logind_says(sessions: list[str], idle_s: float | None) -> None:
    assert parse_logind("\n".join(sessions), NOW_S) == idle_s


def test_what_gnome_and_macos_say() -> None:
    assert parse_gnome("t 61234\n") == 61.234
    assert parse_gnome("Call failed") is None
    assert parse_ioreg('    | |   "HIDIdleTime" = 2500000000\n') == 2.5
    assert parse_ioreg("") is None


def test_every_rule_has_its_sensor_and_each_says_something_or_why_not(tmp_path: Path) -> None:
    sources = machine_sources(lambda: "cpu", tmp_path / "not" / "yet")
    assert {rule.needs for rule in RULES} - {"now"} <= sources.keys()
    for ask in sources.values():
        with contextlib.suppress(Unavailable):  # a missing sensor raises this and nothing else
            assert ask() is not None
    views = look_once(Settings(), tmp_path)
    assert [rule.code for rule, _ in views] == [rule.code for rule in RULES]
    assert all(view.available or view.text for _, view in views)


def test_what_xprop_says_of_the_active_window() -> None:
    assert active_window("_NET_ACTIVE_WINDOW(WINDOW): window id # 0x3a00007\n") == "0x3a00007"
    assert active_window("_NET_ACTIVE_WINDOW(WINDOW): window id # 0x0\n") is None
    assert active_window("_NET_ACTIVE_WINDOW:  not found.\n") is None
    assert active_window("window id # 0x" + "f" * 40) is None
    assert fills_screen("_NET_WM_STATE(ATOM) = _NET_WM_STATE_FULLSCREEN, _NET_WM_STATE_FOCUSED\n")
    assert not fills_screen("_NET_WM_STATE(ATOM) = _NET_WM_STATE_MAXIMIZED_VERT\n")
    assert not fills_screen("")


def test_this_very_program_is_among_those_that_run() -> None:
    assert any(name.startswith(("python", "pytest")) for name in running_programs())


def test_the_share_of_others_is_a_share() -> None:
    share = ProcessorShare()
    sum(range(10**6))
    assert 0.0 <= share.others_share() <= 1.0

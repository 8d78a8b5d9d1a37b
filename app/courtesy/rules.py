"""The courtesy rules: from sensor readings and settings to the decision if hosting should pause, and why. Pure.

An unknown reading (None) never causes a pause; a rule that applied before it is released after its usual time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from app.config.settings import SETTINGS, Settings
from app.config.timetable import parse_schedule
from app.core.reasons import Reason, because
from app.core.units import format_size
from app.snapshot.views import RuleView

UNUSED = "pause_unused"  # the rule that unloads blocks which nobody uses
COOLER_C = 5.0  # degrees below the limit before a hot device counts as cool again


@dataclass(frozen=True)
class Readings:
    """Sensor readings at one moment; None if a sensor gave none."""

    now: datetime  # local wall-clock time
    device: str = "processor"  # name of the computing device for the user
    others_load: float | None = None  # part of the device's time that other programs use, 0 to 1
    others_bytes: int | None = None  # device memory that other programs hold
    idle_s: float | None = None  # since keyboard or mouse was last used
    on_battery: bool | None = None
    temperature_c: float | None = None
    programs: frozenset[str] | None = None  # names of all running programs, in lower case
    disk_free_bytes: int | None = None
    full_screen: bool | None = None  # a program fills the screen
    unused_s: float | None = None  # since a session used this node's blocks; 0 while other members need them


# Range of a working sensor; anything else counts as unknown.
_BOUNDS = {
    "others_load": (0.0, 1.0),
    "others_bytes": (0, 2**50),
    "idle_s": (0.0, 1e10),
    "temperature_c": (1.0, 150.0),
    "disk_free_bytes": (0, 2**62),
    "unused_s": (0.0, 1e10),
}


def believable(readings: Readings) -> Readings:
    """Return the readings with impossible values replaced by None."""
    nonsense = [name for name, (low, high) in _BOUNDS.items() if not _is_within(getattr(readings, name), low, high)]
    nonsense += [name for name in ("on_battery", "full_screen") if not isinstance(getattr(readings, name), bool)]
    if not isinstance(readings.programs, frozenset):
        nonsense.append("programs")
    unknown: dict[str, Any] = dict.fromkeys(nonsense)
    return replace(readings, **unknown)


def _is_within(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and low <= value <= high


@dataclass(frozen=True)
class RuleReading:
    """Result of a rule for one moment."""

    holds: bool
    reason: str  # why hosting pauses; the same text while the cause is the same
    detail: str  # with figures, which may change at every check


Judge = Callable[[Settings, Readings, bool], RuleReading]  # the bool: the rule applies already


@dataclass(frozen=True)
class Rule:
    """One rule: the setting that enables it, the reading it needs, its test, and its delays."""

    code: str
    label: str
    setting: str
    needs: str  # field of `Readings`
    judge: Judge
    after_s: float  # it must hold for this long before it applies
    release_s: float  # and be over for this long before it is released
    pauses: bool = True

    def is_on(self, settings: Settings) -> bool:
        """True if the settings enable the rule."""
        return bool(getattr(settings, self.setting))

    @property
    def way_out(self) -> str:
        """Command that disables the rule."""
        default = SETTINGS[self.setting].default
        off = {bool: "false", int: "0"}.get(type(default), '""')
        return f"shoal config set {self.setting} {off}"


def _busy(settings: Settings, readings: Readings, applies: bool) -> RuleReading:
    load, limit = readings.others_load or 0.0, settings.pause_busy / 100
    detail = f"other programs use {load:.0%} of the {readings.device}; the limit is {limit:.0%}"
    return RuleReading(load >= limit, f"another program uses the {readings.device}", detail)


def _crowded(settings: Settings, readings: Readings, applies: bool) -> RuleReading:
    held, limit = readings.others_bytes or 0, settings.pause_busy_memory or 0
    detail = f"other programs hold {format_size(held)} of the device's memory; the limit is {format_size(limit)}"
    return RuleReading(held >= limit, f"another program holds the {readings.device}'s memory", detail)


def _active(settings: Settings, readings: Readings, applies: bool) -> RuleReading:
    idle_s, limit_s = readings.idle_s or 0.0, settings.pause_active * 60
    detail = f"no key or mouse for {idle_s / 60:.0f} min; the limit is {settings.pause_active} min"
    return RuleReading(idle_s < limit_s, "somebody is using this machine", detail)


def _battery(settings: Settings, readings: Readings, applies: bool) -> RuleReading:
    on_battery = bool(readings.on_battery)
    return RuleReading(on_battery, "this machine runs on battery", "on battery" if on_battery else "on mains")


def _hot(settings: Settings, readings: Readings, applies: bool) -> RuleReading:
    heat, limit = readings.temperature_c or 0.0, float(settings.pause_above)
    hot = heat >= (limit - COOLER_C if applies else limit)
    return RuleReading(hot, f"the {readings.device} is hot", f"{heat:.0f} °C; the limit is {limit:.0f} °C")


def _program(settings: Settings, readings: Readings, applies: bool) -> RuleReading:
    running = sorted(set(settings.pause_programs) & (readings.programs or frozenset()))
    named = ", ".join(running)
    detail = f"running: {named}" if running else f"none of {', '.join(settings.pause_programs)} runs"
    return RuleReading(bool(running), f"{named} is running", detail)


def _full_screen(settings: Settings, readings: Readings, applies: bool) -> RuleReading:
    fills = bool(readings.full_screen)
    return RuleReading(fills, "a program fills the screen", "one does" if fills else "none does")


def _unused(settings: Settings, readings: Readings, applies: bool) -> RuleReading:
    unused_s, limit_s = readings.unused_s or 0.0, settings.pause_unused * 60
    detail = f"no session for {unused_s / 60:.0f} min; the limit is {settings.pause_unused} min"
    return RuleReading(unused_s >= limit_s, "nobody uses its blocks, so they are unloaded", detail)


def _scheduled(settings: Settings, readings: Readings, applies: bool) -> RuleReading:
    schedule = parse_schedule(settings.pause_times)
    if schedule.covers(readings.now):
        until = schedule.until(readings.now)
        when = f" until {until}" if until else ""
        return RuleReading(True, f"paused by timetable{when}", settings.pause_times)
    return RuleReading(False, "paused by timetable", f"begins {schedule.next_start(readings.now) or 'never'}")


def _disk(settings: Settings, readings: Readings, applies: bool) -> RuleReading:
    free, floor = readings.disk_free_bytes or 0, settings.disk_floor or 0
    detail = f"{format_size(free)} of the disk is free; the limit is {format_size(floor)}"
    return RuleReading(free < floor, "the disk is nearly full, so nothing is downloaded", detail)


RULES = (
    Rule("pause_busy", "another program uses the device", "pause_busy", "others_load", _busy, 6, 30),
    Rule("pause_memory", "another program holds its memory", "pause_busy_memory", "others_bytes", _crowded, 4, 30),
    Rule("pause_active", "somebody uses this machine", "pause_active", "idle_s", _active, 0, 10),
    Rule("pause_battery", "on battery", "pause_on_battery", "on_battery", _battery, 4, 20),
    Rule("pause_heat", "too hot", "pause_above", "temperature_c", _hot, 4, 60),
    Rule("pause_program", "a program of the list is running", "pause_programs", "programs", _program, 0, 10),
    Rule("pause_full_screen", "a program fills the screen", "pause_full_screen", "full_screen", _full_screen, 4, 10),
    Rule("pause_schedule", "by timetable", "pause_times", "now", _scheduled, 0, 0),
    Rule(UNUSED, "nobody uses its blocks", "pause_unused", "unused_s", _unused, 0, 0),  # last: training goes on then
    Rule("disk_floor", "the disk is nearly full", "disk_floor", "disk_free_bytes", _disk, 0, 10, pauses=False),
)


@dataclass(frozen=True)
class RuleState:
    """State of a rule between checks."""

    applies: bool = False
    contrary_since: float | None = None  # since when the readings contradict `applies`
    finding: RuleReading | None = None  # None: the rule is off or its sensor gave nothing
    reason: str = ""  # of the last finding that held


def advance_rule(rule: Rule, before: RuleState, settings: Settings, readings: Readings, now_s: float) -> RuleState:
    """Return a rule's state after another check, with its delays applied."""
    if not rule.is_on(settings):
        return RuleState()
    known = getattr(readings, rule.needs) is not None
    finding = rule.judge(settings, readings, before.applies) if known else None
    holds = finding is not None and finding.holds
    reason = finding.reason if finding is not None and finding.holds else before.reason
    if holds == before.applies:
        return RuleState(holds, None, finding, reason)
    since = now_s if before.contrary_since is None else before.contrary_since
    if now_s - since < (rule.after_s if holds else rule.release_s):
        return RuleState(before.applies, since, finding, reason)
    return RuleState(holds, None, finding, reason)


def why_pause(rules: Sequence[Rule], states: Mapping[str, RuleState]) -> Reason | None:
    """Return the reason of the first pausing rule that applies, or None."""
    for rule in rules:
        state = states[rule.code]
        if rule.pauses and state.applies:
            return because(rule.code, state.reason, next_step=f"`{rule.way_out}` turns this rule off")
    return None


def rule_view(rule: Rule, state: RuleState, settings: Settings, trouble: str | None) -> RuleView:
    """Return a rule for the snapshot; `trouble` is why its sensor gave no reading."""
    text = trouble or ("" if state.finding is None else state.finding.detail)
    return RuleView(rule.code, rule.label, rule.is_on(settings), state.applies, available=trouble is None, text=text)


def limits_at(settings: Settings, now: datetime) -> tuple[int | None, int | None]:
    """Limits for upload and download in bytes per second at this local time; None: no limit."""
    if parse_schedule(settings.limit_times).covers(now):
        return settings.timed_upload or None, settings.timed_download or None
    return settings.max_upload or None, settings.max_download or None


def next_pause(settings: Settings, now: datetime) -> str:
    """Text about the next scheduled pause; empty if there is none."""
    start = parse_schedule(settings.pause_times).next_start(now)
    return "" if start is None else f"pauses {start} by timetable"

"""The courtesy rules: what was read and what the person wants, to whether hosting should rest, and why. Pure.

A reading that is not known (None) never speaks for a pause: what it said before is let go after the rule's usual time.
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

COOLER_C = 5.0  # below the limit before a hot device counts as cool again


@dataclass(frozen=True)
class Readings:
    """What the sensors say at one moment; None where one did not say."""

    now: datetime  # local wall-clock time
    device: str = "processor"  # what computes here, as the person calls it
    others_load: float | None = None  # the share of the device's time that other programs take, 0 to 1
    others_bytes: int | None = None  # the device's memory that other programs hold
    idle_s: float | None = None  # since somebody last used keyboard or mouse
    on_battery: bool | None = None
    temperature_c: float | None = None
    programs: frozenset[str] | None = None  # names of all that runs, in lower case
    disk_free_bytes: int | None = None


# What a working sensor can say: everything else counts as not known.
_BOUNDS = {
    "others_load": (0.0, 1.0),
    "others_bytes": (0, 2**50),
    "idle_s": (0.0, 1e10),
    "temperature_c": (1.0, 150.0),
    "disk_free_bytes": (0, 2**62),
}


def believable(readings: Readings) -> Readings:
    """The readings without what no working sensor says."""
    nonsense = [name for name, (low, high) in _BOUNDS.items() if not _is_within(getattr(readings, name), low, high)]
    if not isinstance(readings.on_battery, bool):
        nonsense.append("on_battery")
    if not isinstance(readings.programs, frozenset):
        nonsense.append("programs")
    unknown: dict[str, Any] = dict.fromkeys(nonsense)
    return replace(readings, **unknown)


def _is_within(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and low <= value <= high


@dataclass(frozen=True)
class RuleReading:
    """What a rule says of one moment: whether it holds, and the figures behind it."""

    holds: bool
    reason: str  # why hosting rests; the same words for as long as it is the same cause
    detail: str  # with figures that may change at every look


Judge = Callable[[Settings, Readings, bool], RuleReading]  # the bool: whether the rule applies already


@dataclass(frozen=True)
class Rule:
    """One rule: when it is on, which reading it needs, how it judges, and how long it hesitates."""

    code: str
    label: str
    setting: str
    needs: str  # the field of `Readings`
    judge: Judge
    after_s: float  # it must hold so long before it applies
    release_s: float  # and be over so long before it is let go
    pauses: bool = True

    def is_on(self, settings: Settings) -> bool:
        """Whether the person wants it."""
        return bool(getattr(settings, self.setting))

    @property
    def way_out(self) -> str:
        """How a person drops it."""
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
    detail = f"unused for {idle_s / 60:.0f} min; the limit is {settings.pause_active} min"
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


def _scheduled(settings: Settings, readings: Readings, applies: bool) -> RuleReading:
    schedule = parse_schedule(settings.pause_times)
    if schedule.covers(readings.now):
        until = schedule.until(readings.now)
        when = f" until {until}" if until else ""
        return RuleReading(True, f"the timetable says so{when}", settings.pause_times)
    return RuleReading(False, "the timetable says so", f"begins {schedule.next_start(readings.now) or 'never'}")


def _disk(settings: Settings, readings: Readings, applies: bool) -> RuleReading:
    free, floor = readings.disk_free_bytes or 0, settings.disk_floor or 0
    detail = f"{format_size(free)} of the disk is free; at least {format_size(floor)} stay so"
    return RuleReading(free < floor, "the disk is nearly full, so nothing is fetched", detail)


RULES = (
    Rule("pause_busy", "another program uses the device", "pause_busy", "others_load", _busy, 6, 30),
    Rule("pause_memory", "another program holds its memory", "pause_busy_memory", "others_bytes", _crowded, 4, 30),
    Rule("pause_active", "somebody uses this machine", "pause_active", "idle_s", _active, 0, 10),
    Rule("pause_battery", "on battery", "pause_on_battery", "on_battery", _battery, 4, 20),
    Rule("pause_heat", "too hot", "pause_above", "temperature_c", _hot, 4, 60),
    Rule("pause_program", "a program of the list runs", "pause_programs", "programs", _program, 0, 10),
    Rule("pause_schedule", "by timetable", "pause_times", "now", _scheduled, 0, 0),
    Rule("disk_floor", "the disk is nearly full", "disk_floor", "disk_free_bytes", _disk, 0, 10, pauses=False),
)


@dataclass(frozen=True)
class RuleState:
    """How a rule stands: whether it applies, since when the readings speak against that, and its last finding."""

    applies: bool = False
    contrary_since: float | None = None
    finding: RuleReading | None = None  # None: off, or its sensor does not say
    reason: str = ""  # of the last finding that held


def advance_rules(rule: Rule, before: RuleState, settings: Settings, readings: Readings, now_s: float) -> RuleState:
    """How a rule stands after another look."""
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
    """Why hosting should rest now: the first rule that applies; None: it should not."""
    for rule in rules:
        state = states[rule.code]
        if rule.pauses and state.applies:
            return because(rule.code, state.reason, next_step=f"`{rule.way_out}` drops this rule")
    return None


def rule_view(rule: Rule, state: RuleState, settings: Settings, trouble: str | None) -> RuleView:
    """A rule as a person sees it; `trouble` is why its sensor does not say anything."""
    text = trouble or ("" if state.finding is None else state.finding.detail)
    return RuleView(rule.code, rule.label, rule.is_on(settings), state.applies, available=trouble is None, text=text)


def limits_at(settings: Settings, now: datetime) -> tuple[int | None, int | None]:
    """Bytes a second up and down, at most, at this local time; None: no limit."""
    if parse_schedule(settings.limit_times).covers(now):
        return settings.timed_upload or None, settings.timed_download or None
    return settings.max_upload or None, settings.max_download or None


def next_pause(settings: Settings, now: datetime) -> str:
    """The next pause that is known beforehand, as a person says it."""
    start = parse_schedule(settings.pause_times).next_start(now)
    return "" if start is None else f"pauses {start} by timetable"

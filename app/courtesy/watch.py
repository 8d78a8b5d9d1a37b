"""Checks the sensors every `LOOK_S` seconds and has the node pause and resume as the rules say.

How a pause is carried out, and that one by hand comes first, is up to the node. A pause by rule is delayed by up to
`ONLY_HOLDER_S` while no other node hosts the blocks that would become unavailable.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Protocol

import trio

from app.config.settings import Settings
from app.core.reasons import Reason
from app.core.signal import Signal
from app.courtesy.rules import (
    RULES,
    Rule,
    RuleState,
    advance_rule,
    believable,
    limits_at,
    next_pause,
    rule_view,
    why_pause,
)
from app.courtesy.sensors import Sensors, machine_sources
from app.snapshot.views import CourtesyView, RuleView

LOOK_S = 2.0
ONLY_HOLDER_S = 60.0

log = logging.getLogger("shoal.courtesy")


class PauseTarget(Protocol):
    """The part of a node that the watch uses."""

    def pause_by_rule(self, reason: Reason) -> None:
        """Drain and pause until `resume_by_rule`; a second reason replaces the first."""

    def resume_by_rule(self) -> None:
        """End the pause by rule."""

    def is_only_holder(self) -> bool:
        """True if a pause now would leave some block without a host."""

    def set_limits(self, upload: int | None, download: int | None) -> None:
        """Limit upload and download to these bytes per second from now on; None: no limit."""

    def note(self, kind: str, text: str) -> None:
        """Log an event that the user may want to know."""


def local_now() -> datetime:
    """Local wall-clock time, which timetables refer to."""
    return datetime.now()


class CourtesyWatch:
    """Applies the rules; `run` until cancelled."""

    def __init__(
        self,
        node: PauseTarget,
        settings: Callable[[], Settings],
        sensors: Sensors,
        now: Callable[[], datetime] = local_now,
        rules: Sequence[Rule] = RULES,
    ) -> None:
        self._node, self._settings, self._sensors, self._now, self._rules = node, settings, sensors, now, rules
        self._states = {rule.code: RuleState() for rule in rules}
        self._requested: Reason | None = None  # reason of the pause that was requested
        self._delayed: Reason | None = None  # reason of a pause that is delayed
        self._delayed_since = 0.0
        self._limits: tuple[int | None, int | None] | None = None
        self._wake = Signal()

    def nudge(self) -> None:
        """Check now: a setting has changed."""
        self._wake.notify()

    async def run(self) -> None:
        """Check and act until cancelled."""
        while True:
            seen = self._wake.version
            await self._check()
            with trio.move_on_after(LOOK_S):
                await self._wake.wait_beyond(seen)

    def view(self) -> CourtesyView:
        """Return the rules and the next pause; pauses by hand are added by the node."""
        settings = self._settings()
        views = tuple(
            rule_view(rule, self._states.get(rule.code, RuleState()), settings, self._sensors.troubles.get(rule.needs))
            for rule in RULES
        )
        paused = self._requested is not None
        return CourtesyView(paused=paused, by="rule" if paused else "", next_text=self._next_text(), rules=views)

    def _next_text(self) -> str:
        if self._delayed is not None:
            left_s = ONLY_HOLDER_S - (trio.current_time() - self._delayed_since)
            return (
                f"pauses within {max(0.0, left_s):.0f} s: {self._delayed.text}; "
                "waiting because no other node hosts its blocks"
            )
        return "" if self._requested is not None else next_pause(self._settings(), self._now())

    async def _check(self) -> None:
        settings = self._settings()
        wanted = {rule.needs for rule in self._rules if rule.is_on(settings)}
        readings = believable(await self._sensors.read(wanted, self._now()))
        at = trio.current_time()
        before = self._states
        self._states = {
            rule.code: advance_rule(rule, before[rule.code], settings, readings, at) for rule in self._rules
        }
        self._note_problems(before)
        self._apply_limits(limits_at(settings, readings.now))
        self._act(why_pause(self._rules, self._states), at)

    def _act(self, reason: Reason | None, at: float) -> None:
        if reason is None:
            self._delayed = None
            if self._requested is not None:
                self._requested = None
                self._node.resume_by_rule()
        elif self._requested is not None or not self._should_delay(reason, at):
            self._delayed = None
            if self._requested != reason:
                self._requested = reason
                self._node.pause_by_rule(reason)

    def _should_delay(self, reason: Reason, at: float) -> bool:
        """True while other nodes are given time to host what only this node hosts."""
        if self._delayed is None:
            if not self._node.is_only_holder():
                return False
            self._delayed_since = at
            wait = f"pauses within {ONLY_HOLDER_S:.0f} s, since no other node hosts its blocks"
            self._node.note("courtesy", f"{wait}: {reason.text}")
        elif at - self._delayed_since >= ONLY_HOLDER_S or not self._node.is_only_holder():
            return False
        self._delayed = reason
        return True

    def _apply_limits(self, limits: tuple[int | None, int | None]) -> None:
        if limits != self._limits:
            self._limits = limits
            self._node.set_limits(*limits)

    def _note_problems(self, before: dict[str, RuleState]) -> None:
        """Log rules that begin to apply and do not pause; the node logs those that pause."""
        for rule in self._rules:
            now, then = self._states[rule.code], before[rule.code]
            if not rule.pauses and now.applies and not then.applies and now.finding is not None:
                self._node.note("problem", f"{now.finding.reason}: {now.finding.detail}")


def look_once(settings: Settings, disk: Path) -> list[tuple[Rule, RuleView]]:
    """Return the present state of every rule on this machine, enabled or not."""
    sensors = Sensors(machine_sources(lambda: settings.chosen_device, disk))
    now = local_now()
    readings = believable(trio.run(sensors.read, {rule.needs for rule in RULES}, now))
    views = []
    for rule in RULES:
        known = getattr(readings, rule.needs) is not None
        finding = rule.judge(settings, readings, False) if known else None
        applies = finding is not None and finding.holds and rule.is_on(settings)
        trouble = sensors.troubles.get(rule.needs)
        views.append((rule, rule_view(rule, RuleState(applies, None, finding), settings, trouble)))
    return views

"""The watch: looks at the sensors now and then, and has the node pause and resume as the rules say.

What a pause means, and that one by hand goes before it, is the node's. A rule's pause waits, a minute at most, while
nobody else holds the blocks that would fall silent.
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
from app.courtesy.rules import (
    RULES,
    Rule,
    RuleState,
    advance_rules,
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
    """What the watch needs of a node."""

    def pause_by_rule(self, reason: Reason) -> None:
        """Drain and rest until `resume_by_rule`; a second reason takes the place of the first."""

    def resume_by_rule(self) -> None:
        """No rule asks for rest any more."""

    def is_only_holder(self) -> bool:
        """Whether some block would have no holder if this node rested now."""

    def set_limits(self, upload: int | None, download: int | None) -> None:
        """Bytes a second at most from now on; None: no limit."""

    def note(self, kind: str, text: str) -> None:
        """Something happened that a person may want to know."""


def local_now() -> datetime:
    """The time on the wall, which is what timetables mean."""
    return datetime.now()


class CourtesyWatch:
    """Carries the rules out; `run` until cancelled."""

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
        self._asked: Reason | None = None  # what the node was asked to rest for
        self._waiting: Reason | None = None  # what it will be asked for unless it passes
        self._waiting_since = 0.0
        self._limits: tuple[int | None, int | None] | None = None
        self._nudged = trio.Event()

    def nudge(self) -> None:
        """Look at once: a setting has changed."""
        self._nudged.set()

    async def run(self) -> None:
        """Look, and act upon it, again and again."""
        while True:
            self._nudged = trio.Event()
            await self._look()
            with trio.move_on_after(LOOK_S):
                await self._nudged.wait()

    def view(self) -> CourtesyView:
        """The rules as they stand, and what is going to happen; whether the node rests by hand is the node's."""
        settings = self._settings()
        views = tuple(
            rule_view(rule, self._states.get(rule.code, RuleState()), settings, self._sensors.troubles.get(rule.needs))
            for rule in RULES
        )
        resting = self._asked is not None
        return CourtesyView(paused=resting, by="rule" if resting else "", next_text=self._next_text(), rules=views)

    def _next_text(self) -> str:
        if self._waiting is not None:
            left_s = ONLY_HOLDER_S - (trio.current_time() - self._waiting_since)
            return (
                f"pauses within {max(0.0, left_s):.0f} s: {self._waiting.text}; "
                "waits while nobody else holds its blocks"
            )
        return "" if self._asked is not None else next_pause(self._settings(), self._now())

    async def _look(self) -> None:
        settings = self._settings()
        wanted = {rule.needs for rule in self._rules if rule.is_on(settings)}
        readings = believable(await self._sensors.read(wanted, self._now()))
        at = trio.current_time()
        before = self._states
        self._states = {
            rule.code: advance_rules(rule, before[rule.code], settings, readings, at) for rule in self._rules
        }
        self._tell_changes(before)
        self._follow_limits(limits_at(settings, readings.now))
        self._act(why_pause(self._rules, self._states), at)

    def _act(self, reason: Reason | None, at: float) -> None:
        if reason is None:
            self._waiting = None
            if self._asked is not None:
                self._asked = None
                self._node.resume_by_rule()
        elif self._asked is not None or not self._should_wait(reason, at):
            self._waiting = None
            if self._asked != reason:
                self._asked = reason
                self._node.pause_by_rule(reason)

    def _should_wait(self, reason: Reason, at: float) -> bool:
        """Whether others are given time to take over what only this node holds."""
        if self._waiting is None:
            if not self._node.is_only_holder():
                return False
            self._waiting_since = at
            self._node.note("courtesy", f"pauses within {ONLY_HOLDER_S:.0f} s, for nobody else holds it: {reason.text}")
        elif at - self._waiting_since >= ONLY_HOLDER_S or not self._node.is_only_holder():
            return False
        self._waiting = reason
        return True

    def _follow_limits(self, limits: tuple[int | None, int | None]) -> None:
        if limits != self._limits:
            self._limits = limits
            self._node.set_limits(*limits)

    def _tell_changes(self, before: dict[str, RuleState]) -> None:
        """Rules that pause are told of by the node; the others here."""
        for rule in self._rules:
            now, then = self._states[rule.code], before[rule.code]
            if not rule.pauses and now.applies and not then.applies and now.finding is not None:
                self._node.note("problem", f"{now.finding.reason}: {now.finding.detail}")


def look_once(settings: Settings, disk: Path) -> list[tuple[Rule, RuleView]]:
    """How every rule would stand on this machine at this moment, whether it is on or not."""
    device = None if settings.device == "auto" else settings.device
    sensors = Sensors(machine_sources(lambda: device, disk))
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

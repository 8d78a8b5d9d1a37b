"""A watch over fake sensors, for tests of the courtesy rules."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import trio
import trio.testing

from app.config.settings import Settings
from app.core.reasons import Reason
from app.courtesy.rules import Readings
from app.courtesy.sensors import Sensors, Source
from app.courtesy.watch import CourtesyWatch
from app.snapshot.views import RuleView
from engine.device.sensors import Unavailable

MONDAY = datetime(2026, 3, 2, 8, 0)
CALM = Settings(pause_on_battery=False, disk_floor=None)


@dataclass
class Recorder:
    """A node that writes down what it is asked."""

    alone: bool = False
    reason: Reason | None = None
    changes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    limits: tuple[int | None, int | None] | None = None
    changed: trio.Event = field(default_factory=trio.Event)

    def pause_by_rule(self, reason: Reason) -> None:
        self.reason = reason
        self._write(reason.code)

    def resume_by_rule(self) -> None:
        self.reason = None
        self._write("resume")

    def _write(self, change: str) -> None:
        self.changes.append(change)
        self.changed.set()
        self.changed = trio.Event()

    def is_only_holder(self) -> bool:
        return self.alone

    def set_limits(self, upload: int | None, download: int | None) -> None:
        self.limits = (upload, download)

    def note(self, kind: str, text: str) -> None:
        self.notes.append(text)


async def ask_here(source: Source) -> Any:
    """Read fake sensors without a thread, since threads do not follow the autojumping clock."""
    answer = source()
    if isinstance(answer, HangsForever):
        await trio.sleep_forever()
    return answer


class HangsForever:
    """Reading of a fake sensor that never returns."""


class Scene:
    """A watch over fake sensors, whose readings and settings a test changes as it goes."""

    def __init__(self, settings: Settings = CALM, **said: Any) -> None:
        self.settings, self.said, self.node = settings, said, Recorder()
        self.pace = 1  # speed of the wall clock
        self._began, self._jumped = trio.current_time(), timedelta()
        sources = {name: self._source(name) for name in Readings.__dataclass_fields__ if name != "now"}
        self.watch = CourtesyWatch(self.node, lambda: self.settings, Sensors(sources, ask_here), self.now)

    def now(self) -> datetime:
        return MONDAY + self._jumped + timedelta(seconds=(trio.current_time() - self._began) * self.pace)

    def jump(self, hours: float) -> None:
        """Set the wall clock forward or back; trio's clock does not change."""
        self._jumped += timedelta(hours=hours)

    def _source(self, name: str) -> Source:
        def ask() -> Any:
            value = self.said.get(name, Unavailable("there is none"))
            if isinstance(value, Exception):
                raise value
            return value

        return ask

    def rule(self, code: str) -> RuleView:
        return next(view for view in self.watch.view().rules if view.code == code)

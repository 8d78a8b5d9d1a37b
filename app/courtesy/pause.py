"""Whether this node hosts: paused by hand, by a rule, or not at all. What a hand did, no rule undoes.

A pause by hand is kept in the home folder, so that a restart does not end it before its time; a rule's pause is not,
for the rule will ask for it again. Draining and unloading are for `app.node.active_swarm`, which looks here for what is
wanted.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import trio

from app.core.canonical_json import decode_object
from app.core.errors import RecordError
from app.core.reasons import Reason, because
from app.snapshot.views import CourtesyView, RuleView
from p2p.platform import write_private

log = logging.getLogger("shoal.node")

LOOK_S = 30.0  # the longest between two looks at the clock: the machine may have slept
LONGEST_S = 366 * 86400.0
_MAX_FILE_BYTES = 4096
_MAX_MS = 2**53


@dataclass(frozen=True)
class Pause:
    """Why hosting rests, and until when."""

    by: str  # hand, rule
    why: Reason
    until_ms: int | None = None
    patient: bool = False  # sessions may finish, however long they take


def pause_by_hand(until_ms: int | None, *, patient: bool = False) -> Pause:
    """What a person asked for."""
    if patient:
        return Pause("hand", because("drained_by_hand", "drained by hand"), None, patient=True)
    end = "" if until_ms is None else f" until {time.strftime('%Y-%m-%d %H:%M', time.localtime(until_ms / 1000))}"
    return Pause("hand", because("pause_by_hand", f"paused by hand{end}"), until_ms)


class PauseControl:
    """The node's wish to rest; `run` ends pauses that have an end."""

    def __init__(
        self,
        path: Path,
        changed: Callable[[], None],
        now_ms: Callable[[], int] = lambda: time.time_ns() // 10**6,
    ) -> None:
        self._path, self._tell, self._now_ms = path, changed, now_ms
        self._hand = _read(path)
        self._rule: Pause | None = None
        self._ends_at: float | None = None  # of the person's pause, on trio's clock
        self._news = trio.Event()
        self._writing = trio.Lock()

    @property
    def current(self) -> Pause | None:
        """The pause in force, a person's before a rule's."""
        return self._hand if self._hand is not None else self._rule

    def view(self, rules: tuple[RuleView, ...] = (), next_text: str = "") -> CourtesyView:
        """As a person sees it."""
        pause = self.current
        if pause is None:
            return CourtesyView(next_text=next_text, rules=rules)
        return CourtesyView(True, pause.by, pause.until_ms, next_text, rules)

    async def by_hand(self, for_s: float | None, *, patient: bool = False) -> None:
        """Rest until `resume`, or for so long."""
        until_ms = None if for_s is None else self._now_ms() + int(min(for_s, LONGEST_S) * 1000)
        self._ends_at = None
        await self._set_hand(pause_by_hand(until_ms, patient=patient))

    async def resume(self) -> None:
        """Undo what a person asked for; a rule that still applies keeps the node paused."""
        await self._set_hand(None)

    def by_rule(self, why: Reason) -> None:
        """Rest until `rule_over`."""
        if self._rule is None or self._rule.why != why:
            self._rule = Pause("rule", why)
            self._changed()

    def rule_over(self) -> None:
        """No rule asks for rest any more."""
        if self._rule is not None:
            self._rule = None
            self._changed()

    async def wait_change(self) -> None:
        """Return after the next change."""
        await self._news.wait()

    async def run(self) -> None:
        """End the pause of a person at its time; until cancelled.

        By the wall clock, which goes on while the machine sleeps; but a clock that is set back makes no pause longer.
        """
        while True:
            until_ms = None if self._hand is None else self._hand.until_ms
            left_s = LOOK_S
            if until_ms is not None:
                left_s, now = (until_ms - self._now_ms()) / 1000, trio.current_time()
                self._ends_at = now + left_s if self._ends_at is None else self._ends_at
                left_s = min(left_s, self._ends_at - now)
            if left_s <= 0:
                await self._set_hand(None)
                continue
            with trio.move_on_after(min(left_s, LOOK_S)):
                await self._news.wait()

    async def _set_hand(self, pause: Pause | None) -> None:
        self._hand = pause
        self._changed()
        try:
            async with self._writing:  # whoever comes last writes what holds then
                await trio.to_thread.run_sync(_write, self._path, self._hand)
        except OSError as error:
            log.warning("%s cannot be written, so that a restart forgets this pause: %s", self._path, error)

    def _changed(self) -> None:
        news, self._news = self._news, trio.Event()
        news.set()
        self._tell()


def _write(path: Path, pause: Pause | None) -> None:
    if pause is None:
        path.unlink(missing_ok=True)
        return
    kept = {"version": 1, "until_ms": pause.until_ms or 0, "patient": pause.patient}
    write_private(path, json.dumps(kept).encode() + b"\n")


def _read(path: Path) -> Pause | None:
    """What a person asked of an earlier run; a damaged file counts as a pause, for hosting unasked is the worse."""
    try:
        with open(path, "rb") as file:
            raw = file.read(_MAX_FILE_BYTES)
        fields = decode_object(raw, path.name, max_bytes=_MAX_FILE_BYTES)
        until_ms = fields.integer("until_ms", 0, _MAX_MS, 0)  # 0: no end
        return pause_by_hand(until_ms or None, patient=fields.flag("patient", False))
    except FileNotFoundError:
        return None
    except (OSError, RecordError) as error:
        log.warning("%s cannot be read, so this node stays paused: %s", path, error)
        return pause_by_hand(None)

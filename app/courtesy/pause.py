"""The pause in force: by hand, by a rule, or none. A pause by hand overrides the rules.

A pause by hand is kept in the home folder, so that a restart does not end it early. A rule's pause is not kept: the
rule asks for it again. Draining and unloading is done by `app.node.active_swarm`, which reads the pause here.
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
from app.core.signal import Signal
from app.core.wall_clock import wall_ms
from app.courtesy.rules import UNUSED
from app.snapshot.views import CourtesyView, RuleView
from p2p.platform import write_private

log = logging.getLogger("shoal.node")

LOOK_S = 30.0  # longest time between checks of the wall clock, which jumps when the machine sleeps
LONGEST_S = 366 * 86400.0
_MAX_FILE_BYTES = 4096
_MAX_MS = 2**53


@dataclass(frozen=True)
class Pause:
    """One pause of hosting: its cause and its end."""

    by: str  # hand, rule
    why: Reason
    until_ms: int | None = None
    patient: bool = False  # let sessions finish, however long they take


def pause_by_hand(until_ms: int | None, *, patient: bool = False) -> Pause:
    """Return the pause for a user's command; `patient` is `shoal drain`."""
    if patient:
        return Pause("hand", because("drained_by_hand", "drained by hand"), None, patient=True)
    end = "" if until_ms is None else f" until {time.strftime('%Y-%m-%d %H:%M', time.localtime(until_ms / 1000))}"
    return Pause("hand", because("pause_by_hand", f"paused by hand{end}"), until_ms)


class PauseControl:
    """Holds the node's pause by hand and by rule; `run` ends a pause by hand at its time."""

    def __init__(
        self,
        path: Path,
        changed: Callable[[], None],
        now_ms: Callable[[], int] = wall_ms,
    ) -> None:
        self._path, self._on_change, self._now_ms = path, changed, now_ms
        self._hand_pause = _read(path)
        self._rule_pause: Pause | None = None
        self._ends_at: float | None = None  # end of the pause by hand, on trio's clock
        self._change = Signal()
        self._writing = trio.Lock()

    @property
    def current(self) -> Pause | None:
        """The pause in force; one by hand comes before one by rule."""
        return self._hand_pause if self._hand_pause is not None else self._rule_pause

    @property
    def of_training(self) -> Pause | None:
        """The pause in force for training jobs: the same, but that nobody uses the blocks is none for them."""
        pause = self.current
        return None if pause is not None and pause.why.code == UNUSED else pause

    @property
    def training_waits(self) -> str:
        """What jobs wait for while this node is paused for them, in words; nothing if it is not."""
        pause = self.of_training
        return "" if pause is None else f"waits for the end of the pause: {pause.why.text}"

    def view(self, rules: tuple[RuleView, ...] = (), next_text: str = "") -> CourtesyView:
        """Return the pause and the rules for the snapshot."""
        pause = self.current
        if pause is None:
            return CourtesyView(next_text=next_text, rules=rules)
        return CourtesyView(True, pause.by, pause.until_ms, next_text, rules)

    async def by_hand(self, for_s: float | None, *, patient: bool = False) -> None:
        """Pause until `resume`, or for `for_s` seconds."""
        until_ms = None if for_s is None else self._now_ms() + int(min(for_s, LONGEST_S) * 1000)
        self._ends_at = None
        await self._set_hand(pause_by_hand(until_ms, patient=patient))

    async def resume(self) -> None:
        """End a pause by hand; a rule that still applies keeps the node paused."""
        await self._set_hand(None)

    def by_rule(self, why: Reason) -> None:
        """Pause until `rule_over`."""
        if self._rule_pause is None or self._rule_pause.why != why:
            self._rule_pause = Pause("rule", why)
            self._changed()

    def rule_over(self) -> None:
        """End the pause by rule."""
        if self._rule_pause is not None:
            self._rule_pause = None
            self._changed()

    async def wait_change(self) -> None:
        """Return after the next change."""
        await self._change.wait()

    async def run(self) -> None:
        """End a pause by hand at its time; runs until cancelled.

        The wall clock counts, because it advances while the machine sleeps; but setting it back does not make a pause
        longer.
        """
        while True:
            until_ms = None if self._hand_pause is None else self._hand_pause.until_ms
            left_s = LOOK_S
            if until_ms is not None:
                left_s, now = (until_ms - self._now_ms()) / 1000, trio.current_time()
                self._ends_at = now + left_s if self._ends_at is None else self._ends_at
                left_s = min(left_s, self._ends_at - now)
            if left_s <= 0:
                await self._set_hand(None)
                continue
            with trio.move_on_after(min(left_s, LOOK_S)):
                await self._change.wait()

    async def _set_hand(self, pause: Pause | None) -> None:
        self._hand_pause = pause
        self._changed()
        try:
            async with self._writing:  # the last of several writers writes the latest state
                await trio.to_thread.run_sync(_write, self._path, self._hand_pause)
        except OSError as error:
            log.warning("%s cannot be written, so a restart forgets this pause: %s", self._path, error)

    def _changed(self) -> None:
        self._change.notify()
        self._on_change()


def _write(path: Path, pause: Pause | None) -> None:
    if pause is None:
        path.unlink(missing_ok=True)
        return
    kept = {"version": 1, "until_ms": pause.until_ms or 0, "patient": pause.patient}
    write_private(path, json.dumps(kept).encode() + b"\n")


def _read(path: Path) -> Pause | None:
    """Read the pause by hand of an earlier run; a damaged file counts as a pause, since hosting unasked is worse."""
    try:
        with open(path, "rb") as file:
            raw = file.read(_MAX_FILE_BYTES)
        fields = decode_object(raw, path.name, max_bytes=_MAX_FILE_BYTES)
        until_ms = fields.integer("until_ms", 0, _MAX_MS, 0)  # 0: no end
        return pause_by_hand(until_ms or None, patient=fields.flag("patient", False))
    except FileNotFoundError:
        return None
    except (OSError, RecordError) as error:
        log.warning("%s cannot be read, so this node stays paused until `shoal resume`: %s", path, error)
        return pause_by_hand(None)

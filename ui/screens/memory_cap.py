"""The memory cap (setting `max_vram`): how much memory hosting may take, moved with `+` and `-`, or typed."""

from __future__ import annotations

import re
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from app.api.client import PATIENT_S, Client
from app.snapshot.codec import prospects_from
from app.snapshot.views import DeviceView, Snapshot
from ui.draw.bars import bar
from ui.draw.coverage import loss_words
from ui.draw.numbers import memory, memory_of
from ui.draw.rows import Row, row, wrap
from ui.node_app import NodeApp
from ui.state.store import Store
from ui.widgets.dialogs import Dialog, key_line
from ui.widgets.panel import RowWidget

GB = 10**9
STEP_BYTES = GB // 2
_BAR = 40
_LONGEST = 12  # characters of a typed size


def moved(cap_bytes: int | None, device: DeviceView, steps: int) -> int:
    """The cap in bytes after `steps` steps, between 0 and the device's memory.

    Without a cap, the memory that is free or used by this node is the start. A cap between two steps is first rounded
    against the direction, so that one step never moves it by more than `STEP_BYTES`.
    """
    total = device.memory_total_bytes or 0
    start = cap_bytes if cap_bytes is not None else (device.memory_free_bytes or 0) + device.held_bytes
    whole = start // STEP_BYTES if steps > 0 or start % STEP_BYTES == 0 else start // STEP_BYTES + 1
    return max(0, min(total // STEP_BYTES, whole + steps)) * STEP_BYTES


def typed_bytes(text: str) -> int | None:
    """The size that was typed, in GB unless it ends in M or MB; None while it is not a size."""
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)([gm]?)b?", text)
    return None if found is None else round(float(found[1]) * (10**6 if found[2] == "m" else GB))


def cap_rows(cap_bytes: int | None, device: DeviceView) -> list[Row]:
    """The cap as a gauge, and its meaning."""
    total = device.memory_total_bytes or 0
    words = "no limit: what is free" if cap_bytes is None else memory_of(cap_bytes, total)
    share = None if cap_bytes is None or not total else min(1.0, cap_bytes / total)
    free = device.memory_free_bytes
    if cap_bytes == 0:
        meaning = row(("this node would host nothing", "warning"))
    elif cap_bytes is not None and free is not None and cap_bytes > free + device.held_bytes:
        meaning = row(("more than is free now", "warning"))
    else:
        full = f", {memory(device.reserved_bytes)} with a full cache"
        more = full if device.reserved_bytes > device.held_bytes else ""
        meaning = row((f"hosting takes {memory(device.held_bytes)} now{more}", "dim"))
    return [[*bar(share, _BAR, "mine"), (f"  {words}", "b")], meaning]


def change_cap(client: Client, cap_bytes: int | None) -> int | None:
    """Write the cap, which the node applies at once, and return the one in force: a flag of the node overrides it."""
    answer = client.set_config("max_vram", None if cap_bytes is None else str(cap_bytes))
    in_force = answer.get("value")
    return in_force if isinstance(in_force, int) else None


def offer_cap(app: NodeApp, known: Snapshot, steps: int) -> None:
    """Open the dialog with the cap already moved by `steps`, and apply what is chosen.

    A node that has hosted nothing since its start does not know its device yet: it is asked for it.
    """

    def opened(device: DeviceView | None) -> None:
        if device is None or not device.memory_total_bytes:
            app.complain("the device's memory is not known; the setting max_vram caps it")
            return
        start = device.limit_bytes if steps == 0 else moved(device.limit_bytes, device, steps)
        app.push_screen(CapDialog(app.store, device, start), chosen)

    def chosen(cap: tuple[int | None] | None) -> None:
        if cap is not None:
            app.ask(
                lambda client: change_cap(client, cap[0]), lambda in_force: app.say(_result_words(cap[0], in_force))
            )

    if known.hardware is not None:
        opened(known.hardware)
    else:
        path = "/control/prospects"
        app.say("examining the device")
        app.ask(
            lambda client: client.get(path, timeout_s=PATIENT_S), lambda answer: opened(prospects_from(answer).device)
        )


def _result_words(cap_bytes: int | None, in_force: int | None) -> str:
    if in_force != cap_bytes:
        return "the cap is saved; the running node was started with --max-vram, which still applies"
    if cap_bytes == 0:
        return "this node hosts nothing now; + raises the cap again"
    return "the cap is removed" if cap_bytes is None else f"the cap is {memory(cap_bytes)}"


class CapGauge(RowWidget):
    """The gauge of the cap."""

    def __init__(self, store: Store, device: DeviceView, cap_bytes: int | None) -> None:
        super().__init__(store, id="cap-gauge")
        self.device, self.cap_bytes = device, cap_bytes

    def rows(self, width: int, height: int) -> list[Row]:
        """The gauge and its meaning, with a warning if blocks may lose their only host."""
        rows = cap_rows(self.cap_bytes, self.device)
        lowered = self.cap_bytes is not None and self.cap_bytes < self.device.reserved_bytes
        warning = loss_words(self.store, "they no longer fit") if lowered else ""
        return [*rows, *wrap(warning, width, "warning")]


class CapDialog(Dialog[tuple[int | None] | None]):
    """Dialog that moves the cap, or takes it as typed; returns it in a tuple (None is no cap), or None if cancelled."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("plus,equals_sign,right", "move(1)", "more"),
        Binding("minus,left", "move(-1)", "less"),
        Binding("n", "set_no_limit", "no limit"),
        Binding("enter", "take", "apply"),
        Binding("escape", "cancel", "back"),
    ]

    def __init__(self, store: Store, device: DeviceView, cap_bytes: int | None) -> None:
        super().__init__()
        self._gauge = CapGauge(store, device, cap_bytes)
        self._typed = ""

    def compose(self) -> ComposeResult:
        """Gauge and keys."""
        with Vertical(classes="dialog") as box:
            box.border_title = "memory cap"
            yield self._gauge
            yield Static("", id="typed")
            yield Static(key_line(("+ -", "move"), ("n", "no limit"), ("⏎", "apply"), ("esc", "back")))

    def on_mount(self) -> None:
        """Say that a size can be typed."""
        self._show("")

    def on_key(self, event: events.Key) -> None:
        """Take a size as it is typed: a digit alone must not be a command, since it may begin a number."""
        if event.key == "backspace":
            self._show(self._typed[:-1])
        elif event.character and event.character.lower() in "0123456789.gmb" and len(self._typed) < _LONGEST:
            self._show(self._typed + event.character.lower())
        else:
            return
        event.stop()

    def _show(self, typed: str) -> None:
        """Show the gauge, and what is typed; a typed size moves the gauge."""
        self._typed = typed
        cap_bytes = typed_bytes(typed)
        if cap_bytes is not None:
            self._gauge.cap_bytes = cap_bytes
        line = (typed.upper(), "bold $mine") if typed else ("or type a size like 6GB or 500MB; 0 hosts nothing", "$dim")
        self.query_one("#typed", Static).update(Content.assemble(line))
        self._gauge.show()

    def action_move(self, steps: int) -> None:
        """Move the cap by some steps."""
        self._gauge.cap_bytes = moved(self._gauge.cap_bytes, self._gauge.device, steps)
        self._show("")

    def action_set_no_limit(self) -> None:
        """Remove the cap: hosting uses what is free."""
        self._gauge.cap_bytes = None
        self._show("")

    def action_take(self) -> None:
        """Close with this cap, unless something is typed that is not a size."""
        if self._typed and typed_bytes(self._typed) is None:
            words = f"{self._typed.upper()} is not a size: type it like 6GB or 500MB"
            self.query_one("#typed", Static).update(Content.styled(words, "$error"))
        else:
            self.close((self._gauge.cap_bytes,))

    def action_cancel(self) -> None:
        """Close without a change."""
        self.close(None)

"""The memory cap (setting `max_vram`): how much of the device's memory hosting may take, moved with `+` and `-`."""

from __future__ import annotations

import time
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from app.api.client import Client
from app.core.errors import AppError
from app.snapshot.views import DeviceView, Snapshot
from ui.draw.bars import bar
from ui.draw.numbers import gigabytes
from ui.draw.rows import Row, row
from ui.node_app import NodeApp
from ui.state.store import Store
from ui.widgets.dialogs import Dialog
from ui.widgets.panel import RowWidget

STEP_BYTES = 500 * 10**6
_DRAINED_S = 60.0  # the node hands sessions over within half of that
_POLL_S = 0.5
_BAR = 40


def moved(cap_bytes: int | None, device: DeviceView, steps: int) -> int:
    """The cap in bytes after `steps` steps, between 0 and the device's memory.

    Without a cap, the memory that is free or used by this node is the start. A cap between two steps is first rounded
    against the direction, so that one step never moves it by more than `STEP_BYTES`.
    """
    total = device.memory_total_bytes or 0
    held = device.weights_bytes + device.cache_bytes
    start = cap_bytes if cap_bytes is not None else (device.memory_free_bytes or 0) + held
    whole = start // STEP_BYTES if steps > 0 or start % STEP_BYTES == 0 else start // STEP_BYTES + 1
    return max(0, min(total // STEP_BYTES, whole + steps)) * STEP_BYTES


def cap_rows(cap_bytes: int | None, device: DeviceView) -> list[Row]:
    """The cap as a gauge, and its meaning."""
    total = device.memory_total_bytes or 0
    words = "no cap: what is free" if cap_bytes is None else f"{gigabytes(cap_bytes)} of {gigabytes(total)} GB"
    share = None if cap_bytes is None or not total else cap_bytes / total
    held = device.weights_bytes + device.cache_bytes
    free = device.memory_free_bytes
    if cap_bytes == 0:
        meaning = row(("this node would host nothing", "warning"))
    elif cap_bytes is not None and free is not None and cap_bytes > free + held:
        meaning = row(("more than is free now", "warning"))
    else:
        meaning = row((f"{gigabytes(held)} GB are in use now", "dim"))
    return [[*bar(share, _BAR, "mine"), (f"  {words}", "b")], meaning]


def change_cap(client: Client, cap_bytes: int | None) -> bool:
    """Write the cap and, if the node hosts, pause and resume it so that it loads blocks under the new cap.

    Returns True if hosting was restarted. Raises `AppError` if hosting does not pause within `_DRAINED_S`.
    """
    client.set_config("max_vram", None if cap_bytes is None else str(cap_bytes))
    if client.snapshot().state not in ("serving", "client", "loading"):
        return False
    client.post("/api/pause", {"for_s": None})
    deadline = time.monotonic() + _DRAINED_S
    while client.snapshot().state != "paused":
        if time.monotonic() > deadline:
            raise AppError("the cap is saved, but hosting did not pause in time: restart the node to apply it")
        time.sleep(_POLL_S)
    client.post("/api/resume", {})
    return True


def offer_cap(app: NodeApp, known: Snapshot, steps: int) -> None:
    """Open the dialog with the cap already moved by `steps`, and apply what is chosen."""
    device = known.hardware
    if device is None or not device.memory_total_bytes:
        app.complain("the device is not known yet; the setting max_vram caps its memory")
        return

    def chosen(cap: tuple[int | None] | None) -> None:
        if cap is not None:
            app.say("changing the cap: sessions move to other members, then hosting restarts")
            app.ask(
                lambda client: change_cap(client, cap[0]), lambda restarted: app.say(_result_words(cap[0], restarted))
            )

    app.push_screen(CapDialog(app.store, device, moved(device.limit_bytes, device, steps)), chosen)


def _result_words(cap_bytes: int | None, restarted: bool) -> str:
    words = "the cap is removed" if cap_bytes is None else f"the cap is {gigabytes(cap_bytes)} GB"
    return f"{words}; hosting restarts" if restarted else f"{words}; this applies as soon as the node hosts"


class CapGauge(RowWidget):
    """The gauge of the cap."""

    def __init__(self, store: Store, device: DeviceView, cap_bytes: int | None) -> None:
        super().__init__(store, id="cap-gauge")
        self.device, self.cap_bytes = device, cap_bytes

    def rows(self, width: int, height: int) -> list[Row]:
        """The gauge and its meaning."""
        return cap_rows(self.cap_bytes, self.device)


class CapDialog(Dialog[tuple[int | None] | None]):
    """Dialog that moves the cap; returns it in a tuple, since None means no cap, or None if cancelled."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("plus,equals_sign,right", "move(1)", "more"),
        Binding("minus,left", "move(-1)", "less"),
        Binding("0", "none", "no cap"),
        Binding("enter", "take", "apply"),
        Binding("escape", "cancel", "back"),
    ]

    def __init__(self, store: Store, device: DeviceView, cap_bytes: int | None) -> None:
        super().__init__()
        self._gauge = CapGauge(store, device, cap_bytes)

    def compose(self) -> ComposeResult:
        """Gauge and keys."""
        with Vertical(classes="dialog") as box:
            box.border_title = "memory cap"
            yield self._gauge
            keys = (("+ -", "bold $mine"), " move   ", ("0", "bold $mine"), " no cap   ", ("⏎", "bold $mine"))
            yield Static(Content.assemble(*keys, " apply   ", ("esc", "bold $mine"), " back"))

    def action_move(self, steps: int) -> None:
        """Move the cap by some steps."""
        self._gauge.cap_bytes = moved(self._gauge.cap_bytes, self._gauge.device, steps)
        self._gauge.show()

    def action_none(self) -> None:
        """Remove the cap: use what is free."""
        self._gauge.cap_bytes = None
        self._gauge.show()

    def action_take(self) -> None:
        """Close with this cap."""
        self.close((self._gauge.cap_bytes,))

    def action_cancel(self) -> None:
        """Close without a change."""
        self.close(None)

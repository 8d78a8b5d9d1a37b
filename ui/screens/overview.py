"""The overview tab: this node at a glance."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widget import Widget

from app.core.terminal_text import one_line
from app.snapshot.views import DeviceView, cache_words, weight_words
from ui.draw.bars import ceiling, plot
from ui.draw.coverage import MARGIN, legend, strip_rows, weak_note
from ui.draw.node import gauge_rows, given_rows, is_coming_up, session_rows, step_rows
from ui.draw.numbers import fine_rate, megabits
from ui.draw.rows import UNKNOWN, Row, beside, row, wrap
from ui.screens.frame import MainScreen
from ui.state.store import Store
from ui.widgets.following_list import EventsPanel
from ui.widgets.panel import Panel

_NO_SWARM = "In no swarm yet: press j to join one, c to create one."


class NodePanel(Panel):
    """Gauges of the device, speed and pause rules."""

    HELP = (
        "Memory is gold where it is this node's: solid for weights, hatched for sessions' caches, light for what is "
        "reserved for sessions to come; the mark is your cap. A dash means that this machine has no such sensor, or "
        "that nothing was measured yet."
    )

    def title(self) -> Row:
        """A fixed title."""
        return row("this node")

    def subtitle(self) -> Row:
        """The node's name, its device and how weights and cache are kept."""
        known = self.store.snapshot
        if known is None:
            return []
        device = known.hardware.name if known.hardware is not None else known.device or ""
        kept = known.hardware or DeviceView("")
        parts = (known.name, device, weight_words(kept.quantisation), cache_words(kept.cache))
        return row(" · ".join(one_line(part) for part in parts if part))

    def rows(self, width: int, height: int) -> list[Row]:
        """The gauges that fit."""
        return gauge_rows(self.store.snapshot, width, height)


class StartPanel(Panel):
    """The start-up steps; shown while one is not done, and after a failure until that is dismissed."""

    HELP = "What a node does before it serves, in this order. A failed step stays here until you dismiss it with x."

    def __init__(self, store: Store) -> None:
        super().__init__(store, id="start")
        self._dismissed: tuple[str, ...] = ()

    def title(self) -> Row:
        """Number of steps done, and in all."""
        steps = self.store.snapshot.steps if self.store.snapshot else ()
        done = sum(step.state == "done" for step in steps)
        return row("start-up  ", (f"{done} of {len(steps)}", "b"))

    def subtitle(self) -> Row:
        """The key that dismisses a failure."""
        return row("x dismiss") if self._failed() else []

    def wanted(self) -> bool:
        """True if a step is not done, or has failed and was not dismissed."""
        steps = self.store.snapshot.steps if self.store.snapshot else ()
        failed = self._failed()
        return is_coming_up(steps) if not failed else failed != self._dismissed

    def rows(self, width: int, height: int) -> list[Row]:
        """One row for each step."""
        return step_rows(self.store.snapshot.steps if self.store.snapshot else (), width)[:height]

    def dismiss(self) -> None:
        """Hide the failures that are shown; another failure shows the panel again."""
        self._dismissed = self._failed()

    @property
    def can_dismiss(self) -> bool:
        """True if a failure is shown."""
        return bool(self._failed()) and self._failed() != self._dismissed

    def _failed(self) -> tuple[str, ...]:
        steps = self.store.snapshot.steps if self.store.snapshot else ()
        return tuple(f"{step.key}: {step.detail}" for step in steps if step.state == "failed")


class ServedPanel(Panel):
    """Plot of the tokens per second that passed through this node's blocks."""

    HELP = "Tokens a second that passed through your blocks, over the last ten minutes."

    def title(self) -> Row:
        """The current rate."""
        known = self.store.snapshot
        now = fine_rate(None if known is None else known.flow.served_tokens_per_s)
        return row("served  ", (f"{now} tok/s", "b"))

    def subtitle(self) -> Row:
        """The highest rate of the plotted time."""
        values = [value for value in self.store.served if value is not None]
        return row("10 min · ", (f"peak {fine_rate(max(values))}", "b")) if values else row("10 min")

    def rows(self, width: int, height: int) -> list[Row]:
        """The plot, with a time axis if there is room."""
        values = list(self.store.served)
        top = ceiling(values)
        if height <= 3:
            return plot(values, width, height, top)
        shown = max(1, width - 6)
        minutes = "10 min ago" if len(values) >= 600 else f"{len(values)} s ago" if values else ""
        axis = (" " * 6 + minutes.ljust(max(len(minutes) + 1, shown - 3)) + "now", "dim")
        return [*plot(values, width, height - 1, top), row(axis)]


class CoveragePanel(Panel):
    """Holders and throughput of each block."""

    HELP = (
        "Each column is a block: its height is the tokens a second of all its holders, the digit is how many hold it. "
        "Your span is gold. A cell that stands for several blocks shows the worst of them."
    )

    def title(self) -> Row:
        """Number of blocks that have a holder, and in all."""
        cover = self.store.cover()
        if cover is None:
            return row("coverage")
        style = "b" if cover.held == len(cover.holders) else "b error"
        return row("coverage  ", (f"{cover.held} of {len(cover.holders)} blocks", style))

    def subtitle(self) -> Row:
        """The weak stretch."""
        cover = self.store.cover()
        return row(f"weakest {cover.weak.label}") if cover is not None and cover.weak is not None else []

    def rows(self, width: int, height: int) -> list[Row]:
        """The strip, with at least heights, digits and marks; or why there is none."""
        cover = self.store.cover()
        if cover is None:
            known = self.store.snapshot
            text = UNKNOWN if known is None else _NO_SWARM if known.swarm is None else "The model is not known yet."
            return wrap(text, width, "dim")
        narrow = width < 90
        rows = strip_rows(cover, width, max(1, height - 3), gutter=not narrow, margin=0 if narrow else MARGIN)
        if height < len(rows):
            rows = rows[1:]
        return beside(rows, [[], legend(), weak_note(cover)], width) if not narrow else rows[:height]


class SessionsPanel(Panel):
    """Sessions that this node serves or asks for."""

    HELP = (
        "Replies being generated through this node: yours in gold, the others by the name of the asker. An amber ↻2 "
        "means that two hops left or failed, and the reply continued."
    )

    def title(self) -> Row:
        """The number of sessions."""
        known = self.store.snapshot
        return row("sessions  ", (UNKNOWN if known is None else str(len(known.active_sessions)), "b"))

    def rows(self, width: int, height: int) -> list[Row]:
        """One row for each session."""
        store = self.store
        return session_rows(store.snapshot, store.speeds, store.peer_name, width, height)


class LinkPanel(Panel):
    """Plot of the network traffic."""

    HELP = "Bytes sent above the line and received below it, over the last ten minutes."

    def title(self) -> Row:
        """Current rates in both directions."""
        flow = self.store.snapshot.flow if self.store.snapshot else None
        up = megabits(flow.up_bytes_per_s if flow else None)
        down = megabits(flow.down_bytes_per_s if flow else None)
        return row("link  ", (f"▲ {up}  ▼ {down} Mbit/s", "b"))

    def subtitle(self) -> Row:
        """Number of peers by kind of link."""
        known = self.store.snapshot
        if known is None:
            return []
        kinds = [peer.link for peer in known.peers if peer.link]
        named = (("lan", "lan"), ("direct", "direct"), ("relay", "relayed"))
        return row(" · ".join(f"{kinds.count(kind)} {words}" for words, kind in named if kind in kinds))

    def rows(self, width: int, height: int) -> list[Row]:
        """Sent above the line, received below it."""
        half = max(1, (height - 1) // 2)
        up = [None if value is None else value * 8 / 1e6 for value in self.store.up]
        down = [None if value is None else value * 8 / 1e6 for value in self.store.down]
        top = ceiling([*up, *down], 0.1)
        above = plot(up, width, half, top)
        above[-1] = [(f"{top:g}".rjust(4) + "  " if half == 1 else " " * 6, "dim"), *above[-1][1:]]
        line = row(("   0  " + "─" * max(1, width - 6), "dim"))
        return [*above, line, *plot(down, width, half, top, down=True)][:height]


class TodayPanel(Panel):
    """Figures of today, and the model's files."""

    HELP = "Counted since midnight by this machine's clock. Weights are checked against the model's hashes."

    def title(self) -> Row:
        """A fixed title."""
        return row("today and weights")

    def rows(self, width: int, height: int) -> list[Row]:
        """Figures with their labels."""
        return given_rows(self.store.snapshot, self.store.now_ms(), width, height)


class Overview(MainScreen):
    """The screen of the overview."""

    TAB = "overview"
    AUTO_FOCUS = "#node"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("x", "dismiss_start", "dismiss")]
    HELP_TEXT = (
        "p pauses hosting or resumes it; d drains; i makes an invite; "
        "g goes to another saved swarm, if there is one; w says why."
    )

    def body(self) -> Iterable[Widget]:
        """Panels in three bands, and the events."""
        store = self.store
        yield StartPanel(store)
        yield Horizontal(NodePanel(store, id="node"), ServedPanel(store, id="served"), id="top")
        yield CoveragePanel(store, id="cover")
        yield Horizontal(
            SessionsPanel(store, id="sessions"), LinkPanel(store, id="link"), TodayPanel(store, id="today"), id="mid"
        )
        yield EventsPanel(store, id="events")

    def show(self) -> None:
        """Redraw from the store; while the start-up steps are shown, they take the place of the sessions."""
        for start in self.query(StartPanel):  # none while the app closes
            wanted = start.wanted()
            start.display = wanted
            if wanted and self.store.snapshot is not None:
                frame = 1 if self.has_class("-narrow") else 2
                start.styles.height = len(self.store.snapshot.steps) + frame
            self.set_class(wanted, "-starting")
        super().show()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """True unless the key would dismiss a failure and there is none."""
        return self.query_one(StartPanel).can_dismiss if action == "dismiss_start" else True

    def action_dismiss_start(self) -> None:
        """Hide a failed start-up step."""
        self.query_one(StartPanel).dismiss()
        self.show()
        self.refresh_bindings()

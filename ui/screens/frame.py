"""The frame of every tab: a line with the tabs and the swarm, a line with the node's state and its reason, the footer.

What lies between is composed by the screen of the tab (`MainScreen.body`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, cast

from textual.app import ComposeResult
from textual.events import Click, Key
from textual.screen import Screen
from textual.widget import Widget

from app.core.terminal_text import one_line
from ui.draw.numbers import plural
from ui.draw.rows import Row, fit, row, spread, text_of, width_of, wrap
from ui.draw.state_line import state_row, swarm_label
from ui.node_app import NodeApp
from ui.state.store import Store
from ui.widgets.following_list import FollowingList
from ui.widgets.footer import FooterKeys
from ui.widgets.panel import GrowingLine, RowWidget

TABS = ("overview", "swarm", "chat", "jobs", "logs", "settings")
NARROW = 100
_LABEL = 28  # cells for the swarm's name that the tabs leave free


class Head(RowWidget):
    """The first line: the tabs, and the active swarm at the right."""

    def __init__(self, store: Store, active: str) -> None:
        super().__init__(store, id="head")
        self._active = active

    def rows(self, width: int, height: int) -> list[Row]:
        """One line; where not all fits, the swarm loses its hash, and then the other tabs shrink to their digits."""
        narrow = width < NARROW
        left = self._tabs(narrow, named=True)
        for right in (self._right(narrow), self._right(narrow, with_hash=False)):
            if width_of(left) + min(width_of(right), _LABEL) + 1 <= width:
                break
        else:
            left, right = self._tabs(narrow, named=False), self._right(narrow)
        return [spread(left, fit(right, max(8, width - width_of(left) - 2)), width)]

    def _tabs(self, narrow: bool, *, named: bool) -> Row:
        tabs = row(" ", ("≋" if narrow else "≋ shoal", "b primary"), " " if narrow else "  ")
        for number, name in enumerate(cast(NodeApp, self.app).tabs, 1):
            active = name == self._active
            words = f" {number} {name} " if named or active else f" {number} "
            tabs.append((words, "b background on primary" if active else "dim"))
        return tabs

    def _right(self, narrow: bool, *, with_hash: bool = True) -> Row:
        known = self.store.snapshot
        label = swarm_label(known, with_hash=with_hash)
        if known is None or not label:
            return row(("no node" if known is None else "no swarm", "dim"), " ")
        right = row((label, "b"))
        if not narrow:
            right += row((" · ", "dim"), one_line(known.model)) if known.model else []
            right += row((f" · {plural(len(known.peers), 'peer')}", "dim"))
        return [*right, (" ", "")]

    def on_click(self, event: Click) -> None:
        """Switch to the clicked tab."""
        at = 0
        tabs = 0
        for text, style in self._rows[0] if self._rows else []:
            at += width_of([(text, style)])
            tabs += 1 if text.strip()[:1].isdigit() else 0
            if event.x < at:
                if text.strip()[:1].isdigit():
                    app = cast(NodeApp, self.app)
                    self.app.run_worker(app.action_go(app.tabs[tabs - 1]))
                return


class MarkerLine(RowWidget):
    """Says that what is shown is not a dashboard of one's own node: a recording, or a view without control."""

    def rows(self, width: int, height: int) -> list[Row]:
        """One line."""
        return [row((fit([(f"  {self.store.marker}", "")], width)[0][0].ljust(width), "b background on warning"))]


class StateLine(GrowingLine):
    """The node's state and its reason, which gets a second line if it does not fit on one."""

    def rows(self, width: int, height: int) -> list[Row]:
        """One line, and a second one if the reason does not fit."""
        store = self.store
        wide = width >= NARROW
        line = state_row(store.link, store.snapshot, store.now(), wide=wide, name_of=store.peer_name)
        if width_of(line) <= width:
            return [line]
        head, rest = line[:3], text_of(line[3:])
        first, *more = wrap(rest, width - width_of(head))
        indent = (" " * 3, "")
        return [[*head, *first], [indent, *row(" ".join(text_of(part) for part in more))]]


class MainScreen(Screen[None]):
    """The screen of a tab; subclasses compose what is between the state line and the footer."""

    TAB: ClassVar[str] = ""
    TYPES: ClassVar[bool] = False  # letters are text here, not commands to the node
    HELP_TEXT: ClassVar[str] = ""
    ALLOW_IN_MAXIMIZED_VIEW = "#keys"

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store

    @property
    def dashboard(self) -> NodeApp:
        """The app with its own type."""
        return cast(NodeApp, self.app)

    def compose(self) -> ComposeResult:
        """The frame around the tab's own widgets."""
        yield Head(self.store, self.TAB)
        if self.store.marker:
            yield MarkerLine(self.store, id="marker")
        yield StateLine(self.store, id="state")
        yield from self.body()
        yield FooterKeys(self.store)

    def body(self) -> Iterable[Widget]:
        """The tab's own widgets."""
        return ()

    def arrive(self) -> None:
        """Called whenever the tab is chosen."""

    def before_key(self, event: Key) -> None:
        """Called with every key while this screen is the one on top, before any widget gets it."""

    def show(self) -> None:
        """Redraw every widget from the store; unchanged lines are not repainted."""
        for painted in self.query(RowWidget):
            painted.show()
        for listed in self.query(FollowingList):
            listed.show()

    def on_screen_resume(self) -> None:
        """Redraw: the store has changed while another screen was shown."""
        self.show()

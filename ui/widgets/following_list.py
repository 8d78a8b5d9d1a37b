"""Lists that follow their end: the newest row stays in view until the user scrolls up.

While the list does not follow, its lower title counts the new rows.
"""

from __future__ import annotations

from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from ui.draw.events import happening_row
from ui.draw.rows import Row, row
from ui.state.store import Store
from ui.widgets.panel import strip_of, title_of

_RENAMED_APART_S = 5.0  # a peer can take another name many times a second, and all rows are made anew


class FollowingList(ScrollView, can_focus=True):
    """A scrolling list of rows that follows its end."""

    DEFAULT_CLASSES = "panel"
    HELP = ""

    def __init__(self, store: Store, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.store = store
        self.following = True
        self._lines: list[Row] = []
        self._seen = 0
        self._titles: object = None
        self._key: object = ()
        self._names: object = ()
        self._renamed_at = -_RENAMED_APART_S

    def lines(self) -> list[Row]:
        """All rows, the oldest first."""
        return []

    def key(self) -> object:
        """A value that the rows depend on, besides names of peers: the list calls `lines` again when it changes."""
        return None

    def title(self) -> Row:
        """The upper title."""
        return []

    def subtitle(self) -> Row:
        """The lower title: the number of rows added since the list stopped following."""
        fresh = len(self._lines) - self._seen
        return row(("+", "b mine"), (f"{fresh} new · end follows", "mine")) if not self.following and fresh > 0 else []

    def show(self) -> None:
        """Redraw from the store; if following, scroll to the end."""
        key, names = self.key(), self.store.names()
        is_renamed = names != self._names and self.store.now() - self._renamed_at >= _RENAMED_APART_S
        if key != self._key or is_renamed:
            if key == self._key:
                self._renamed_at = self.store.now()
            self._key, self._names = key, names
            self._lines = self.lines()
            self.virtual_size = Size(0, len(self._lines))
            self.refresh()
        if self.following:
            self._seen = len(self._lines)
            self.scroll_end(animate=False, immediate=True, x_axis=False)
        titles = (self.title(), self.subtitle(), self.app.theme)
        if titles != self._titles:
            self._titles = titles
            self.border_title = title_of(self.app.theme, self.title())
            self.border_subtitle = title_of(self.app.theme, self.subtitle())

    def on_mount(self) -> None:
        """Redraw whenever the theme changes."""
        self.watch(self.app, "theme", self._repaint, init=False)

    def _repaint(self) -> None:
        self.show()
        self.refresh()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Stop following when scrolled up, follow again at the end."""
        super().watch_scroll_y(old_value, new_value)
        self.following = round(new_value) >= round(self.max_scroll_y)
        if self.following:
            self._seen = len(self._lines)

    def on_resize(self) -> None:
        """Keep the end in view."""
        self.show()

    def render_line(self, y: int) -> Strip:
        """Paint one row."""
        index = y + round(self.scroll_y)
        line = self._lines[index] if 0 <= index < len(self._lines) else []
        return strip_of(self.app.theme, line, self.size.width, self.rich_style)


class EventsPanel(FollowingList):
    """Events of the node."""

    HELP = "What the node noticed and did, the newest last. Scroll up to stop following."

    def lines(self) -> list[Row]:
        """One row for each event."""
        if not self.store.notes:
            return [row(("Nothing yet.", "dim"))]
        return [happening_row(note, self.store.peer_name) for note in self.store.notes]

    def key(self) -> object:
        """The newest event."""
        return self.store.notes[-1] if self.store.notes else None

    def title(self) -> Row:
        """A fixed title."""
        return row("what happened")

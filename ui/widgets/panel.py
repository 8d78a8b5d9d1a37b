"""Base classes of the painted widgets: `RowWidget` paints rows, `Panel` adds a frame whose titles carry figures.

Subclasses return rows for their size; only lines that changed are repainted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import zip_longest

from rich.segment import Segment
from rich.style import Style
from textual.content import Content
from textual.events import Resize
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from ui.draw.rows import Row, fit, width_of
from ui.draw.theme import style_of
from ui.state.store import Store


def strip_of(theme: str, line: Row, width: int, base: Style) -> Strip:
    """Paint a row on top of the widget's style; the strip is complete, since each further operation would copy it."""
    fitted = fit(line, width)
    segments = [Segment(text, based_style(theme, words, base)) for text, words in fitted if text]
    room = width - width_of(fitted)
    if room > 0:
        segments.append(Segment(" " * room, base))
    return Strip(segments, width)


@lru_cache(maxsize=4096)
def based_style(theme: str, words: str, base: Style) -> Style:
    """Style of the words on top of a widget's style; cached."""
    return base + style_of(theme, words)


def changed_lines(before: Sequence[object], after: Sequence[object], width: int) -> list[Region]:
    """Regions of the lines that differ."""
    pairs = zip_longest(before, after)
    return [Region(0, y, width, 1) for y, (old, new) in enumerate(pairs) if old != new]


def title_of(theme: str, line: Row) -> Content:
    """A row as the title of a frame; never parsed as markup, since it may contain a peer's text."""
    parts: list[str | Content | tuple[str, str]] = []
    for text, words in line:
        style = style_of(theme, words)
        colour = style.color.name if style.color is not None else ""
        parts.append((text, f"{'bold ' if style.bold else ''}{colour}".strip()))
    return Content.assemble(*parts)


class RowWidget(Widget):
    """A widget that paints rows."""

    def __init__(self, store: Store, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self.store = store
        self._rows: list[Row] = []
        self._drawn: object = None

    def rows(self, width: int, height: int) -> list[Row]:
        """The rows for this size."""
        return []

    def show(self) -> None:
        """Redraw from the store; only changed lines are repainted."""
        width, height = self.size
        rows = self.rows(width, height) if width and height else []
        changed = changed_lines(self._rows, rows, width)
        self._rows = rows
        if changed:
            self.refresh(*changed)

    def on_mount(self) -> None:
        """Redraw whenever the theme changes."""
        self.watch(self.app, "theme", self._repaint, init=False)

    def _repaint(self) -> None:
        self._drawn = None
        self.show()
        self.refresh()

    def on_resize(self, event: Resize) -> None:
        """Redraw for the new size."""
        self.show()

    def render_line(self, y: int) -> Strip:
        """Paint one row."""
        width = self.size.width
        line = self._rows[y] if y < len(self._rows) else []
        return strip_of(self.app.theme, line, width, self.rich_style)


class GrowingLine(RowWidget):
    """A line that becomes two while its rows need them."""

    _lines = 1

    def show(self) -> None:
        """Redraw from the store, and set the height to one line or two."""
        lines = len(self.rows(self.size.width, 2)) if self.size.width else 1
        if lines != self._lines:
            self._lines = lines
            self.styles.height = lines
        super().show()


class Panel(RowWidget, can_focus=True):
    """A framed widget that can take the focus; its titles carry figures."""

    DEFAULT_CLASSES = "panel"
    HELP = ""

    def title(self) -> Row:
        """The upper title."""
        return []

    def subtitle(self) -> Row:
        """The lower title."""
        return []

    def show(self) -> None:
        """Redraw titles and rows from the store."""
        titles = (self.title(), self.subtitle(), self.app.theme)
        if titles != self._drawn:
            self._drawn = titles
            self.border_title = title_of(self.app.theme, titles[0])
            self.border_subtitle = title_of(self.app.theme, titles[1])
        super().show()

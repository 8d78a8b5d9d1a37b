"""A line that filters rows: it is shown while it is typed in or has text."""

from __future__ import annotations

from textual import events
from textual.widget import Widget
from textual.widgets import Input


class FilterField(Input):
    """The filter of a tab; `rows` is the widget whose rows it filters."""

    def open(self) -> None:
        """Show and focus it."""
        self.screen.set_focus(self.add_class("-open"))

    def close(self, rows: Widget) -> None:
        """Focus the rows; a filter with text stays in view."""
        self.set_class(bool(self.value), "-open")
        rows.focus()

    def is_cleared_by(self, event: events.Key, rows: Widget) -> bool:
        """True for escape in the field, and in rows that it filters."""
        return event.key == "escape" and (self.has_focus or (rows.has_focus and bool(self.value)))

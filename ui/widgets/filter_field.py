"""A line that filters rows: it is shown while it is typed in or has text."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.widget import Widget

from ui.widgets.text_field import TextField


class FilterField(TextField):
    """The filter of a tab; `rows` is the widget whose rows it filters."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "submit", "keep", key_display="⏎"),
        Binding("escape", "clear", "clear", key_display="esc"),
    ]

    def open(self) -> None:
        """Show and focus it."""
        self.screen.set_focus(self.add_class("-open"))

    def close(self, rows: Widget) -> None:
        """Focus the rows; a filter with text stays in view."""
        self.set_class(bool(self.value), "-open")
        rows.focus()

    def action_clear(self) -> None:
        """Empty it, and go back to the rows."""
        self.value = ""
        self.post_message(self.Submitted(self, ""))

    def is_cleared_by(self, event: events.Key, rows: Widget) -> bool:
        """True for escape in rows that it filters."""
        return event.key == "escape" and rows.has_focus and bool(self.value)

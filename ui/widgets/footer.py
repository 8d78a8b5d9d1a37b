"""The footer: the keys that work now, as many as fit.

It is one painted line, because Textual's footer of one widget per key costs more than the rest of a screen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from textual.events import Click
from textual.screen import Screen

from ui.draw.rows import Row, row, spread, width_of
from ui.state.store import Store
from ui.widgets.panel import RowWidget

# Keys that are left out first if not all fit, in this order; help (`?`) still lists them.
_LEFT_OUT_FIRST = ("theme", "zoom", "jump", "why", "create", "sampling", "cap", "sort", "export", "invite", "list")


class FooterKey(NamedTuple):
    """One key of the footer."""

    key: str  # Textual name
    shown: str
    words: str


class FooterKeys(RowWidget):
    """The keys that work now, and the palette at the right; a click presses a key."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, id="keys")
        self._keys: list[FooterKey] = []
        self._palette: FooterKey | None = None

    def on_mount(self) -> None:
        """Update the line whenever the active bindings change."""
        super().on_mount()
        self.screen.bindings_updated_signal.subscribe(self, self._changed)

    def _changed(self, screen: Screen[object]) -> None:
        if not self.is_attached:
            return
        active = screen.active_bindings
        shown: dict[str, FooterKey] = {}
        for _, binding, enabled, _ in active.values():
            if binding.show and enabled:
                key = FooterKey(binding.key, self.app.get_key_display(binding), binding.description)
                shown.setdefault(binding.description, key)
        self._keys = list(shown.values())
        palette = active.get(self.app.COMMAND_PALETTE_BINDING)
        self._palette = None if palette is None else FooterKey(palette.binding.key, "^p", "palette")
        self.show()

    def rows(self, width: int, height: int) -> list[Row]:
        """One line."""
        right = row(("▏", "line"), *_words(self._palette), " ") if self._palette is not None else []
        left: Row = []
        for key in fitting(self._keys, width - width_of(right) - 1):
            left += row("  " if left else "", *_words(key))
        return [spread(left, right, width)]

    def on_click(self, event: Click) -> None:
        """Press the clicked key."""
        line, at = self._rows[0] if self._rows else [], 0
        pressed = ""
        known = {key.shown: key for key in (*self._keys, *([self._palette] if self._palette else []))}
        for text, style in line:
            at += width_of([(text, style)])
            pressed = text if text in known and "mine" in style else pressed
            if event.x < at:
                if text.strip() and pressed:
                    self.app.simulate_key(known[pressed].key)
                return


def fitting(keys: Sequence[FooterKey], width: int) -> list[FooterKey]:
    """The keys that fit into `width` cells; the least important ones are left out first."""
    kept = list(keys)
    while kept and sum(width_of([*_words(key), ("  ", "")]) for key in kept) - 2 > width:
        late = next((word for word in _LEFT_OUT_FIRST if any(key.words == word for key in kept)), None)
        kept.remove(next((key for key in kept if key.words == late), kept[-1]))
    return kept


def _words(key: FooterKey) -> Row:
    return row((key.shown, "b mine"), (f" {key.words}", "dim"))

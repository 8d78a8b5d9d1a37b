"""Events of the node as rows of text."""

from __future__ import annotations

from collections.abc import Callable

from app.core.terminal_text import one_line, with_names
from ui.draw.numbers import time_of_day
from ui.draw.rows import Row, row, tidy
from ui.state.store import Event

_SIGNS = {
    "state": ("●", "primary"),
    "swarm": ("●", "success"),
    "peer": ("●", "success"),
    "setting": ("·", "dim"),
    "problem": ("▲", "warning"),
    "knock": ("·", "dim"),
    "request": ("?", "warning"),
}
DECIDES = "i on the overview lets it in or refuses it"


def happening_row(event: Event, name_of: Callable[[str], str]) -> Row:
    """Row of one event: time, sign of its kind, and text with peer ids replaced by names."""
    sign, style = _SIGNS.get(event.kind, ("·", "dim"))
    text = tidy(with_names(event.text, name_of))
    if event.kind == "request":
        text = f"{text.partition(': `shoal ')[0]}: {DECIDES}"
    return row((time_of_day(event.at_ms), "dim"), " ", (sign, style), " ", one_line(text))

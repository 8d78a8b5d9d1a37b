"""What happened, in sentences: one row each, the newest at the end."""

from __future__ import annotations

import re
from collections.abc import Callable

from app.core.terminal_text import one_line
from ui.draw.numbers import time_of_day
from ui.draw.rows import Row, row
from ui.state.store import Event

_PEER_ID = re.compile(r"12D3KooW[1-9A-HJ-NP-Za-km-z]{44}")
_SIGNS = {
    "state": ("●", "primary"),
    "swarm": ("●", "success"),
    "peer": ("●", "success"),
    "setting": ("·", "dim"),
    "problem": ("▲", "warning"),
    "knock": ("▲", "warning"),
}


def happening_row(happening: Event, name_of: Callable[[str], str]) -> Row:
    """One thing that happened; peers by their names."""
    sign, style = _SIGNS.get(happening.kind, ("·", "dim"))
    text = _PEER_ID.sub(lambda found: name_of(found.group()), happening.text)
    return row((time_of_day(happening.at_ms), "dim"), " ", (sign, style), " ", one_line(text))

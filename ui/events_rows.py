"""What happened, in sentences: one row each, the newest at the end."""

from __future__ import annotations

from ui.figures import time_of_day
from ui.ink import Row, clean, row
from ui.store import Happening

_SIGNS = {
    "state": ("●", "primary"),
    "swarm": ("●", "success"),
    "peer": ("●", "success"),
    "setting": ("·", "dim"),
    "problem": ("▲", "warning"),
}


def happening_row(happening: Happening) -> Row:
    """One thing that happened."""
    sign, style = _SIGNS.get(happening.kind, ("·", "dim"))
    return row((time_of_day(happening.at_ms), "dim"), " ", (sign, style), " ", clean(happening.text))

"""A dashboard without a node, and its screen as text and as a map of colours."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rich.style import Style
from textual.app import App
from textual.pilot import Pilot

from tests.ui.fixed import Clock, fill
from ui.dashboard import Dashboard
from ui.palette import colours
from ui.store import Store

FIXTURES = Path(__file__).parent / "screens"
KEYS = {"overview": "1", "swarm": "2", "chat": "3", "logs": "4", "settings": "5"}
# The letter of each style word in a map of colours; what has no word of its own is a dot.
LETTERS = {
    "mine": "m",
    "warning": "w",
    "error": "e",
    "success": "s",
    "primary": "p",
    "secondary": "c",
    "dim": "d",
    "heat2": "2",
    "heat3": "3",
    "trackfg": "t",
    "line": "l",
    "background": "b",
}


class StillDashboard(Dashboard):
    """A dashboard whose figures move only when a test moves them."""

    def _tick(self) -> None:
        """Time stands still."""


@asynccontextmanager
async def still(size: tuple[int, int], state: str = "healthy") -> AsyncIterator[tuple[StillDashboard, Pilot[None]]]:
    """A dashboard that shows a fixed snapshot."""
    store = Store(Clock())
    fill(store, state)
    app = StillDashboard(None, store=store)
    app.asked_first_run = True
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        yield app, pilot


async def settle(app: Dashboard, pilot: Pilot[None]) -> None:
    """Let the screen look at its store, and be painted."""
    await pilot.pause()
    app.show_now()
    await pilot.pause()


def text_of_screen(app: App[None]) -> str:
    """What a person sees, without colours."""
    strips = app.screen._compositor.render_strips()
    lines = ["".join(segment.text for segment in strip).rstrip() for strip in strips]
    return "\n".join(lines) + "\n"


def colours_of_screen(app: App[None]) -> str:
    """One letter for the colour of each character that is drawn."""
    letters = {value.lower(): LETTERS[name] for name, value in colours(app.theme).items() if name in LETTERS}
    lines = []
    for strip in app.screen._compositor.render_strips():
        line = ""
        for segment in strip:
            line += "".join(" " if c == " " else _letter(segment.style, letters) for c in segment.text)
        lines.append(line.rstrip())
    return "\n".join(lines) + "\n"


def _letter(style: Style | None, letters: dict[str, str]) -> str:
    if style is None or style.color is None or style.color.triplet is None:
        return "."
    return letters.get(style.color.triplet.hex.lower(), ".")

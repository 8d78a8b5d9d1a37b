"""A dashboard without a node, and its screen as text, and as text with the colours and the style of every cell."""

from __future__ import annotations

import string
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import groupby
from pathlib import Path

from rich.style import Style
from textual.app import App
from textual.pilot import Pilot

from tests.ui.fixed import Clock, fill
from ui.app import Dashboard
from ui.state.store import Store

FIXTURES = Path(__file__).parent / "screens"
KEYS = {"overview": "1", "swarm": "2", "chat": "3", "jobs": "4", "logs": "5", "settings": "6"}
SIGNS = string.ascii_letters + string.digits + "".join(c for c in string.punctuation if c not in "=|")
Look = list[tuple[str, str]]  # (text, style) of a line, one after another


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
    app.show_now()
    await pilot.pause()


def text_of_screen(app: App[None]) -> str:
    """What a person sees, without colours."""
    strips = app.screen._compositor.render_strips()
    lines = ["".join(segment.text for segment in strip).rstrip() for strip in strips]
    return "\n".join(lines) + "\n"


def look_of_screen(app: App[None]) -> list[Look]:
    """Every cell as it is painted: its character, its two colours and its style."""
    lines = []
    for strip in app.screen._compositor.render_strips():
        lines.append([(segment.text, _style_words(segment.style)) for segment in strip if segment.text])
    return lines


def _style_words(style: Style | None) -> str:
    if style is None:
        return "none"
    colours = [None if colour is None else colour.triplet for colour in (style.color, style.bgcolor)]
    front, back = ("default" if triplet is None else triplet.hex for triplet in colours)
    flags = [name for name in ("bold", "dim", "italic", "underline", "strike", "reverse") if getattr(style, name)]
    return " ".join([front, "on", back, *flags])


def page_of(looks: Mapping[str, list[Look]]) -> str:
    """The same screen in several themes as one text: its characters, then a sign for the styles of each run of cells.

    A sign stands for one style in each theme; what it stands for is listed below.
    """
    texts = {
        theme: "\n".join("".join(text for text, _ in line).rstrip() for line in look) for theme, look in looks.items()
    }
    text, *others = texts.values()
    for other in others:
        assert other.split("\n") == text.split("\n"), "a theme changes nothing but colours"
    signs: dict[tuple[str, ...], str] = {}
    runs = []
    for lines in zip(*looks.values(), strict=True):
        cells = zip(*([style for text, style in line for _ in text] for line in lines), strict=True)
        coded = (signs.setdefault(styles, _sign(len(signs))) for styles in cells)
        runs.append(" ".join(f"{sign}{sum(1 for _ in group)}" for sign, group in groupby(coded)))
    legend = [f"{sign} = {' | '.join(styles)}" for styles, sign in signs.items()]
    return "\n".join([text, f"--- runs of styles: {' | '.join(looks)}", *runs, "---", *legend, ""])


def _sign(number: int) -> str:
    return SIGNS[number] if number < len(SIGNS) else f"<{number}>"

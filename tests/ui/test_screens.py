"""Every screen from fixed snapshots, compared with what was looked at and found good (`tests/ui/screens`).

`SHOAL_UPDATE_SCREENS=1` writes them anew: look at the difference before it is kept.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import cast

import pytest
from textual.pilot import Pilot

from app.snapshot.views import DeviceView, FitView, GuestView, OfferView, ProspectsView
from tests.ui.fixed import JOBS, SNAPSHOTS, TRAINING, fill
from tests.ui.rendering import (
    FIXTURES,
    KEYS,
    Look,
    StillDashboard,
    look_of_screen,
    page_of,
    settle,
    still,
    text_of_screen,
)
from ui.draw import theme as palette
from ui.draw.node import now_ms
from ui.draw.theme import DAY, NIGHT
from ui.screens.first_run import FirstRun
from ui.screens.invite import InviteScreen
from ui.screens.jobs import Jobs
from ui.screens.logs import Logs
from ui.screens.settings import SettingsScreen
from ui.state.conversations import Message
from ui.state.store import LogRow
from ui.widgets import panel
from ui.widgets.ask_box import AskBox
from ui.widgets.transcript import Transcript

SIZES = ((80, 24), (160, 48))
THEMES_SEEN = (NIGHT, DAY)
CONFIG = [
    {
        "name": "max_vram",
        "value": 7 * 10**9,
        "default": None,
        "origin": "file",
        "live": False,
        "help": "The most memory that hosting may take.",
        "expected": "a size like 6GB or 500MB",
    },
    {
        "name": "relay",
        "value": True,
        "default": True,
        "origin": "default",
        "live": True,
        "help": "Pass on traffic for nodes behind a NAT.",
        "expected": "true or false",
    },
]
AT_MS = 1_700_000_000_000
SAID = [
    Message(1, "user", "Three short novels for May?", AT_MS, {}),
    Message(
        2,
        "assistant",
        "Three that read in an *evening*:\n\n| novel | pages |\n|---|---|\n| **Train Dreams** | 116 |\n",
        AT_MS,
        {"token_ids": [1] * 86, "ttft_s": 1.9, "tokens_per_s": 4.6, "route": [{"peer": "x"}] * 6, "recoveries": 1},
    ),
]


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Times of day are the same on every machine."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


class Gallery:
    """What each screen looked like, theme by theme; compared with the kept files once all themes were seen."""

    def __init__(self, size: tuple[int, int]) -> None:
        self._size = f"{size[0]}x{size[1]}"
        self._seen: dict[str, dict[str, list[Look]]] = {}

    def take(self, app: StillDashboard, name: str) -> None:
        """A picture of what is on the screen now."""
        self._seen.setdefault(f"{name}-{self._size}", {})[app.theme] = look_of_screen(app)

    def compare(self) -> None:
        """With the kept files, or keep them."""
        different = []
        for name, looks in self._seen.items():
            assert list(looks) == [theme.name for theme in THEMES_SEEN]
            page, path = page_of(looks), FIXTURES / f"{name}.txt"
            if os.environ.get("SHOAL_UPDATE_SCREENS"):
                path.parent.mkdir(exist_ok=True)
                path.write_text(page, "utf-8")
            if page != path.read_text("utf-8"):
                different.append(name)
        assert different == []


def focus_first(app: StillDashboard) -> None:
    """Where a person is who has just come to the screen."""
    app.screen.set_focus(app.screen.query(app.screen.AUTO_FOCUS or ".panel").first())


async def in_each_theme(app: StillDashboard, pilot: Pilot[None]) -> AsyncIterator[None]:
    """By night, then by day."""
    for theme in THEMES_SEEN:
        app.theme = theme.name
        await settle(app, pilot)
        yield
    app.theme = NIGHT.name


async def fill_screen(app: StillDashboard) -> None:
    """What the other screens get from the node, given by hand."""
    if isinstance(app.screen, Logs):
        app.store.log(LogRow(AT_MS, "info", "shoal.node", "this node's swarm is reading-club"))
        app.store.log(LogRow(AT_MS + 1000, "warning", "shoal.p2p", "mako did not answer \x1b[2Jin time"))
    if isinstance(app.screen, SettingsScreen):
        app.screen.take(CONFIG)
    if isinstance(app.screen, Jobs) and app.store.snapshot is not None:
        app.store.take_jobs(JOBS if app.store.snapshot.swarm is not None else ())
    for box in app.screen.query(AskBox):
        box.cursor_blink = False  # or it would be seen now and then
    for said in app.screen.query(Transcript):
        if not said.query(".ask"):
            await said.show_messages(SAID)


@pytest.mark.parametrize(
    "size", [SIZES[0], pytest.param(SIZES[1], marks=pytest.mark.soak)], ids=lambda size: f"{size[0]}x{size[1]}"
)
def test_every_screen_shows_every_state(size: tuple[int, int]) -> None:
    gallery = Gallery(size)

    async def look() -> None:
        async with still(size) as (app, pilot):
            async for _ in in_each_theme(app, pilot):
                for screen, key in KEYS.items():
                    await pilot.press("escape", "escape", key)
                    focus_first(app)
                    for state in SNAPSHOTS:
                        fill(app.store, state)
                        await fill_screen(app)
                        await settle(app, pilot)
                        gallery.take(app, f"{screen}-{state}")

    asyncio.run(look())
    gallery.compare()


PROSPECTS = ProspectsView(
    (
        OfferView("starter", "SmolLM2-135M-Instruct", FitView(30, 30), 93 * 10**6, alone_tokens_per_s=25.4),
        OfferView(
            "reading-club#1a2b3c4d1a2b3c4d1a2b",
            "a llama of 70.6 billion weights",
            FitView(12, 80, 150 * 10**9, True),
            140 * 10**9,
            nearby="lan",
            members=14,
            tokens_per_s=4.5,
        ),
        OfferView("birds#5e6f7a8b5e6f7a8b5e6f", "Llama-3.2-3B", FitView(20, 28, 2 * 10**9), 0, alone_tokens_per_s=9.2),
        OfferView("far#9c0d1e2f9c0d1e2f9c0d"),
    ),
    DeviceView("cuda:0", "RTX 3060", 12 * 10**9, 4 * 10**9),
    77 * 10**9,
    360.0 * 10**9,
)


@pytest.mark.parametrize(
    "size", [SIZES[0], pytest.param(SIZES[1], marks=pytest.mark.soak)], ids=lambda size: f"{size[0]}x{size[1]}"
)
def test_the_dialogs_show_what_is_known(size: tuple[int, int]) -> None:
    gallery = Gallery(size)

    async def look() -> None:
        async with still(size) as (app, pilot):
            async for _ in in_each_theme(app, pilot):
                fill(app.store, "healthy")
                await look_at_windows(app, pilot, gallery)
                await look_at_training(app, pilot, gallery)
                fill(app.store, "empty")
                await look_at_first_run(app, pilot, gallery)

    asyncio.run(look())
    gallery.compare()


async def look_at_windows(app: StillDashboard, pilot: Pilot[None], gallery: Gallery) -> None:
    """What keys open over the overview."""
    focus_first(app)
    for name, key in (("help", "question_mark"), ("why", "w"), ("drain", "d"), ("cap", "plus"), ("jump", "ctrl+o")):
        await pilot.press(key)
        await settle(app, pilot)
        gallery.take(app, name)
        await pilot.press("escape")
    await pilot.press("i")
    await settle(app, pilot)
    cast(InviteScreen, app.screen).take({"invite": "shoal:" + "a2b3c4d5" * 8, "name": "reading-club", "private": True})
    await settle(app, pilot)
    gallery.take(app, "invite")
    limits = {"id": "1a2b3c4d", "uses": 1, "expires_at_ms": now_ms() + 5_400_000, "approve": True}
    known = app.store.snapshot
    assert known is not None
    app.store.take(replace(known, requests=(GuestView("12D3KooWRequest", "ann"),)))
    cast(InviteScreen, app.screen).take({"invite": "shoal:" + "a2b3" * 9, "name": "reading-club", "limits": limits})
    await settle(app, pilot)
    gallery.take(app, "invite-limited")
    app.store.take(known)
    await pilot.press("escape", "tab", "z")
    await settle(app, pilot)
    gallery.take(app, "zoom")
    await pilot.press("z")


async def look_at_training(app: StillDashboard, pilot: Pilot[None], gallery: Gallery) -> None:
    """A training job among others, and all that is known about it."""
    await pilot.press(KEYS["jobs"])
    focus_first(app)
    app.store.take_jobs((TRAINING, *JOBS))
    await settle(app, pilot)
    gallery.take(app, "training")
    await pilot.press("enter")
    await settle(app, pilot)
    gallery.take(app, "training-facts")
    await pilot.press("escape", KEYS["overview"])


async def look_at_first_run(app: StillDashboard, pilot: Pilot[None], gallery: Gallery) -> None:
    """Its three steps."""
    first = FirstRun(app.store)
    await app.push_screen(first)
    first.state.pauses = {"pause_busy": False, "pause_on_battery": True}
    first.state.public = False
    for step in range(3):
        first.state.step, first.state.target, first.state.trouble = step, "birds#5e6f7a8b5e6f7a8b5e6f", ""
        if step == 0:
            await settle(app, pilot)
            gallery.take(app, "first-unknown")
            first.state.take(PROSPECTS)
        await settle(app, pilot)
        gallery.take(app, f"first{step}")
    first.close()
    await settle(app, pilot)


def test_another_colour_or_style_is_another_picture() -> None:
    line = [("serving ", "#84c98b on #0e1621"), ("you", "#f0c65a on #0e1621 bold")]
    page = page_of({"night": [line]})
    assert page_of({"night": [[("serving ", "#84c98c on #0e1621"), line[1]]]}) != page
    assert page_of({"night": [[line[0], ("you", "#f0c65a on #0e1621")]]}) != page
    assert page_of({"night": [[line[0], ("yon", line[1][1])]]}) != page


def test_a_changed_theme_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    gallery = Gallery((80, 24))
    monkeypatch.setitem(palette.NIGHT.variables, "dim", "#7c8ea4")
    for cached in (palette.style_of, panel.based_style):
        cached.cache_clear()

    async def look() -> None:
        async with still((80, 24)) as (app, pilot):
            async for _ in in_each_theme(app, pilot):
                gallery.take(app, "overview-healthy")

    monkeypatch.delenv("SHOAL_UPDATE_SCREENS", raising=False)
    try:
        asyncio.run(look())
        with pytest.raises(AssertionError, match="overview-healthy-80x24"):
            gallery.compare()
    finally:
        monkeypatch.undo()
        for cached in (palette.style_of, panel.based_style):
            cached.cache_clear()


@pytest.mark.parametrize("screen", ["overview", "swarm"])
def test_without_colours_nothing_is_lost(screen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    async def look() -> None:
        async with still((160, 48)) as (app, pilot):
            await pilot.press(KEYS[screen])
            for state in ("healthy", "hole", "paused", "away"):
                fill(app.store, state)
                await settle(app, pilot)
                kept = (FIXTURES / f"{screen}-{state}-160x48.txt").read_text("utf-8").partition("---")[0]
                assert text_of_screen(app) == kept, state
                styles = {style for line in look_of_screen(app) for _, style in line}
                assert all(_is_grey(colour) for style in styles for colour in style.split() if colour[0] == "#")

    asyncio.run(look())


def _is_grey(colour: str) -> bool:
    return colour[1:3] == colour[3:5] == colour[5:7]

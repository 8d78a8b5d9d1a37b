"""Every screen from fixed snapshots, compared with what was looked at and found good (`tests/ui/screens`).

`SHOAL_UPDATE_SCREENS=1` writes them anew: look at the difference before it is kept.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from typing import cast

import pytest

from app.snapshot import DeviceView, FitView, OfferView, ProspectsView
from tests.ui.fixed import SNAPSHOTS, fill
from tests.ui.rendering import FIXTURES, KEYS, StillDashboard, colours_of_screen, settle, still, text_of_screen
from ui.conversations import Message
from ui.first_run import FirstRun
from ui.invite import InviteScreen
from ui.logs import Logs
from ui.settings import SettingsScreen
from ui.store import LogRow
from ui.transcript import Transcript

SIZES = ((80, 24), (160, 48))
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


def compare(name: str, seen: str) -> None:
    """With the kept file, or keep it."""
    path = FIXTURES / f"{name}.txt"
    if os.environ.get("SHOAL_UPDATE_SCREENS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(seen, "utf-8")
    assert seen == path.read_text("utf-8"), name


async def fill_screen(app: StillDashboard) -> None:
    """What the other screens get from the node, given by hand."""
    if isinstance(app.screen, Logs):
        app.store.log(LogRow(AT_MS, "info", "shoal.node", "this node's swarm is reading-club"))
        app.store.log(LogRow(AT_MS + 1000, "warning", "shoal.p2p", "mako did not answer \x1b[2Jin time"))
    if isinstance(app.screen, SettingsScreen):
        app.screen.take(CONFIG)
    for said in app.screen.query(Transcript):
        await said.show_messages(SAID)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_the_main_screens_show_what_is_known(size: tuple[int, int]) -> None:
    async def look() -> None:
        async with still(size) as (app, pilot):
            for screen in ("overview", "swarm"):
                await pilot.press(KEYS[screen])
                for state in SNAPSHOTS:
                    fill(app.store, state)
                    await settle(app, pilot)
                    compare(f"{screen}-{state}-{size[0]}x{size[1]}", text_of_screen(app))

    asyncio.run(look())


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_the_other_screens_show_what_is_known(size: tuple[int, int]) -> None:
    async def look() -> None:
        async with still(size) as (app, pilot):
            for screen in ("chat", "logs", "settings"):
                await pilot.press("escape", "escape", KEYS[screen])
                for state in ("healthy", "away", "wide"):
                    fill(app.store, state)
                    await settle(app, pilot)
                    await fill_screen(app)
                    await settle(app, pilot)
                    compare(f"{screen}-{state}-{size[0]}x{size[1]}", text_of_screen(app))

    asyncio.run(look())


PROSPECTS = ProspectsView(
    (
        OfferView("starter", "SmolLM2-135M-Instruct", FitView(30, 30), 93 * 10**6),
        OfferView("reading-club#1a2b3c4d", "Llama-3.1-70B", FitView(12, 80, 150 * 10**9, True), 5 * 10**9),
        OfferView("birds#5e6f7a8b", "Llama-3.2-3B", FitView(20, 28, 2 * 10**9), 0),
        OfferView("far#9c0d1e2f"),
    ),
    DeviceView("cuda:0", "RTX 3060", 12 * 10**9, 4 * 10**9),
    77 * 10**9,
)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_the_dialogs_show_what_is_known(size: tuple[int, int]) -> None:
    named = f"{size[0]}x{size[1]}"

    async def look() -> None:
        async with still(size) as (app, pilot):
            await pilot.press("question_mark")
            await settle(app, pilot)
            compare(f"help-{named}", text_of_screen(app))
            await pilot.press("escape", "i")
            await settle(app, pilot)
            cast(InviteScreen, app.screen).take({"invite": "shoal:" + "a2b3c4d5" * 8, "name": "reading-club"})
            await settle(app, pilot)
            compare(f"invite-{named}", text_of_screen(app))
            await pilot.press("escape")
            fill(app.store, "empty")
            first = FirstRun(app.store)
            await app.push_screen(first)
            first.state.pauses = {"pause_busy": False, "pause_on_battery": True}
            for step in range(3):
                first.state.step, first.state.target = step, "birds#5e6f7a8b"
                if step == 0:
                    await settle(app, pilot)
                    compare(f"first-unknown-{named}", text_of_screen(app))
                    first.state.prospects = PROSPECTS
                await settle(app, pilot)
                compare(f"first{step}-{named}", text_of_screen(app))

    asyncio.run(look())


@pytest.mark.parametrize("screen", ["overview", "swarm"])
def test_colours_mean_the_same_by_day_and_by_night(screen: str) -> None:
    async def look() -> None:
        async with still((160, 48)) as (app, pilot):
            await pilot.press(KEYS[screen])
            for state in ("healthy", "hole", "paused", "away"):
                fill(app.store, state)
                await settle(app, pilot)
                night = colours_of_screen(app)
                await pilot.press("ctrl+t")
                await settle(app, pilot)
                assert app.theme == "shoal-day"
                assert colours_of_screen(app) == night, state
                await pilot.press("ctrl+t", "ctrl+t")
                compare(f"colours-{screen}-{state}", night)

    asyncio.run(look())

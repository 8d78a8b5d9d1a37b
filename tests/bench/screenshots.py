"""The README's pictures: `python -m tests.bench.screenshots packaging/screenshots`.

A real swarm of four processes with the starter model, which is fetched where it is not in the cache. The dashboard
is driven by keys as a person would, and Textual draws what is on its screen.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import cast

from textual.pilot import Pilot

from app.api.client import client_of
from app.cli.dashboard import HomeConnector
from app.config.home import cache_folder
from tests.process.node_process import LOOPBACK, Place, Serving
from tests.ui.rendering import text_of_screen
from ui.app import Dashboard
from ui.screens.chat import Chat
from ui.screens.first_run import FirstRun
from ui.state.conversations import Conversations
from ui.state.reply_stream import Sampling

SIZE = (120, 36)
NODES = (("tern", "0:16"), ("heron", "10:24"), ("osprey", "20:30"))
OWN_BLOCKS = "8:20"
QUESTION = "Why do fish swim in shoals?"
PATIENCE_S = 180.0
PLOTTED_S = 25.0  # of somebody else's replies, before the overview is drawn


@contextmanager
def swarm(folder: Path, cache: Path) -> Iterator[Place]:
    """Three nodes with names; the last one's place, to ask from."""
    with ExitStack() as stack:
        places = [Place(folder / name, cache) for name, _ in NODES]
        created = places[0].shoal("create", "reading-club", "--model", "starter", patience_s=PATIENCE_S)
        assert created.status == 0, created.err
        invite = ""
        for place, (name, blocks) in zip(places, NODES, strict=True):
            variables = {"SHOAL_NAME": name, **({"SHOAL_INVITE": invite} if invite else {})}
            flags = ("--discovery=invite,mdns", f"--blocks={blocks}", "--device=cpu")
            node = stack.enter_context(Serving(place, *flags, max_vram="2GB", **variables))
            node.ready(PATIENCE_S)
            invite = invite or place.shoal("invite").out.strip()
        yield places[-1]


def door_to(folder: Path, cache: Path) -> HomeConnector:
    """The way to a node that the dashboard starts."""
    settings = {"LISTEN": LOOPBACK, "API_PORT": "0", "DISCOVERY": "mdns", "DEVICE": "cpu", "BLOCKS": OWN_BLOCKS}
    for name, value in {**settings, "MAX_VRAM": "2GB", "NAME": "kelp", "CACHE": str(cache)}.items():
        os.environ[f"SHOAL_{name}"] = value
    folder.mkdir()
    kept = Conversations(folder)
    kept.choose("sampling", asdict(Sampling(temperature=0.0, max_tokens=160)))
    kept.close()
    return HomeConnector(folder)


async def until(pilot: Pilot[None], holds: Callable[[], object]) -> None:
    """Let the dashboard live until something is so."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, text_of_screen(pilot.app)
        await pilot.pause(0.1)


async def tour(app: Dashboard, pilot: Pilot[None], asker: Place, into: Path) -> None:
    """From the first run to the overview, with a picture of each."""
    await until(pilot, lambda: "Join reading-club" in text_of_screen(app))
    await until(pilot, lambda: "tok/s for you" in text_of_screen(app))
    app.save_screenshot("first-run.svg", str(into))
    first = cast(FirstRun, app.screen)
    (place,) = [index for index, offer in first.state.choices.items() if offer.target.startswith("reading-club")]
    await pilot.press("enter" if place == 0 else str(place))
    await pilot.press("enter")
    await until(pilot, lambda: app.store.snapshot and app.store.snapshot.state == "serving")
    await pilot.press(*QUESTION, "enter")
    await until(pilot, lambda: isinstance(app.screen, Chat) and len(app.screen._messages) == 2)
    await pilot.pause(1.0)
    app.save_screenshot("chat.svg", str(into))
    await pilot.press("escape", "escape", "1")
    stop = threading.Event()
    others = threading.Thread(target=ask_on, args=(asker, stop))
    others.start()
    await pilot.pause(PLOTTED_S)
    app.save_screenshot("overview.svg", str(into))
    await pilot.press("2")
    await pilot.pause(2.0)
    app.save_screenshot("swarm.svg", str(into))
    stop.set()
    others.join()


def ask_on(place: Place, stop: threading.Event) -> None:
    """Somebody else's replies, one after another."""
    client = client_of(place.home)
    while not stop.is_set():
        for _ in client.chat(Sampling(max_tokens=64).request([{"role": "user", "content": "Tell me about the sea."}])):
            if stop.is_set():
                break


def main() -> None:
    """Make all pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    into: Path = parser.parse_args().folder
    cache = cache_folder()
    with tempfile.TemporaryDirectory() as scratch, swarm(Path(scratch), cache) as asker:
        door = door_to(Path(scratch) / "kelp", cache)

        async def live() -> None:
            app = Dashboard(door, folder=door.folder)
            async with app.run_test(size=SIZE) as pilot:
                await tour(app, pilot, asker, into)

        try:
            asyncio.run(live())
        finally:
            if door.process is not None:
                door.process.terminate()
                door.process.wait(PATIENCE_S)


if __name__ == "__main__":
    main()

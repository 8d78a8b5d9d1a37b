"""The dashboard's figures: the first paint, and 500 peers with updates at 10 Hz. Prints one JSON object.

    python -m tests.bench.dashboard [--seconds 10]

The first paint is taken in a terminal of its own, from the start of the process to the first frame. The share of a
core counts all of the dashboard's process but the making of the snapshots, which a node would do.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import pty
import select
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from textual.events import Key

from app.snapshot.codec import to_json
from tests.ui.fixed import five_hundred
from ui.app import Dashboard, NodeMessage
from ui.screens.swarm import PeersTable
from ui.state.follower import RawSnapshot
from ui.state.store import ConnectionState, Store

FRAME = "≋".encode()
HERTZ = 10
SNAPSHOTS = 20  # made beforehand, as the JSON text in which they come


def first_paint_s() -> float:
    """Seconds from the start of `shoal` to its first frame, before any node is up."""
    ours, theirs = pty.openpty()
    with tempfile.TemporaryDirectory() as home:
        command = [sys.executable, "-m", "app.cli", "--home", home, "--node", "http://127.0.0.1:9"]
        settings = {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "36", "SHOAL_TOKEN": "x" * 32}
        began = time.perf_counter()
        shoal = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, **settings}, close_fds=True
        )
        seen = b""
        try:
            while FRAME not in seen:
                ready, _, _ = select.select([ours], [], [], max(0.0, began + 30 - time.perf_counter()))
                assert ready, f"no frame within 30 s: {seen[-400:]!r}"
                seen += os.read(ours, 65536)
            return time.perf_counter() - began
        finally:
            shoal.kill()
            shoal.wait()
            os.close(ours)
            os.close(theirs)


async def busy(seconds: float) -> dict[str, Any]:
    """500 peers at 10 Hz on each of the two main screens: the share of a core, and a key to its paint."""
    texts = [json.dumps(to_json(five_hundred(tick))) for tick in range(SNAPSHOTS)]
    app = Dashboard(None, store=Store())
    app.asked_first_run = True
    found: dict[str, Any] = {}
    gc.freeze()  # as `shoal` does before it shows the dashboard
    async with app.run_test(size=(160, 48)) as pilot:
        app.post_message(NodeMessage(ConnectionState("live")))
        for screen, key in (("overview", "1"), ("swarm", "2")):
            await pilot.press(key)
            cpu, wall, tick = time.process_time(), time.perf_counter(), 0
            while time.perf_counter() - wall < seconds:
                tick += 1
                app.post_message(NodeMessage(RawSnapshot(texts[tick % SNAPSHOTS])))
                await asyncio.sleep(max(0.0, wall + tick / HERTZ - time.perf_counter()))
            share = (time.process_time() - cpu) / (time.perf_counter() - wall)
            found[f"core_share_{screen}"] = round(share, 3)
        found["key_to_paint_ms"] = await _key_to_paint(app, texts)
    return found


async def _key_to_paint(app: Dashboard, texts: list[str]) -> dict[str, float]:
    """From a key to the frame that shows the cursor on the next row, while snapshots come."""
    table = app.screen.query_one(PeersTable)
    times = []
    for index in range(40):
        app.post_message(NodeMessage(RawSnapshot(texts[index % SNAPSHOTS])))
        painted = asyncio.Event()
        began, cursor = time.perf_counter(), table.cursor
        app.post_message(Key("down", None))
        while table.cursor == cursor:  # noqa: ASYNC110 (what is measured is the loop)
            await asyncio.sleep(0)
        app.screen.call_after_refresh(painted.set)
        await painted.wait()
        times.append((time.perf_counter() - began) * 1000)
        await asyncio.sleep(0.1)
    times.sort()
    return {"p50": round(statistics.median(times), 1), "worst": round(times[-1], 1)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    chosen = parser.parse_args()
    paints = sorted(first_paint_s() for _ in range(5))
    figures = {"first_paint_s": {"p50": round(paints[2], 3), "worst": round(paints[-1], 3)}}
    print(json.dumps({**figures, **asyncio.run(busy(chosen.seconds)), "peers": 500, "hertz": HERTZ}))


if __name__ == "__main__":
    main()

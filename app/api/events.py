"""Server-sent events: the snapshot at once and after changes, and a note for each thing that happened.

Changes that come quickly are told together. The stream ends when the node leaves, and it ends first: the server waits
for open responses.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncGenerator
from typing import Any

import trio

from app.api.control import Control
from app.snapshot.codec import facts

APART_S = 0.2  # between two snapshots to one follower
SILENCE_S = 15.0  # after which a comment shows that the line is alive


async def stream(control: Control, last_note: int) -> AsyncGenerator[bytes, None]:
    """The bytes of one follower's stream; `last_note` is the number it saw before it lost the line."""
    feed = control.feed
    while True:
        seen, is_last = feed.version, feed.closed
        for note in feed.notes_after(last_note):
            last_note = note.number
            yield _event("note", dataclasses.asdict(note), note.number)
        yield _event("snapshot", facts(control.snapshot()))
        if is_last:
            return
        while feed.version <= seen and not feed.closed:
            with trio.move_on_after(SILENCE_S):
                await feed.wait_beyond(seen)
            if feed.version <= seen:
                yield b": still here\n\n"
        with trio.move_on_after(APART_S):
            await _closed(control)


async def _closed(control: Control) -> None:
    while not control.feed.closed:
        await control.feed.wait_beyond(control.feed.version)


def _event(name: str, data: dict[str, Any], number: int | None = None) -> bytes:
    identifier = "" if number is None else f"id: {number}\n"
    return f"event: {name}\n{identifier}data: {json.dumps(data, allow_nan=False)}\n\n".encode()

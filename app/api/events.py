"""Server-sent events: the snapshot at once and after changes, and one note for each logged event.

Changes within `APART_S` are sent as one snapshot. The stream ends as soon as the event log is closed, because the
server waits for open responses before it stops.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncGenerator
from typing import Any

import trio

from app.api.control import Control
from app.snapshot.codec import to_json

APART_S = 0.2  # least time between two snapshots to one follower
SILENCE_S = 15.0  # without changes, a comment is sent this often, so that the client knows the connection is alive


async def stream(control: Control, last_note: int) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of one follower's stream; `last_note` is the last note it saw before it reconnected, or 0."""
    event_log = control.event_log
    while True:
        seen, is_last = event_log.version, event_log.closed
        for note in event_log.notes_after(last_note):
            last_note = note.number
            yield _event("note", dataclasses.asdict(note), note.number)
        yield _event("snapshot", to_json(control.snapshot()))
        if is_last:
            return
        while event_log.version <= seen and not event_log.closed:
            with trio.move_on_after(SILENCE_S):
                await event_log.wait_beyond(seen)
            if event_log.version <= seen:
                yield b": still here\n\n"
        with trio.move_on_after(APART_S):
            await _wait_closed(control)


async def _wait_closed(control: Control) -> None:
    while not control.event_log.closed:
        await control.event_log.wait_beyond(control.event_log.version)


def _event(name: str, data: dict[str, Any], number: int | None = None) -> bytes:
    identifier = "" if number is None else f"id: {number}\n"
    return f"event: {name}\n{identifier}data: {json.dumps(data, allow_nan=False)}\n\n".encode()

"""Server-sent events: the snapshot at once and after changes, and one note for each logged event.

Changes within `APART_S` are sent as one snapshot, which is the same for all followers. The stream ends as soon as the
event log is closed, because the server waits for open responses before it stops.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import AsyncGenerator
from functools import lru_cache
from typing import Any

import trio

from app.api.control import Control
from app.snapshot.codec import to_json
from app.snapshot.views import PeerView, Snapshot

APART_S = 0.2  # least time between two snapshots
SILENCE_S = 15.0  # without changes, a comment is sent this often, so that the client knows the connection is alive


class EventFeed:
    """The events of a node for all who follow them."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._turn = trio.Lock()
        self._version, self._made_at, self._snapshot = -1, -math.inf, b""

    async def stream(self, last_note: int) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of one follower's stream; `last_note` is the last note it saw before it reconnected, or 0."""
        event_log = self._control.event_log
        while True:
            is_last = event_log.closed
            seen, snapshot = await self._latest()
            for note in event_log.notes_after(last_note):
                last_note = note.number
                yield _event("note", _json(dataclasses.asdict(note)), note.number)
            yield snapshot
            if is_last:
                return
            while event_log.version <= seen and not event_log.closed:
                with trio.move_on_after(SILENCE_S):
                    await event_log.wait_beyond(seen)
                if event_log.version <= seen:
                    yield b": still here\n\n"

    async def _latest(self) -> tuple[int, bytes]:
        """Return the event with the state of the node, and its version: that of this moment or a later one."""
        event_log = self._control.event_log
        wanted = event_log.version
        async with self._turn:
            if self._version < wanted:
                with trio.move_on_at(self._made_at + APART_S):
                    while not event_log.closed:
                        await event_log.wait_beyond(event_log.version)
                version, made_at, snapshot = event_log.version, trio.current_time(), self._control.snapshot()
                # In a thread: to write hundreds of peers takes milliseconds, in which no token would be sent.
                made = await trio.to_thread.run_sync(_snapshot_event, snapshot)
                self._version, self._made_at, self._snapshot = version, made_at, made
            return self._version, self._snapshot


def _snapshot_event(snapshot: Snapshot) -> bytes:
    values = to_json(dataclasses.replace(snapshot, peers=()))
    texts = [f'"{name}": {_json(value)}' for name, value in values.items() if name != "peers"]
    peers = ", ".join(map(_peer_text, snapshot.peers))
    return _event("snapshot", f'{{{", ".join(texts)}, "peers": [{peers}]}}')


@lru_cache(maxsize=4096)
def _peer_text(peer: PeerView) -> str:
    """A peer as JSON; most of a large swarm are the same in one snapshot after another."""
    return _json(to_json(peer))


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def _event(name: str, data: str, number: int | None = None) -> bytes:
    identifier = "" if number is None else f"id: {number}\n"
    return f"event: {name}\n{identifier}data: {data}\n\n".encode()

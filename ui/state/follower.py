"""The line to the node: a thread that follows its events, and finds it again after it was away.

How a node is reached, and started where none runs, is for whoever starts the dashboard; they give a `NodeConnector`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from app.api.client import Client, Hangup, WrongToken
from app.core.errors import AppError, NotRunning
from ui.state.store import ConnectionState

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 8.0
NOT_OURS = "what answers there is not a node of this version"
COMING_UP_S = 0.15  # between two looks for a node that was started just now


class NodeConnector(Protocol):
    """The way to one node."""

    def client(self) -> Client:
        """The node's client; raises `NotRunning` where it cannot be reached."""

    def coming_up(self) -> bool:
        """Whether a node was started that is not reachable yet."""

    def ended(self) -> str | None:
        """How the node that was started here came to its end, where it did."""

    def start(self) -> None:
        """Start a node where none runs; nothing for a node elsewhere."""


@dataclass(frozen=True)
class EventNote:
    """A note of the node as it came."""

    data: Mapping[str, Any]


@dataclass(frozen=True)
class RawSnapshot:
    """A snapshot as it came; read only when somebody looks, for several may come between two looks."""

    text: str  # JSON


Heard = ConnectionState | RawSnapshot | EventNote


class Follower:
    """Follows one node until closed, in a thread of its own."""

    def __init__(
        self, door: NodeConnector, tell: Callable[[Heard], None], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._door, self._tell, self._now = door, tell, now
        self._closed, self._hurry = threading.Event(), threading.Event()
        self._hangup = Hangup()
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End; the thread is gone soon after."""
        self._closed.set()
        self._hurry.set()
        self._hangup.hang_up()

    def hurry(self) -> None:
        """Do not wait any longer before the next try."""
        self._hurry.set()

    def _run(self) -> None:
        wait_s = FIRST_WAIT_S
        self._start()
        while not self._closed.is_set():
            link = ConnectionState("away", "the node has ended")
            try:
                if self._follow():
                    wait_s = FIRST_WAIT_S
            except WrongToken as error:
                link = ConnectionState("refused", str(error))
            except NotRunning as error:
                link = ConnectionState("away", self._door.ended() or str(error))
            except AppError as error:
                link = ConnectionState("away", str(error))
            except ValueError:
                link = ConnectionState("away", NOT_OURS)
            if self._closed.is_set():
                return
            if self._door.coming_up():
                self._tell(ConnectionState("starting", "the node is coming up: its program is being loaded"))
                self._pause(COMING_UP_S)
                continue
            self._tell(ConnectionState(link.kind, link.text, self._now() + wait_s))
            self._pause(wait_s)
            wait_s = min(LONGEST_WAIT_S, 2 * wait_s)

    def _start(self) -> None:
        try:
            self._door.start()
        except AppError as error:
            self._tell(ConnectionState("away", str(error), self._now()))

    def _pause(self, seconds: float) -> None:
        self._hurry.wait(seconds)
        self._hurry.clear()

    def _follow(self) -> bool:
        """Tell every event until the line breaks; returns whether there was any."""
        client = self._door.client()
        self._hangup = Hangup()
        heard = False
        for event in client.events(hangup=self._hangup):
            if self._closed.is_set():
                return heard
            if not heard:
                self._tell(ConnectionState("live", url=client.url))
                heard = True
            if event.name == "snapshot":
                self._tell(RawSnapshot(event.text))
            elif event.name == "note":
                self._tell(EventNote(event.data))
        return heard

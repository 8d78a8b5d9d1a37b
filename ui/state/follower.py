"""The connection to the node: a thread that follows its event stream and reconnects after it was lost.

How a node is reached, or started if none runs, is decided by a `NodeConnector` from outside (`app.cli.dashboard`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from app.api.client import Client, Hangup, NotAnswering, WrongToken
from app.core.errors import AppError, NotRunning
from ui.state.store import ConnectionState

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 8.0
NOT_OURS = "the program that answers there is not a Shoal node of this version"
START_AGAIN = "press F5 to start it"
HANGS, END_IT = "the node runs but does not answer", "wait, or end its process; `shoal logs` may say why"
COMING_UP_S = 0.15  # between two attempts to reach a node that was just started


class NodeConnector(Protocol):
    """Reaches one node, and can start it if it belongs on this machine."""

    can_start: bool

    def client(self) -> Client:
        """Return the node's client; raises `NotRunning` if the node cannot be reached."""

    def coming_up(self) -> bool:
        """True if a node was started but is not reachable yet."""

    def ended(self) -> str | None:
        """Reason why the node that was started here has ended; None if it runs or was not started here."""

    def start(self) -> None:
        """Start a node if none runs; do nothing for a node elsewhere."""

    def settings(self) -> list[dict[str, Any]]:
        """All settings of a node that does not run, from its file; raises `AppError`."""

    def set_setting(self, name: str, text: str | None) -> None:
        """Write a setting of a node that does not run, or reset it; raises `AppError`."""


@dataclass(frozen=True)
class EventNote:
    """One event of the node, as decoded JSON."""

    data: Mapping[str, Any]


@dataclass(frozen=True)
class RawSnapshot:
    """A snapshot that is not parsed yet: several may arrive between two repaints, and only the last is needed."""

    text: str  # JSON


Heard = ConnectionState | RawSnapshot | EventNote


class Follower:
    """Follows one node in its own thread until closed; everything received goes to `tell`, in that thread."""

    def __init__(
        self, door: NodeConnector, tell: Callable[[Heard], None], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._door, self._tell, self._now = door, tell, now
        self._closed, self._hurry = threading.Event(), threading.Event()
        self._was_live = False
        self._hangup = Hangup()
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Ask the thread to end and break its connection; does not wait for it."""
        self._closed.set()
        self._hurry.set()
        self._hangup.hang_up()

    def hurry(self) -> None:
        """Retry now instead of after the current wait."""
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
            except NotAnswering as error:
                is_here = self._door.can_start
                link = ConnectionState("away", HANGS if is_here else str(error), next_step=END_IT if is_here else "")
            except NotRunning as error:
                ended = "the node has ended" if self._was_live else "no node runs here"
                link = ConnectionState("away", self._door.ended() or (ended if self._door.can_start else str(error)))
            except AppError as error:
                link = ConnectionState("away", str(error))
            except ValueError:
                link = ConnectionState("away", NOT_OURS)
            if self._closed.is_set():
                return
            if self._door.coming_up():
                self._tell(ConnectionState("starting", "the node is starting: its program is being loaded"))
                self._pause(COMING_UP_S)
                continue
            cure = link.next_step or (START_AGAIN if link.kind == "away" and self._door.can_start else "")
            self._tell(ConnectionState(link.kind, link.text, self._now() + wait_s, next_step=cure))
            self._pause(wait_s)
            wait_s = min(LONGEST_WAIT_S, 2 * wait_s)

    def _start(self) -> None:
        try:
            self._door.start()
        except AppError as error:
            self._tell(ConnectionState("away", str(error), self._now(), next_step=START_AGAIN))

    def _pause(self, seconds: float) -> None:
        self._hurry.wait(seconds)
        self._hurry.clear()

    def _follow(self) -> bool:
        """Pass on every event until the connection breaks; True if there was at least one."""
        client = self._door.client()
        self._hangup = Hangup()
        received = False
        for event in client.events(hangup=self._hangup):
            if self._closed.is_set():
                return received
            if not received:
                self._tell(ConnectionState("live", url=client.url))
                received = self._was_live = True
            if event.name == "snapshot":
                self._tell(RawSnapshot(event.text))
            elif event.name == "note":
                self._tell(EventNote(event.data))
        return received

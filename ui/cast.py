"""The dashboard as an asciicast (version 2): what a terminal of a fixed size would get, with times.

It shows a running node, takes no keys, and ends with the node, at a limit of time or bytes, or with Ctrl-C.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from textual import events
from textual.driver import Driver
from textual.geometry import Size

from ui.app import Dashboard, NodeMessage
from ui.state.follower import NodeConnector
from ui.state.store import ConnectionState

_HIDE_CURSOR = "\x1b[?25l"


def cast_header(size: tuple[int, int], at_s: int) -> bytes:
    """The first line of an asciicast; `at_s` is its time in seconds since 1970."""
    width, height = size
    return _line({"version": 2, "width": width, "height": height, "timestamp": at_s, "title": "shoal"})


def cast_output(after_s: float, text: str) -> bytes:
    """One line of output, written `after_s` seconds after the begin."""
    return _line([round(after_s, 3), "o", text])


def _line(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"


class CastDriver(Driver):
    """A terminal that nobody sits at: it passes the output on to the app's cast."""

    def write(self, data: str) -> None:
        """Pass output on."""
        if isinstance(self._app, CastDashboard):
            self._app.take_output(data)

    def start_application_mode(self) -> None:
        """Report the size, which never changes; let Ctrl-C end the app."""
        loop = asyncio.get_running_loop()
        with suppress(NotImplementedError, ValueError, RuntimeError):  # on Windows, or outside the main thread
            loop.add_signal_handler(signal.SIGINT, self._app.exit)
        size = Size(*(self._size or (80, 24)))
        self.write(_HIDE_CURSOR)
        asyncio.run_coroutine_threadsafe(self._app._post_message(events.Resize(size, size)), loop=loop)

    def disable_input(self) -> None:
        """Do nothing: there is no input."""

    def stop_application_mode(self) -> None:
        """Do nothing: there is no terminal to restore."""


class CastDashboard(Dashboard):
    """A dashboard that writes itself down instead of being shown."""

    def __init__(
        self,
        door: NodeConnector,
        write: Callable[[bytes], None],
        *,
        tab: str,
        most_bytes: int,
        most_s: float,
        size: tuple[int, int],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(door)
        self.driver_class = CastDriver
        self.asked_first_run = True
        self.first_tab = tab
        self._write, self._most_bytes, self._most_s, self._now = write, most_bytes, most_s, now
        self._cast_size, self._began_at = size, now()
        self.outputs = self.bytes = 0
        self.seconds = 0.0
        self.ended = "stopped by hand"
        self.trouble: OSError | None = None

    async def on_mount(self) -> None:
        """Begin the clock of the limit."""
        self.set_timer(self._most_s, lambda: self._end("the time is over"))

    def on_node_message(self, message: NodeMessage) -> None:
        """End with the node."""
        if isinstance(message.heard, ConnectionState) and message.heard.kind in ("away", "refused"):
            self._end("the node has ended")

    def take_output(self, text: str) -> None:
        """Write a piece of output down; ends the app if there is no room for it."""
        if self._exit:
            return
        self.seconds = self._now() - self._began_at
        lines = cast_output(self.seconds, text)
        if not self.outputs:
            lines = cast_header(self._cast_size, int(time.time())) + lines
        if self.bytes + len(lines) > self._most_bytes:
            self._end("the file has the size that --size allows")
            return
        try:
            self._write(lines)
        except OSError as error:
            self.trouble = error
            self._end("the file cannot be written")
            return
        self.outputs += 1
        self.bytes += len(lines)

    def _end(self, why: str) -> None:
        if not self._exit:  # the first reason is the cause of the others
            self.ended = why
            self.exit()

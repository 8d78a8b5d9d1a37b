"""The dashboard's terminal when it is shown in a page (`app.web`): Textual's `WebDriver`, which ends with its server.

Textual's own goes on without input or output if the other end of its pipes is gone, as after a server that was killed.
"""

from __future__ import annotations

import os
from typing import Any

from textual import messages
from textual.app import App
from textual.drivers.web_driver import WebDriver


class PageDriver(WebDriver):
    """Talks in packets over the standard streams; closes the app when they are closed."""

    def __init__(
        self, app: App[Any], *, debug: bool = False, mouse: bool = True, size: tuple[int, int] | None = None
    ) -> None:
        super().__init__(app, debug=debug, mouse=mouse, size=size)
        self._write = self._write_or_end  # type: ignore[assignment]

    def _write_or_end(self, data: bytes) -> int:
        """Write a packet; if nobody reads any more, let the app end instead of failing."""
        try:
            return os.write(self.fileno, data)
        except BrokenPipeError:
            if not self.exit_event.is_set():
                self.send_message(messages.ExitApp())
            return len(data)

    def run_input_thread(self) -> None:
        """Pass input on until its end, which is the server's."""
        super().run_input_thread()
        if not self.exit_event.is_set():
            self.send_message(messages.ExitApp())

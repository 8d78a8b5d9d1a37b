"""An app that asks its node: in a thread of its own, whose answer comes back as a message."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from textual.app import App
from textual.message import Message

from app.api.client import Client
from app.core.errors import AppError
from ui.state.follower import Door


class Answer(Message):
    """What the node was asked has an answer."""

    def __init__(self, handle: Callable[[], None]) -> None:
        super().__init__()
        self.handle = handle


class AskingApp(App[None]):
    """The part of the dashboard that speaks with its node and with the person."""

    def __init__(self, door: Door | None) -> None:
        super().__init__()
        self.door = door

    def ask(
        self,
        work: Callable[[Client], Any],
        then: Callable[[Any], None] = lambda answer: None,
        failed: Callable[[str], None] | None = None,
    ) -> None:
        """Ask the node in a thread; the answer, or what went wrong, is handled here."""
        tell_failure = failed or self.complain
        door = self.door

        def run() -> None:
            try:
                if door is None:
                    raise AppError("there is no node to ask")
                answer = work(door.client())
            except (AppError, ValueError) as error:
                text = str(error)
                self.post_message(Answer(lambda: tell_failure(text)))
            else:
                self.post_message(Answer(lambda: then(answer)))

        threading.Thread(target=run, name="ask", daemon=True).start()

    def on_answer(self, message: Answer) -> None:
        """Handle it where the screens live."""
        message.stop()
        message.handle()

    def complain(self, text: str) -> None:
        """Say what went wrong, until the person has seen it."""
        self.notify(text, severity="error", timeout=12, markup=False)

    def say(self, text: str) -> None:
        """Say what was done."""
        self.notify(text, timeout=4, markup=False)

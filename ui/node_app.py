"""An app that asks its node: in a thread of its own, whose answer comes back as a message."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from textual.app import App
from textual.message import Message

from app.api.client import Client
from app.core.errors import AppError
from ui.state.follower import NodeConnector
from ui.state.store import Store


class Answer(Message):
    """What the node was asked has an answer."""

    def __init__(self, handle: Callable[[], None]) -> None:
        super().__init__()
        self.handle = handle


class NodeApp(App[None]):
    """The dashboard as its screens and actions know it; `ui.app.Dashboard` is the one implementation."""

    def __init__(self, door: NodeConnector | None, store: Store, folder: Path | None) -> None:
        super().__init__()
        self.door = door
        self.store = store
        self.folder = folder  # where conversations are kept; None: nowhere

    @abstractmethod
    async def action_go(self, name: str) -> None:
        """Show another screen."""

    @abstractmethod
    def action_invite(self) -> None:
        """Show the invite."""

    @abstractmethod
    def action_start_node(self) -> None:
        """Start a node where none runs."""

    @abstractmethod
    def choose_theme(self, name: str) -> None:
        """Use a theme and remember it."""

    @abstractmethod
    async def say_hello(self, question: str) -> None:
        """Go to the chat and ask a first question."""

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

"""Base class of the dashboard app: sends requests to the node in a thread, each answer coming back as a message."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from textual.app import App
from textual.message import Message

from app.api.client import Client
from app.core.errors import AppError
from app.snapshot.codec import offer_from
from app.snapshot.views import OfferView
from ui.draw.rows import tidy
from ui.state.follower import NodeConnector
from ui.state.store import Store


class Answer(Message):
    """The node has answered a request, or the request has failed; `handle` continues in the app's own thread."""

    def __init__(self, handle: Callable[[], None]) -> None:
        super().__init__()
        self.handle = handle


class NodeApp(App[None]):
    """The part of the app that screens and actions use; `ui.app.Dashboard` implements it."""

    tabs: ClassVar[tuple[str, ...]]

    def __init__(self, door: NodeConnector | None, store: Store, folder: Path | None) -> None:
        super().__init__()
        self.door = door
        self.store = store
        self.folder = folder  # keeps conversations.db; None: keep nothing on disk
        self.unsent = ""  # a question that was typed in the first run and not sent, for the chat's input
        self.invite: tuple[tuple[object, ...], dict[str, Any]] | None = None  # shown last, for which addresses

    @abstractmethod
    async def action_go(self, name: str) -> None:
        """Switch to the screen of a tab."""

    @abstractmethod
    def action_invite(self) -> None:
        """Open the invite dialog."""

    @abstractmethod
    def action_leave(self) -> None:
        """Close the dashboard; the node keeps running."""

    @abstractmethod
    def action_start_node(self) -> None:
        """Start a node if none runs in the home folder."""

    @abstractmethod
    def choose_theme(self, name: str) -> None:
        """Switch to a theme and remember it for the next start."""

    @abstractmethod
    async def say_hello(self, question: str) -> None:
        """Switch to the chat and send a first question."""

    def ask(
        self,
        work: Callable[[Client], Any],
        then: Callable[[Any], None] = lambda answer: None,
        failed: Callable[[str], None] | None = None,
    ) -> None:
        """Run `work` with the node's client in a thread, then `then(answer)` in the app's thread.

        If `work` raises an `AppError` or a `ValueError`, `failed` gets its text; by default it is shown as an error.
        """
        door = self.door

        def with_client() -> Any:
            if door is None:
                raise AppError("not connected to a node")
            return work(door.client())

        self._run(with_client, then, failed or self.complain)

    def _run(self, work: Callable[[], Any], then: Callable[[Any], None], failed: Callable[[str], None]) -> None:
        """Run `work` in a thread, then `then` or `failed` in the app's thread."""

        def run() -> None:
            try:
                answer = work()
            except (AppError, ValueError) as error:
                text = str(error)
                self.post_message(Answer(lambda: failed(text)))
            else:
                self.post_message(Answer(lambda: then(answer)))

        threading.Thread(target=run, name="ask", daemon=True).start()

    def check(
        self, field: str, found: Callable[[OfferView], None] = lambda offer: None
    ) -> Callable[[str, Callable[[], None], Callable[[str], None]], None]:
        """A check of a `TextDialog` by the node: `field` is `target`, `name` or `model` of `/control/preview`."""

        def check(text: str, right: Callable[[], None], wrong: Callable[[str], None]) -> None:
            def answered(answer: Any) -> None:
                found(offer_from(answer))
                right()

            self.ask(lambda client: client.post("/control/preview", {field: text}), answered, wrong)

        return check

    def ask_settings(
        self,
        change: tuple[str, str | None] | None,
        then: Callable[[Any], None],
        failed: Callable[[str], None],
    ) -> None:
        """Change a setting if one is given, then pass all settings to `then`: the node's, or its file's if it is away.

        A text of None resets a setting to its default.
        """
        door, is_live = self.door, self.store.link.kind == "live"

        def work(client: Client) -> Any:
            if change is not None:
                client.set_config(*change)
            return client.get("/control/config")

        def from_file() -> Any:
            if door is None:
                raise AppError("not connected to a node")
            if change is not None:
                door.set_setting(*change)
            return door.settings()

        if is_live:
            self.ask(work, then, failed)
        else:
            self._run(from_file, then, failed)

    def on_answer(self, message: Answer) -> None:
        """Run the continuation of a request in the app's thread, where widgets may be touched."""
        message.stop()
        message.handle()

    def complain(self, text: str) -> None:
        """Show an error for 12 seconds."""
        self.notify(tidy(text), severity="error", timeout=12, markup=False)

    def say(self, text: str) -> None:
        """Confirm an action for 4 seconds."""
        self.notify(text, timeout=4, markup=False)

    def copy(self, text: str, what: str, otherwise: str) -> None:
        """Send text to the terminal's clipboard, and name another way to it: some terminals ignore this silently."""
        self.copy_to_clipboard(text)
        self.say(f"copied {what}; if it cannot be pasted, {otherwise}")

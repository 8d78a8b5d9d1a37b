"""The input of the chat, and the line above it: the progress of the reply, or who can read the chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message as TextualMessage
from textual.widgets import TextArea

from ui.draw.bars import spark
from ui.draw.reply import hole_in, live_rows, prompt_of, readers_words
from ui.draw.rows import Row, row
from ui.state.reply_stream import ReplyProgress
from ui.widgets.panel import GrowingLine
from ui.widgets.text_field import run_own_key


class AskBox(TextArea):
    """The input for questions: enter sends, ctrl+j starts a new line."""

    class Asked(TextualMessage):
        """The user has sent a question."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+j", "newline", "new line", show=False)]

    async def _on_key(self, event: events.Key) -> None:
        if event.key == "enter":
            event.stop()
            event.prevent_default()
            if text := self.text.strip():
                self.text = ""
                self.post_message(self.Asked(text))
        else:
            await run_own_key(self, event)

    def action_newline(self) -> None:
        """Start a new line within the question."""
        self.insert("\n")


class LiveLine(GrowingLine):
    """Progress of the reply being received; while there is none, who can read the chat."""

    progress: ReplyProgress | None = None
    hops: Sequence[Mapping[str, Any]] = ()  # of all replies of the conversation
    route: Sequence[Mapping[str, Any]] = ()  # of the reply being received
    is_visit = False  # another swarm replies

    def rows(self, width: int, height: int) -> list[Row]:
        """The progress of a reply, with a second line if the user can do something about it; else who can read it."""
        known = self.store.snapshot
        if self.progress is None:
            words = readers_words(self.hops, known, self.store.peer_name, is_visit=self.is_visit)
            return [row(" ", (words, "dim"))]
        hole = None if self.is_visit else hole_in(known, self.store.cover(), self.route, self.store.peer_name)
        speeds = spark(list(self.progress.speeds), 12)
        return live_rows(self.progress, prompt_of(known), self.store.now(), speeds, hole)

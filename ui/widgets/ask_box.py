"""The input of the chat, and the line above it: the progress of the reply, or who can read the chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message as TextualMessage
from textual.widgets import TextArea

from ui.draw.bars import spark
from ui.draw.reply import live_row, prompt_of, readers_words
from ui.draw.rows import Row, row
from ui.state.reply_stream import ReplyProgress
from ui.widgets.panel import RowWidget


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
            return
        await super()._on_key(event)

    def action_newline(self) -> None:
        """Start a new line within the question."""
        self.insert("\n")


class LiveLine(RowWidget):
    """Progress of the reply being received; while there is none, who can read the chat."""

    progress: ReplyProgress | None = None
    hops: Sequence[Mapping[str, Any]] = ()  # of all replies of the conversation
    is_visit = False  # another swarm replies

    def rows(self, width: int, height: int) -> list[Row]:
        """One line: the progress of a reply, else who can read the chat."""
        known = self.store.snapshot
        if self.progress is None:
            words = readers_words(self.hops, known, self.store.peer_name, is_visit=self.is_visit)
            return [row(" ", (words, "dim"))]
        now, cover = self.store.now(), self.store.cover()
        holes = cover.holes if cover is not None else ()
        return [live_row(self.progress, prompt_of(known), now, spark(list(self.progress.speeds), 12), holes)]

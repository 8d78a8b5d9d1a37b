"""The input of the chat, and the line above it that shows the progress of the reply."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message as TextualMessage
from textual.widgets import TextArea

from ui.draw.bars import spark
from ui.draw.reply import live_row, prompt_of
from ui.draw.rows import Row
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
    """Progress of the reply being received."""

    progress: ReplyProgress | None = None

    def rows(self, width: int, height: int) -> list[Row]:
        """One line while a reply is received, else none."""
        if self.progress is None:
            return []
        now = self.store.now()
        return [live_row(self.progress, prompt_of(self.store.snapshot), now, spark(list(self.progress.speeds), 12))]

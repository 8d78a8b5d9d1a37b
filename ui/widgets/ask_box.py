"""Where questions are typed, and the line above it that tells how the reply goes."""

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
    """Where questions are typed: enter sends, ctrl+j is a new line."""

    class Asked(TextualMessage):
        """A question is complete."""

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
        """A new line within the question."""
        self.insert("\n")


class LiveLine(RowWidget):
    """How the reply goes that is being written."""

    progress: ReplyProgress | None = None

    def rows(self, width: int, height: int) -> list[Row]:
        """One line while a reply comes, else nothing."""
        if self.progress is None:
            return []
        now = self.store.now()
        return [live_row(self.progress, prompt_of(self.store.snapshot), now, spark(list(self.progress.speeds), 12))]

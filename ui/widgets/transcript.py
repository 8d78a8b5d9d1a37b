"""The transcript of a conversation: questions, replies as Markdown while they arrive, and the figures of each."""

from __future__ import annotations

import time

from textual.containers import VerticalScroll
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Collapsible, Markdown, Static
from textual.widgets.markdown import MarkdownBlock, MarkdownFence

from ui.draw.numbers import plural
from ui.draw.reply import done_words, error_words, recovery_words
from ui.state.conversations import Message, files_of, split_thinking

_EMPTY = "Ask something. The line above the input says who can read it."
# To draw a long reply again takes longer than its next token: it is drawn as often as takes this share of the time, and
# at the latest after so many seconds, since other screens take time too.
_DRAWING_SHARE = 1 / 3
_DRAWN_LATE_S = 2.0


class PlainFence(MarkdownFence):
    """A code block in one colour.

    Highlighters search the code with patterns that a few well-chosen characters keep busy for hours, and a reply, which
    a hop can write, names the language.
    """

    @classmethod
    def highlight(cls, code: str, language: str, ansi: bool = False, dark: bool = False) -> Content:
        """Return the code as it is."""
        return Content(code)


class ReplyText(Markdown):
    """The text of a reply."""

    def __init__(self, text: str = "") -> None:
        super().__init__(text, classes="say", open_links=False)

    def get_block_class(self, block_name: str) -> type[MarkdownBlock]:
        """Return the widget for a kind of block: code is plain."""
        return PlainFence if block_name in ("fence", "code_block") else super().get_block_class(block_name)


class Thought(Collapsible):
    """A model's thinking, folded; a click or enter opens it."""

    def __init__(self, text: str = "") -> None:
        self._body = Static(Content(text))
        super().__init__(self._body, title=self._words(text), classes="thought")

    def show(self, text: str) -> None:
        """Replace the text."""
        self.title = self._words(text)
        self._body.update(Content(text))

    def _words(self, text: str) -> str:
        return f"thinking · {plural(len(text.split()), 'word')}"


class Transcript(VerticalScroll, can_focus=True):
    """The messages of one conversation; follows the end until the user scrolls up."""

    DEFAULT_CLASSES = "panel"
    HELP = (
        "Replies come through the hops named below the frame. ^r asks again, ^e edits your last question and, pressed "
        "again, the one before it, ^b goes back to an earlier version, ^y copies the last reply. Whoever hosts a hop "
        "can read what passes through it."
    )

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._reply: ReplyText | None = None  # the one that arrives
        self._thought: Thought | None = None
        self._text = ""  # of the reply so far
        self._drawn = self._written = ""  # what of it is drawn, and what of that is in `_reply`
        self._drawn_at = self._drawn_cpu_s = 0.0  # monotonic and CPU time of the last drawing
        self._is_following = True  # the end, to which it scrolls when something is added or the widget shrinks

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Follow the end while it is in view, within 3 rows."""
        super().watch_scroll_y(old_value, new_value)
        self._is_following = self.max_scroll_y - new_value <= 3

    def on_resize(self) -> None:
        """Keep the end in view: the line below grows while a reply waits, and would hide the question."""
        if self._is_following:
            self._follow()

    async def show_messages(self, messages: list[Message]) -> None:
        """Replace the transcript by these messages."""
        await self._end_reply()
        await self.remove_children()
        parts = [part for message in messages for part in self._parts(message)]
        await self.mount_all(parts or [Static(Content(_EMPTY), classes="meta")])
        self._follow()

    async def ask(self, message: Message) -> None:
        """Append a question and an empty reply that `add` writes to."""
        if not self.query(".ask"):
            await self.remove_children()
        await self.mount_all(self._parts(message))
        self._reply = ReplyText()
        await self.mount(self._reply)
        self._thought, self._text, self._drawn, self._written = None, "", "", ""
        self._follow()

    async def add(self, text: str) -> None:
        """Append text to the reply; a later `draw` may be what shows it."""
        self._text += text
        await self.draw()

    async def draw(self) -> None:
        """Draw what was added to the reply, unless too much of the time since the last drawing went into it."""
        since_s, busy_s = time.monotonic() - self._drawn_at, time.thread_time() - self._drawn_cpu_s
        if busy_s <= _DRAWING_SHARE * since_s or since_s >= _DRAWN_LATE_S:
            await self._draw()

    async def _draw(self) -> None:
        if self._reply is None or self._text == self._drawn:
            return
        self._drawn, self._drawn_at, self._drawn_cpu_s = self._text, time.monotonic(), time.thread_time()
        thought, rest = split_thinking(self._text)
        if thought and self._thought is None:
            self._thought = Thought()
            await self.mount(self._thought, before=self._reply)
        if self._thought is not None:
            self._thought.show(thought)
        if "<think>".startswith(rest.lstrip()):
            rest = ""  # it may become the tag
        if rest.startswith(self._written):
            await self._reply.append(rest[len(self._written) :])
        else:  # what was taken for the reply was thinking: its opening tag was in the prompt
            await self._reply.update(rest)
        self._written = rest
        if self._is_following:
            self._follow()

    async def note(self, text: str, kind: str = "warning") -> None:
        """Append a line about the reply; `kind` is its CSS class (warning, figures or error)."""
        if text:
            await self.mount(Static(Content(text), classes=f"meta -{kind}"))
            if self._is_following:
                self._follow()

    async def finish(self, message: Message) -> None:
        """End the reply, which is now this message, and append its figures and its error."""
        await self._end_reply()
        figures = message.figures
        error = error_words(str(figures.get("error") or ""), str(figures.get("error_code") or ""))
        for text, kind in (*_closing_words(message), (error, "error")):
            await self.note(text, kind)

    def _follow(self) -> None:
        self._is_following = True
        self.call_after_refresh(self.scroll_end, animate=False)

    async def _end_reply(self) -> None:
        await self._draw()
        self._reply = None

    def _parts(self, message: Message) -> list[Widget]:
        if message.role == "user":
            when = time.strftime("%H:%M", time.localtime(message.at_ms / 1000))
            words = Content.assemble(
                ("you", "bold $mine"), (f" {when}  {_version_words(message)}", "$dim"), message.content
            )
            words += Content.styled("".join(f"\n  + {file['name']}" for file in files_of(message)), "$dim")
            return [Static(words, classes="ask")]
        thought, content = split_thinking(message.content)
        parts: list[Widget] = [Thought(thought)] if thought else []
        parts.append(ReplyText(content))
        changes = [(str(change["text"]), str(change["kind"])) for change in message.figures.get("changes") or ()]
        error = f"× {message.figures['error']}" if message.figures.get("error") else ""
        for text, kind in (*changes, *_closing_words(message), (error, "error")):
            if text:
                parts.append(Static(Content(text), classes=f"meta -{kind}"))
        return parts


def _closing_words(message: Message) -> list[tuple[str, str]]:
    """The lines at the end of a reply, each with its CSS class: failed hops, then its version and its figures."""
    figures = message.figures
    has_figures = bool(figures.get("token_ids") or figures.get("stopped"))
    closing = _version_words(message) + (done_words(figures) if has_figures else "")
    return [(recovery_words(figures), "warning"), (closing.removesuffix(" · "), "figures")]


def _version_words(message: Message) -> str:
    """Which of several versions a message is; empty for the only one."""
    return f"version {message.version} of {message.versions} · " if message.versions > 1 else ""

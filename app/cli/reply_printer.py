"""Prints a reply while it arrives: as Markdown on a terminal, as plain text anywhere else.

Finished blocks of the Markdown (a paragraph, a list, a closed code block) are printed once and stay. Only the block
that is still growing is drawn again, below them, and never higher than the window, so that scrolling back shows each
line once. A reply that is silent for a while says below it what it waits for.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from app.core.terminal_text import without_controls
from app.system.console import without_echo

if TYPE_CHECKING:
    from markdown_it.token import Token
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

_REFRESH_PER_S = 8
_SILENT_S = 2.0  # without a piece before the reason is shown
_ASK_EVERY_S = 1.0  # for the reason


class ReplyPrinter(Protocol):
    """Receives the pieces of one reply, then `end`, also if the reply was stopped."""

    def write(self, piece: str) -> None: ...
    def end(self) -> None: ...


def reply_printer(waits_for: Callable[[], str] = str) -> ReplyPrinter:
    """Return the printer for this process's stdout; `waits_for` says what a silent reply waits for."""
    return MarkdownPrinter(waits_for) if sys.stdout.isatty() else PlainPrinter()


class PlainPrinter:
    """Prints the pieces as they are, without control characters."""

    def write(self, piece: str) -> None:
        """Print one piece at once."""
        print(without_controls(piece), end="", flush=True)

    def end(self) -> None:
        """End the last line."""
        print()


class MarkdownPrinter:
    """Renders the reply as Markdown, wrapped at words."""

    def __init__(self, waits_for: Callable[[], str] = str, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(highlight=False)
        self._growing, self._is_first, self._is_over = "", True, False
        self._waits_for, self._clock, self._piece_at = waits_for, clock, clock()
        self._reason, self._asked_at = "", float("-inf")
        self._live = Live(
            get_renderable=self._shown,
            console=self._console,
            refresh_per_second=_REFRESH_PER_S,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._terminal = ExitStack()
        self._terminal.enter_context(without_echo())
        self._live.start()

    def write(self, piece: str) -> None:
        """Append one piece, and print the blocks that it finishes."""
        self._piece_at = self._clock()
        done, self._growing = finished_blocks(self._growing + without_controls(piece))
        if done.strip():
            self._print(done)

    def end(self) -> None:
        """Print what is left, and leave the cursor below it."""
        self._is_over = True
        self._live.stop()
        if self._growing.strip():
            self._print(self._growing)
        self._terminal.close()

    def _shown(self) -> RenderableType:
        """The growing block, and below it what the reply waits for; asked anew by rich's thread for each refresh."""
        from rich.console import Group
        from rich.text import Text

        if self._is_over:
            return ""
        growing: RenderableType = Text("…", style="dim")
        if self._growing or not self._is_first:
            growing = _LastRows(rendered(self._growing))
        now = self._clock()
        silent_s = now - self._piece_at
        if silent_s < _SILENT_S:
            return growing
        if now - self._asked_at >= _ASK_EVERY_S:
            self._reason, self._asked_at = self._waits_for(), now
        words = f"{self._reason or 'waiting for the next piece'} · {silent_s:.0f} s · Ctrl-C stops"
        return Group(growing, Text(words, style="dim"))

    def _print(self, text: str) -> None:
        if not self._is_first:
            self._console.print()
        self._is_first = False
        self._console.print(rendered(text))


class _LastRows:
    """The last rows of another renderable, as many as the window can show."""

    def __init__(self, inner: RenderableType) -> None:
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        from rich.segment import Segment

        rows = console.render_lines(self._inner, options, pad=False)
        for row in rows[-max(1, console.height - 3) :]:  # the reason below may take two rows
            yield from row
            yield Segment.line()


def rendered(text: str) -> RenderableType:
    """Return Markdown as rich renders it, but with headings at the left and with the addresses of links.

    Code has one colour: highlighters search it with patterns that a few well-chosen characters keep busy for hours, and
    a reply, which a hop can write, names the language.
    """
    from rich.markdown import CodeBlock, Heading, Markdown
    from rich.text import Text

    class LeftHeading(Heading):
        def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
            self.text.justify = "left"
            yield Text.assemble("", self.text, style="bold")

    class PlainCode(CodeBlock):
        @classmethod
        def create(cls, markdown: Markdown, token: Token) -> PlainCode:
            return cls("text", markdown.code_theme)

    class ChatMarkdown(Markdown):
        elements: ClassVar = {
            **Markdown.elements,
            "heading_open": LeftHeading,
            "fence": PlainCode,
            "code_block": PlainCode,
        }

    return ChatMarkdown(text, hyperlinks=False)


def finished_blocks(text: str) -> tuple[str, str]:
    """Split growing Markdown into the blocks that no later text can change, and the rest.

    A block ends at an empty line outside a code block, once the next line has begun without an indent: an indented one
    may still belong to a list item.
    """
    fence = ""
    at = split = 0
    is_after_empty = False
    for line in text.splitlines(keepends=True):
        words = line.strip()
        if is_after_empty and not fence and words and not line[0].isspace():
            split = at
        mark = words[:3]
        if mark in ("```", "~~~"):
            fence = mark if not fence else "" if mark == fence else fence
        is_after_empty = not words
        at += len(line)
    return text[:split], text[split:]

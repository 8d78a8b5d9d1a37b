"""General dialogs: a question, a text to type, facts, help, and the letters of jump mode."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import ClassVar, TypeVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.events import Key
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Input, Label, Static

from app.core.terminal_text import one_line

JUMP_KEYS = "asdfghjkl"
_DIALOG, _DIALOG_FRAME = 76, 8  # width of a dialog, and the part of it that frame, padding and scrollbar take
Result = TypeVar("Result")


def plain(text: str) -> Content:
    """Text that is never parsed as markup."""
    return Content(text)


class Dialog(ModalScreen[Result]):
    """A modal screen that closes only once, even if a second key arrives before it is gone."""

    _is_closing = False

    def close(self, result: Result | None = None) -> None:
        """Close with this result; a second call does nothing."""
        if not self._is_closing:
            self._is_closing = True
            self.dismiss(result)


class Question(Dialog[bool]):
    """Asks for confirmation; returns True for yes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter,y", "answer(True)", "yes"),
        Binding("escape,n", "answer(False)", "no"),
    ]

    def __init__(self, words: str, yes: str) -> None:
        super().__init__()
        self._words, self._yes = words, yes

    def compose(self) -> ComposeResult:
        """The question and its two keys."""
        with Vertical(classes="dialog"):
            yield Static(plain(self._words))
            yield Static(Content.assemble(("⏎", "bold $mine"), f" {self._yes}   ", ("esc", "bold $mine"), " not now"))

    def action_answer(self, sure: bool) -> None:
        """Close with the answer."""
        self.close(sure)


class TextDialog(Dialog[str | None]):
    """Asks for one line of text; returns it without surrounding spaces, or None if cancelled."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", "back")]

    def __init__(self, words: str, *, value: str = "", hint: str = "") -> None:
        super().__init__()
        self._words, self._value, self._hint = words, value, hint

    def compose(self) -> ComposeResult:
        """The prompt, the input and its keys."""
        with Vertical(classes="dialog"):
            yield Static(plain(self._words))
            yield Input(self._value, placeholder=self._hint, id="line")
            yield Static(Content.assemble(("⏎", "bold $mine"), " continue   ", ("esc", "bold $mine"), " back"))

    @on(Input.Submitted)
    def submitted(self, event: Input.Submitted) -> None:
        """Close with the typed text, unless it is empty."""
        event.stop()
        if event.value.strip():
            self.close(event.value.strip())

    def action_cancel(self) -> None:
        """Close without a text."""
        self.close(None)


class Facts(Dialog[None]):
    """A list of names and values; `copied` is what the copy key puts into the clipboard."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter", "close", "close"),
        Binding("y", "copy", "copy"),
    ]

    def __init__(self, title: str, facts: Sequence[tuple[str, str]], *, copied: str = "") -> None:
        super().__init__()
        self._title, self._facts, self._copied = title, facts, copied

    def compose(self) -> ComposeResult:
        """One row for each fact, long values wrapped under themselves."""
        room = max((len(name) for name, _ in self._facts), default=0) + 2
        width = max(20, min(_DIALOG, self.app.size.width - 4) - _DIALOG_FRAME - room)
        with VerticalScroll(classes="dialog") as box:
            box.border_title = plain(self._title).markup
            for name, value in self._facts:
                lines = f"\n{' ' * room}".join(textwrap.wrap(one_line(value), width))
                yield Static(Content.assemble((name.ljust(room), "$dim"), lines))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """True unless the key would copy and there is nothing to copy."""
        return bool(self._copied) if action == "copy" else True

    def action_copy(self) -> None:
        """Copy to the terminal's clipboard."""
        self.app.copy_to_clipboard(self._copied)
        self.notify("copied", timeout=2)

    def action_close(self) -> None:
        """Close the dialog."""
        self.close()


class Help(Dialog[None]):
    """Help: about the focused panel and the screen, then the keys that work now."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,question_mark,q", "close", "close")]

    def __init__(self, panel: str, about: str, keys: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._panel, self._about, self._keys = panel, about, keys

    def compose(self) -> ComposeResult:
        """Name of the panel, text, then a row for each key."""
        with VerticalScroll(classes="dialog") as box:
            box.border_title = "help"
            if self._panel:
                yield Static(Content.assemble((one_line(self._panel), "bold $mine")))
            yield Static(plain(self._about))
            yield Static("")
            for key, words in self._keys:
                yield Static(Content.assemble((key.rjust(8), "bold $mine"), f"  {words}"))

    def action_close(self) -> None:
        """Close the dialog."""
        self.close()


class Jump(Dialog[Widget | None]):
    """Jump mode: shows a letter over each panel and returns the panel whose letter is pressed."""

    def __init__(self, panels: Sequence[Widget]) -> None:
        super().__init__()
        self._panels = dict(zip(JUMP_KEYS, panels, strict=False))

    def compose(self) -> ComposeResult:
        """A letter at the corner of each panel."""
        for key, panel in self._panels.items():
            label = Label(key, classes="jump")
            label.styles.offset = (panel.region.x + 1, panel.region.y)
            yield label

    def on_key(self, event: Key) -> None:
        """Close with the panel of the pressed letter; any other key closes with None."""
        event.stop()
        self.close(self._panels.get(event.key))

"""General dialogs: a question, a text to type, facts, help, and the letters of jump mode."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.events import Key
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Input, Label, OptionList, Static
from textual.widgets.option_list import Option

from app.core.terminal_text import one_line
from ui.widgets.text_field import TextField

JUMP_KEYS = "asdfghjkl"
_DIALOG, _DIALOG_FRAME = 76, 8  # width of a dialog, and the part of it that frame, padding and scrollbar take
Result = TypeVar("Result")
Check = Callable[[str, Callable[[], None], Callable[[str], None]], None]


def plain(text: str) -> Content:
    """Text that is never parsed as markup."""
    return Content(text)


def key_line(*keys: tuple[str, str]) -> Content:
    """The keys of a dialog with their words, for its last line."""
    return Content.assemble(*(part for key, words in keys for part in ((key, "bold $mine"), f" {words}   ")))


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
    """Asks for one line of text; returns it without surrounding spaces, or None if cancelled.

    `check` gets the text and two functions: one to call if it is right, and one with what is wrong with it, which is
    shown and keeps the dialog open.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", "back")]

    def __init__(self, words: str, *, value: str = "", hint: str = "", check: Check | None = None) -> None:
        super().__init__()
        self._words, self._value, self._hint, self._check = words, value, hint, check

    def compose(self) -> ComposeResult:
        """The prompt, the input, what is wrong with it, and its keys."""
        with Vertical(classes="dialog"):
            yield Static(plain(self._words))
            yield TextField(self._value, placeholder=self._hint, id="line")
            yield Static("", id="wrong")
            yield Static(Content.assemble(("⏎", "bold $mine"), " continue   ", ("esc", "bold $mine"), " back"))

    @on(Input.Submitted)
    def submitted(self, event: Input.Submitted) -> None:
        """Close with the typed text, if there is some and it is right."""
        event.stop()
        text = event.value.strip()
        if not text:
            self._complain("type something, or press esc")
        elif self._check is None:
            self.close(text)
        else:
            self.query_one("#wrong", Static).update(Content.styled("checking…", "$dim"))
            self._check(text, lambda: self.close(text), self._complain)

    def _complain(self, text: str) -> None:
        if self.is_attached:
            self.query_one("#wrong", Static).update(Content.styled(one_line(text), "$error"))

    def action_cancel(self) -> None:
        """Close without a text."""
        self.close(None)


class Choice(Dialog[str | None]):
    """A list of options, each an id and its words; returns the id of the chosen one, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", "back")]

    def __init__(self, title: str, options: Sequence[tuple[str, str]], yes: str) -> None:
        super().__init__()
        self._title, self._options, self._yes = title, options, yes

    def compose(self) -> ComposeResult:
        """The options and their keys."""
        with Vertical(classes="dialog") as box:
            box.border_title = plain(self._title).markup
            yield OptionList(*(Option(plain(words), id=key) for key, words in self._options))
            yield Static(Content.assemble(("⏎", "bold $mine"), f" {self._yes}   ", ("esc", "bold $mine"), " back"))

    def on_mount(self) -> None:
        """Begin at the first option."""
        self.query_one(OptionList).highlighted = 0

    @on(OptionList.OptionSelected)
    def chosen(self, event: OptionList.OptionSelected) -> None:
        """Close with the chosen option."""
        self.close(event.option_id)

    def action_cancel(self) -> None:
        """Close without a choice."""
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
            box.border_subtitle = "y copies the id · esc closes" if self._copied else "esc closes"
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
            box.border_title, box.border_subtitle = "help", "↑ ↓ scroll · esc closes"
            if self._panel:
                yield Static(Content.assemble((one_line(self._panel), "bold $mine")))
            yield Static(plain(self._about))
            yield Static("")
            for key, words in self._keys:
                yield Static(Content.assemble((key.rjust(8), "bold $mine"), f"  {words}"))

    def action_close(self) -> None:
        """Close the dialog."""
        self.close()


class Jump(Dialog[Widget | str | None]):
    """Jump mode: shows a letter over each panel and returns the panel whose letter is pressed, or another key."""

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
        """Close with the panel of the pressed letter, or with the key itself, as a digit for the tabs."""
        event.stop()
        self.close(self._panels.get(event.key, event.key))

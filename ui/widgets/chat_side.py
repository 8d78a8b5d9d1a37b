"""The side column of the chat (conversations, sampling settings), and the dialogs that choose and change them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from app.core.terminal_text import one_line
from ui.draw.node import now_ms
from ui.draw.numbers import count, day_or_time
from ui.draw.rows import Row, cell, row, shorten
from ui.state.conversations import Branch, Conversation
from ui.state.reply_stream import BOUNDS, Replier, Sampling, sampling_value
from ui.state.store import Store
from ui.widgets.dialogs import Dialog, Question, key_line
from ui.widgets.panel import Panel
from ui.widgets.text_field import TextField

_BRANCH_CELLS = 58  # of a version's first words: it has one row, also with its time and in a window of 80 columns


class ConversationList(Panel):
    """The conversations, the most recently used first."""

    HELP = "Kept in the home folder, readable by you alone. ⏎ opens one, r renames it, / searches, delete forgets it."
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", show=False),
        Binding("down", "move(1)", show=False),
        Binding("enter", "open", "open", show=False),
        Binding("r", "rename", "rename"),
        Binding("slash", "screen.list", "search", key_display="/"),
        Binding("delete,backspace", "forget", "forget", show=False),
    ]

    class Chosen(Message):
        """The user wants to open a conversation."""

        def __init__(self, conversation: int) -> None:
            super().__init__()
            self.conversation = conversation

    class Renamed(Chosen):
        """The user wants to give a conversation another title."""

    class Deleted(Chosen):
        """The user has confirmed that a conversation is to be deleted."""

    def __init__(self, store: Store, *, id: str) -> None:
        super().__init__(store, id=id)
        self.conversations: list[Conversation] = []
        self.current: int | None = None
        self._cursor = 0
        self._top = 0  # the conversation in the first row

    def title(self) -> Row:
        """The number of conversations."""
        return row("conversations  ", (str(len(self.conversations)), "b"))

    def rows(self, width: int, height: int) -> list[Row]:
        """Title and time of each conversation, the open one marked; the last row names the keys."""
        self._cursor = max(0, min(self._cursor, len(self.conversations) - 1))  # some may have been forgotten elsewhere
        first = self._top = max(self._cursor - height + 2, min(self._top, self._cursor))
        rows: list[Row] = []
        for index, kept in enumerate(self.conversations[first : first + height - 1], first):
            when = day_or_time(kept.used_ms, now_ms())
            is_open = kept.id == self.current
            back = " on cursor" if index == self._cursor and self.has_focus else ""
            name = cell(one_line(kept.title), max(4, width - 2 - len(when)))
            mark = ("▌", f"b mine{back}") if is_open else (" ", back.strip())
            rows.append([mark, (name, f"{'b' if is_open else ''}{back}".strip()), (f" {when}", f"dim{back}")])
        return [*rows, row(("^n new · ^x export", "dim"))] if height > 2 else rows

    def on_focus(self) -> None:
        """Show the cursor."""
        self.show()

    def on_blur(self) -> None:
        """Hide the cursor."""
        self.show()

    def action_move(self, rows: int) -> None:
        """Move the cursor."""
        self._cursor = max(0, min(len(self.conversations) - 1, self._cursor + rows))
        self.show()

    def action_open(self) -> None:
        """Open the conversation under the cursor."""
        if self.conversations:
            self.post_message(self.Chosen(self.conversations[self._cursor].id))

    def action_rename(self) -> None:
        """Rename the conversation under the cursor."""
        if self.conversations:
            self.post_message(self.Renamed(self.conversations[self._cursor].id))

    def action_forget(self) -> None:
        """Delete the conversation under the cursor, after confirmation."""
        if not self.conversations:
            return
        kept = self.conversations[self._cursor]

        def answered(sure: bool | None) -> None:
            if sure:
                self._cursor = max(0, self._cursor - 1)
                self.post_message(self.Deleted(kept.id))

        self.app.push_screen(Question(f"Forget the conversation “{one_line(kept.title)}”?", "Forget it"), answered)

    def on_click(self, event: events.Click) -> None:
        """Open the clicked conversation."""
        offset = event.get_content_offset(self)
        if offset is None or offset.y >= self.size.height - 1:
            return
        clicked = self._top + offset.y
        if clicked < len(self.conversations):
            self._cursor = clicked
            self.action_open()


class SamplingPanel(Panel):
    """The sampling settings, the model, and the API's address."""

    HELP = (
        "^s changes these, ^g who replies. Hops of the route can read the chat: for private chats use a private swarm."
    )
    sampling = Sampling()
    replier = Replier()

    def title(self) -> Row:
        """A fixed title."""
        return row("sampling")

    def rows(self, width: int, height: int) -> list[Row]:
        """The most used settings, and the API's address."""
        s = self.sampling
        known = self.store.snapshot
        if self.replier.swarm is None:
            model, context = ("", None) if known is None else (known.model, known.context_length)
        else:
            visit = None if known is None else known.visit
            model, context = "" if visit is None else visit.model, None
        choice = [("swarm", self.replier.swarm), ("adapter", self.replier.adapter)]
        facts = [
            *((name, one_line(value)) for name, value in choice if value is not None),
            ("model", one_line(model) if model else "—"),
            ("context", f"{count(context)} tokens" if context else "—"),
            ("temp", f"{s.temperature:g}"),
            ("top-p", f"{s.top_p:g}"),
            ("max", f"{count(s.max_tokens)} tokens"),
            ("seed", "random" if s.seed is None else str(s.seed)),
            ("API", f"{known.api_url.removeprefix('http://')}" if known is not None else "—"),
        ]
        return [row((name.ljust(8), "dim"), cell(value, max(1, width - 8))) for name, value in facts][:height]


class ConversationPicker(Dialog[tuple[str, int, str] | None]):
    """Dialog that searches the conversations.

    Returns `open`, `rename` or `forget`, the id of the chosen one, and the text that was searched for.
    """

    AUTO_FOCUS = "Input"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "cancel", "back"),
        Binding("up", "move(-1)", show=False),
        Binding("down", "move(1)", show=False),
        Binding("f2", "choose('rename')", "rename"),
        Binding("f8", "choose('forget')", "forget"),
    ]

    def __init__(self, search: Callable[[str], list[Conversation]], wanted: str = "") -> None:
        super().__init__()
        self._search, self._wanted = search, wanted

    def compose(self) -> ComposeResult:
        """A field to search in titles and messages, and the conversations."""
        with Vertical(classes="dialog", id="talks") as box:
            box.border_title = "conversations"
            yield TextField(self._wanted, placeholder="search titles and messages", compact=True)
            yield OptionList()
            yield Static(key_line(("⏎", "open"), ("f2", "rename"), ("f8", "forget"), ("esc", "back")))

    def on_mount(self) -> None:
        """List all."""
        self.query_one(OptionList).can_focus = False
        self._show(self._wanted.strip())

    def _show(self, wanted: str) -> None:
        found = self.query_one(OptionList)
        found.clear_options()
        hits = self._search(wanted)
        found.add_options(Option(Content(one_line(kept.title)), id=str(kept.id)) for kept in hits)
        if not hits:
            none = f"no conversation contains “{one_line(wanted)}”" if wanted else "no conversation yet"
            found.add_option(Option(Content(none), disabled=True))
        found.highlighted = 0 if hits else None

    def on_input_changed(self, event: Input.Changed) -> None:
        """Search while typing."""
        self._show(event.value.strip())

    def on_input_submitted(self) -> None:
        """Open the highlighted conversation."""
        self.action_choose("open")

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Open the clicked conversation."""
        self.action_choose("open")

    def action_choose(self, what: str) -> None:
        """Close with the highlighted conversation."""
        found = self.query_one(OptionList)
        if found.highlighted is not None:
            conversation = int(found.get_option_at_index(found.highlighted).id or 0)
            self.close((what, conversation, self.query_one(Input).value))

    def action_move(self, rows: int) -> None:
        """Move the highlight while the field keeps the focus."""
        found = self.query_one(OptionList)
        if found.highlighted is not None:
            found.highlighted = max(0, min(found.option_count - 1, found.highlighted + rows))

    def action_cancel(self) -> None:
        """Close without a choice."""
        self.close(None)


class BranchPicker(Dialog[int | None]):
    """Dialog that lists the versions of a conversation; returns the last message of the chosen one, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", "back")]

    def __init__(self, branches: list[Branch]) -> None:
        super().__init__()
        self._branches = branches

    def compose(self) -> ComposeResult:
        """One option for each version: its time, and the first words that only it has."""
        with Vertical(classes="dialog") as box:
            box.border_title = "versions of this conversation"
            yield OptionList(*(Option(self._words(branch), id=str(branch.leaf)) for branch in self._branches))
            yield Static(Content.assemble(("⏎", "bold $mine"), " show it   ", ("esc", "bold $mine"), " back"))

    def on_mount(self) -> None:
        """Begin at the version that is shown."""
        self.query_one(OptionList).highlighted = next(
            (index for index, branch in enumerate(self._branches) if branch.is_shown), 0
        )

    def _words(self, branch: Branch) -> Content:
        mark = "▌" if branch.is_shown else " "
        when = day_or_time(branch.at_ms, now_ms())
        words = shorten(one_line(branch.words), _BRANCH_CELLS) or "(no text: failed or stopped)"
        return Content.assemble((mark, "$mine"), words, (f"  {when}", "$dim"))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Close with the chosen version."""
        self.close(int(event.option_id or 0))

    def action_cancel(self) -> None:
        """Close without a choice."""
        self.close(None)


class SamplingForm(Dialog[Sampling | None]):
    """Form with every sampling setting and its help; an invalid value is reported and keeps the form open."""

    AUTO_FOCUS = "Input"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", "back")]

    def __init__(self, sampling: Sampling, *, is_new: bool) -> None:
        super().__init__()
        self._sampling = sampling
        whose = "new conversations" if is_new else "this conversation"
        self._about = {name: words for name, (_, _, words) in BOUNDS.items()}
        self._about["system"] = f"system prompt of {whose}, sent before everything else"

    def compose(self) -> ComposeResult:
        """A field for each setting, and the help of the focused one: all fit into 80x24."""
        with VerticalScroll(classes="dialog", id="sampling-form", can_focus=False) as box:
            box.border_title = "sampling"
            for name, value in asdict(self._sampling).items():
                field = TextField("" if value is None else str(value), id=f"field-{name}", compact=True)
                yield Horizontal(Static(Content.styled(name.replace("_", " "), "bold")), field)
            yield Static("", id="about")
            yield Static("", id="wrong")
            yield Static(Content.assemble(("⏎", "bold $mine"), " save   ", ("esc", "bold $mine"), " back"))

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        """Show the help of the focused field."""
        name = (event.widget.id or "").removeprefix("field-")
        self.query_one("#about", Static).update(Content.styled(self._about.get(name, ""), "$dim"))

    def on_input_submitted(self) -> None:
        """Close with the typed settings, if all are valid."""
        values = {}
        for name in asdict(self._sampling):
            field = self.query_one(f"#field-{name}", Input)
            try:
                values[name] = sampling_value(name, field.value)
            except ValueError as error:
                self.query_one("#wrong", Static).update(Content.styled(str(error), "$error"))
                field.focus()
                return
        self.close(Sampling(**values))  # type: ignore[arg-type]

    def action_cancel(self) -> None:
        """Close without a change."""
        self.close(None)

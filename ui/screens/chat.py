"""The chat tab: conversations and sampling at the side, the transcript, and the input.

The reply is read by a thread of `ui.state.reply_stream`; conversations are stored by `ui.state.conversations`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.widget import Widget

from app.core.terminal_text import one_line, with_names
from ui.draw.reply import error_words, lost_hops, way_row
from ui.draw.rows import row, tidy
from ui.screens.frame import MainScreen
from ui.state.conversations import (
    Conversation,
    Conversations,
    ConversationsError,
    Message,
    export_folder,
    export_in,
    files_of,
    sent_text,
    split_thinking,
)
from ui.state.reply_stream import (
    Replier,
    ReplyPiece,
    ReplyProgress,
    ReplyThread,
    Sampling,
    read_text_file,
    repliers,
)
from ui.state.store import Store
from ui.widgets.ask_box import AskBox, LiveLine
from ui.widgets.chat_side import ConversationList, SamplingPanel
from ui.widgets.dialogs import Question, TextDialog
from ui.widgets.panel import title_of
from ui.widgets.transcript import Transcript


class Chat(MainScreen):
    """The screen of the chat; at most one reply is received at a time."""

    TAB = "chat"
    AUTO_FOCUS = "AskBox"
    TYPES = True
    HELP_TEXT = (
        "⏎ sends, ctrl+j is a new line. esc stops a reply, then leaves the input, so that digits switch screens again; "
        "^o and a digit do so while a reply arrives. Any other letter goes back to the input. ^e and ^r keep the old "
        "version: ^b goes back to it."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", "stop", key_display="esc"),
        Binding("escape", "keep_question", "keep the old", key_display="esc"),
        # With priority: the keys typed after it must find the focus where it has gone.
        Binding("escape", "leave_box", "tabs", key_display="esc", priority=True),
        Binding("ctrl+r", "again", "again", key_display="^r", priority=True),
        Binding("ctrl+e", "edit", "edit", key_display="^e", priority=True),
        Binding("ctrl+y", "copy", "copy", key_display="^y", priority=True),
        Binding("ctrl+n", "new", "new", key_display="^n", priority=True),
        Binding("ctrl+l", "list", "list", key_display="^l", priority=True),
        Binding("ctrl+s", "sampling", "sampling", key_display="^s", priority=True),
        Binding("ctrl+g", "replier", "who replies", key_display="^g", show=False, priority=True),
        Binding("ctrl+b", "branches", "versions", key_display="^b", priority=True),
        Binding("ctrl+f", "attach", "file", key_display="^f", priority=True),
        Binding("f1", "app.help", "help", key_display="F1"),
        Binding("ctrl+x", "export", "export", show=False, priority=True),
    ]

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._thread: ReplyThread | None = None
        self._progress = ReplyProgress(0.0)  # of the latest reply
        self._conversation: Conversation | None = None
        self._messages: list[Message] = []  # of the branch that is shown
        self._asked: Message | None = None  # the question that the reply being received is for
        self._edited: Message | None = None  # the question that the next one replaces
        self._files: list[dict[str, str]] = []  # attached to the next question
        self._typed = ""
        self._draft_before = ""  # typed before the edit began
        self._files_before: list[dict[str, str]] = []  # attached before the edit began
        self._new_draft = ""  # typed for a conversation that has not begun
        self._text = ""
        self._route: list[dict[str, Any]] = []
        self._left: list[dict[str, Any]] = []  # hops that were in the route before
        self._changes: list[dict[str, str]] = []  # lines about them in the transcript, with their CSS class
        self.sampling = Sampling()
        self._replier = Replier()

    def body(self) -> Iterable[Widget]:
        """Side column with conversations and sampling, main column with transcript, progress line and input."""
        yield Horizontal(
            Vertical(ConversationList(self.store, id="convs"), SamplingPanel(self.store, id="sampling"), id="side"),
            Vertical(
                Transcript(id="said"),
                LiveLine(self.store, id="live"),
                AskBox(placeholder="Ask the swarm…   ⏎ send · ctrl+j new line", id="ask", compact=True),
                id="main",
            ),
            id="chatrow",
        )

    async def on_mount(self) -> None:
        """Open the conversation used last; if the file cannot be used, keep conversations in memory only."""
        try:
            self._kept = Conversations(self.dashboard.folder)
        except ConversationsError as error:
            self.dashboard.complain(str(error))
            self._kept = Conversations(None)
        self.sampling = Sampling.chosen(self._kept.choice("sampling"))
        known_all = self._kept.all()
        await self._open(known_all[0].id if known_all else None)
        self._take_unsent()
        self.set_interval(0.25, self._tick)

    def on_unmount(self) -> None:
        """Stop the reply, since nothing will show it, keep what has come of it, and close the file."""
        if self._thread is not None:
            self._thread.stop()
            if self._text and self._conversation is not None and self._asked is not None:
                figures = self._cut_figures() | self._route_figures()
                self._kept.add(self._conversation.id, self._asked.id, "assistant", self._text, figures)
        self._keep_draft(self._typed)  # the input is already gone
        self._kept.close()

    def arrive(self) -> None:
        """Focus the input at once: whoever comes to the chat types, and may begin with a digit."""
        self.set_focus(self.query_one(AskBox))
        self._take_unsent()

    def on_screen_resume(self) -> None:
        """Redraw, and take what was typed in a first run that covered this tab."""
        super().on_screen_resume()
        if self.is_mounted:
            self._take_unsent()

    def _take_unsent(self) -> None:
        """Put the question that was not sent in the first run into the input, unless something is typed there."""
        if self.dashboard.unsent and not self._typed:
            self._type(self.dashboard.unsent)
            self.dashboard.unsent = ""

    def before_key(self, event: events.Key) -> None:
        """Focus the input if a letter is typed elsewhere: it must not be taken as a command to the node.

        The focus moves at once, so that the letter and those that follow quickly reach the input in their order.
        """
        known = self.focused._bindings.key_to_bindings if self.focused is not None else {}
        if not event.is_printable or event.character is None or event.key in known:
            return
        if not event.character.isdecimal() and event.character != "?":
            self.set_focus(self.query_one(AskBox))

    # --- conversations -----------------------------------------------------------------------------------------------

    async def _open(self, conversation: int | None) -> None:
        if self._thread is not None:
            self._thread.stop()
            await self._reply_ended({"stopped": True})
        self._left, self._changes = [], []
        self._keep_draft(self.query_one(AskBox).text)
        self._files = []
        self._conversation = None if conversation is None else self._kept.get(conversation)
        self._type(self._new_draft if self._conversation is None else self._conversation.draft)
        await self._show_messages()

    async def _show_messages(self) -> None:
        """Show the messages of the open conversation's branch."""
        self._messages = [] if self._conversation is None else self._kept.messages(self._conversation.id)
        await self.query_one(Transcript).show_messages(self._messages)
        self._show_sides()
        self.refresh_bindings()

    def _keep_draft(self, typed: str) -> None:
        """Keep what was typed with the conversation that it was typed in; the text of an edit is dropped."""
        text = typed if self._edited is None else self._draft_before
        self._edited = None
        if self._conversation is None:
            self._new_draft = text
        else:
            self._kept.set_draft(self._conversation.id, text)

    def on_text_area_changed(self, event: AskBox.Changed) -> None:
        """Remember what is typed."""
        self._typed = event.text_area.text

    def _type(self, text: str) -> None:
        box = self.query_one(AskBox)
        box.text = self._typed = text
        box.move_cursor(box.document.end)

    def _show_sides(self) -> None:
        listed = self.query_one(ConversationList)
        listed.conversations = self._kept.all()
        listed.current = self._conversation.id if self._conversation is not None else None
        listed.show()
        side = self.query_one(SamplingPanel)
        side.sampling, side.replier = self.sampling, self._replier
        last = self._messages[-1].figures if self._messages else {}
        route = self._route if self._thread is not None else last.get("route") or ()
        live = self.query_one(LiveLine)
        read = [] if self._conversation is None else self._kept.hops(self._conversation.id)
        live.hops = [*read, *self._left, *route]
        live.route = self._route if self._thread is not None else ()
        live.is_visit = self._replier.swarm is not None
        side.show()
        live.show()
        transcript = self.query_one(Transcript)
        title = one_line(self._conversation.title) if self._conversation is not None else "new conversation"
        box = self.query_one(AskBox)
        edited = ["a new version of this question · esc keeps the old"] if self._edited is not None else []
        names = ", ".join(one_line(file["name"]) for file in self._files)
        box.border_title = Content(" · ".join([*edited, *([f"with {names}, ^f removes"] if names else [])]))
        transcript.border_title = title_of(self.app.theme, row(title))
        way = way_row(route, self.store.snapshot, self.store.peer_name)
        transcript.border_subtitle = title_of(self.app.theme, way)

    async def on_conversation_list_chosen(self, message: ConversationList.Chosen) -> None:
        """Open the chosen conversation."""
        await self._open(message.conversation)

    async def on_conversation_list_deleted(self, message: ConversationList.Deleted) -> None:
        """Delete a conversation."""
        await self._forget(message.conversation)

    async def _forget(self, conversation: int) -> None:
        """Delete a conversation; if it is open, start a new one."""
        self._kept.delete(conversation)
        if self._conversation is not None and self._conversation.id == conversation:
            await self._open(None)
        self._show_sides()

    async def action_new(self) -> None:
        """Start a new conversation."""
        await self._open(None)
        self.query_one(AskBox).focus()

    async def on_conversation_list_renamed(self, message: ConversationList.Renamed) -> None:
        """Ask for another title."""
        self._rename(message.conversation, lambda: None)

    def _rename(self, conversation: int, back: Callable[[], None]) -> None:
        """Ask for another title; `back` is called if none is given."""
        known = self._kept.get(conversation)
        if known is None:
            return

        def named(title: str | None) -> None:
            if title:
                self._kept.rename(conversation, title)
                if self._conversation is not None and self._conversation.id == conversation:
                    self._conversation = self._kept.get(conversation)
                self._show_sides()
            else:
                back()

        self.app.push_screen(TextDialog("Rename this conversation", value=known.title), named)

    def action_list(self) -> None:
        """Search, open, rename or forget conversations in a dialog."""
        from ui.widgets.chat_side import ConversationPicker

        async def chosen(choice: tuple[str, int, str] | None) -> None:
            what, conversation, wanted = choice or ("", 0, "")
            if what == "open":
                await self._open(conversation)
                self.query_one(AskBox).focus()
            elif what == "rename":
                self._rename(conversation, partial(pick, wanted))
            elif what == "forget" and (known := self._kept.get(conversation)) is not None:
                words = f"Forget the conversation “{one_line(known.title)}”?"
                self.app.push_screen(Question(words, "Forget it"), partial(forgotten, conversation, wanted))

        async def forgotten(conversation: int, wanted: str, sure: bool | None) -> None:
            if sure:
                await self._forget(conversation)
            else:
                pick(wanted)

        def pick(wanted: str) -> None:
            self.app.push_screen(ConversationPicker(self._kept.all, wanted), chosen)

        pick("")

    def action_attach(self) -> None:
        """Attach a text file to the next question, or remove the attached ones."""
        if self._files:
            self._files = []
            self._show_sides()
            return

        def check(text: str, right: Callable[[], None], wrong: Callable[[str], None]) -> None:
            try:
                self._files = [read_text_file(Path(text).expanduser())]
            except ValueError as error:
                wrong(str(error))
            else:
                right()

        words = "A text file to send with the question"
        self.app.push_screen(TextDialog(words, hint="~/notes.txt", check=check), lambda _: self._show_sides())

    def action_export(self) -> None:
        """Write the conversation to a Markdown file in the user's documents."""
        if self._conversation is None:
            return
        try:
            path = export_in(export_folder(), self._conversation, self._messages)
            self.dashboard.say(f"conversation written to {path}")
        except OSError as error:
            self.dashboard.complain(f"the conversation cannot be written: {error.strerror or error}")

    # --- questions and replies ---------------------------------------------------------------------------------------

    async def on_ask_box_asked(self, message: AskBox.Asked) -> None:
        """Send a typed question; while a reply is received, put it back into the input."""
        if self._thread is not None:
            self._type(message.text)
            self.dashboard.say("a reply is on its way: esc stops it")
            return
        await self.ask(message.text)

    async def ask(self, text: str) -> None:
        """Send a question after the last message, or as a new version of the edited one."""
        if self._conversation is None:
            self._conversation = self._kept.begin(text, self.sampling.system)
            self._new_draft = ""
        files, self._files = self._files, []
        if (edited := self._edited) is not None:
            self._edited, self._files = None, self._files_before
            self._type(self._draft_before)
            self._messages = [message for message in self._messages if message.id < edited.id]
            await self.query_one(Transcript).show_messages(self._messages)
        parent = self._messages[-1].id if self._messages else None
        question = self._kept.add(self._conversation.id, parent, "user", text, {"files": files} if files else None)
        self._messages.append(question)
        await self._request_reply(question)

    async def _request_reply(self, question: Message) -> None:
        """Ask the node to reply to the last message, and show the reply as it arrives."""
        transcript, door, link = self.query_one(Transcript), self.dashboard.door, self.store.link
        if door is None or link.kind != "live":
            cure = f": {link.next_step}" if link.next_step else ""
            await self._show_messages()
            await transcript.note(error_words(f"not connected to the node{cure}"), "error")
            return
        await transcript.ask(question)
        self._asked = question
        messages = [{"role": m.role, "content": text} for m in self._messages if (text := sent_text(m))]
        self._text, self._route, self._left, self._changes = "", [], [], []
        request = self._sampling_here().request(messages) | self._replier.request()
        thread = ReplyThread(door.client, request, lambda piece: self._post_piece(thread, piece))
        self._thread = thread
        self._progress = self.query_one(LiveLine).progress = ReplyProgress(self.store.now())
        self._show_sides()
        self.refresh_bindings()
        thread.start()

    def _sampling_here(self) -> Sampling:
        """The sampling settings with the open conversation's own system prompt."""
        return self.sampling if self._conversation is None else replace(self.sampling, system=self._conversation.system)

    def _post_piece(self, thread: ReplyThread, piece: dict[str, Any]) -> None:
        self.post_message(ReplyPiece(thread, piece))

    async def on_reply_piece(self, message: ReplyPiece) -> None:
        """Show a piece of the reply; pieces from the thread of an earlier reply are dropped."""
        if message.thread is not self._thread:
            return
        if any(key in message.piece for key in ("done", "error", "stopped")):
            await self._reply_ended(message.piece)
            return
        fresh = self._progress.take(message.piece, self.store.now())
        self._text += fresh
        await self.query_one(Transcript).add(fresh)
        if "route" in message.piece:
            await self._route_changed(message.piece, self._progress.tokens)

    async def _route_changed(self, piece: dict[str, Any], tokens: int) -> None:
        """Record the reply's route; if hops left it, say so in the transcript."""
        before, self._route = self._route, piece["route"]
        self._left += [hop for hop in before if hop not in self._route]
        moved = bool(piece.get("moved"))
        if words := lost_hops(before, self._route, self.store.peer_name, moved=moved):
            text = f"{'↷' if moved else '▼'} at token {tokens}: {words} · the reply continues"
            change = {"text": text, "kind": "figures" if moved else "warning"}
            self._changes.append(change)
            await self.query_one(Transcript).note(**change)
        self._show_sides()

    async def _reply_ended(self, piece: dict[str, Any]) -> None:
        thread, self._thread = self._thread, None
        live = self.query_one(LiveLine)
        live.progress = None
        live.show()
        question = self._asked
        if thread is None or self._conversation is None or question is None:
            return
        figures = {name: value for name, value in piece.get("done", {}).items() if name != "text"}
        error = tidy(with_names(str(piece.get("error", "")), self.store.peer_name))
        code = str(piece.get("code", ""))
        if error or piece.get("stopped"):
            figures = self._cut_figures(error, code)
        elif self._progress.has_waited:
            figures["has_waited"] = True
        figures |= self._route_figures()
        if not self._text and len(self._kept.messages(self._conversation.id)) > len(self._messages):
            await self._show_messages()  # nothing came: the reply that was to be replaced stays
            words = error_words(error, code) or "stopped"
            await self.query_one(Transcript).note(words, "error" if error else "figures")
            return
        reply = self._kept.add(self._conversation.id, question.id, "assistant", self._text, figures)
        self._messages.append(reply)
        await self.query_one(Transcript).finish(reply)
        self._show_sides()
        self.refresh_bindings()

    def _cut_figures(self, error: str = "", code: str = "") -> dict[str, Any]:
        """The figures of a reply that an error or its reader has ended."""
        figures: dict[str, Any] = {"token_ids": [0] * self._progress.tokens, "stopped": not error, "error": error}
        return figures | ({"error_code": code} if error else {}) | ({"route": self._route} if self._route else {})

    def _route_figures(self) -> dict[str, Any]:
        """The hops that left the reply's route, and the lines that say so."""
        return ({"left": self._left} if self._left else {}) | ({"changes": self._changes} if self._changes else {})

    async def _tick(self) -> None:
        live = self.query_one(LiveLine)
        if live.progress is not None:
            live.progress.speeds.append(live.progress.speed(self.store.now()))
            live.show()
            self.call_later(self.query_one(Transcript).draw)  # in turn with the pieces, which a timer is not

    # --- keys --------------------------------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """True if the key does something now."""
        if action == "stop":
            return self._thread is not None
        if action == "leave_box":
            return self._thread is None and self._edited is None and isinstance(self.focused, AskBox)
        if action == "keep_question":
            return self._thread is None and self._edited is not None
        if action in ("again", "edit"):
            return self._thread is None and bool(self._messages)
        if action == "branches":
            return self._thread is None and any(message.versions > 1 for message in self._messages)
        if action == "export":
            return bool(self._messages)
        if action == "copy":
            return any(message.role == "assistant" for message in self._messages)
        return True

    async def action_stop(self) -> None:
        """Stop the reply."""
        if self._thread is not None:
            self._thread.stop()
            await self._reply_ended({"stopped": True})

    def action_leave_box(self) -> None:
        """Move the focus out of the input, so that single-letter keys work."""
        self.set_focus(self.query_one(Transcript))

    async def action_again(self) -> None:
        """Ask the last question again; the old reply stays as another version."""
        asked = next((m for m in reversed(self._messages) if m.role == "user"), None)
        if asked is not None:
            self._messages = [message for message in self._messages if message.id <= asked.id]
            await self.query_one(Transcript).show_messages(self._messages[:-1])
            await self._request_reply(asked)

    def action_edit(self) -> None:
        """Copy the last question into the input, or the one before the edited one; sending it makes a new version.

        An edited text that was changed is not replaced: it is kept nowhere else.
        """
        if self._edited is not None and self.query_one(AskBox).text != self._edited.content:
            self.dashboard.say("this version is not sent yet: ⏎ sends it, esc keeps the old")
            return
        before = self._edited.id if self._edited is not None else None
        asked = [m for m in self._messages if m.role == "user" and (before is None or m.id < before)]
        if asked:
            if self._edited is None:
                self._draft_before, self._files_before = self.query_one(AskBox).text, self._files
            self._edited, self._files = asked[-1], files_of(asked[-1])
            self._type(asked[-1].content)
            self.query_one(AskBox).focus()
            self._show_sides()
            self.refresh_bindings()

    def action_keep_question(self) -> None:
        """End the edit and leave the question as it was."""
        self._edited, self._files = None, self._files_before
        self._type(self._draft_before)
        self._show_sides()
        self.refresh_bindings()

    def action_branches(self) -> None:
        """Let the user choose among the versions of this conversation."""
        from ui.widgets.chat_side import BranchPicker

        conversation = self._conversation
        if conversation is None:
            return

        async def chosen(leaf: int | None) -> None:
            if leaf is not None:
                self._kept.show_branch(conversation.id, leaf)
                await self._show_messages()

        self.app.push_screen(BranchPicker(self._kept.branches(conversation.id)), chosen)

    def action_copy(self) -> None:
        """Copy the last reply to the terminal's clipboard."""
        last = next((m for m in reversed(self._messages) if m.role == "assistant"), None)
        if last is not None:
            reply = split_thinking(last.content)[1] or last.content
            self.dashboard.copy(reply, "the reply", "^x writes the conversation to a file")

    def action_replier(self) -> None:
        """Choose who replies: the own swarm, it with an adapter, or another saved swarm."""
        from ui.widgets.dialogs import Choice

        known = self.store.snapshot
        if known is None or known.swarm is None:
            return
        own, others = known.swarm, [swarm.pinned for swarm in known.swarms if not swarm.active]

        def choose(answer: Any) -> None:
            found = repliers([str(model["id"]) for model in answer["data"]], own, others)
            options = [(str(number), one_line(words)) for number, (_, words) in enumerate(found)]

            def chosen(number: str | None) -> None:
                if number is not None:
                    self._replier = found[int(number)][0]
                    self._show_sides()

            self.app.push_screen(Choice("who replies?", options, "ask them"), chosen)

        self.dashboard.ask(lambda client: client.get("/v1/models"), choose)

    def action_sampling(self) -> None:
        """Open the form with the sampling settings."""
        from ui.widgets.chat_side import SamplingForm

        def chosen(sampling: Sampling | None) -> None:
            if sampling is None:
                return
            if self._conversation is not None:  # its system prompt is its own
                self._kept.set_system(self._conversation.id, sampling.system)
                self._conversation = replace(self._conversation, system=sampling.system)
                sampling = replace(sampling, system=self.sampling.system)
            self.sampling = sampling
            self._kept.choose("sampling", asdict(sampling))
            self._show_sides()

        self.app.push_screen(SamplingForm(self._sampling_here(), is_new=self._conversation is None), chosen)

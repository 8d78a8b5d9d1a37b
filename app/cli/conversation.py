"""A conversation in the terminal: the prompt, Ctrl-C, `/` commands, and saving with the dashboard's conversations.

`app.cli.chat` chooses who answers; `app.cli.reply_printer` prints.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from app.cli.command import print_json
from app.cli.failures import explain
from app.cli.parser import followed, nearest
from app.cli.reply_printer import reply_printer
from app.core.errors import AppError, UsageError
from app.core.terminal_text import without_controls
from app.system.console import edit_lines
from engine.errors import EngineError

if TYPE_CHECKING:
    from ui.state.conversations import Conversations

Chat = list[dict[str, str]]
# The command, what follows it, and its help.
HELP = (
    ("/help", "", "show these commands"),
    ("/clear", "", "start a new conversation"),
    ("/regenerate", "", "ask the last question again"),
    ("/save", "[FILE]", "write the conversation as Markdown, to a new file"),
    ("/system", "[TEXT]", 'show or set the system message; "" removes it'),
    ("/set", "[NAME [VALUE]]", 'show or change the sampling settings; "" clears one'),
    ("/model", "[NAME]", "show the model; with --local, load another one"),
    ("/quit", "", "end; Ctrl-D does the same"),
)
_NOTHING = ('""', "''")  # how an empty text is written
_CLEARED: dict[str, Any] = {"seed": None, "stop": [], "private_blocks": None}  # settings that may have no value
_LONGER = {True: "/set max_tokens N", False: "--max-tokens N"}  # in a conversation, and for one question
_KEYS = "Ctrl-C stops a reply or clears the line, twice ends. Pasted text is one message."


class Answers(Protocol):
    """The side that answers: the swarm through a running node, or a model in this process."""

    settings: dict[str, Any]  # by the names of `app.cli.chat.SAMPLING`
    facts: dict[str, Any]  # of the last reply that was read to its end, as `chat --json` shows them

    def answer(self, messages: Chat) -> Iterator[str]:
        """Yield the pieces of the reply to these messages."""

    def figures(self, *, is_whole: bool) -> dict[str, Any]:
        """Return what is kept with the last reply, for the dashboard's chat; of one cut short, what is known."""

    def waits_for(self) -> str:
        """Say what the reply waits for now, or an empty text; called by another thread while `answer` is silent."""

    def model(self) -> str:
        """Describe the model that answers."""

    def use_model(self, name: str) -> None:
        """Have another model answer; raises `AppError` if that is not possible."""


class TerminalChat:
    """One conversation at a time, with its messages and its row in the store."""

    def __init__(self, answers: Answers, store: Conversations, settings: dict[str, Callable[[str], Any]]) -> None:
        self._answers, self._store, self._parsers = answers, store, settings
        self._system: str | None = None
        self._messages: Chat = []  # questions and replies in turn
        self._unanswered: str | None = None  # the last question, if its reply never began
        self._id: int | None = None  # of the conversation in the store
        self._title = ""
        self._is_interactive = self._was_interrupted = False  # the latter by the latest key

    def set_system(self, text: str | None) -> None:
        """Use this system message from now on; None or an empty one: none."""
        self._system = text or None
        if self._id is not None:
            self._store.set_system(self._id, text or "")

    def resume(self) -> None:
        """Continue the conversation used last, with its system message and its files."""
        from ui.state.conversations import sent_text

        kept = self._store.all()
        if not kept:
            raise AppError("there is no conversation to resume: start one with `shoal chat`")
        self._id, self._title, self._system = kept[0].id, kept[0].title, kept[0].system or None
        stored = self._store.messages(kept[0].id)
        self._messages = [{"role": message.role, "content": text} for message in stored if (text := sent_text(message))]
        if self._messages and self._messages[-1]["role"] == "user":
            self._messages.pop()  # its reply never came

    def show_last(self) -> None:
        """Print where the conversation stands."""
        _note(f"Resuming {self._title!r}, {len(self._messages)} messages.")
        if len(self._messages) >= 2:
            print(f"> {without_controls(self._messages[-2]['content'])}")
            printer = reply_printer()
            printer.write(self._messages[-1]["content"])
            printer.end()

    def converse(self) -> None:
        """Answer what the user types until the end of the input, /quit, or Ctrl-C twice."""
        interactive = self._is_interactive = sys.stdin.isatty()
        if interactive:
            edit_lines()
            _note("Type a message; /help lists the commands, Ctrl-D ends.")
        while True:
            try:
                line = input("> " if interactive else "")
            except EOFError:
                if interactive:
                    print()
                return
            except KeyboardInterrupt:
                print()
                if self._was_interrupted:
                    return
                self._was_interrupted = True
                _note("Ctrl-C again ends.")
                continue
            self._was_interrupted = False
            if line.strip() in ("/quit", "/exit", "/bye"):
                return
            try:
                self._take(line)
            except (AppError, EngineError, OSError) as error:
                if not interactive:
                    raise
                _note(f"shoal: {explain(error)}")
                if self._messages and isinstance(error, AppError) and error.code == "context_length_exceeded":
                    _note("The conversation so far counts: /clear starts a new one.")

    def say(self, text: str, *, as_json: bool = False) -> None:
        """Print the reply to one message, and keep both; a reply that Ctrl-C stops is kept as far as it came."""
        self._unanswered = text
        self._ask([*self._messages, {"role": "user", "content": text}], as_json=as_json)

    def _take(self, line: str) -> None:
        """Run a `/` command, or send the line as a message."""
        if not line.startswith("/"):
            if line.strip():
                self.say(line.strip())
            return
        word, _, rest = line.partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/clear": self._clear,
            "/regenerate": self._regenerate,
            "/save": self._save,
            "/system": self._show_system,
            "/set": self._set,
            "/model": self._model,
        }
        if word not in commands:
            known = nearest(word, [*commands, "/quit"])
            more = "/help lists them, a space before it sends the line"
            raise UsageError(followed(f"unknown command {word!r}{known}", more))
        commands[word](rest.strip())

    def _ask(self, messages: Chat, *, as_json: bool = False, replaces: bool = False) -> None:
        from ui.state.conversations import split_thinking

        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        printer = None if as_json else reply_printer(self._answers.waits_for)
        pieces: list[str] = []
        is_whole = False
        stream = self._answers.answer([*system, *messages])
        try:
            for piece in stream:
                piece = without_controls(piece)
                pieces.append(piece)
                if printer is not None:
                    printer.write(piece)
            is_whole = True
        except KeyboardInterrupt:
            if not self._is_interactive:
                raise
            self._was_interrupted = True
        finally:
            if printer is not None:
                printer.end()
        if not is_whole:
            _note("Stopped. Ctrl-C again ends.")
        elif printer is not None and sys.stdout.isatty() and self._answers.facts.get("finish_reason") == "length":
            _note(f"Cut off: {_LONGER[self._is_interactive]} allows longer replies.")
        if is_whole or pieces:
            figures = self._answers.figures(is_whole=is_whole)
            self._keep(messages[-1]["content"], "".join(pieces), figures, replaces)
            self._messages = [*messages, {"role": "assistant", "content": split_thinking("".join(pieces))[1]}]
            self._unanswered = None
        if as_json:
            print_json(self._answers.facts)

    def _keep(self, question: str, reply: str, figures: dict[str, Any], replaces: bool) -> None:
        if self._id is None:
            begun = self._store.begin(question, self._system or "")
            self._id, self._title = begun.id, begun.title
        stored = self._store.messages(self._id)
        if replaces:
            asked = next(message for message in reversed(stored) if message.role == "user")
        else:
            asked = self._store.add(self._id, stored[-1].id if stored else None, "user", question)
        self._store.add(self._id, asked.id, "assistant", reply, figures)

    # --- commands -----------------------------------------------------------------------------------------------------

    def _help(self, rest: str) -> None:
        for word, arguments, text in HELP:
            _note(f"{f'{word} {arguments}':<22} {text}")
        _note(_KEYS)

    def _clear(self, rest: str) -> None:
        self._messages, self._id, self._unanswered = [], None, None
        _note("A new conversation.")

    def _regenerate(self, rest: str) -> None:
        if self._unanswered is not None:
            self.say(self._unanswered)
        elif len(self._messages) < 2:
            raise UsageError("there is no question to ask again")
        else:
            self._ask(self._messages[:-1], replaces=True)

    def _save(self, rest: str) -> None:
        from ui.state.conversations import export_in, export_to

        kept = None if self._id is None else self._store.get(self._id)
        if kept is None:
            raise UsageError("there is nothing to save yet")
        messages = self._store.messages(kept.id)
        if rest:
            path = Path(rest).expanduser()
            try:
                export_to(path, kept, messages)
            except FileExistsError:
                raise UsageError(f"{path} exists already: give another name, or none for one of the title") from None
        else:
            path = export_in(Path.cwd(), kept, messages)
        _note(f"Saved to {path}.")

    def _show_system(self, rest: str) -> None:
        if rest:
            self.set_system(None if rest in _NOTHING else rest)
        _note(f"System message: {self._system or 'none'}")

    def _set(self, rest: str) -> None:
        name, _, text = rest.replace("=", " ", 1).partition(" ")
        if name:
            name = name.replace("-", "_")
            if name not in self._parsers:
                raise UsageError(followed(f"unknown setting {name!r}{nearest(name, self._parsers)}", "/set lists them"))
            self._change_setting(name, text.strip())
        for one, value in self._answers.settings.items():
            if name in ("", one):
                shown = ", ".join(map(repr, value)) if isinstance(value, list) else value
                _note(f"{one} = {'not set' if shown in (None, '') else shown}")

    def _change_setting(self, name: str, text: str) -> None:
        """Give a setting another value; an empty text leaves it as it is."""
        if text in _NOTHING and name in _CLEARED:
            self._answers.settings[name] = _CLEARED[name]
        elif text:
            try:
                self._answers.settings[name] = self._parsers[name](text)
            except argparse.ArgumentTypeError as error:
                raise UsageError(f"{name}: {error}") from None

    def _model(self, rest: str) -> None:
        if rest:
            self._answers.use_model(rest)
        _note(self._answers.model())


def open_store(folder: Path | None) -> Conversations:
    """Open the conversations of a home folder; in memory if `folder` is None, or with a warning if it is unusable."""
    from ui.state.conversations import Conversations, ConversationsError

    try:
        return Conversations(folder)
    except ConversationsError as error:
        _note(f"shoal: this conversation will not be kept: {error}")
        return Conversations(None)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

"""Conversations and the user's choices (sampling, theme), in one SQLite file that only its owner can read.

A conversation is a tree: each message names the one before it, and an edited question or another reply to the same
question is a new branch beside the old one. `leaf` is the last message of the branch that is shown.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from app.core.terminal_text import without_controls

FILE = "conversations.db"
VERSION = 2
_TITLE_CHARS = 60
_SCHEMA = """
create table conversation (
    id integer primary key, title text not null, used_ms integer not null,
    leaf integer, system text not null default '', draft text not null default ''
);
create table message (
    id integer primary key,
    conversation integer not null references conversation(id) on delete cascade,
    role text not null, content text not null, at_ms integer not null, figures text not null, parent integer
);
create index message_of on message(conversation, id);
create table choice (name text primary key, value text not null);
"""
_FROM_VERSION_1 = """
alter table conversation add column leaf integer;
alter table conversation add column system text not null default '';
alter table conversation add column draft text not null default '';
alter table message add column parent integer;
update message set parent =
    (select max(id) from message as earlier
        where earlier.conversation = message.conversation and earlier.id < message.id);
update conversation set leaf = (select max(id) from message where message.conversation = conversation.id);
update conversation set system =
    coalesce((select json_extract(value, '$.system') from choice where name = 'sampling'), '');
"""
_PATH = """
with recursive path(id) as (
    select leaf from conversation where conversation.id = ?
    union select parent from message join path using (id) where parent is not null
)
select id, role, content, at_ms, figures, parent,
    (select count(*) from message as twin where twin.conversation = message.conversation
        and twin.parent is message.parent and twin.id <= message.id),
    (select count(*) from message as twin where twin.conversation = message.conversation
        and twin.parent is message.parent)
from message where id in (select id from path) order by id
"""


class ConversationsError(Exception):
    """The file cannot be used; the message says why and what to do."""


@dataclass(frozen=True)
class Conversation:
    """One conversation without its messages."""

    id: int
    title: str
    used_ms: int
    system: str = ""  # system prompt
    draft: str = ""  # typed and not sent


@dataclass(frozen=True)
class Message:
    """One message; a reply has the figures of `chat --json`, such as tokens per second and its route."""

    id: int
    role: str
    content: str
    at_ms: int
    figures: dict[str, Any]
    parent: int | None = None  # the message before it
    version: int = 1  # place among the messages that follow the same one
    versions: int = 1  # number of these


@dataclass(frozen=True)
class Branch:
    """One branch of a conversation: its last message, and the first words that are in no other branch."""

    leaf: int
    words: str
    at_ms: int
    is_shown: bool


def files_of(message: Message) -> list[dict[str, str]]:
    """The text files attached to a question, each with its name and text."""
    return [file for file in message.figures.get("files") or () if isinstance(file, dict)]


def split_thinking(text: str) -> tuple[str, str]:
    """A model's thinking (`<think>…</think>` at the start of its reply) and the rest; the end may be missing so far.

    Some chat templates write the opening tag into the prompt, so that a reply has only the closing one.
    """
    head, closed, rest = text.partition("</think>")
    start = head.lstrip()
    if closed:
        return start.removeprefix("<think>").strip(), rest.lstrip()
    if start.startswith("<think>"):
        return start.removeprefix("<think>").strip(), ""
    return "", text


def with_files(text: str, files: Sequence[Mapping[str, str]]) -> str:
    """A question with its attached text files before it, as the model gets it."""
    parts = [f"File {file['name']}:\n```\n{file['text']}\n```" for file in files]
    return "\n\n".join([*parts, text])


def sent_text(message: Message) -> str:
    """A message as the model gets it: a question with its files, a reply without its thinking."""
    if message.role == "user":
        return with_files(message.content, files_of(message))
    return split_thinking(message.content)[1]


class Conversations:
    """All conversations of a home folder; without a folder they are kept in memory only."""

    def __init__(self, folder: Path | None, now_ms: Callable[[], int] = lambda: time.time_ns() // 10**6) -> None:
        self._now_ms = now_ms
        self._path = None if folder is None else folder / FILE
        try:
            self._db = _open(self._path)
            self._db.create_function("fold", 1, str.casefold, deterministic=True)
            version = int(self._db.execute("pragma user_version").fetchone()[0])
        except (sqlite3.Error, OSError) as error:
            raise ConversationsError(f"{self._path} cannot be used ({error}): move it away to start afresh") from error
        if version > VERSION:
            raise ConversationsError(f"{self._path} was written by a newer Shoal: update this one")
        if version < VERSION:
            script = _SCHEMA if version == 0 else _FROM_VERSION_1
            self._db.executescript(f"begin;{script}pragma user_version = {VERSION};commit;")

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def all(self, wanted: str = "") -> list[Conversation]:
        """Every conversation whose title or messages contain a text, the most recently used first."""
        query = (
            "select id, title, used_ms, system, draft from conversation where instr(fold(title), ?) or exists"
            " (select 1 from message where message.conversation = conversation.id and instr(fold(content), ?))"
            if wanted
            else "select id, title, used_ms, system, draft from conversation"
        )
        values = (wanted.casefold(), wanted.casefold()) if wanted else ()
        rows = self._db.execute(f"{query} order by used_ms desc, conversation.id desc", values)
        return [Conversation(*row) for row in rows]

    def get(self, conversation: int) -> Conversation | None:
        """One conversation; None if it was deleted."""
        query = "select id, title, used_ms, system, draft from conversation where id = ?"
        found = self._db.execute(query, (conversation,)).fetchone()
        return None if found is None else Conversation(*found)

    def begin(self, question: str, system: str = "") -> Conversation:
        """Create a conversation, with its first question as title."""
        title, now_ms = _title_of(question), self._now_ms()
        with self._db:
            done = self._db.execute(
                "insert into conversation (title, used_ms, system) values (?, ?, ?)", (title, now_ms, system)
            )
        assert done.lastrowid is not None
        return Conversation(done.lastrowid, title, now_ms, system)

    def rename(self, conversation: int, title: str) -> None:
        """Give a conversation another title."""
        self._update(conversation, "title", _title_of(title))

    def set_system(self, conversation: int, system: str) -> None:
        """Give a conversation another system prompt."""
        self._update(conversation, "system", system)

    def set_draft(self, conversation: int, draft: str) -> None:
        """Keep what was typed in a conversation and not sent."""
        self._update(conversation, "draft", draft)

    def _update(self, conversation: int, column: str, value: str | int) -> None:
        with self._db:
            self._db.execute(f"update conversation set {column} = ? where id = ?", (value, conversation))

    def messages(self, conversation: int) -> list[Message]:
        """Messages of the branch that is shown, the oldest first."""
        rows = self._db.execute(_PATH, (conversation,))
        return [
            Message(key, role, without_controls(content), at_ms, json.loads(figures), parent, version, versions)
            for key, role, content, at_ms, figures, parent, version, versions in rows
        ]

    def hops(self, conversation: int) -> list[dict[str, Any]]:
        """Hops of the replies of all branches, also those that left a route: each has read the conversation so far."""
        rows = self._db.execute("select figures from message where conversation = ? order by id", (conversation,))
        replies = [json.loads(figures) for (figures,) in rows]
        return [hop for reply in replies for hop in (*(reply.get("left") or ()), *(reply.get("route") or ()))]

    def add(
        self,
        conversation: int,
        parent: int | None,
        role: str,
        content: str,
        figures: dict[str, Any] | None = None,
    ) -> Message:
        """Add a message after `parent`, show its branch, and mark the conversation as just used."""
        now_ms = self._now_ms()
        with self._db:
            done = self._db.execute(
                "insert into message (conversation, parent, role, content, at_ms, figures) values (?, ?, ?, ?, ?, ?)",
                (conversation, parent, role, content, now_ms, json.dumps(figures or {})),
            )
            self._db.execute(
                "update conversation set used_ms = ?, leaf = ? where id = ?", (now_ms, done.lastrowid, conversation)
            )
        return self.messages(conversation)[-1]

    def branches(self, conversation: int) -> list[Branch]:
        """The branches of a conversation, the oldest first."""
        rows = self._db.execute(
            "select id, parent, content, at_ms from message where conversation = ? order by id", (conversation,)
        ).fetchall()
        parents = {key: parent for key, parent, _, _ in rows}
        contents = {key: content for key, _, content, _ in rows}
        children = Counter(parents.values())
        shown = self._db.execute("select leaf from conversation where id = ?", (conversation,)).fetchone()
        found = []
        for leaf, _, _, at_ms in rows:
            if children[leaf]:
                continue
            own = at = leaf  # climb to the first message that no other branch has
            while parents[at] is not None and children[parents[at]] == 1:
                own = at = parents[at]
            found.append(Branch(leaf, " ".join(contents[own].split()), at_ms, shown is not None and shown[0] == leaf))
        return found

    def show_branch(self, conversation: int, leaf: int) -> None:
        """Show the branch that ends in this message."""
        self._update(conversation, "leaf", leaf)

    def delete(self, conversation: int) -> None:
        """Delete a conversation with its messages."""
        with self._db:
            self._db.execute("delete from conversation where id = ?", (conversation,))

    def choice(self, name: str) -> Any:
        """The value last given to `choose` under this name, or None."""
        row = self._db.execute("select value from choice where name = ?", (name,)).fetchone()
        return None if row is None else json.loads(row[0])

    def choose(self, name: str, value: Any) -> None:
        """Remember a value that JSON can hold under a name."""
        with self._db:
            self._db.execute("insert or replace into choice (name, value) values (?, ?)", (name, json.dumps(value)))


def _title_of(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= _TITLE_CHARS else words[: _TITLE_CHARS - 1] + "…"


def _open(path: Path | None) -> sqlite3.Connection:
    if path is not None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # at a first start it is the home folder
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite would create it readable by everybody
    connection = sqlite3.connect(":memory:" if path is None else path)
    connection.execute("pragma foreign_keys = on")
    return connection


def as_markdown(conversation: Conversation, messages: list[Message]) -> str:
    """A conversation as a Markdown document."""
    parts = [f"# {conversation.title}"]
    if conversation.system:
        parts.append(f"**System message**\n\n{conversation.system}")
    for message in messages:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(message.at_ms / 1000))
        who = {"user": "You", "assistant": "The swarm"}.get(message.role, message.role)
        parts.append(f"**{who}** · {when}\n\n{message.content}")
    return "\n\n".join(parts) + "\n"


def export_folder() -> Path:
    """Folder for exported conversations: the user's documents, downloads or home, the first that exists."""
    home = Path.home()
    return next((place for place in (home / "Documents", home / "Downloads") if place.is_dir()), home)


def export_in(folder: Path, conversation: Conversation, messages: list[Message]) -> Path:
    """Write a conversation to a new Markdown file in a folder, named by its title."""
    name = "".join(c if c.isalnum() else "-" for c in conversation.title.lower())[:40].strip("-") or "chat"
    for number in count(1):
        path = folder / (f"{name}.md" if number == 1 else f"{name}-{number}.md")
        with suppress(FileExistsError):
            export_to(path, conversation, messages)
            return path
    raise AssertionError("unreachable: the loop is endless")


def export_to(path: Path, conversation: Conversation, messages: list[Message]) -> None:
    """Write a conversation to a new Markdown file that only its owner can read; never overwrite a file."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(as_markdown(conversation, messages))

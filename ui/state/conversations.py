"""Conversations and the user's choices (sampling, theme), in one SQLite file that only its owner can read."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

FILE = "conversations.db"
VERSION = 1
_TITLE_CHARS = 60
_SCHEMA = """
create table conversation (id integer primary key, title text not null, used_ms integer not null);
create table message (
    id integer primary key,
    conversation integer not null references conversation(id) on delete cascade,
    role text not null, content text not null, at_ms integer not null, figures text not null
);
create index message_of on message(conversation, id);
create table choice (name text primary key, value text not null);
"""


class ConversationsError(Exception):
    """The file cannot be used; the message says why and what to do."""


@dataclass(frozen=True)
class Conversation:
    """One conversation without its messages."""

    id: int
    title: str
    used_ms: int


@dataclass(frozen=True)
class Message:
    """One message; a reply has the figures of `chat --json`, such as tokens per second and its route."""

    id: int
    role: str
    content: str
    at_ms: int
    figures: dict[str, Any]


class Conversations:
    """All conversations of a home folder; without a folder they are kept in memory only."""

    def __init__(self, folder: Path | None, now_ms: Callable[[], int] = lambda: time.time_ns() // 10**6) -> None:
        self._now_ms = now_ms
        self._path = None if folder is None else folder / FILE
        try:
            self._db = _open(self._path)
            version = int(self._db.execute("pragma user_version").fetchone()[0])
        except (sqlite3.Error, OSError) as error:
            raise ConversationsError(f"{self._path} cannot be used ({error}): move it away to start afresh") from error
        if version > VERSION:
            raise ConversationsError(f"{self._path} was written by a newer Shoal: update this one")
        if version == 0:
            with self._db:
                self._db.executescript(_SCHEMA)
                self._db.execute(f"pragma user_version = {VERSION}")

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def all(self) -> list[Conversation]:
        """Every conversation, the most recently used first."""
        rows = self._db.execute("select id, title, used_ms from conversation order by used_ms desc, id desc")
        return [Conversation(*row) for row in rows]

    def begin(self, question: str) -> Conversation:
        """Create a conversation, with its first question as title."""
        words = " ".join(question.split())
        title = words if len(words) <= _TITLE_CHARS else words[: _TITLE_CHARS - 1] + "…"
        now_ms = self._now_ms()
        with self._db:
            done = self._db.execute("insert into conversation (title, used_ms) values (?, ?)", (title, now_ms))
        assert done.lastrowid is not None
        return Conversation(done.lastrowid, title, now_ms)

    def messages(self, conversation: int) -> list[Message]:
        """Messages of a conversation, the oldest first."""
        query = "select id, role, content, at_ms, figures from message where conversation = ? order by id"
        rows = self._db.execute(query, (conversation,))
        return [Message(key, role, content, at_ms, json.loads(figures)) for key, role, content, at_ms, figures in rows]

    def add(self, conversation: int, role: str, content: str, figures: dict[str, Any] | None = None) -> Message:
        """Append a message and mark the conversation as just used."""
        now_ms = self._now_ms()
        with self._db:
            done = self._db.execute(
                "insert into message (conversation, role, content, at_ms, figures) values (?, ?, ?, ?, ?)",
                (conversation, role, content, now_ms, json.dumps(figures or {})),
            )
            self._db.execute("update conversation set used_ms = ? where id = ?", (now_ms, conversation))
        assert done.lastrowid is not None
        return Message(done.lastrowid, role, content, now_ms, figures or {})

    def cut(self, conversation: int, message: int) -> None:
        """Delete a message and all messages after it."""
        with self._db:
            self._db.execute("delete from message where conversation = ? and id >= ?", (conversation, message))

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


def _open(path: Path | None) -> sqlite3.Connection:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite would create it readable by everybody
    connection = sqlite3.connect(":memory:" if path is None else path)
    connection.execute("pragma foreign_keys = on")
    return connection


def as_markdown(title: str, messages: list[Message]) -> str:
    """A conversation as a Markdown document."""
    parts = [f"# {title}"]
    for message in messages:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(message.at_ms / 1000))
        who = {"user": "You", "assistant": "The swarm"}.get(message.role, message.role)
        parts.append(f"**{who}** · {when}\n\n{message.content}")
    return "\n\n".join(parts) + "\n"


def export_to(folder: Path, title: str, messages: list[Message]) -> Path:
    """Write a conversation to a new Markdown file that only its owner can read; never overwrite a file."""
    name = "".join(c if c.isalnum() else "-" for c in title.lower())[:40].strip("-") or "chat"
    for number in count(1):
        path = folder / (f"{name}.md" if number == 1 else f"{name}-{number}.md")
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            continue
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(as_markdown(title, messages))
        return path
    raise AssertionError("unreachable: the loop is endless")

"""Responses that a later one may continue (`previous_response_id`), kept for a day in SQLite.

Each is kept with the whole conversation that it ends, so continuing it needs no other, and belongs to the key with
which it was asked for: no other key can read, continue or remove it, nor push it out. A damaged file is replaced: its
loss costs programs the continuation of their last responses, and they are told so.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from app.api.bodies import has_too_many_parts
from p2p.platform import create_private

log = logging.getLogger("shoal.api")

KEPT_S = 24 * 3600.0
MOST = 2000  # responses of one owner
MOST_BYTES = 4 << 20  # of one response with its conversation; a longer one is not kept
MOST_OWNER_BYTES = 128 << 20  # of all responses of one owner
_TABLE = """CREATE TABLE IF NOT EXISTS owned_responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, at REAL NOT NULL, size INTEGER NOT NULL, body TEXT NOT NULL,
    messages TEXT NOT NULL)"""


class ResponseStore:
    """The responses of one home, or in memory if there is no file. All calls block; use them from a worker thread."""

    def __init__(self, file: Path | None, clock: Callable[[], float] = time.time) -> None:
        self._file, self._clock = file, clock
        self._lock = threading.Lock()
        self._memory = None if file is not None else sqlite3.connect(":memory:", check_same_thread=False)

    def add(self, owner: str, response_id: str, body: dict[str, Any], messages: Sequence[dict[str, Any]]) -> None:
        """Keep a response, and drop those that are too old or too many; a file that cannot be written is logged."""
        texts = json.dumps(body), json.dumps(list(messages))
        size = sum(map(len, texts))
        if size > MOST_BYTES or has_too_many_parts(texts[1]):
            return
        now = self._clock()
        try:
            with self._opened() as database:
                values = (response_id, owner, now, size, *texts)
                database.execute("INSERT OR REPLACE INTO owned_responses VALUES (?, ?, ?, ?, ?, ?)", values)
                database.execute("DELETE FROM owned_responses WHERE at < ?", (now - KEPT_S,))
                self._drop_oldest(database, owner)
        except sqlite3.OperationalError as error:  # locked, full disk, no permission
            log.warning("the response is not kept in %s: %s", self._file, error)
        except sqlite3.DatabaseError as error:
            self._replace(error)

    def _drop_oldest(self, database: sqlite3.Connection, owner: str) -> None:
        query = "SELECT id, size FROM owned_responses WHERE owner = ? ORDER BY at DESC"
        kept = 0
        for place, (response_id, size) in enumerate(database.execute(query, (owner,)).fetchall()):
            kept += size
            if place >= MOST or kept > MOST_OWNER_BYTES:
                database.execute("DELETE FROM owned_responses WHERE id = ?", (response_id,))

    def body(self, owner: str, response_id: str) -> str | None:
        """Return a kept response of an owner as JSON; None if there is none of this id, or it is too old."""
        return self._column("body", owner, response_id)

    def messages(self, owner: str, response_id: str) -> list[dict[str, Any]] | None:
        """Return the conversation up to the end of a kept response of an owner; None if it is not kept."""
        text = self._column("messages", owner, response_id)
        return None if text is None else json.loads(text)

    def _column(self, name: str, owner: str, response_id: str) -> str | None:
        if not response_id.isascii():
            return None
        oldest = self._clock() - KEPT_S
        try:
            with self._opened() as database:
                query = f"SELECT {name} FROM owned_responses WHERE id = ? AND owner = ? AND at >= ?"
                row = database.execute(query, (response_id, owner, oldest)).fetchone()
        except sqlite3.DatabaseError as error:
            self._replace(error)
            return None
        return None if row is None else row[0]

    def remove(self, owner: str, response_id: str) -> bool:
        """Forget a response of an owner; False if there is none of this id."""
        if not response_id.isascii():
            return False
        try:
            with self._opened() as database:
                query = "DELETE FROM owned_responses WHERE id = ? AND owner = ?"
                return database.execute(query, (response_id, owner)).rowcount > 0
        except sqlite3.DatabaseError as error:
            self._replace(error)
            return False

    def _replace(self, error: sqlite3.DatabaseError) -> None:
        log.warning("%s is damaged (%s): kept responses are lost", self._file, error)
        if self._file is not None and not isinstance(error, sqlite3.OperationalError):
            self._file.unlink(missing_ok=True)

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self._memory is not None:
                self._memory.execute(_TABLE)
                with self._memory:
                    yield self._memory
                return
            assert self._file is not None, "a store has a file or is in memory"
            try:
                if not self._file.exists():
                    create_private(self._file, b"")
            except OSError as error:
                raise sqlite3.OperationalError(f"it cannot be made: {error.strerror or error}") from error
            with closing(sqlite3.connect(self._file, timeout=5)) as database, database:
                database.execute(_TABLE)
                database.execute("DROP TABLE IF EXISTS responses")  # of older versions, without owners
                yield database

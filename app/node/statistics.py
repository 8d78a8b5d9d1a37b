"""Tokens, bytes and audits that this node contributed and used, by day and by peer, in SQLite in the home folder.

Sums are added in memory and written by a thread every `WRITE_S`, in one transaction. If the file is lost, damaged or
unwritable, a warning is logged and unwritten sums stay in memory; the node is not affected.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable
from datetime import date, timedelta
from pathlib import Path
from typing import NamedTuple, TypeVar

from app.snapshot.views import GivenView
from p2p.platform import replace_file

log = logging.getLogger("shoal.statistics")

K = TypeVar("K")

WRITE_S = 10.0  # between two writes; a power cut loses at most this
KEPT_DAYS = 90  # of sums by peer; sums by day are kept for ever
KEPT_ROWS = 10_000  # of sums by peer
_MAX_PENDING = 2_000  # peers counted singly between two writes; further ones count in the day's sums only
_VERSION = 1
_TABLES = """
CREATE TABLE IF NOT EXISTS days (
    day TEXT PRIMARY KEY,
    served INTEGER NOT NULL, asked INTEGER NOT NULL, up INTEGER NOT NULL, down INTEGER NOT NULL,
    audits INTEGER NOT NULL, audits_passed INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS peers (
    day TEXT NOT NULL, peer TEXT NOT NULL,
    served INTEGER NOT NULL, asked INTEGER NOT NULL, up INTEGER NOT NULL, down INTEGER NOT NULL,
    audits INTEGER NOT NULL, audits_passed INTEGER NOT NULL,
    PRIMARY KEY (day, peer)
) WITHOUT ROWID;
"""
_SUMS = "served, asked, up, down, audits, audits_passed"
_ADDING = ", ".join(f"{name} = {name} + excluded.{name}" for name in _SUMS.split(", "))
_ADD_DAY = f"INSERT INTO days (day, {_SUMS}) VALUES (?,?,?,?,?,?,?) ON CONFLICT DO UPDATE SET {_ADDING}"
_ADD_PEER = f"INSERT INTO peers (day, peer, {_SUMS}) VALUES (?,?,?,?,?,?,?,?) ON CONFLICT DO UPDATE SET {_ADDING}"
# Rows beyond the limit are deleted from the oldest day first, and within a day those with the fewest tokens.
_PRUNE = """DELETE FROM peers WHERE day < ? OR (day, peer) IN (
    SELECT day, peer FROM peers ORDER BY day DESC, served + asked DESC, up + down DESC LIMIT -1 OFFSET ?)"""


class LifetimeTotals(NamedTuple):
    """Sums of tokens, bytes and audits; `up` and `down` are bytes sent and received by this node."""

    served: int = 0
    asked: int = 0
    up: int = 0
    down: int = 0
    audits: int = 0
    audits_passed: int = 0

    def plus(self, other: LifetimeTotals) -> LifetimeTotals:
        """Return the sums of both."""
        return LifetimeTotals(*map(int.__add__, self, other))


class Statistics:
    """The node's sums; `run` writes them to the file until cancelled."""

    def __init__(self, path: Path, today: Callable[[], date] = date.today) -> None:
        self._path, self._today = path, today
        self._database: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None  # device and inode of the open file
        self._days: dict[str, LifetimeTotals] = {}  # not yet written
        self._peers: dict[tuple[str, str], LifetimeTotals] = {}
        self._sums_today, self._sums_ever = LifetimeTotals(), LifetimeTotals()
        self._served_today: set[str] = set()
        self._served_ever: set[str] = set()
        self._day = today().isoformat()
        self._warned = False  # that the file cannot be written
        self._read()

    # --- adding -------------------------------------------------------------------------------------------------------

    def add_served(self, peer: str, tokens: int) -> None:
        """Count tokens that this node computed for a peer."""
        self._add(LifetimeTotals(served=tokens), [peer])
        for known in (self._served_today, self._served_ever):
            if len(known) < KEPT_ROWS:
                known.add(peer)

    def add_asked(self, tokens: int, hops: Iterable[str] = ()) -> None:
        """Count tokens that this node's user received; each peer in `hops` took part in computing them."""
        self._add(LifetimeTotals(asked=tokens), hops)

    def add_bytes(self, peer: str, up: int, down: int) -> None:
        """Count bytes sent to and received from a peer."""
        self._add(LifetimeTotals(up=up, down=down), [peer])

    def add_audits(self, audits: int, passed: int) -> None:
        """Count checks of other peers' work, and how many of them found no error."""
        self._add(LifetimeTotals(audits=audits, audits_passed=passed), [])

    def totals(self, *, ever: bool = False) -> GivenView:
        """Return today's sums, or with `ever` those since the file was created."""
        self._start_day_if_new()
        sums, peers = (self._sums_ever, self._served_ever) if ever else (self._sums_today, self._served_today)
        return GivenView(sums.served, sums.asked, sums.up, sums.down, len(peers), sums.audits, sums.audits_passed)

    def _add(self, sums: LifetimeTotals, peers: Iterable[str]) -> None:
        self._start_day_if_new()
        self._sums_today, self._sums_ever = self._sums_today.plus(sums), self._sums_ever.plus(sums)
        self._days[self._day] = self._days.get(self._day, LifetimeTotals()).plus(sums)
        for peer in peers:
            key = (self._day, peer)
            if key in self._peers or len(self._peers) < _MAX_PENDING:
                self._peers[key] = self._peers.get(key, LifetimeTotals()).plus(sums)

    def _start_day_if_new(self) -> None:
        day = self._today().isoformat()
        if day != self._day:
            self._day, self._sums_today = day, self._days.get(day, LifetimeTotals())
            self._served_today = set()

    # --- writing ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Write every `WRITE_S`, and once more on cancellation, for 5 s at most."""
        import trio

        try:
            while True:
                await trio.sleep(WRITE_S)
                await self._write_in_thread()
        finally:
            with trio.move_on_after(5) as scope:
                scope.shield = True
                await self._write_in_thread()

    async def _write_in_thread(self) -> None:
        import trio  # not at the top: the command line reads the file without trio

        # The event loop keeps adding while the thread writes, so the thread gets its own sums; if it fails, they are
        # merged back.
        days, peers = self._days, self._peers
        self._days, self._peers = {}, {}
        if not await trio.to_thread.run_sync(self._write, days, peers):
            self._days = _merged(days, self._days)
            self._peers = _merged(peers, self._peers)

    def write(self) -> bool:
        """Write pending sums in this thread; True if that succeeded."""
        done = self._write(self._days, self._peers)
        if done:
            self._days, self._peers = {}, {}
        return done

    def _write(self, days: dict[str, LifetimeTotals], peers: dict[tuple[str, str], LifetimeTotals]) -> bool:
        try:
            self._write_to(self._open(), days, peers)
        except sqlite3.DatabaseError as error:
            self._close()
            if not isinstance(error, sqlite3.OperationalError):
                self._move_aside(error)
            elif not self._warned:
                self._warned = True
                log.warning("statistics cannot be written to %s (%s): kept in memory, trying again", self._path, error)
            return False
        except OSError as error:
            log.warning("statistics cannot be written to %s: %s", self._path, error)
            return False
        self._warned = False
        return True

    def _write_to(
        self,
        database: sqlite3.Connection,
        days: dict[str, LifetimeTotals],
        peers: dict[tuple[str, str], LifetimeTotals],
    ) -> None:
        with database:
            database.execute("BEGIN IMMEDIATE")
            database.executemany(_ADD_DAY, [(day, *sums) for day, sums in days.items()])
            database.executemany(_ADD_PEER, [(*key, *sums) for key, sums in peers.items()])
            if peers:
                oldest = date.fromisoformat(max(day for day, _ in peers)) - timedelta(days=KEPT_DAYS)
                database.execute(_PRUNE, (oldest.isoformat(), KEPT_ROWS))

    # --- the file -----------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            database = self._open()
            row = f"coalesce(sum({'), 0), coalesce(sum('.join(_SUMS.split(', '))}), 0)"
            self._sums_ever = LifetimeTotals(*database.execute(f"SELECT {row} FROM days").fetchone())
            self._sums_today = LifetimeTotals(
                *database.execute(f"SELECT {row} FROM days WHERE day = ?", (self._day,)).fetchone()
            )
            served = database.execute("SELECT DISTINCT peer FROM peers WHERE served > 0 LIMIT ?", (KEPT_ROWS,))
            self._served_ever = {str(peer) for (peer,) in served}
            today = database.execute("SELECT peer FROM peers WHERE served > 0 AND day = ?", (self._day,))
            self._served_today = {str(peer) for (peer,) in today}
        except sqlite3.OperationalError as error:
            self._close()
            log.warning("the statistics in %s cannot be read: %s", self._path, error)
        except (sqlite3.DatabaseError, TypeError, ValueError) as error:
            self._close()
            self._move_aside(error)
        except OSError as error:
            log.warning("the statistics in %s cannot be read: %s", self._path, error)

    def _open(self) -> sqlite3.Connection:
        """Return the open database; opens it again if the file was deleted or replaced. Raises `sqlite3.Error`."""
        if self._database is not None and self._identity == _identity(self._path):
            return self._database
        if self._database is not None:
            self._close()
            log.warning("%s was removed or replaced while this node ran: its statistics are lost", self._path)
        if not self._path.exists():
            with contextlib.suppress(FileExistsError):  # create it readable by the user only, before it has content
                os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        database = sqlite3.connect(self._path, timeout=2.0, isolation_level=None, check_same_thread=False)
        try:
            version = database.execute("PRAGMA user_version").fetchone()[0]
            if version > _VERSION:
                raise sqlite3.OperationalError(f"it has version {version}, this Shoal reads {_VERSION}: update Shoal")
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            database.executescript(_TABLES)
            database.execute(f"PRAGMA user_version = {_VERSION}")
        except BaseException:
            database.close()
            raise
        self._database, self._identity = database, _identity(self._path)
        return database

    def _close(self) -> None:
        if self._database is not None:
            with contextlib.suppress(sqlite3.Error):
                self._database.close()
        self._database = self._identity = None

    def _move_aside(self, error: Exception) -> None:
        """Rename a damaged file, which is kept for inspection, so that the next write creates a new one."""
        aside = self._path.with_name(f"{self._path.name}.damaged-{time.time_ns() // 10**9}")
        log.warning(
            "statistics in %s are damaged (%s): moved to %s, starting a new file", self._path, error, aside.name
        )
        try:
            replace_file(self._path, aside)
            for suffix in ("-wal", "-shm"):
                self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        except OSError as failure:
            log.warning("%s cannot be moved: %s", self._path, failure)


def read_days(path: Path, count: int) -> list[tuple[str, LifetimeTotals]]:
    """Read the sums of the last `count` days from the file, newest first; empty if it cannot be read."""
    return _rows(path, f"SELECT day, {_SUMS} FROM days ORDER BY day DESC LIMIT ?", count)


def read_peers(path: Path, count: int) -> list[tuple[str, LifetimeTotals]]:
    """Read the sums of the `count` peers with the most tokens in the kept days; empty if it cannot be read."""
    sums = ", ".join(f"sum({name})" for name in _SUMS.split(", "))
    return _rows(
        path,
        f"SELECT peer, {sums} FROM peers GROUP BY peer ORDER BY sum(served) + sum(asked) DESC, peer LIMIT ?",
        count,
    )


def _rows(path: Path, query: str, count: int) -> list[tuple[str, LifetimeTotals]]:
    if not path.exists():
        return []
    try:
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=2.0)) as database:
            return [(str(name), LifetimeTotals(*sums)) for name, *sums in database.execute(query, (count,))]
    except sqlite3.Error as error:
        log.warning("the statistics in %s cannot be read: %s", path, error)
        return []


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        state = os.stat(path)
    except OSError:
        return None
    return state.st_dev, state.st_ino


def _merged(first: dict[K, LifetimeTotals], second: dict[K, LifetimeTotals]) -> dict[K, LifetimeTotals]:
    keys = itertools.islice({**first, **second}, _MAX_PENDING)
    return {key: first.get(key, LifetimeTotals()).plus(second.get(key, LifetimeTotals())) for key in keys}

"""Past forecasts beside what was measured, in SQLite in the home folder, and the correction that follows from them.

The only module of this room that reads or writes a file. A damaged file is replaced: its loss costs a correction.
"""

from __future__ import annotations

import logging
import sqlite3
import statistics
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from app.core.errors import AppError
from p2p.platform import create_private

log = logging.getLogger("shoal.planning")

KEPT = 1000  # forecasts, the latest
FITTED = 20  # forecasts of a task that its correction follows from
FEWEST = 3  # below this there is no correction
BOUNDS = (0.5, 2.0)  # of a correction

_TABLE = """CREATE TABLE IF NOT EXISTS forecasts (
    at_ms INTEGER NOT NULL, task TEXT NOT NULL, model TEXT NOT NULL, machines INTEGER NOT NULL,
    forecast REAL NOT NULL, measured REAL NOT NULL)"""


@dataclass(frozen=True)
class PastForecast:
    """A task that ended: the tokens/s that were forecast for it, without correction, and those that it reached."""

    at_ms: int  # since the epoch
    task: str  # chat, finetune or train
    model: str  # the manifest's hash
    machines: int
    forecast: float
    measured: float

    @property
    def error(self) -> float:
        """By how much the forecast was too high (above 0) or too low, as a share of what was measured."""
        return self.forecast / self.measured - 1


def remember(file: Path, ended: PastForecast) -> None:
    """Add a forecast, and drop the oldest beyond `KEPT`; a file that cannot be written is logged and left."""
    if not (ended.forecast > 0 and ended.measured > 0):
        return
    try:
        _add(file, ended)
    except (sqlite3.OperationalError, OSError) as error:  # locked, full disk, no permission
        log.warning("the forecast is not kept in %s: %s", file, error)
    except sqlite3.DatabaseError as error:
        log.warning("%s is damaged (%s): past forecasts are lost", file, error)
        file.unlink(missing_ok=True)
        _add(file, ended)


def past_forecasts(file: Path) -> list[PastForecast]:
    """Return the kept forecasts, the latest first; raises `AppError` if the file cannot be read."""
    if not file.exists():
        return []
    try:
        with _opened(file) as database:
            rows = database.execute("SELECT * FROM forecasts ORDER BY rowid DESC LIMIT ?", (KEPT,)).fetchall()
    except sqlite3.Error as error:
        raise AppError(f"{file} cannot be read: {error}") from error
    return [PastForecast(*row) for row in rows]


def correction(past: Sequence[PastForecast], task: str) -> float | None:
    """Return by what to multiply the forecast speed of a task, from its latest ends; None after too few of them."""
    ratios = [one.measured / one.forecast for one in past if one.task == task][:FITTED]
    if len(ratios) < FEWEST:
        return None
    return min(max(statistics.median(ratios), BOUNDS[0]), BOUNDS[1])


def _add(file: Path, ended: PastForecast) -> None:
    if not file.exists():
        create_private(file, b"")
    with _opened(file) as database, database:
        database.execute(_TABLE)
        values = (ended.at_ms, ended.task, ended.model, ended.machines, ended.forecast, ended.measured)
        database.execute("INSERT INTO forecasts VALUES (?, ?, ?, ?, ?, ?)", values)
        database.execute("DELETE FROM forecasts WHERE rowid <= (SELECT max(rowid) FROM forecasts) - ?", (KEPT,))


@contextmanager
def _opened(file: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(file, timeout=2.0)) as database:
        yield database

"""Where the node's log goes: a rotating file in the home folder, what matters to stderr, the latest rows to the API.

Secrets, invites, tokens and what people write are never logged; whoever logs something of a swarm writes its name.
Every record is one line whatever it says, and a log that cannot be written costs the node nothing.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from p2p.platform import private_directory

LEVELS = ("debug", "info", "warning", "error")
FILE = "node.log"
_FILE_BYTES = 2 * 10**6
_FILES = 4
KEPT_ROWS = 2000
_MAX_ROW_CHARS = 2000
_MAX_CHARS = 20_000  # of one record: a traceback is long, what a peer sends must not be
_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
# What a terminal would obey, or a reader of lines would take for another line.
_UNPRINTABLE = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}


@dataclass(frozen=True)
class LogRow:
    """One row of the log, numbered from 1 in this run of the node."""

    number: int
    at_ms: int
    level: str
    source: str
    text: str


class RecentRows(logging.Handler):
    """The latest rows, for whoever follows the log through the API."""

    def __init__(self) -> None:
        super().__init__()
        self._rows: deque[LogRow] = deque(maxlen=KEPT_ROWS)
        self._numbers = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one row."""
        self._numbers += 1
        text = record.getMessage()[:_MAX_ROW_CHARS]
        level = record.levelname.lower()
        self._rows.append(LogRow(self._numbers, int(record.created * 1000), level, record.name, text))

    def after(self, number: int) -> list[LogRow]:
        """The kept rows that a follower who saw `number` has not seen."""
        return [row for row in self._rows.copy() if row.number > number]


RECENT = RecentRows()  # logging is the process's own, and so is this


def escaped(text: str) -> str:
    """The text as one line without control characters, each of which is shown as its code."""
    return text[:_MAX_CHARS].translate(_UNPRINTABLE)


class LineFormatter(logging.Formatter):
    """One line for a record; a traceback follows on lines of its own, each set in."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as text."""
        text = super().format(record)
        first, *more = text.split("\n") if record.exc_info or record.stack_info else [text]
        return "\n    ".join(escaped(line) for line in (first, *more))


class JsonFormatter(logging.Formatter):
    """One JSON object for a record."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as an object on one line; `time` is in UTC."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {
            "time": f"{at}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "area": record.name,
            "message": record.getMessage()[:_MAX_CHARS],
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)[:_MAX_CHARS]
        return json.dumps(fields)


class RetryingFileHandler(logging.handlers.RotatingFileHandler):
    """A rotating file that a full disk, or a folder that went away, silences for a moment and never breaks."""

    lost = 0  # records since it last could be written

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, and before it that some are missing."""
        try:
            if self.lost:
                self._write(logging.makeLogRecord({**_OWN, "msg": f"{self.lost} lines could not be written here"}))
                self.lost = 0
            self._write(record)
        except (OSError, ValueError):
            self.lost += 1
            self._give_up_stream()

    def _write(self, record: logging.LogRecord) -> None:
        if self.stream is not None and not Path(self.baseFilename).exists():
            self._give_up_stream()
        private_directory(Path(self.baseFilename).parent)
        if self.shouldRollover(record):
            self.doRollover()
        if self.stream is None:
            self.stream = self._open()
        self.stream.write(self.format(record) + self.terminator)
        self.stream.flush()

    def _give_up_stream(self) -> None:
        """Close without raising: what is still in its buffer cannot be written either."""
        stream, self.stream = self.stream, None
        try:
            if stream is not None:
                stream.close()
        except (OSError, ValueError):
            pass


_OWN = {"name": "shoal.log", "levelno": logging.WARNING, "levelname": "WARNING"}


def start_logging(folder: Path, level: str | None, *, as_json: bool = False) -> Path:
    """Log from now on; returns the file. Without a level the file has `info` and stderr `warning`."""
    private_directory(folder)
    logging.raiseExceptions = False  # a log that cannot be written has nowhere to say so
    path = folder / FILE
    file = RetryingFileHandler(
        path, maxBytes=_FILE_BYTES, backupCount=_FILES, encoding="utf-8", errors="backslashreplace", delay=True
    )
    stderr = logging.StreamHandler(sys.stderr)
    root = logging.getLogger()
    for handler, usual in ((file, "info"), (stderr, "warning")):
        handler.setFormatter(JsonFormatter() if as_json else LineFormatter(_FORMAT))
        handler.setLevel((level or usual).upper())
        root.addHandler(handler)
    RECENT.setLevel(file.level)
    root.addHandler(RECENT)
    root.setLevel(min(handler.level for handler in (file, stderr)))
    for chatty in ("hypercorn", "libp2p", "zeroconf", "asyncio", "multiaddr"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    return path

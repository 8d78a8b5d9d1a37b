"""Log outputs of the node: a rotating file in the home folder, warnings on stderr, the latest rows for the API.

Rule for all callers: never log secrets, invites, tokens, prompts or replies; of a swarm, log its name only. Every
record is one line, whatever its text contains (a traceback follows indented), and failures to write the log never
affect the node.
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
_MAX_CHARS = 20_000  # per record: enough for a traceback, and a bound for text from peers
_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
# Characters that a terminal would execute, or that would look like a line break.
_UNPRINTABLE = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}


@dataclass(frozen=True)
class LogRow:
    """One log record for the API, numbered from 1 since the node started."""

    number: int
    at_ms: int
    level: str
    source: str
    text: str


class RecentRows(logging.Handler):
    """Keeps the latest `KEPT_ROWS` records in memory, for clients that follow the log through the API."""

    def __init__(self) -> None:
        super().__init__()
        self._rows: deque[LogRow] = deque(maxlen=KEPT_ROWS)
        self._numbers = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Store one record, cut to `_MAX_ROW_CHARS`; called by `logging`."""
        self._numbers += 1
        text = record.getMessage()[:_MAX_ROW_CHARS]
        level = record.levelname.lower()
        self._rows.append(LogRow(self._numbers, int(record.created * 1000), level, record.name, text))

    def after(self, number: int) -> list[LogRow]:
        """Return the kept rows after row `number`."""
        return [row for row in self._rows.copy() if row.number > number]


RECENT = RecentRows()  # one per process, as `logging` itself


def escaped(text: str) -> str:
    """Return the text on one line, with control characters replaced by their codes."""
    return text[:_MAX_CHARS].translate(_UNPRINTABLE)


class LineFormatter(logging.Formatter):
    """Formats a record as one line; the lines of a traceback follow indented."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text."""
        text = super().format(record)
        first, *more = text.split("\n") if record.exc_info or record.stack_info else [text]
        return "\n    ".join(escaped(line) for line in (first, *more))


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON; `time` is in UTC."""
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
    """A rotating log file that drops records while it cannot be written, and reopens as soon as it can.

    Causes are a full disk or a deleted folder; errors never reach the code that logs.
    """

    lost = 0  # records dropped since the last successful write

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, preceded by a note if earlier ones were dropped."""
        try:
            if self.lost:
                self._write(logging.makeLogRecord({**_OWN, "msg": f"{self.lost} lines could not be written here"}))
                self.lost = 0
            self._write(record)
        except (OSError, ValueError):
            self.lost += 1
            self._drop_stream()

    def _write(self, record: logging.LogRecord) -> None:
        if self.stream is not None and not Path(self.baseFilename).exists():
            self._drop_stream()
        private_directory(Path(self.baseFilename).parent)
        if self.shouldRollover(record):
            self.doRollover()
        if self.stream is None:
            self.stream = self._open()
        self.stream.write(self.format(record) + self.terminator)
        self.stream.flush()

    def _drop_stream(self) -> None:
        """Close the file without raising; its buffered text is lost."""
        stream, self.stream = self.stream, None
        try:
            if stream is not None:
                stream.close()
        except (OSError, ValueError):
            pass


_OWN = {"name": "shoal.log", "levelno": logging.WARNING, "levelname": "WARNING"}


def start_logging(folder: Path, level: str | None, *, as_json: bool = False) -> Path:
    """Set up all three outputs and return the log file's path.

    `level` applies to the file and to stderr; without it the file gets `info` and stderr `warning`.
    """
    private_directory(folder)
    logging.raiseExceptions = False  # do not print tracebacks to stderr when writing the log fails
    path = folder / FILE
    file = RetryingFileHandler(
        path, maxBytes=_FILE_BYTES, backupCount=_FILES, encoding="utf-8", errors="backslashreplace", delay=True
    )
    stderr = logging.StreamHandler(sys.stderr)
    root = logging.getLogger()
    for handler, default in ((file, "info"), (stderr, "warning")):
        handler.setFormatter(JsonFormatter() if as_json else LineFormatter(_FORMAT))
        handler.setLevel((level or default).upper())
        root.addHandler(handler)
    RECENT.setLevel(file.level)
    root.addHandler(RECENT)
    root.setLevel(min(handler.level for handler in (file, stderr)))
    for chatty in ("hypercorn", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    return path

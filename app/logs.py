"""Where the node's log goes: a rotating file in the home folder, what matters to stderr, the latest rows to the API.

Secrets, invites and tokens are never logged; whoever logs something of a swarm writes its name.
"""

from __future__ import annotations

import logging
import logging.handlers
import sys
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
_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


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


def start_logging(folder: Path, level: str | None) -> Path:
    """Log from now on; returns the file. Without a level the file has `info` and stderr `warning`."""
    private_directory(folder)
    path = folder / FILE
    file = logging.handlers.RotatingFileHandler(
        path, maxBytes=_FILE_BYTES, backupCount=_FILES, encoding="utf-8", delay=True
    )
    stderr = logging.StreamHandler(sys.stderr)
    root = logging.getLogger()
    for handler, usual in ((file, "info"), (stderr, "warning")):
        handler.setFormatter(logging.Formatter(_FORMAT))
        handler.setLevel((level or usual).upper())
        root.addHandler(handler)
    RECENT.setLevel(file.level)
    root.addHandler(RECENT)
    root.setLevel(min(handler.level for handler in (file, stderr)))
    for chatty in ("hypercorn", "libp2p", "zeroconf", "asyncio", "multiaddr"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    return path

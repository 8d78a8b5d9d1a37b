"""Where the node's log goes: a rotating file in the home folder, and what matters to stderr.

Secrets, invites and tokens are never logged; whoever logs something of a swarm writes its name.
"""

from __future__ import annotations

import logging
import logging.handlers
import sys
from pathlib import Path

from p2p.platform import private_directory

LEVELS = ("debug", "info", "warning", "error")
FILE = "node.log"
_FILE_BYTES = 2 * 10**6
_FILES = 4
_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


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
    root.setLevel(min(handler.level for handler in (file, stderr)))
    for chatty in ("hypercorn", "libp2p", "zeroconf", "asyncio", "multiaddr"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    return path

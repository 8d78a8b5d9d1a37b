"""`shoal logs`: prints the node's log, and follows it with -f.

The log is read from its file, so that this works while no node runs; `app.system.logs` writes it.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from app.cli.command import Command, print_json
from app.cli.parser import number_argument

_POLL_S = 0.25
_LINES = 50
_TAIL_BYTES = 4 * 2**20
_LINE = re.compile(r"(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+) (?P<level>[A-Z]+) +(?P<source>[\w.]+): (?P<text>.*)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --follow and --lines."""
    parser.add_argument("-f", "--follow", action="store_true", help="print new lines as they come, until Ctrl-C")
    words = f"how many of the last lines to print (default: {_LINES})"
    parser.add_argument("-n", "--lines", type=number_argument(int, 0, 10**6), default=_LINES, metavar="N", help=words)


def run_logs(arguments: argparse.Namespace) -> int:
    """Print the last lines of the log; with --json, one JSON object for each."""
    from app.config.home import Home
    from app.core.errors import AppError

    file = Home(arguments.home).log_file
    if not file.exists() and not arguments.follow:
        raise AppError(f"there is no log in {file.parent} yet: `shoal serve` writes one")
    try:
        for line in log_lines(file, arguments.lines, follow=arguments.follow):
            if arguments.json:
                print_json(line_facts(line))
            else:
                print(line, flush=True)
    except KeyboardInterrupt:
        if not arguments.follow:
            raise
    return 0


def log_lines(file: Path, last: int, *, follow: bool) -> Iterator[str]:
    """Yield the last lines of a log; with `follow` also new ones, through rotations of the file, without end."""
    at = 0
    if file.exists():
        tail, at = _read_from(file, max(0, file.stat().st_size - _TAIL_BYTES))
        yield from tail[-last:] if last else ()
    opened = _identity(file)
    while follow:
        time.sleep(_POLL_S)
        now = _identity(file)
        if now is None:
            continue
        if now != opened or file.stat().st_size < at:
            opened, at = now, 0  # the log was rotated
        lines, at = _read_from(file, at)
        yield from lines


def line_facts(line: str) -> dict[str, Any]:
    """Return a line of the log as `logs --json` prints it; a line of a traceback has its text only."""
    if line.startswith("{"):
        try:
            facts = json.loads(line)
        except ValueError:
            return {"text": line}
        return facts if isinstance(facts, dict) else {"text": line}
    found = _LINE.fullmatch(line)
    return {"text": line} if found is None else {**found.groupdict(), "level": found["level"].lower()}


def _read_from(file: Path, at: int) -> tuple[list[str], int]:
    """Return the whole lines after a position, and the position after them."""
    with open(file, "rb") as log:
        log.seek(at)
        raw = log.read()
    whole = raw[: raw.rfind(b"\n") + 1]
    return whole.decode("utf-8", "replace").splitlines(), at + len(whole)


def _identity(file: Path) -> tuple[int, int] | None:
    """Return what tells a file from its successor of the same name; None while there is none."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


COMMANDS = (Command("logs", "print the node's log", run_logs, add_arguments, prints_facts=True),)

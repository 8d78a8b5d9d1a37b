"""The type of a command, and how commands print JSON.

Each module of `app.cli` with commands lists them in `COMMANDS`. All of them are imported whenever `shoal` starts, so
they import nothing heavy at the top: torch, trio and Textual are imported inside the `run` functions.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def no_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: for commands that have only the common options."""


@dataclass(frozen=True)
class Command:
    """A command: its name, a line of help, and the functions that add its arguments and run it."""

    name: str
    help: str
    # Gets its own arguments, `home` (Path) and, if `prints_facts`, `json` (bool); returns the exit status. Failures are
    # raised as EngineError, P2PError or AppError, and printed by `app.cli.main`.
    run: Callable[[argparse.Namespace], int]
    add_arguments: Callable[[argparse.ArgumentParser], None] = no_arguments
    prints_facts: bool = False  # adds --json


def print_json(value: Any) -> None:
    """Print one JSON value on one line, in ASCII, which every console can encode."""
    print(json.dumps(value, allow_nan=False))

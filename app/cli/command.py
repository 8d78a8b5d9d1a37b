"""One command of the command line as a value.

A group module (`app/cli/models.py`, …) lists its commands in `COMMANDS`. It is imported whenever `shoal` starts, so
at its top it imports nothing heavy: torch, trio, libp2p and Textual are imported inside the `run` functions.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def no_arguments(parser: argparse.ArgumentParser) -> None:
    """For commands that take only the common options."""


@dataclass(frozen=True)
class Command:
    """A name, a line of help, and the functions that declare the arguments and do the work."""

    name: str
    help: str
    # Gets `home` (Path) and, where the command prints facts, `json` (bool) besides its own arguments; returns the
    # exit status. Failures are raised as EngineError, P2PError or AppError, never printed here.
    run: Callable[[argparse.Namespace], int]
    add_arguments: Callable[[argparse.ArgumentParser], None] = no_arguments
    prints_facts: bool = False  # adds --json


def print_json(value: Any) -> None:
    """Print facts for a program: one JSON value on one line, in ASCII, which every console's encoding can carry."""
    print(json.dumps(value, allow_nan=False))

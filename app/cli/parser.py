"""The parser of the command line: one line on a mistake, with the nearest thing that would have made sense."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import NoReturn

from app.core.units import parse_duration, parse_size

_CHOICE = re.compile(r"invalid choice: '([^']*)'")


class Parser(argparse.ArgumentParser):
    """Says what is wrong on one line and exits with 2."""

    def error(self, message: str) -> NoReturn:
        """What argparse found wrong."""
        wrong = _CHOICE.search(message)
        if wrong is not None:
            message = f"there is no {wrong.group(1)!r} here{nearest(wrong.group(1), self._choices())}"
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}; `{self.prog} --help` explains\n")

    def options(self) -> list[str]:
        """Every option, as it is written."""
        return [option for action in self._actions for option in action.option_strings]

    def parse_all(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """As `parse_args`, but an unknown option is answered with the nearest one of the command that was given."""
        arguments, unknown = self.parse_known_args(argv)
        if unknown:
            parser: Parser = getattr(arguments, "parser", self)
            parser.error(f"{unknown[0]!r} makes no sense here{nearest(unknown[0], parser.options())}")
        return arguments

    def _choices(self) -> list[str]:
        return [str(choice) for action in self._actions for choice in action.choices or ()]


def nearest(word: str, known: Iterable[str]) -> str:
    """`: did you mean …?`, or nothing where nothing is near."""
    found = difflib.get_close_matches(word.split("=")[0], list(known), n=1)
    return f": did you mean {found[0]}?" if found else ""


def size_argument(text: str) -> int:
    """A size like 6GB, in bytes."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def duration_argument(text: str) -> float:
    """A time like 2h, in seconds."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error

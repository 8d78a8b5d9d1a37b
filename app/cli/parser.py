"""The argument parser: a usage error is one line with the closest known word, and exit status 2."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn, TypeVar

from app.core.units import parse_duration, parse_size

MODELS = "starter, tiny-random, a folder, a GGUF file or ORG/NAME"  # what an option --model takes, in help texts
_Number = TypeVar("_Number", int, float)
_CHOICE = re.compile(r"(?:argument (?P<name>.+?): )?invalid choice: '(?P<word>[^']*)'")


class Parser(argparse.ArgumentParser):
    """Reports a usage error on one line and exits with status 2."""

    def error(self, message: str) -> NoReturn:
        """Print one line with argparse's message, or with a suggestion if a choice is unknown, and exit."""
        wrong = _CHOICE.search(message)
        if wrong is not None:
            name, word = wrong["name"] or "", wrong["word"]
            kind = "command" if name in self._command_metavars() else "choice"
            option = f" for {name}" if name.startswith("-") else ""
            message = f"unknown {kind} {word!r}{option}{nearest(word, self._choices())}"
        self.exit(2, f"{self.prog}: error: {followed(' '.join(message.split()), f'`{self.prog} --help` explains')}\n")

    def options(self) -> list[str]:
        """Return every option of this parser, as the user writes it."""
        return [option for action in self._actions for option in action.option_strings]

    def parse_all(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """Parse like `parse_args`, but suggest the closest option of the given command for an unknown one."""
        arguments, unknown = self.parse_known_args(argv)
        if unknown:
            parser: Parser = getattr(arguments, "parser", self)
            kind = "unknown option" if unknown[0].startswith("-") else "unexpected argument"
            parser.error(f"{kind} {unknown[0]!r}{nearest(unknown[0], parser.options())}")
        return arguments

    def _command_metavars(self) -> list[object]:
        return [action.metavar for action in self._actions if isinstance(action, argparse._SubParsersAction)]

    def _choices(self) -> list[str]:
        return [str(choice) for action in self._actions for choice in action.choices or ()]


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `: did you mean …?` with the closest known word, or nothing if none is close."""
    bare = {one.strip("-"): one for one in known}  # the dashes of options would make all short ones alike
    found = difflib.get_close_matches(word.split("=")[0].strip("-"), bare, n=1)
    return f": did you mean {bare[found[0]]}?" if found else ""


def followed(message: str, more: str) -> str:
    """Return both parts as one line; a message that ends with a question needs no semicolon."""
    return f"{message} {more}" if message.endswith("?") else f"{message}; {more}"


def number_argument(
    kind: Callable[[str], _Number], low: _Number, high: _Number, *, above: bool = False
) -> Callable[[str], _Number]:
    """Return a parser for a number from `low` to `high`, or above `low` if `above`."""
    what = "a whole number" if kind is int else "a number"
    bounds = f"above {low} and at most {high}" if above else f"from {low} to {high}"

    def parse(text: str) -> _Number:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from None
        if not (low < value if above else low <= value) or not value <= high:
            raise argparse.ArgumentTypeError(f"must be {bounds}, not {text}")
        return value

    return parse


def size_argument(text: str) -> int:
    """Parse a size like 6GB into bytes."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def duration_argument(text: str) -> float:
    """Parse a duration like 2h into seconds."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error

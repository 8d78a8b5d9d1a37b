"""`shoal completion bash|zsh|fish`: a completion script for the shell, generated from the parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from app.cli.command import Command

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the shell."""
    parser.add_argument("shell", choices=SHELLS, help='for bash: eval "$(shoal completion bash)"')


def run_completion(arguments: argparse.Namespace) -> int:
    """Print the completion script of a shell."""
    print(script_for(arguments.shell))
    return 0


def script_for(shell: str) -> str:
    """Return the script for a shell; a value without fixed choices is completed as a file name."""
    import shtab

    from app.cli import build_parser
    from app.cli.registry import all_commands

    parser = build_parser(all_commands())
    for action in _actions(parser):
        if action.choices is None and action.nargs != 0:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    return shtab.complete(parser, shell)


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from _actions(child)


COMMANDS = (Command("completion", "print a completion script for a shell", run_completion, add_arguments),)

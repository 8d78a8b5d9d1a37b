"""What `shoal` alone says until there is a dashboard to show."""

from __future__ import annotations

from collections.abc import Sequence

from app.cli.command import Command


def welcome(commands: Sequence[Command]) -> int:
    """Say honestly what this version can do."""
    print("Shoal has no dashboard yet. These commands work:\n")
    width = max((len(command.name) for command in commands), default=0)
    for command in commands:
        print(f"  shoal {command.name:<{width}}  {command.help}")
    print("\n`shoal COMMAND --help` explains one; `shoal doctor` checks this machine.")
    return 0

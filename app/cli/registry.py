"""The list of all commands, gathered from the modules of `app.cli`."""

from __future__ import annotations

import importlib

from app.cli.command import Command

# Modules of `app.cli` in the order that `shoal --help` shows their commands.
GROUPS: tuple[str, ...] = (
    "serve",
    "swarms",
    "find",
    "invites",
    "status",
    "pause",
    "restart",
    "logs",
    "record",
    "web",
    "bans",
    "chat",
    "demo",
    "models",
    "finetune",
    "train",
    "jobs",
    "adapters",
    "bench",
    "plan",
    "keys",
    "use",
    "config",
    "identity",
    "doctor",
    "service",
    "update",
    "uninstall",
    "completion",
)


def all_commands() -> tuple[Command, ...]:
    """Import the modules, and return all their commands."""
    modules = [importlib.import_module(f"app.cli.{group}") for group in GROUPS]
    return tuple(command for module in modules for command in module.COMMANDS)

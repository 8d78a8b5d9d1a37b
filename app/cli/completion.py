"""`shoal completion SHELL`: a completion script for the shell, generated from the parser.

Names that change, such as those of swarms, are asked from `shoal completion --names KIND` when a key is pressed.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from app.cli.command import Command
from app.core.errors import UsageError

SHELLS = ("bash", "zsh", "fish", "powershell")
NAMES = ("swarms", "models", "peers")
_WITH_MODEL = ("create", "chat", "demo", "finetune", "train", "adapters", "bench", "plan", "doctor")
# The kind of names that an argument takes, by the command's name and the argument's `dest`.
_KINDS = {
    ("join", "target"): "swarms",
    ("leave", "name"): "swarms",
    ("invite", "name"): "swarms",
    ("serve", "join"): "swarms",
    ("chat", "swarm"): "swarms",
    ("plan", "swarm"): "swarms",
    ("ban", "peer"): "peers",
    ("trust", "peer"): "peers",
    ("revoke", "peer"): "peers",
    ("pull", "model"): "models",
    **{(command, "model"): "models" for command in _WITH_MODEL},
}
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
_SETTING_ACTIONS = ("get", "set", "unset")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the shell."""
    words = 'for bash: eval "$(shoal completion bash)"; for PowerShell: shoal completion powershell | Out-String | iex'
    parser.add_argument("shell", nargs="?", choices=SHELLS, help=words)
    parser.add_argument("--names", choices=NAMES, help=argparse.SUPPRESS)


def run_completion(arguments: argparse.Namespace) -> int:
    """Print the completion script of a shell, or the names of one kind."""
    if arguments.names is not None:
        print("\n".join(names_of(arguments.names, arguments.home)))
    elif arguments.shell is None:
        raise UsageError(f"name the shell: {', '.join(SHELLS)}")
    else:
        print(script_for(arguments.shell))
    return 0


def names_of(kind: str, home: Path) -> list[str]:
    """Return the names that an argument of this kind can have now."""
    from app.config.home import Home

    if kind == "swarms":
        from app.swarm.saved import load

        return [str(swarm) for swarm in load(Home(home)).swarms]
    if kind == "peers":
        from app.api.client import running_client

        client = running_client(home)
        peers = [] if client is None else client.get("/control/peers")
        return [safe_name(str(peer["name"]), str(peer["peer"])) for peer in peers]
    from app.config.home import cache_folder
    from engine.sources.hub import is_hub_name
    from engine.sources.opening import BUILT_IN, list_cached

    cached = [model.name for model in list_cached(cache_folder()) if is_hub_name(model.name)]
    return [*BUILT_IN, *cached]


def safe_name(name: str, peer: str) -> str:
    """Return a member's name, or its id if the name has a character that a shell could act upon.

    Members choose their names, and bash expands the words that it completes: `$(…)` would be run.
    """
    return name if _SAFE_NAME.fullmatch(name) else peer


def script_for(shell: str) -> str:
    """Return the script for a shell; a value that is neither a choice nor a name is completed as a file name."""
    import shtab

    from app.cli import build_parser
    from app.cli.registry import all_commands
    from app.config.settings import SETTINGS

    parser = build_parser(all_commands())
    for command, action in _actions(parser):
        kind = _KINDS.get((command, action.dest))
        if kind is not None:
            action.complete = _names(kind)  # type: ignore[attr-defined]
        elif command in _SETTING_ACTIONS and action.dest == "name":
            action.choices = list(SETTINGS)
        elif action.choices is None and action.nargs != 0:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    return shtab.complete(parser, shell)


def _names(kind: str) -> dict[str, Any]:
    """Return shtab's description of an argument that is completed by `names_of`; models and targets may be files."""
    ask = f"shoal completion --names {kind}"
    function = f"_shoal_{kind}"
    files = kind != "peers"
    bash = f'{function}() {{ compgen -W "$({ask} 2>/dev/null)" -- "$1"; {"compgen -f -- $1;" * files} }}'
    zsh = f'{function}() {{ compadd -- ${{(f)"$({ask} 2>/dev/null)"}}; {"_files" if files else ""} }}'
    powershell = (
        f"function {function} {{ param([string]$WordToComplete) "
        f'{ask} 2>$null | Where-Object {{ $_ -like "$WordToComplete*" }}; '
        f"{'_shtab_powershell_compgen_files $WordToComplete' if files else ''} }}"
    )
    fish = f"({ask} 2>/dev/null)" + " (__fish_complete_path (commandline -ct))" * files
    return {
        **{"bash": function, "zsh": function, "fish": fish, "powershell": function},
        "preamble": {"bash": bash, "zsh": zsh, "powershell": powershell},
    }


def _actions(parser: argparse.ArgumentParser, command: str = "") -> Iterator[tuple[str, argparse.Action]]:
    """Yield every action of a parser and its subparsers, with the name of the innermost command."""
    for action in parser._actions:
        yield command, action
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from _actions(child, name)


COMMANDS = (Command("completion", "print a completion script for a shell", run_completion, add_arguments),)

"""`shoal config`: reads and changes settings.

A running node is asked, and applies what it can at once; without one, the home folder's file is read and written.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from app.cli.command import Command, print_json
from app.cli.pause import warn_sole_holder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions get NAME, set NAME VALUE, unset NAME and list, which is the default."""
    parser.set_defaults(action="list")
    actions = parser.add_subparsers(metavar="get|set|unset|list")
    get = actions.add_parser("get", help="print one setting's value")
    put = actions.add_parser("set", help="change one setting; separate the items of a list by commas")
    unset = actions.add_parser("unset", help="reset one setting to its default")
    everything = actions.add_parser("list", help="print every setting with its explanation")
    for name, action in (("get", get), ("set", put), ("unset", unset), ("list", everything)):
        action.set_defaults(action=name)
        if name != "list":
            action.add_argument("name", metavar="NAME")
    put.add_argument("value", metavar="VALUE")


def run_config(arguments: argparse.Namespace) -> int:
    """Read or change settings, through the running node if there is one."""
    if arguments.action == "list":
        return _print_all(settings_facts(arguments.home), arguments)
    from app.config.file import setting_named

    name = setting_named(arguments.name).name
    if arguments.action != "get":
        if name == "max_vram" and arguments.action == "set" and _lowers_limit(arguments):
            warn_sole_holder(arguments.home)
        change_setting(arguments.home, name, arguments.value if arguments.action == "set" else None)
    facts = next(setting for setting in settings_facts(arguments.home) if setting["name"] == name)
    if arguments.json:
        print_json(facts)
    elif arguments.action == "get":
        print(_shown(facts["value"]))
    else:
        print(f"{name} = {_shown(facts['value'])}{_size(facts)}{_note(facts, arguments)}")
    return 0


def _lowers_limit(arguments: argparse.Namespace) -> bool:
    """True if the new memory limit is lower than the present one, so that blocks may have to go."""
    from app.config.settings import SETTINGS

    new = SETTINGS["max_vram"].parse(arguments.value)
    old = next(facts["value"] for facts in settings_facts(arguments.home) if facts["name"] == "max_vram")
    return isinstance(new, int) and (old is None or new < old)


def settings_facts(home: Path) -> list[dict[str, Any]]:
    """Return every setting with its value and origin, from the running node or else from the file."""
    from app.api.client import running_client

    client = running_client(home)
    if client is not None:
        answer: list[dict[str, Any]] = client.get("/control/config")
        return answer
    from app.config.file import load_config
    from app.config.home import Home
    from app.config.settings import SETTINGS

    config = load_config(Home(home).config_file, os.environ)
    return [config.facts(name) for name in SETTINGS]


def change_setting(home: Path, name: str, value: str | None) -> None:
    """Change a setting, or reset it if `value` is None, through the running node or else in the file."""
    from app.api.client import running_client

    client = running_client(home)
    if client is not None:
        client.set_config(name, value)
        return
    from app.config.file import set_value, unset
    from app.config.home import Home

    opened = Home.open(home)
    if value is None:
        unset(opened.config_file, name)
    else:
        set_value(opened.config_file, name, value)


def _print_all(settings: list[dict[str, Any]], arguments: argparse.Namespace) -> int:
    if arguments.json:
        print_json(settings)
        return 0
    for setting in settings:
        origin = "" if setting["origin"] == "default" else f"  (from {setting['origin']})"
        print(f"{setting['name']} = {_shown(setting['value'])}{_size(setting)}{origin}\n    {setting['help']}")
    return 0


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(value) if isinstance(value, list | tuple) else str(value)


def _size(facts: dict[str, Any]) -> str:
    """Return a size in its unit, beside the exact bytes."""
    from app.config.settings import SETTINGS
    from app.core.units import format_size

    value, setting = facts["value"], SETTINGS.get(facts["name"])
    if setting is None or setting.kind != "size" or not isinstance(value, int) or value < 1000:
        return ""
    return f", {format_size(value)}"


def _note(facts: dict[str, Any], arguments: argparse.Namespace) -> str:
    if facts["origin"] in ("environment", "flag"):
        return f"  (the file is changed, but the {facts['origin']} overrides it)"
    from app.api.client import running_client

    if facts["live"] or running_client(arguments.home) is None:
        return ""
    return "  (applies after a restart: `shoal restart`)"


COMMANDS = (Command("config", "read and change settings", run_config, add_arguments, prints_facts=True),)

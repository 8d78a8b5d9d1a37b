"""`shoal keys`: keys for programs that may ask this node for replies but not control it."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from app.cli.command import Command, print_json
from app.core.errors import UsageError

if TYPE_CHECKING:
    from app.config.keys import ApiKey

ACTIONS = ("add", "list", "revoke")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action, the key's name and its limits."""
    parser.add_argument("action", nargs="?", choices=ACTIONS, default="list", help="what to do (%(default)s)")
    parser.add_argument("name", nargs="?", metavar="NAME", help="the key's name, for add and revoke")
    parser.add_argument("--limit", type=int, metavar="TOKENS", help="with add: most tokens a minute (no limit)")
    parser.add_argument("--at-once", type=int, metavar="N", help="with add: most requests under way (no limit)")


def run_keys(arguments: argparse.Namespace) -> int:
    """Make a key and print it once, list all keys, or revoke one."""
    from app.config.home import Home
    from app.config.keys import MAX_LIMIT, add_key, read_keys, revoke_key

    file = Home.open(arguments.home).keys_file
    limits = (arguments.limit, arguments.at_once)
    if arguments.action != "add" and any(limit is not None for limit in limits):
        raise UsageError("--limit and --at-once belong to `shoal keys add NAME`")
    if arguments.action == "list":
        if arguments.name is not None:
            raise UsageError(f"unknown action {arguments.name!r}: use {', '.join(ACTIONS)}")
        return _list(read_keys(file), as_json=arguments.json)
    if arguments.name is None:
        raise UsageError(f"write `shoal keys {arguments.action} NAME`")
    if arguments.action == "revoke":
        gone = revoke_key(file, arguments.name)
        if arguments.json:
            print_json({"revoked": gone.name})
        else:
            print(f"The key {gone.name} is revoked: programs that use it are refused from now on.")
        return 0
    if not all(limit is None or 1 <= limit <= MAX_LIMIT for limit in limits):
        raise UsageError("a limit must be 1 or more")
    made, text = add_key(file, arguments.name, *limits)
    if arguments.json:
        print_json({**_facts(made), "key": text})
    else:
        print(text)
    return 0


def _facts(key: ApiKey) -> dict[str, Any]:
    return {name: value for name, value in asdict(key).items() if name != "digest"}


def _list(keys: tuple[ApiKey, ...], *, as_json: bool) -> int:
    if as_json:
        print_json([_facts(key) for key in keys])
        return 0
    for key in keys:
        day = time.strftime("%Y-%m-%d", time.localtime(key.created_at))
        limit = "no limit" if key.tokens_per_minute is None else f"{key.tokens_per_minute} tokens a minute"
        once = "" if key.at_once is None else f", {key.at_once} at once"
        print(f"{key.name}  made {day}  {limit}{once}")
    if not keys:
        print("There are no keys. `shoal keys add NAME` makes one for a program that may ask for replies.")
    return 0


COMMANDS = (Command("keys", "make, list and revoke keys for programs", run_keys, add_arguments, True),)

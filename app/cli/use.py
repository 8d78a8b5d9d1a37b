"""`shoal use`: sets other programs up to ask this node, or prints how.

The functions that know a program's configuration take its old text and return the new one. A program whose
configuration cannot be changed without losing the user's comments, or that is configured elsewhere, is only explained.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from app.cli.command import Command, print_json
from app.core.errors import AppError, UsageError

_PLACEHOLDER = "KEY"  # in what is printed; `shoal keys add` makes one


@dataclass(frozen=True)
class Endpoint:
    """What a program must know: the node's address, a key, the model's name, and its context in tokens."""

    url: str
    key: str
    model: str
    context_length: int = 8192


LONGEST_REPLY = 8192  # tokens that a program is told to ask for, at most


@dataclass(frozen=True)
class Program:
    """A program that can ask this node: its file below the user's home, and how its settings change.

    Without a file, `settings` returns what to enter, and nothing is written.
    """

    title: str
    file: str | None
    settings: Callable[[str, Endpoint], str]


def _claude(text: str, to: Endpoint) -> str:
    environment = {
        "ANTHROPIC_BASE_URL": to.url,
        "ANTHROPIC_AUTH_TOKEN": to.key,
        "ANTHROPIC_API_KEY": "",  # one in the user's environment would be sent too
        "ANTHROPIC_MODEL": to.model,
        **{f"ANTHROPIC_DEFAULT_{tier}_MODEL": to.model for tier in ("OPUS", "SONNET", "HAIKU")},
    }
    return _merged(text, {"env": environment})


def _opencode(text: str, to: Endpoint) -> str:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Shoal",
        "options": {"baseURL": f"{to.url}/v1", "apiKey": to.key},
        "models": {to.model: {"name": to.model, "limit": {"context": to.context_length, "output": _output(to)}}},
    }
    return _merged(text, {"provider": {"shoal": provider}, "model": f"shoal/{to.model}"})


def _codex(text: str, to: Endpoint) -> str:
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    try:
        config = tomlkit.parse(text)
    except TOMLKitError as error:
        raise ValueError(str(error)) from error
    # Before the tables: what follows a table's heading belongs to it.
    for name, value in (("model", to.model), ("model_provider", "shoal")):
        if name in config:
            config[name] = value
        else:
            config = tomlkit.parse(f"{name} = {json.dumps(value)}\n{tomlkit.dumps(config)}")
    provider = {
        "name": "Shoal",
        "base_url": f"{to.url}/v1",
        "wire_api": "responses",
        "http_headers": {"Authorization": f"Bearer {to.key}"},
    }
    providers = config.setdefault("model_providers", tomlkit.table(is_super_table=True))
    if not isinstance(providers, dict):
        raise ValueError("model_providers is not a table")
    providers["shoal"] = provider
    return tomlkit.dumps(config)


def _aider(text: str, to: Endpoint) -> str:
    values = {"model": f"openai/{to.model}", "openai-api-base": f"{to.url}/v1", "openai-api-key": to.key}
    kept = [line for line in text.splitlines() if not re.match(rf"({'|'.join(values)})\s*:", line)]
    return "\n".join([*kept, *(f"{name}: {json.dumps(value)}" for name, value in values.items())]) + "\n"


def _continue(text: str, to: Endpoint) -> str:
    return (
        "name: Shoal\nversion: 0.0.1\nschema: v1\n"
        f"models:\n  - name: Shoal\n    provider: openai\n    model: {json.dumps(to.model)}\n"
        f"    apiBase: {to.url}/v1\n    apiKey: {to.key}\n    roles: [chat, edit, apply]\n"
        f"    defaultCompletionOptions:\n      contextLength: {to.context_length}\n"
    )


def _open_webui(text: str, to: Endpoint) -> str:
    return f"OPENAI_API_BASE_URL={to.url}/v1\nOPENAI_API_KEY={to.key}\n"


def _zed(text: str, to: Endpoint) -> str:
    can = {"tools": True, "images": False, "parallel_tool_calls": True, "prompt_cache_key": False}
    model = {
        "name": to.model,
        "display_name": to.model,
        "max_tokens": to.context_length,  # Zed's word for the context
        "max_output_tokens": _output(to),
        "capabilities": can,
    }
    provider = {"Shoal": {"api_url": f"{to.url}/v1", "available_models": [model]}}
    return _merged("", {"language_models": {"openai_compatible": provider}})


def _output(to: Endpoint) -> int:
    """Return the longest reply to offer: half of the context, so that the question has room.

    Programs ask for all of it each time, and hops reserve room for what is asked: it is bounded.
    """
    return max(1, min(to.context_length // 2, LONGEST_REPLY))


PROGRAMS = {
    "claude": Program("Claude Code", ".claude/settings.json", _claude),
    "codex": Program("Codex", ".codex/config.toml", _codex),
    "opencode": Program("opencode", ".config/opencode/opencode.json", _opencode),
    "aider": Program("aider", ".aider.conf.yml", _aider),
    "continue": Program("Continue: its config.yaml; add only the model to one that you have", None, _continue),
    "open-webui": Program(
        "Open WebUI: start it with these variables the first time, in Docker with --network=host; later its admin "
        "settings count",
        None,
        _open_webui,
    ),
    "zed": Program("Zed: add this to its settings, and start it with SHOAL_API_KEY set to the key", None, _zed),
}


def _merged(text: str, new: dict[str, Any]) -> str:
    """Return a JSON object with more settings; objects are merged, other values replaced."""
    old = json.loads(text) if text.strip() else {}
    if not isinstance(old, dict):
        raise ValueError("the file is not a JSON object")
    return json.dumps(_merge(old, new), indent=2, ensure_ascii=False) + "\n"


def _merge(old: Any, new: Any) -> Any:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    return {**old, **{name: _merge(old.get(name), value) for name, value in new.items()}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the program, --print and --undo."""
    parser.add_argument("program", choices=tuple(PROGRAMS), metavar="PROGRAM", help=f"one of {', '.join(PROGRAMS)}")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--print", action="store_true", dest="only_print", help="print the settings, write nothing")
    group.add_argument("--undo", action="store_true", help="restore the program's settings, and revoke its key")


def run_use(arguments: argparse.Namespace) -> int:
    """Write a program's settings for this node, print them, or restore the former ones."""
    program = PROGRAMS[arguments.program]
    if arguments.undo:
        return _undo(arguments, program)
    if arguments.only_print or program.file is None:
        text = program.settings("", _endpoint(arguments.home, _PLACEHOLDER))
        hint = f"`shoal keys add {arguments.program}` makes the key"
        if arguments.json:
            print_json({"program": arguments.program, "settings": text, "file": program.file, "hint": hint})
        else:
            print(f"# {program.title}; {hint}\n{text}", end="")
        return 0
    path = Path.home() / program.file
    old = _read(path)
    endpoint = _endpoint(arguments.home, _PLACEHOLDER)
    _changed(path, program, old, endpoint)  # fails before a key is made
    key = _new_key(arguments.home, arguments.program)
    _write(path, old, _changed(path, program, old, replace(endpoint, key=key)))
    if arguments.json:
        print_json({"program": arguments.program, "file": str(path), "model": endpoint.model})
    else:
        print(f"{program.title} now asks {endpoint.model} at {endpoint.url}.")
        print(f"Its settings are in {path}; `shoal use {arguments.program} --undo` restores the former ones.")
    return 0


def _undo(arguments: argparse.Namespace, program: Program) -> int:
    from app.config.home import Home
    from app.config.keys import read_keys, revoke_key

    if program.file is None:
        raise UsageError(f"`shoal use {arguments.program}` has written nothing: remove the settings by hand")
    path = Path.home() / program.file
    backup = _backup(path)
    if not backup.exists():
        raise UsageError(f"`shoal use {arguments.program}` has not changed {path}")
    try:
        if backup.stat().st_size:
            backup.replace(path)
        else:  # there was no file before
            path.unlink(missing_ok=True)
            backup.unlink()
    except OSError as error:
        raise AppError(f"{path} cannot be restored: {error.strerror or error}") from error
    file = Home.open(arguments.home).keys_file
    if any(key.name == _key_name(arguments.program) for key in read_keys(file)):
        revoke_key(file, _key_name(arguments.program))
    if arguments.json:
        print_json({"program": arguments.program, "file": str(path), "restored": True})
    else:
        print(f"{path} is as it was before, and the key is revoked.")
    return 0


def _endpoint(home: Path, key: str) -> Endpoint:
    """Return the running node's address and model; raises `NotRunning`, or `AppError` if it is in no swarm."""
    from app.api.client import client_of

    client = client_of(home)
    models = client.get("/v1/models")["data"]
    if not models:
        raise AppError("this node is in no swarm", code="no_swarm")
    length = models[0].get("context_length")
    return Endpoint(client.url, key, str(models[0]["id"]), *([length] if isinstance(length, int) else []))


def _changed(path: Path, program: Program, old: str, to: Endpoint) -> str:
    try:
        return program.settings(old, to)
    except ValueError as error:
        why = " ".join(str(error).split())[:120]
        raise AppError(f"{path} cannot be changed ({why}): use --print and change it by hand") from error


def _key_name(program: str) -> str:
    return f"use-{program}"


def _new_key(home: Path, program: str) -> str:
    """Return a fresh key for a program; its former one ends, since only its hash is known."""
    from app.config.home import Home
    from app.config.keys import add_key, read_keys, revoke_key

    file, name = Home.open(home).keys_file, _key_name(program)
    if any(key.name == name for key in read_keys(file)):
        revoke_key(file, name)
    return add_key(file, name, None, None)[1]


def _backup(path: Path) -> Path:
    return path.with_name(f"{path.name}.before-shoal")


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise AppError(f"{path} cannot be read: {error}") from error


def _write(path: Path, old: str, new: str) -> None:
    """Write a program's settings, and keep those from before the first change beside them."""
    from p2p.platform import create_private, write_private

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        create_private(_backup(path), old.encode())
        write_private(path, new.encode())
    except OSError as error:
        raise AppError(f"{path} cannot be written: {error.strerror or error}") from error


COMMANDS = (Command("use", "set another program up to ask this node", run_use, add_arguments, True),)

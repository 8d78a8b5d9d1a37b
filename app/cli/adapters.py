"""`shoal adapters`: lists, exports, imports and removes adapters, in PEFT's format."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from app.cli.command import Command, print_json
from app.cli.models import progress_on_stderr
from app.core.errors import UsageError
from app.core.terminal_text import without_controls
from app.core.units import format_size

if TYPE_CHECKING:
    from app.training.adapter_store import AdapterFacts, AdapterStore

ACTIONS = ("export", "import", "remove")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action, the adapter and the folder."""
    parser.add_argument("action", nargs="?", choices=ACTIONS, help="what to do; without it, list all adapters")
    words = "export NAME FOLDER, import FOLDER, remove NAME; FOLDER is in PEFT's format"
    parser.add_argument("values", nargs="*", metavar="NAME|FOLDER", help=words)
    parser.add_argument("--name", metavar="NAME", help="with import: the adapter's name (default: that of the folder)")
    words = "with import: the model that the adapter is for (%(default)s)"
    parser.add_argument("--model", default="starter", metavar="M", help=words)


def run_adapters(arguments: argparse.Namespace) -> int:
    """List the adapters of this home, or act on one."""
    from app.config.home import Home
    from app.training.adapter_store import AdapterStore

    store = AdapterStore(Home.open(arguments.home))
    if arguments.action is None:
        if arguments.values:
            raise UsageError(f"unknown action {arguments.values[0]!r}: use {', '.join(ACTIONS)}")
        return _list(store, as_json=arguments.json)
    wanted = {"export": "NAME FOLDER", "import": "FOLDER", "remove": "NAME"}[arguments.action]
    if len(arguments.values) != len(wanted.split()):
        raise UsageError(f"write `shoal adapters {arguments.action} {wanted}`")
    if arguments.action == "remove":
        store.remove(arguments.values[0])
        words, name = f"The adapter {arguments.values[0]} is removed.", arguments.values[0]
    elif arguments.action == "export":
        name, folder = arguments.values[0], Path(arguments.values[1]).expanduser()
        store.export(name, folder)
        words = f"The adapter {name} is in {folder}, for PEFT's `PeftModel.from_pretrained`."
    else:
        name = _import(store, arguments)
        words = f"The adapter {name} is imported."
    if arguments.json:
        print_json({"action": arguments.action, "name": name})
    else:
        print(words)
    return 0


def _import(store: AdapterStore, arguments: argparse.Namespace) -> str:
    """Read an adapter's folder, check it against the model, and store it; returns its name."""
    from app.config.home import cache_folder
    from app.manifest.importing import hash_source
    from engine.sources.opening import open_source
    from engine.training.peft_format import peft_files, read_peft

    folder = Path(arguments.values[0]).expanduser()
    name: str = arguments.name or folder.absolute().name
    store.require_free(name)
    with progress_on_stderr(arguments.model) as progress:
        source = open_source(arguments.model, cache_folder(), progress)
    model = hash_source(source).manifest.hash
    adapter = read_peft(folder, source.config, model)
    store.save(name, peft_files(dataclasses.replace(adapter, model=model), source.config, source.label))
    return name


def _list(store: AdapterStore, *, as_json: bool) -> int:
    found = [store.facts(name) for name in store.names()]
    if as_json:
        print_json([dataclasses.asdict(adapter) for adapter in found])
        return 0
    for adapter in found:
        print(_line(adapter))
    if not found:
        print("There are no adapters. `shoal finetune --data FILE --out NAME` trains one.")
    return 0


def _line(adapter: AdapterFacts) -> str:
    if adapter.error is not None:
        return f"{adapter.name}: damaged: {without_controls(adapter.error)}"
    base = without_controls(adapter.base or "a model")
    model = f" ({adapter.model[:8]})" if adapter.model else ""
    roles = without_controls(",".join(adapter.targets))
    return f"{adapter.name}: for {base}{model}, rank {adapter.rank}, {roles}, {format_size(adapter.size_bytes)}"


COMMANDS = (
    Command("adapters", "list, export, import or remove adapters", run_adapters, add_arguments, prints_facts=True),
)

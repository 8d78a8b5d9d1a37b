"""`shoal uninstall`: lists Shoal's files and service on this machine and, with --yes, removes them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from app.cli.command import Command, print_json

if TYPE_CHECKING:
    from app.system.service import ServicePlan
    from app.system.uninstall import RemovableItem


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --yes."""
    parser.add_argument("--yes", action="store_true", help="remove everything; without it, only list it")


def run_uninstall(arguments: argparse.Namespace) -> int:
    """List the files and the service, and remove them if --yes is given; the identity cannot be recovered."""
    from app.api.client import running_client
    from app.cli.service import plan_here
    from app.config.home import cache_folder
    from app.system.uninstall import items_in_cache, items_in_home

    plan, cache = plan_here(arguments.home), cache_folder()
    service = plan.file if plan.file.exists() else None
    is_running = running_client(arguments.home) is not None
    if arguments.yes and _stop(arguments.home, plan) and not arguments.json:
        print("stopped")
    shared = _is_used_by_others(cache, arguments.home)
    items = [*items_in_home(arguments.home), *([] if shared else items_in_cache(cache))]
    left = _remove(items, [arguments.home, *([] if shared else [cache])]) if arguments.yes else []
    program = f"{sys.executable} -m pip uninstall shoal"
    if arguments.json:
        facts = [{"path": str(item.path), "bytes": item.size_bytes} for item in items]
        found = {"service": None if service is None else str(service), "items": facts, "program": program}
        kept = {"left": [str(folder) for folder in left], "used_by_others": str(cache) if shared else None}
        print_json({"removed": arguments.yes, "running": is_running, **found, **kept})
        return 0
    print("Removed:" if arguments.yes else "This would be removed (`shoal uninstall --yes` does it):")
    for line in [f"the service {service}"] * (service is not None) + [_line(item) for item in items]:
        print(f"  {line}")
    if is_running and not arguments.yes:
        print("The node that runs now would be stopped first")
    if shared:
        print(f"{cache} stays, because another node of this machine uses its models: stop that node first")
    for folder in left:
        print(f"{folder} was kept, because it contains other files")
    checkout = _checkout()
    print(f"To remove the program itself: {program if checkout is None else f'delete the folder {checkout}'}")
    return 0


def _is_used_by_others(cache: Path, home: Path) -> bool:
    """True if a running node other than this home's uses the cache, which all homes of a user share by default."""
    from app.api.client import running_client
    from app.weights.disk_space import users

    client = running_client(home)
    own = None if client is None else client.snapshot().peer_id
    return any(own is None or not name.startswith(own) for name in users(cache))


def _checkout() -> Path | None:
    """Return the folder with the source code if the running Python environment lies in it, as `make run` builds it."""
    import app

    folder = Path(app.__file__).parents[1]
    is_within = (folder / "pyproject.toml").exists() and Path(sys.prefix).is_relative_to(folder)
    return folder if is_within else None


def _line(item: RemovableItem) -> str:
    from app.core.units import format_size

    return f"{item.path}  {format_size(item.size_bytes)}"


def _stop(home: Path, plan: ServicePlan) -> bool:
    """Remove the service first, because the system would restart its node, then stop a running node, if there is one.

    True if a node was stopped.
    """
    from app.api.client import running_client
    from app.cli.pause import stop_node
    from app.system import service

    service.uninstall(plan)
    if running_client(home) is None:
        return False
    stop_node(home)
    return True


def _remove(items: list[RemovableItem], folders: list[Path]) -> list[Path]:
    """Remove the items; return the folders that were kept because they contain other files."""
    from app.system.uninstall import remove, remove_if_empty

    for item in items:
        remove(item)
    return [folder for folder in folders if not remove_if_empty(folder)]


COMMANDS = (Command("uninstall", "remove all of Shoal's files, after a dry run", run_uninstall, add_arguments, True),)

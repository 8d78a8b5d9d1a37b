"""`shoal update --check`: compares this program with the newest release, by a signed list, and changes nothing."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
from dataclasses import asdict

from app.cli.command import Command, print_json
from app.core.errors import UsageError

LIST_VARIABLE = "SHOAL_RELEASES"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --check and the place of the list."""
    parser.add_argument("--check", action="store_true", help="compare with the newest release; nothing is installed")
    words = f"URL or file of the signed list of releases (default: the variable {LIST_VARIABLE})"
    parser.add_argument("--from", dest="address", metavar="LIST", help=words)


def run_update(arguments: argparse.Namespace) -> int:
    """Say whether a newer release exists; only when asked, and only from the place that was named."""
    from app.config.home import Home
    from app.system.releases import newest_release, version_number

    if not arguments.check:
        raise UsageError("Shoal does not update itself; `shoal update --check` compares it with the newest release")
    address = arguments.address or os.environ.get(LIST_VARIABLE)
    if not address:
        raise UsageError(f"name the list of releases: `--from URL`, or the variable {LIST_VARIABLE}")
    newest = newest_release(address, Home.open(arguments.home).releases_file)
    version = importlib.metadata.version("shoal")
    is_newer = version_number(newest.version) > version_number(version)
    if arguments.json:
        print_json({"version": version, "newest": asdict(newest), "is_newer": is_newer})
    elif is_newer:
        print(f"Shoal {newest.version} was released on {newest.date}; this is {version}. Get it at {newest.url}")
        if newest.notes:
            print(newest.notes)
    elif newest.version == version:
        print(f"This is Shoal {version}, the newest release.")
    else:
        print(f"This is Shoal {version}; the newest release is {newest.version}.")
    return 0


COMMANDS = (Command("update", "compare this program with the newest release", run_update, add_arguments, True),)

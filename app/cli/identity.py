"""`shoal id`: shows this node's identity, and backs it up or restores it under a passphrase."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from app.cli.command import Command, print_json
from app.core.errors import HomeError, UsageError

VARIABLE = "SHOAL_PASSPHRASE"
_MAX_PASSPHRASE = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions show, export FILE and import FILE; show is the default."""
    parser.set_defaults(action="show")
    actions = parser.add_subparsers(metavar="show|export|import")
    show = actions.add_parser("show", help="print this node's peer id", description="Print this node's peer id.")
    export = actions.add_parser("export", help="write a backup, encrypted under a passphrase")
    export.add_argument("file", metavar="FILE", type=Path)
    bring = actions.add_parser("import", help="restore the identity of a backup")
    bring.add_argument("file", metavar="FILE", type=Path)
    bring.add_argument("--replace", action="store_true", help="replace this node's identity; its old key is kept")
    for name, action in (("show", show), ("export", export), ("import", bring)):
        action.set_defaults(action=name)


def run_id(arguments: argparse.Namespace) -> int:
    """Show, export or import the identity."""
    actions = {"show": show_identity, "export": export_to, "import": import_from}
    peer_id, text = actions[arguments.action](arguments)
    if arguments.json:
        print_json({"peer_id": peer_id})
    else:
        print(text)
    return 0


def show_identity(arguments: argparse.Namespace) -> tuple[str, str]:
    """Return the peer id, also as the text to print; a home folder without an identity gets one."""
    from app.config.home import Home
    from p2p.identity import load_or_create

    peer_id = load_or_create(Home.open(arguments.home).key_file).peer_id
    return peer_id, peer_id


def export_to(arguments: argparse.Namespace) -> tuple[str, str]:
    """Write the encrypted identity to a new file; raises `HomeError` if the file exists."""
    from app.config.home import Home
    from p2p.identity import export_identity, load_or_create
    from p2p.platform import create_private

    identity = load_or_create(Home.open(arguments.home).key_file)
    if arguments.file.exists():
        raise HomeError(f"{arguments.file} exists already: choose another file")
    sealed = export_identity(identity, passphrase(twice=True))
    if not create_private(arguments.file.absolute(), sealed):
        raise HomeError(f"{arguments.file} exists already: choose another file")
    return identity.peer_id, f"{identity.peer_id} was exported to {arguments.file}; restoring it needs the passphrase"


def import_from(arguments: argparse.Namespace) -> tuple[str, str]:
    """Replace this home's identity by that of a backup; raises `HomeError` if one would be lost without --replace."""
    from app.config.home import Home, hold
    from p2p.identity import import_identity, key_file, load
    from p2p.platform import write_private

    home = Home.open(arguments.home)
    with hold(home):  # no node may run, because it would keep its old identity until restarted
        identity = import_identity(arguments.file, passphrase(twice=False))
        if home.key_file.exists():
            present = load(home.key_file)
            if present == identity:
                return identity.peer_id, f"this node already is {identity.peer_id}"
            if not arguments.replace:
                raise HomeError(
                    f"this node is {present.peer_id}: add --replace to make it {identity.peer_id}; "
                    "its old key is kept in a file beside the new one"
                )
            kept = home.key_file.with_name(f"identity-{present.peer_id}.key")
            write_private(kept, key_file(present))
        write_private(home.key_file, key_file(identity))
    return identity.peer_id, f"this node is {identity.peer_id} now"


def passphrase(*, twice: bool) -> str:
    """Read the passphrase from SHOAL_PASSPHRASE, else from the terminal, else from the first line of the input."""
    if VARIABLE in os.environ:
        return os.environ[VARIABLE]
    if not sys.stdin.isatty():
        return sys.stdin.readline(_MAX_PASSPHRASE).rstrip("\r\n")
    import getpass

    chosen = getpass.getpass("Passphrase: ")
    if twice and getpass.getpass("Once more: ") != chosen:
        raise UsageError("the two passphrases differ: run it again")
    return chosen


COMMANDS = (Command("id", "show, export or import this node's identity", run_id, add_arguments, prints_facts=True),)

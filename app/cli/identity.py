"""`shoal id`: who this node is, and its backup under a passphrase."""

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
    """show, export FILE, import FILE."""
    parser.set_defaults(action="show")
    actions = parser.add_subparsers(metavar="show|export|import")
    # The option stands before or after the action; a child's default must not undo what stood before.
    json_help = "print facts for a program"
    show = actions.add_parser("show", help="print this node's peer id", description="Print this node's peer id.")
    export = actions.add_parser("export", help="write a backup, sealed under a passphrase")
    export.add_argument("file", metavar="FILE", type=Path)
    bring = actions.add_parser("import", help="take the identity of a backup")
    bring.add_argument("file", metavar="FILE", type=Path)
    bring.add_argument("--replace", action="store_true", help="though this node has another identity, which is kept")
    for name, action in (("show", show), ("export", export), ("import", bring)):
        action.set_defaults(action=name)
        action.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=json_help)


def run_id(arguments: argparse.Namespace) -> int:
    """Show, export or import the identity."""
    actions = {"show": show_identity, "export": export_to, "import": import_from}
    peer_id, said = actions[arguments.action](arguments)
    if arguments.json:
        print_json({"peer_id": peer_id})
    else:
        print(said)
    return 0


def show_identity(arguments: argparse.Namespace) -> tuple[str, str]:
    """The peer id; a home folder that has none gets one now, for it is what others know the node by."""
    from app.config.home import Home
    from p2p.identity import load_or_create

    peer_id = load_or_create(Home.open(arguments.home).key_file).peer_id
    return peer_id, peer_id


def export_to(arguments: argparse.Namespace) -> tuple[str, str]:
    """Write the sealed identity to a new file."""
    from app.config.home import Home
    from p2p.identity import export_identity, load_or_create
    from p2p.platform import create_private

    identity = load_or_create(Home.open(arguments.home).key_file)
    if arguments.file.exists():
        raise HomeError(f"{arguments.file} exists already: choose another file")
    sealed = export_identity(identity, passphrase(twice=True))
    if not create_private(arguments.file.absolute(), sealed):
        raise HomeError(f"{arguments.file} exists already: choose another file")
    return identity.peer_id, f"{identity.peer_id} is in {arguments.file}; without the passphrase it is worth nothing"


def import_from(arguments: argparse.Namespace) -> tuple[str, str]:
    """Make the identity of an export file this home's own."""
    from app.config.home import Home, hold
    from p2p.identity import import_identity, key_file, load
    from p2p.platform import write_private

    home = Home.open(arguments.home)
    with hold(home):  # a running node keeps the identity it began with
        identity = import_identity(arguments.file, passphrase(twice=False))
        if home.key_file.exists():
            present = load(home.key_file)
            if present == identity:
                return identity.peer_id, f"this node is {identity.peer_id} already"
            if not arguments.replace:
                raise HomeError(
                    f"this node is {present.peer_id}: add --replace to make it {identity.peer_id}; "
                    "the key it has now is kept beside"
                )
            kept = home.key_file.with_name(f"identity-{present.peer_id}.key")
            write_private(kept, key_file(present))
        write_private(home.key_file, key_file(identity))
    return identity.peer_id, f"this node is {identity.peer_id} now"


def passphrase(*, twice: bool) -> str:
    """From the environment, the terminal, or the first line of the input, in this order."""
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

"""`shoal invites` and `shoal revoke`: limited invites, those that ask to join with them, and members to remove.

A running node is asked, and acts at once. Without one, the home folder's files are read and changed; a revocation then
reaches the other members once a node runs.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.cli.bans import peer_id_of_member
from app.cli.command import Command, print_json
from app.core.errors import UsageError
from app.core.terminal_text import quoted

if TYPE_CHECKING:
    from app.swarm.saved import SavedSwarm


def add_invites_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions list, which is the default, approve PEER, refuse PEER and cancel ID."""
    parser.set_defaults(action="list")
    actions = parser.add_subparsers(metavar="list|approve|refuse|cancel")
    listing = actions.add_parser("list", help="print the invites made here, who joined with them, and who asks to")
    approve = actions.add_parser("approve", help="let a peer in that asks to join")
    refuse = actions.add_parser("refuse", help="refuse a peer that asks to join")
    cancel = actions.add_parser("cancel", help="make an invite useless; those that joined with it stay")
    for name, action in (("list", listing), ("approve", approve), ("refuse", refuse), ("cancel", cancel)):
        action.set_defaults(action=name)
    for action in (approve, refuse):
        action.add_argument("which", metavar="PEER", help="its name, its id or the end of it")
    cancel.add_argument("which", metavar="ID", help="as `shoal invites` shows it")


def add_revoke_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the peer and --remove."""
    words = "a member's name, its id or the end of it; without it, list those that were removed"
    parser.add_argument("peer", nargs="?", metavar="PEER", help=words)
    parser.add_argument("--remove", action="store_true", help="take the peer off the list, so that it may join again")


def run_invites(arguments: argparse.Namespace) -> int:
    """List the invites, or decide on one or on a peer that asks to join."""
    if arguments.action == "list":
        return _print_invites(_invites(arguments.home), arguments)
    changed = _change(arguments.home, arguments.action, arguments.which)
    if arguments.json:
        print_json(changed)
    elif arguments.action == "cancel":
        print(f"the invite {changed['id']} is cancelled")
    else:
        done = "may join now" if arguments.action == "approve" else "is refused"
        print(f"{_who(changed)} {done}")
    return 0


def run_revoke(arguments: argparse.Namespace) -> int:
    """Remove a member from a private swarm for good, take that back, or list those that were removed."""
    revoked = _revoked(arguments.home)
    if arguments.peer is None:
        if arguments.remove:
            raise UsageError("name the peer to take off the list")
    else:
        guests = [guest for invite in _invites(arguments.home) for guest in invite["admitted"]]
        peer = peer_id_of_member(arguments.home, arguments.peer, guests, revoked)
        revoked = _revoke(arguments.home, peer, remove=arguments.remove)
    if arguments.json:
        print_json({"revoked": revoked})
    elif arguments.peer is not None:
        print(f"{peer} {'may join again' if arguments.remove else 'is removed; members are told'}")
    else:
        for one in revoked:
            print(one)
        if not revoked:
            print("Nobody was removed. `shoal revoke PEER` removes a member from a private swarm.")
    return 0


def _print_invites(invites: list[dict[str, Any]], arguments: argparse.Namespace) -> int:
    if arguments.json:
        print_json(invites)
        return 0
    for invite in invites:
        until = time.strftime("%d %b %H:%M", time.localtime(invite["expires_at_ms"] / 1000))
        used = f"{len(invite['admitted'])} of {invite['uses']} used"
        extra = "".join(f", {what}" for what in ("approve", "delegate") if invite[what])
        print(f"{invite['id']}  {invite['state']}  {used}, until {until}{extra}")
        for guest in invite["admitted"]:
            print(f"  joined   {_who(guest)}")
        for guest in invite["waiting"]:
            print(f"  asks     {_who(guest)}")
    if not invites:
        print("No limited invites. `shoal invite` makes one to a private swarm.")
    return 0


def _who(guest: dict[str, Any]) -> str:
    return f"{guest['peer']}  {quoted(guest['name'])}" if guest["name"] else str(guest["peer"])


def _invites(home: Path) -> list[dict[str, Any]]:
    from app.api.client import running_client

    client = running_client(home)
    if client is not None:
        answer: list[dict[str, Any]] = client.get("/control/invites")
        return answer
    from app.config.home import Home
    from app.joining.admission import invite_views
    from app.snapshot.codec import to_json

    return [to_json(view) for view in invite_views(Home(home), _active(home))]


def _change(home: Path, action: str, which: str) -> dict[str, Any]:
    from app.api.client import running_client

    client = running_client(home)
    if client is not None:
        body = {"id": which} if action == "cancel" else {"peer": which}
        answer: dict[str, Any] = client.post(f"/control/invites/{action}", body)
        return answer
    from app.config.home import Home
    from app.joining import admission
    from app.snapshot.codec import to_json

    if action == "cancel":
        return to_json(admission.cancel(Home(home), _active(home), which))
    return to_json(admission.decide(Home(home), _active(home), which, approve=action == "approve"))


def _revoked(home: Path) -> list[str]:
    from app.api.client import running_client

    client = running_client(home)
    if client is not None:
        return list(client.get("/control/revoked")["revoked"])
    from app.config.home import Home
    from app.joining.admission import revoked_here
    from p2p.identity import load_or_create

    here = Home(home)
    return list(revoked_here(here, load_or_create(here.key_file), _active(home)))


def _revoke(home: Path, peer: str, *, remove: bool) -> list[str]:
    from app.api.client import running_client

    client = running_client(home)
    if client is not None:
        return list(client.post("/control/revoke", {"peer": peer, "remove": remove})["revoked"])
    from app.config.home import Home
    from app.joining.admission import revoke
    from p2p.identity import load_or_create

    here = Home(home)
    revoke(here, load_or_create(here.key_file), _active(home), peer, remove=remove)
    return _revoked(home)


def _active(home: Path) -> SavedSwarm:
    from app.config.home import Home
    from app.joining.targets import named
    from app.swarm.saved import load

    return named(load(Home(home)), None)


COMMANDS = (
    Command(
        "invites",
        "list limited invites, and approve those that ask to join",
        run_invites,
        add_invites_arguments,
        prints_facts=True,
    ),
    Command("revoke", "remove a member from a private swarm", run_revoke, add_revoke_arguments, prints_facts=True),
)

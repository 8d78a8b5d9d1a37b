"""`shoal ban` and `shoal trust`: peers that this node never speaks with, and peers that it always believes.

Both are lists in the settings, `deny` and `trusted`; a running node applies a change at once.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from app.cli.command import Command, print_json
from app.cli.config import change_setting, settings_facts
from app.core.errors import UsageError
from app.core.terminal_text import one_line, quoted

_SHORTEST = 6  # characters of a peer id's end, as the dashboard shows them
_OF_NETWORKS = "./:"  # one of these is in every address of a network


def add_ban_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the peer and --remove."""
    words = "a member's name, its id or the end of it, or a network like 192.0.2.0/24; without it, list the banned"
    parser.add_argument("peer", nargs="?", metavar="PEER", help=words)
    parser.add_argument("--remove", action="store_true", help="remove the ban")


def add_trust_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the peer and --remove."""
    words = "a member's name, its id or the end of it; without it, list the trusted and every member's score"
    parser.add_argument("peer", nargs="?", metavar="PEER", help=words)
    parser.add_argument("--remove", action="store_true", help="remove it from the trusted")


def run_ban(arguments: argparse.Namespace) -> int:
    """Add a peer to the setting `deny`, remove it, or list the setting."""
    banned = _changed(arguments, "deny")
    if arguments.json:
        print_json({"deny": banned})
    elif arguments.peer is None:
        for entry in banned:
            print(entry)
        if not banned:
            print("Nobody is banned. `shoal ban PEER` refuses a peer for good.")
    else:
        print(f"{arguments.entry} is {'no longer banned' if arguments.remove else 'banned'}")
    return 0


def run_trust(arguments: argparse.Namespace) -> int:
    """Add a peer to the setting `trusted`, remove it, or list the setting with every member's score."""
    trusted = _changed(arguments, "trusted")
    members = _members(arguments.home)
    if arguments.json:
        scores = [{name: peer[name] for name in ("peer", "name", "score", "why")} for peer in members]
        print_json({"trusted": trusted, "members": scores})
    elif arguments.peer is None:
        for peer in members:
            mark = "*" if peer["peer"] in trusted else " "
            why = f"  {one_line(peer['why'])}" if peer["why"] else ""
            name = quoted(peer["name"]) if peer["name"] else "-"
            print(f"{mark} {peer['peer']}  {name}  {peer['score']:.2f}{why}")
        for peer_id in [one for one in trusted if one not in {peer["peer"] for peer in members}]:
            print(f"* {peer_id}")
        if not members and not trusted:
            print("No members yet, and nobody is trusted. `shoal trust PEER` lets a peer run private blocks.")
    else:
        print(f"{arguments.entry} is {'no longer trusted' if arguments.remove else 'trusted'}")
    return 0


def _changed(arguments: argparse.Namespace, setting: str) -> list[str]:
    """Apply the change to a list in the settings, if one was asked for; return the list and set `arguments.entry`."""
    listed = _listed(arguments.home, setting)
    if arguments.peer is None:
        if arguments.remove:
            raise UsageError("name the peer to remove")
        return listed
    arguments.entry = entry = _peer_id(arguments.peer, _members(arguments.home), listed)
    if arguments.remove and entry not in listed:
        raise UsageError(f"{entry} is not in the setting {setting}: it has {', '.join(listed) or 'no entries'}")
    kept = [one for one in listed if one != entry]
    wanted = kept if arguments.remove else [*kept, entry]
    change_setting(arguments.home, setting, ",".join(wanted) if wanted else None)
    return _listed(arguments.home, setting)


def _listed(home: Path, setting: str) -> list[str]:
    return next([*facts["value"]] for facts in settings_facts(home) if facts["name"] == setting)


def _members(home: Path) -> list[dict[str, Any]]:
    from app.api.client import running_client

    client = running_client(home)
    return [] if client is None else client.get("/control/peers")


def peer_id_of_member(home: Path, text: str, others: list[dict[str, Any]], listed: list[str]) -> str:
    """Return the id of the one member, or of the `others` and the `listed`, that a text means, or the text itself."""
    return _peer_id(text, [*others, *_members(home)], listed)


def _peer_id(text: str, members: list[dict[str, Any]], listed: list[str]) -> str:
    """Return the id of the one peer that is meant, or the text itself if it is an id or a network.

    Raises `UsageError` for a text that can only be a name, if no member or several have it.
    """
    from p2p.addresses import is_peer_id

    known = {peer["peer"]: peer["name"] for peer in members} | dict.fromkeys(listed, "")
    if text in known:
        return text
    found = [peer for peer, name in known.items() if name == text or (len(text) >= _SHORTEST and peer.endswith(text))]
    if len(found) > 1:
        raise UsageError(f"several peers are called {text!r}: write the id of one of them: {', '.join(found)}")
    if not found and not is_peer_id(text) and not set(text) & set(_OF_NETWORKS):
        raise UsageError(f"no member is called {text!r}: `shoal peers` lists them; of other peers write the whole id")
    return found[0] if found else text


COMMANDS = (
    Command("ban", "never speak with a peer again, or list the banned", run_ban, add_ban_arguments, True),
    Command("trust", "always believe a peer, or list who is trusted", run_trust, add_trust_arguments, True),
)

"""`shoal create`, `join`, `leave`, `swarms`, `invite`: change and list the swarms of this node.

A running node is asked, and acts at once. Without one, `app.joining.offline` changes the home folder's files, and the
next `shoal serve` acts on them.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.cli.command import Command, print_json
from app.cli.models import progress_on_stderr
from app.cli.parser import MODELS, duration_argument
from app.cli.pause import warn_sole_holder
from app.cli.status import NO_SWARM
from app.core.errors import UsageError

if TYPE_CHECKING:
    from app.api.client import Client
    from app.swarm.saved import SavedSwarm

STILL_TRYING = 3  # exit status of `shoal join` while no member has answered
INVITE_VARIABLE = "SHOAL_INVITE"
_MAX_INPUT = 8192
_POLL_S = 0.2
_BEFORE_START = "start a node with `shoal serve` to take part"


def add_create_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the new swarm's name and model."""
    parser.add_argument("name", metavar="NAME", help="up to 63 letters a-z, digits, '-', '.' and '_'")
    parser.add_argument("--model", required=True, metavar="MODEL", help=MODELS)
    parser.add_argument("--private", action="store_true", help="only peers with an invite can connect")


def add_join_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the swarm to join."""
    words = f"a name, a name#hash, an invite, a file with one, or - for stdin (default: {INVITE_VARIABLE})"
    parser.add_argument("target", nargs="?", metavar="NAME|NAME#HASH|INVITE", help=words)
    words = "leave the present swarm even if no member answers, or one has yet to let this node in"
    parser.add_argument("--force", action="store_true", help=words)


def add_leave_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the swarm to leave."""
    parser.add_argument("name", metavar="NAME", help="as `shoal swarms` shows it")


_ONLY_HERE = (
    "only nodes on this machine can use this invite, as it has loopback addresses alone: connect the machine to a "
    "network; if the setting `listen` is 127.0.0.1, `shoal config unset listen`, then `shoal restart`"
)


def add_invite_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the swarm to invite to, and --qr."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="default: the active swarm")
    parser.add_argument("--qr", action="store_true", help="draw a QR code too")
    words = "a time like 12h or 7d after which the invite is useless; private swarms only (default: 7d)"
    parser.add_argument("--expires", metavar="TIME", type=duration_argument, help=words)
    words = "how many nodes may join with it; private swarms only (default: 1)"
    parser.add_argument("--uses", metavar="N", type=int, help=words)
    words = "let nobody in before you approve it with `shoal invites approve`; private swarms only"
    parser.add_argument("--approve", action="store_true", help=words)
    words = "whoever joins with it may invite others too; private swarms that this node created only"
    parser.add_argument("--delegate", action="store_true", help=words)


def run_create(arguments: argparse.Namespace) -> int:
    """Create a swarm and join it; the model is read in this process, so that its progress can be shown."""
    from app.api.client import running_client
    from app.config.home import Home, cache_folder
    from app.joining.create import SwarmSpec, create_swarm
    from app.swarm.saved import update

    home = Home.open(arguments.home)
    spec = SwarmSpec(arguments.name, arguments.model, arguments.private)
    with progress_on_stderr(arguments.model) as fetching, progress_on_stderr("reading the model") as reading:
        swarm = create_swarm(home, cache_folder(), spec, fetching, reading)
    update(home, lambda known: known.joined(swarm))
    client = running_client(arguments.home)
    if client is None:
        _print_offline(arguments, swarm, f"created {swarm}: {_BEFORE_START}")
    else:
        _print_outcome(
            arguments, client.post("/control/join", {"target": f"{swarm.name}#{swarm.model_hash}"}), "created"
        )
    return 0


def run_join(arguments: argparse.Namespace) -> int:
    """Join a swarm; without --json, show the download until the node serves its first blocks.

    The exit status is `STILL_TRYING` if no member has answered yet.
    """
    from app.api.client import running_client

    target = read_target(arguments.target)
    client = running_client(arguments.home)
    if client is not None:
        outcome = client.post("/control/join", {"target": target, "force": arguments.force})
        _print_outcome(arguments, outcome if arguments.json else while_fetching(client, outcome), "joined")
        return STILL_TRYING if outcome["state"] == "joining" else 0
    from app.config.home import Home
    from app.joining.offline import join_offline

    swarm = join_offline(Home.open(arguments.home), target, os.environ)
    _print_offline(arguments, swarm, f"{swarm} is this node's swarm now: {_BEFORE_START}")
    return 0


def run_leave(arguments: argparse.Namespace) -> int:
    """Leave a swarm and forget it."""
    from app.api.client import running_client
    from app.config.home import Home
    from app.joining.offline import leave_offline

    client = running_client(arguments.home)
    if client is not None:
        _warn_before_leaving(client, arguments)
        left = client.post("/control/leave", {"name": arguments.name})
    else:
        left = swarm_facts(leave_offline(Home.open(arguments.home), arguments.name), active=False)
    if arguments.json:
        print_json(left)
    else:
        print(f"left {left['pinned']}")
    return 0


def _warn_before_leaving(client: Client, arguments: argparse.Namespace) -> None:
    """Warn a sole holder of blocks that is about to leave its active swarm."""
    active = [swarm for swarm in client.snapshot().swarms if swarm.active]
    if active and arguments.name in (active[0].name, active[0].pinned, f"{active[0].name}#{active[0].manifest}"):
        warn_sole_holder(arguments.home)


def run_swarms(arguments: argparse.Namespace) -> int:
    """List the remembered swarms."""
    from app.config.home import Home
    from app.swarm.saved import load

    known = load(Home(arguments.home))
    swarms = [swarm_facts(swarm, active=swarm.id == known.active_id) for swarm in known.swarms]
    if arguments.json:
        print_json(swarms)
        return 0
    for swarm in swarms:
        mark = "*" if swarm["active"] else " "
        print(f"{mark} {swarm['pinned']}{'  private' if swarm['private'] else ''}")
    if not swarms:
        print(NO_SWARM)
    return 0


def run_invite(arguments: argparse.Namespace) -> int:
    """Print an invite; notices go to stderr, so that stdout can be piped."""
    from app.api.client import running_client
    from app.config.home import Home
    from app.joining.admission import invite_facts
    from app.joining.offline import invite_offline
    from app.swarm.invitations import InviteLimits
    from app.swarm.invite import parse_invite

    asked = {"expires_in_s": arguments.expires, "uses": arguments.uses}
    asked |= {"approve": arguments.approve or None, "delegate": arguments.delegate or None}
    wanted = {name: value for name, value in asked.items() if value is not None}
    client = running_client(arguments.home)
    if client is not None:
        facts = client.post("/control/invite", {"name": arguments.name, **wanted})
    else:
        limits = InviteLimits(**wanted) if wanted else None
        facts = invite_facts(invite_offline(Home.open(arguments.home), arguments.name, os.environ, limits))
        print("shoal: no node runs here: the invite works once one does", file=sys.stderr)
    if arguments.json:
        print_json(facts)
        return 0
    if arguments.qr:
        print(parse_invite(facts["invite"]).qr())
    print(facts["invite"])
    if facts["only_here"]:
        print(f"shoal: {_ONLY_HERE}", file=sys.stderr)
    if facts["private"]:
        print(f"shoal: {limits_text(facts['limits'])}", file=sys.stderr)
    return 0


def limits_text(limits: dict[str, Any] | None) -> str:
    """Say what an invite to a private swarm allows, and to whom."""
    if limits is None:
        return (
            "whoever has this invite has the swarm's secret, for good: this swarm was created before invites could "
            "be limited. Invites to a private swarm that you create now can be"
        )
    who = "one node" if limits["uses"] == 1 else f"{limits['uses']} nodes"
    until = time.strftime("%d %b, %H:%M", time.localtime(limits["expires_at_ms"] / 1000))
    text = f"{who} can join with this invite, until {until}, while this node is online"
    text += "; each waits until you approve it (`shoal invites`)" if limits["approve"] else ""
    return text + ("; whoever joins may invite others too" if limits["delegate"] else "")


def read_target(argument: str | None) -> str:
    """Return the target to join: the argument, or the invite from the file, stdin or environment that it stands for.

    Every user of the machine can see an argument while the command runs, but not the other three.
    """
    from app.core.errors import RecordError
    from app.swarm.invite import invite_in, is_invite

    text = argument
    if argument is None:
        if INVITE_VARIABLE not in os.environ:
            raise UsageError(
                f"name the swarm to join, or give an invite (also as a file, - for stdin, or {INVITE_VARIABLE})"
            )
        text = os.environ[INVITE_VARIABLE]
    elif argument == "-":
        text = sys.stdin.read(_MAX_INPUT)
    elif not is_invite(argument) and (os.sep in argument or "." in argument) and Path(argument).is_file():
        with open(argument, encoding="utf-8", errors="replace") as file:
            text = file.read(_MAX_INPUT)
        if not is_invite(text):
            raise UsageError(f"the file {argument} contains no invite: an invite begins with 'shoal:'")
    assert text is not None
    try:
        return invite_in(text) if is_invite(text) else text.strip()
    except RecordError as error:
        raise UsageError(str(error)) from None


def swarm_facts(swarm: SavedSwarm, *, active: bool) -> dict[str, Any]:
    """Return a remembered swarm as `--json` shows it."""
    from app.joining.targets import view_of
    from app.snapshot.codec import to_json

    return to_json(view_of(swarm, active=active))


def while_fetching(client: Client, outcome: dict[str, Any]) -> dict[str, Any]:
    """Show the download's progress until the node serves its first blocks or gives up; return the latest outcome.

    A node that hosts nothing downloads only the embedding and the head, which it needs to ask. Interrupting this does
    not stop the node's download.
    """
    with progress_on_stderr("weights from members") as progress:
        while outcome["state"] in ("fetching", "client"):
            snapshot = client.snapshot()
            coming = "weights" if snapshot.state == "fetching" else "ends"
            running = [step for step in snapshot.steps if step.key == coming and step.state == "running"]
            for step in running:
                if step.total:
                    progress(step.done or 0, step.total)
            outcome = {**outcome, "state": snapshot.state, "reason": snapshot.reason}
            if snapshot.state == "client" and not running:
                break
            time.sleep(_POLL_S)
    return outcome


def _print_outcome(arguments: argparse.Namespace, outcome: dict[str, Any], done: str) -> None:
    if arguments.json:
        print_json(outcome)
    elif outcome["state"] == "joining":
        print(f"not joined yet: {outcome['reason']}")
    else:
        print(f"{done} {outcome['swarm']['pinned']}: {outcome['reason'] or outcome['state']}")


def _print_offline(arguments: argparse.Namespace, swarm: SavedSwarm, words: str) -> None:
    if arguments.json:
        print_json({"swarm": swarm_facts(swarm, active=True), "state": "idle", "reason": "no node runs"})
    else:
        print(words)


COMMANDS = (
    Command("create", "create a swarm and join it", run_create, add_create_arguments, prints_facts=True),
    Command("join", "join a swarm by name or invite", run_join, add_join_arguments, prints_facts=True),
    Command("leave", "leave a swarm and forget it", run_leave, add_leave_arguments, prints_facts=True),
    Command("swarms", "list the swarms that this node remembers", run_swarms, prints_facts=True),
    Command("invite", "print an invite to a swarm", run_invite, add_invite_arguments, prints_facts=True),
)

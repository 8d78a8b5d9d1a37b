"""`shoal pause`, `resume`, `drain`, `stop`: stop and restart hosting by hand, or end the node."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.cli.command import Command, print_json
from app.cli.parser import duration_argument
from app.core.reasons import NEXT_STEPS

if TYPE_CHECKING:
    from app.api.client import Client

_STOP_S = 60.0
_POLL_S = 0.1
_SILENT_S = 1.0
_WAITING = "waiting until the node's sessions have ended or moved to another member"
_NOT_YET_PAUSED = ("draining", "loading", "joining", "fetching", "serving")


def add_pause_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --for, the length of the pause."""
    words = "like 90s, 30m, 2h or 1d; without it until `shoal resume`"
    parser.add_argument("--for", dest="for_s", metavar="TIME", type=duration_argument, help=words)


def run_pause(arguments: argparse.Namespace) -> int:
    """Move sessions to other members and free the memory; returns when that is done."""
    return _pause_and_wait(arguments, "/control/pause", {"for_s": arguments.for_s})


def run_drain(arguments: argparse.Namespace) -> int:
    """Wait for sessions to finish, then free the memory; returns when that is done."""
    return _pause_and_wait(arguments, "/control/drain", {})


def run_resume(arguments: argparse.Namespace) -> int:
    """Host again, and say so if a courtesy rule still keeps the node paused."""
    from app.api.client import client_of

    courtesy = client_of(arguments.home).post("/control/resume", {})
    rule = next((rule for rule in courtesy["rules"] if courtesy["paused"] and rule["applies"]), None)
    if arguments.json:
        print_json(courtesy)
    elif rule is not None:
        print(f"still paused by a rule ({rule['label']}): {NEXT_STEPS[rule['code']]}")
    else:
        print("resumed")
    return 0


def run_stop(arguments: argparse.Namespace) -> int:
    """Ask the node to drain and end, and wait until it has."""
    warn_sole_holder(arguments.home)
    stop_node(arguments.home)
    if arguments.json:
        print_json({"state": "stopped"})
    else:
        print("stopped")
    return 0


def stop_node(home: Path) -> None:
    """Ask a node to drain and end, and wait until it has; raises `AppError` after `_STOP_S` seconds."""
    from app.api.client import WrongToken, client_of
    from app.config.home import Home, require_node
    from app.core.errors import AppError
    from p2p.platform import ask_to_stop, is_locked

    try:
        client_of(home).post("/control/stop", {})
    except WrongToken:  # the file was removed or changed: the node must be told in another way
        if "SHOAL_TOKEN" in os.environ or not ask_to_stop(require_node(Home(home)).pid):
            raise
    deadline, notice = time.monotonic() + _STOP_S, _Notice()
    while is_locked(Home(home).lock_file):
        notice.tell()
        if time.monotonic() > deadline:
            raise AppError(f"the node is still draining after {_STOP_S:.0f} s: look at its log, or kill the process")
        time.sleep(0.05)


class _Notice:
    """Says once what a command waits for, if that takes longer than a moment and somebody watches."""

    def __init__(self) -> None:
        self._due_at: float | None = time.monotonic() + _SILENT_S

    def tell(self) -> None:
        """Say it if it is due."""
        if self._due_at is not None and time.monotonic() >= self._due_at:
            self._due_at = None
            if sys.stderr.isatty():
                print(f"shoal: {_WAITING}", file=sys.stderr, flush=True)


def warn_sole_holder(home: Path) -> None:
    """Warn on stderr if this node runs and some blocks of the swarm have no other host, so that replies would stop."""
    from app.api.client import WrongToken, running_client
    from app.snapshot.codec import sole_blocks

    snapshot = None
    with contextlib.suppress(WrongToken):  # the command itself says so, or does without
        client = running_client(home)
        snapshot = None if client is None else client.snapshot()
    blocks = () if snapshot is None or not snapshot.peers else sole_blocks(snapshot)
    if snapshot is not None and blocks:
        spans = ", ".join(f"{start}:{stop}" for start, stop in blocks)
        text = f"only this node hosts blocks {spans} of {snapshot.swarm}: replies stop until another member hosts them"
        print(f"shoal: {text}", file=sys.stderr)


def _pause_and_wait(arguments: argparse.Namespace, path: str, body: dict[str, Any]) -> int:
    from app.api.client import client_of

    client = client_of(arguments.home)
    warn_sole_holder(arguments.home)
    courtesy = client.post(path, body)
    status = _wait_paused(client)
    if arguments.json:
        print_json({**courtesy, "state": status["state"], "reason": status["reason"]})
    elif status["state"] == "paused":
        print(f"{status['reason']}; `shoal resume` hosts again")
    else:
        print(f"paused; the node is {status['state']}: {status['reason']}")
    return 0


def _wait_paused(client: Client) -> dict[str, Any]:
    """Wait until the node hosts nothing, or was resumed meanwhile; return its state and reason."""
    notice = _Notice()
    while True:
        notice.tell()
        snapshot = client.snapshot()
        if snapshot.state not in _NOT_YET_PAUSED or not snapshot.courtesy.paused:
            return {"state": snapshot.state, "reason": snapshot.reason}
        time.sleep(_POLL_S)


COMMANDS = (
    Command(
        "pause", "stop hosting and training for a while, and free the memory", run_pause, add_pause_arguments, True
    ),
    Command("resume", "host and train again", run_resume, prints_facts=True),
    Command("drain", "let the sessions finish, then host nothing", run_drain, prints_facts=True),
    Command("stop", "ask the node to drain and end", run_stop, prints_facts=True),
)

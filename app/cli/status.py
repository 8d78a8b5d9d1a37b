"""`shoal status`, `peers`, `blocks`, `stop`: what the running node and its swarm are doing."""

from __future__ import annotations

import argparse
import itertools
import time
from typing import Any

from app.cli.command import Command, print_json

_STOP_S = 60.0


def run_status(arguments: argparse.Namespace) -> int:
    """Print what the node does."""
    from app.client import client_of

    status = client_of(arguments.home).get("/api/status")
    if arguments.json:
        print_json(status)
        return 0
    for label, value in _lines(status):
        print(f"{label:<8} {value}")
    return 0


def run_peers(arguments: argparse.Namespace) -> int:
    """Print the other members of the swarm."""
    from app.client import client_of

    client = client_of(arguments.home)
    peers = client.get("/api/peers")
    if arguments.json:
        print_json(peers)
        return 0
    for peer in peers:
        print(describe_peer(peer))
    if not peers:
        print("Nobody else is here yet. `shoal invite` prints an invite for others.")
    return 0


def run_blocks(arguments: argparse.Namespace) -> int:
    """Print for every block who serves it."""
    from app.client import client_of

    blocks = client_of(arguments.home).get("/api/blocks")
    if arguments.json:
        print_json(blocks)
        return 0
    for line in coverage_lines(blocks):
        print(line)
    if not blocks:
        print("The node is in no swarm yet.")
    return 0


def coverage_lines(blocks: list[dict[str, Any]]) -> list[str]:
    """Runs of blocks with the same holders, one line each."""
    lines = []
    for _, run in itertools.groupby(blocks, key=lambda block: [holder["peer"] for holder in block["holders"]]):
        same = list(run)
        holders = [f"{one['peer']} ({one['tokens_per_s']:.1f} tokens/s)" for one in same[0]["holders"]]
        lines.append(f"{same[0]['block']}:{same[-1]['block'] + 1}  {', '.join(holders) or 'nobody'}")
    return lines


def run_stop(arguments: argparse.Namespace) -> int:
    """Ask the node to drain and end, and wait until it has."""
    from app.client import client_of
    from app.errors import AppError
    from app.home import Home
    from p2p.platform import is_locked

    client_of(arguments.home).post("/api/stop", {})
    deadline = time.monotonic() + _STOP_S
    while is_locked(Home(arguments.home).lock_file):
        if time.monotonic() > deadline:
            raise AppError(f"the node is still draining after {_STOP_S:.0f} s: look at its log, or end the process")
        time.sleep(0.05)
    print("stopped")
    return 0


def describe_peer(peer: dict[str, Any]) -> str:
    """A member in one line."""
    who = f"{peer['peer']} {peer['name']}".strip()
    span = f"blocks {peer['start']}:{peer['stop']}" if peer["start"] is not None else "no blocks"
    link = peer["link"] or "no link"
    rtt = f" {peer['rtt_s'] * 1000:.1f} ms" if peer["rtt_s"] is not None else ""
    trust = "" if peer["score"] >= 1 else f", score {peer['score']:.2f} {peer['why']}".rstrip()
    return f"{who}  {peer['state']}, {span}, {link}{rtt}{trust}"


def _lines(status: dict[str, Any]) -> list[tuple[str, Any]]:
    reason = f" ({status['reason']})" if status["reason"] else ""
    lines = [("state", status["state"] + reason), ("peer", status["peer_id"])]
    if status["swarm"] is not None:
        private = ", private" if status["private"] else ""
        lines.append(("swarm", f"{status['swarm']}#{status['manifest'][:8]}{private}"))
    if status["blocks_total"] is not None:
        hosted = "none" if status["start"] is None else f"{status['start']}:{status['stop']}"
        lines.append(("blocks", f"{hosted} of {status['blocks_total']}"))
    if status["device"] is not None:
        lines.append(("device", status["device"]))
    lines += [
        ("sessions", status["sessions"]),
        ("listens", " ".join(status["listen_addrs"])),
        ("api", status["api_url"]),
    ]
    return lines


COMMANDS = (
    Command("status", "what this node is doing", run_status, prints_facts=True),
    Command("peers", "the other members of the swarm", run_peers, prints_facts=True),
    Command("blocks", "who serves which block of the model", run_blocks, prints_facts=True),
    Command("stop", "ask the node to drain and end", run_stop),
)

"""`shoal status`, `peers`, `blocks`, `sessions`: show the running node and its swarm."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

from app.cli.command import Command, print_json
from app.core.terminal_text import quoted, without_controls

_DAYS, _PEERS = 7, 10  # number of days and peers in `status --json`
NO_MEMBERS = "No other members are here now. `shoal invite` prints an invite for others."
NO_SWARM = "This node is in no swarm: join one with `shoal join NAME|INVITE` or create one with `shoal create`."


def run_status(arguments: argparse.Namespace) -> int:
    """Print the node's state; without a node the exit status is 1, and `--json` prints the state `stopped`."""
    from app.api.client import client_of, running_client

    if arguments.json and running_client(arguments.home) is None:
        print_json({"state": "stopped"})
        return 1
    status = client_of(arguments.home).get("/control/status")
    if arguments.json:
        print_json({**status, **_history(arguments.home)})
        return 0
    for label, value in status_lines(status):
        print(f"{label:<8} {value}")
    return 0


def _history(folder: Path) -> dict[str, Any]:
    """Return the sums by day and by peer, from the statistics file that the node writes every few seconds."""
    from app.config.home import Home
    from app.node.statistics import read_days, read_peers

    file = Home(folder).statistics_file
    days = [{"day": day, **sums._asdict()} for day, sums in read_days(file, _DAYS)]
    return {"days": days, "exchanged": [{"peer": peer, **sums._asdict()} for peer, sums in read_peers(file, _PEERS)]}


def run_peers(arguments: argparse.Namespace) -> int:
    """Print the other members of the swarm."""
    from app.api.client import client_of

    client = client_of(arguments.home)
    peers = client.get("/control/peers")
    if arguments.json:
        print_json(peers)
        return 0
    for peer in peers:
        print(describe_peer(peer))
    if not peers:
        snapshot = client.snapshot()
        print(NO_SWARM if snapshot.swarm is None else NO_MEMBERS)
        for warning in snapshot.warnings:
            print(f"{warning.text}: {warning.next_step}")
    return 0


def run_blocks(arguments: argparse.Namespace) -> int:
    """Print who hosts each block."""
    from app.api.client import client_of

    client = client_of(arguments.home)
    blocks = client.get("/control/blocks")
    if arguments.json:
        print_json(blocks)
        return 0
    for line in coverage_lines(blocks, client.get("/control/id")["peer_id"]):
        print(line)
    if not blocks:
        print(NO_SWARM)
    return 0


def coverage_lines(blocks: list[dict[str, Any]], own_peer: str) -> list[str]:
    """Return one line for each run of blocks with the same holders."""
    lines = []
    for _, run in itertools.groupby(blocks, key=lambda block: [holder["peer"] for holder in block["holders"]]):
        same = list(run)
        holders = [f"{_who(one['peer'], own_peer)} ({one['tokens_per_s']:.1f} tokens/s)" for one in same[0]["holders"]]
        lines.append(f"{same[0]['block']}:{same[-1]['block'] + 1}  {', '.join(holders) or 'nobody'}")
    return lines


def _who(peer: str, own_peer: str) -> str:
    """Return a peer as the dashboard names it: by the end of its id, which commands take too, or as `you`."""
    return "you" if peer == own_peer else peer[-6:]


def run_sessions(arguments: argparse.Namespace) -> int:
    """Print the open sessions: those of this node's user, and those served for others."""
    from app.api.client import client_of

    sessions = client_of(arguments.home).get("/control/sessions")
    if arguments.json:
        print_json(sessions)
        return 0
    for session in sessions:
        print(describe_session(session))
    if not sessions:
        print("No session is open.")
    return 0


def describe_session(session: dict[str, Any]) -> str:
    """Return a session as one line."""
    whose = "asked here" if session["role"] == "asking" else f"for {session['asker']}"
    span = "" if session["start"] is None else f", blocks {session['start']}:{session['stop']}"
    number = session["recoveries"]
    recovered = f", {number} {'recovery' if number == 1 else 'recoveries'}" if number else ""
    speed = f", {session['tokens_per_s']:.1f} tokens/s" if session["tokens_per_s"] else ""
    prompt = session.get("prompt_tokens")
    total = session["tokens"]
    passed = f"{total} tokens" if prompt is None else f"{prompt} tokens read, {total - prompt} written"
    tokens = f"{passed} in {session['age_s']:.0f} s"
    guessed, right = session.get("guessed_tokens", 0), session.get("accepted_tokens", 0)
    guesses = f", {right} of {guessed} guesses right" if guessed else ""
    return f"{session['id'][:8]}  {whose}{span}, {tokens}{speed}{guesses}{recovered}"


def describe_peer(peer: dict[str, Any]) -> str:
    """Return a member as one line."""
    who = f"{peer['peer']} {quoted(peer['name'])}" if peer["name"] else peer["peer"]
    span = f"blocks {peer['start']}:{peer['stop']}" if peer["start"] is not None else "no blocks"
    link = peer["link"] or "no link"
    rtt = f" {peer['rtt_s'] * 1000:.1f} ms" if peer["rtt_s"] is not None else ""
    speed = peer.get("down_bytes_per_s")
    rate = "" if speed is None else f" {speed / 1e6:.1f} MB/s"
    why = f" ({peer['why']})" if peer["why"] else ""
    trust = "" if peer["score"] >= 1 else f", score {peer['score']:.2f}{why}"
    unused = peer.get("unused")
    excluded = "" if unused is None else f"; not used: {unused['text']} → {unused['next_step']}"
    return f"{who}  {peer['state']}, {span}, {link}{rtt}{rate}{trust}{excluded}"


def describe_device(device: dict[str, Any]) -> str:
    """Return one of several devices as one line."""
    from app.core.units import format_size

    blocks = "no blocks" if device["start"] is None else f"blocks {device['start']}:{device['stop']}"
    free = device["memory_free_bytes"]
    room = "" if free is None else f", {format_size(free)} free"
    return f"{device['id']} {device['name']}, {blocks}{room}"


def status_lines(status: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return what `shoal status` prints, as labels and values."""
    from app.snapshot.views import cache_words, weight_words
    from app.swarm.names import pinned

    reason = f" ({status['reason']})" if status["reason"] else ""
    lines = [("state", status["state"] + reason)]
    if status.get("why") is not None:
        lines += [("about", ", ".join(status["why"]["peers"]))] if status["why"]["peers"] else []
        lines.append(("", f"→ {status['why']['next_step']}"))
    for warning in status.get("warnings", ()):
        lines += [("warning", warning["text"]), ("", f"→ {warning['next_step']}")]
    lines.append(("peer", status["peer_id"]))
    if status["swarm"] is not None:
        private = ", private" if status["private"] else ""
        lines.append(("swarm", f"{pinned(status['swarm'], status['manifest'])}{private}"))
    if status.get("model"):
        context = f", context {status['context_length']} tokens" if status.get("context_length") else ""
        lines.append(("model", f"{without_controls(status['model'])}{context}"))
    if (visit := status.get("visit")) is not None:
        lines.append(("asks in", f"{pinned(visit['swarm'], visit['manifest'])}, {visit['members']} members"))
    if status["blocks_total"] is not None:
        hosted = "none" if status["start"] is None else f"{status['start']}:{status['stop']}"
        said = [f"{hosted} of {status['blocks_total']}"]
        if status["start"] is not None:
            bits, cache = weight_words(status.get("weights", "none")), cache_words(status.get("cache", "own"))
            said += [f"in {bits}"] * bool(bits) + [f"with {cache}"] * bool(cache)
        lines.append(("blocks", ", ".join(said)))
    if status["device"] is not None:
        several = status.get("devices") or []
        lines += [("device", describe_device(device)) for device in several] or [("device", status["device"])]
    if status.get("reuse", {}).get("prompt_tokens"):
        lines.append(("prompts", _reuse(status["reuse"])))
    guesses = status.get("guesses", {})
    if guesses.get("guessed_tokens") or guesses.get("draft_model"):
        drafts = f", with the draft model {guesses['draft_model']}" if guesses["draft_model"] else ""
        lines.append(("guesses", f"{guesses['accepted_tokens']} of {guesses['guessed_tokens']} right{drafts}"))
    lines += [
        ("sessions", status["sessions"]),
        ("listens", " ".join(status["listen_addrs"])),
        ("api", status["api_url"]),
    ]
    if status.get("lan_url"):
        lines.append(("lan", f"{status['lan_url']}, certificate SHA-256 {status['lan_fingerprint']}"))
    return lines + [(when, _given(status[when])) for when in ("today", "ever") if when in status]


def _reuse(reuse: dict[str, Any]) -> str:
    """Return how much of the prompts was read, and what is kept for the next ones, as one line."""
    total, cached = reuse["prompt_tokens"], reuse["cached_tokens"]
    read = f"{total - cached} of {total} tokens read, {cached / total:.0%} were cached"
    number = reuse["kept_sessions"]
    kept = f"; {number} conversation{'' if number == 1 else 's'} kept" if number else ""
    return read + kept


def _given(sums: dict[str, Any]) -> str:
    """Return tokens and bytes given and received as one line."""
    from app.core.units import format_size

    served = f"{sums['served_tokens']} tokens served to {sums['peers']} peers, {sums['asked_tokens']} asked"
    return f"{served}; {format_size(sums['up_bytes'])} sent, {format_size(sums['down_bytes'])} received"


COMMANDS = (
    Command("status", "show what this node is doing", run_status, prints_facts=True),
    Command("peers", "list the other members of the swarm", run_peers, prints_facts=True),
    Command("blocks", "show who hosts which block of the model", run_blocks, prints_facts=True),
    Command("sessions", "list open sessions, asked here or served for others", run_sessions, prints_facts=True),
)

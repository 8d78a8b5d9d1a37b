"""`shoal find`: the swarms that this node could join, with what each would take and give, the best first.

The figures are those of the dashboard's first screen; the running node looks for the swarms and estimates them.
"""

from __future__ import annotations

import argparse
from typing import Any

from app.cli.command import Command, print_json
from app.core.errors import NameConflict, UnknownSwarm
from app.core.terminal_text import one_line
from app.core.units import format_size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the text to look for."""
    words = "part of a swarm's name or model; without it, all that are known. A whole name is looked up"
    parser.add_argument("text", nargs="?", metavar="TEXT", help=words)


def run_find(arguments: argparse.Namespace) -> int:
    """List the swarms that can be reached, the fastest complete ones first."""
    from app.api.client import client_of

    client = client_of(arguments.home)
    offers: list[dict[str, Any]] = client.get("/control/prospects", timeout_s=60.0)["offers"]
    wanted = (arguments.text or "").casefold()
    found = [one for one in offers if wanted in one["target"].casefold() or wanted in one["model"].casefold()]
    if arguments.text is not None and not any(one["target"].casefold() == wanted for one in found):
        try:
            found.append(client.post("/control/preview", {"target": arguments.text}))
        except (UnknownSwarm, NameConflict):  # no swarm has just this name, or several have it
            pass
    found.sort(key=rank)
    if arguments.json:
        print_json(found)
        return 0
    for one in found:
        print(line(one))
    if not found:
        print("No swarm was found. `shoal create NAME --model MODEL` starts one.")
    return 0


def rank(offer: dict[str, Any]) -> tuple[bool, float, str]:
    """Order offers: swarms that can answer before others, by their speed, then by name."""
    speed = offer["tokens_per_s"] or offer["alone_tokens_per_s"] or 0.0
    is_incomplete = offer["missing_block"] is not None or not (offer["members"] or offer["alone_tokens_per_s"])
    return is_incomplete, -speed, offer["target"]


def line(offer: dict[str, Any]) -> str:
    """Return an offer as one line: name, model, members, coverage, speed, fit and download."""
    parts = [one_line(offer["target"]), one_line(offer["model"]) or "unknown model"]
    if offer["members"] is not None:
        parts.append(f"{offer['members']} member{'' if offer['members'] == 1 else 's'}")
    missing = offer["missing_block"]
    if missing is not None:
        parts.append(f"incomplete: nobody serves block {missing}")
    elif offer["members"]:
        parts.append("complete")
    if offer["tokens_per_s"] is not None:
        parts.append(f"about {offer['tokens_per_s']:.1f} tokens/s")
    elif offer["alone_tokens_per_s"] is not None:
        parts.append(f"about {offer['alone_tokens_per_s']:.1f} tokens/s on this machine alone")
    fit = offer["fit"]
    if fit is not None:
        parts.append(f"{fit['blocks']} of {fit['blocks_total']} blocks fit here")
    if offer["fetch_bytes"] is not None:
        parts.append(f"{format_size(offer['fetch_bytes'])} to fetch" if offer["fetch_bytes"] else "nothing to fetch")
    return "  ".join(parts)


COMMANDS = (Command("find", "list the swarms that this node could join", run_find, add_arguments, True),)

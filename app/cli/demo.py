"""`shoal demo`: starts a three-node swarm on this machine, asks one prompt, and kills a node during the reply.

This module runs the demo and prints it; `app.cli.demo_swarm` starts and stops the nodes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from app.cli.command import Command, print_json
from app.cli.parser import MODELS
from app.core.errors import UsageError
from app.core.terminal_text import without_controls
from app.system.console import can_show

if TYPE_CHECKING:
    from app.cli.demo_swarm import DemoSwarm, Place

PROMPT = "Explain in a few sentences how a school of fish stays together."
SHARE = 2 / 3  # of the model that each node has room for: no node holds all of it, any two can
MIN_TOKENS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the prompt, the model and the reply's length."""
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", default=PROMPT, help="what to ask the swarm")
    parser.add_argument("--model", default="starter", metavar="M", help=MODELS)
    parser.add_argument("--max-tokens", type=int, default=96, metavar="N", help="the longest reply (default: 96)")


@dataclass(frozen=True)
class DemoResult:
    """The demo's outcome."""

    done: dict[str, Any]  # the fields of `chat --json`
    asker: int
    victim: int | None  # number of the killed node; None if the reply ended before the kill
    killed_behind: int  # tokens of the reply before the kill
    route_before: list[dict[str, Any]]
    same_as_undisturbed: bool


def run_demo(arguments: argparse.Namespace) -> int:
    """Run the demo and print its outcome."""
    from app.cli.demo_swarm import choose_asker, open_demo

    if arguments.max_tokens < MIN_TOKENS:
        raise UsageError(f"--max-tokens must be at least {MIN_TOKENS}: a shorter reply leaves no time for a kill")
    output = DemoOutput(quiet=arguments.json)
    with open_demo() as swarm:
        model, blocks = set_up(swarm, arguments.model, output)
        places = swarm.places()
        asker = choose_asker(places, blocks)
        output.show_map(places, blocks, asker)
        outcome = perform(swarm, asker, arguments.prompt, arguments.max_tokens, output)
        if arguments.json:
            print_json(facts(outcome, places, model, blocks))
        else:
            output.show_figures(outcome, places)
    return 0


def set_up(swarm: DemoSwarm, model: str, output: DemoOutput) -> tuple[str, int]:
    """Create the swarm and start its nodes; return the model used and its number of blocks.

    If the starter model cannot be downloaded, tiny-random is used instead.
    """
    from app.cli.demo_swarm import DemoFailed, memory_for

    output.say(f"Creating a swarm for the model {model} ...")
    try:
        swarm.found(model)
    except DemoFailed as error:
        if model != "starter":
            raise
        output.say(f"{error}; using a tiny random model instead, whose replies make no sense.")
        model = "tiny-random"
        swarm.found(model)
    memory_bytes, blocks = memory_for(model, SHARE)
    output.say(
        f"Starting {len(swarm.nodes)} nodes, each with room for {-(-blocks * SHARE // 1):.0f} of {blocks} blocks ..."
    )
    for node in swarm.start(memory_bytes):
        output.say(f"  node {node.number} is serving: {node.peer}")
    return model, blocks


def perform(swarm: DemoSwarm, asker: int, prompt: str, max_tokens: int, output: DemoOutput) -> DemoResult:
    """Ask, kill a node on the reply's route in the middle, and ask again undisturbed for comparison."""
    output.begin_reply(asker, prompt)
    kill_at = max(2, min(max_tokens // 4, 24))
    route: list[dict[str, Any]] = []
    route_before: list[dict[str, Any]] = []
    victim: int | None = None
    numbers = {node.peer: node.number for node in swarm.nodes}
    pieces = (piece for piece in swarm.ask(asker, prompt, max_tokens) if "waiting" not in piece)
    for count, piece in enumerate(pieces, 1):
        if "done" in piece:
            break
        output.stream(piece["text"])
        route = piece.get("route", route)
        if count == kill_at:
            others = [numbers[hop["peer"]] for hop in route if numbers[hop["peer"]] != asker]
            if others:
                victim, route_before = others[0], route
                swarm.node(victim).kill()
                output.killed(victim, count)
    output.end_reply()
    done = piece["done"]
    if victim is None:
        output.say(f"No node was killed: node {asker} replied alone.")
    output.say("Asking again without a kill, for comparison ...")
    again = next(piece["done"] for piece in swarm.ask(asker, prompt, max_tokens) if "done" in piece)
    return DemoResult(
        done, asker, victim, kill_at, route_before or done["route"], again["token_ids"] == done["token_ids"]
    )


def facts(outcome: DemoResult, places: Sequence[Place], model: str, blocks: int) -> dict[str, Any]:
    """Return the fields of `demo --json`: those of `chat --json`, the nodes and the kill."""
    return {
        **outcome.done,
        "model": model,
        "blocks_total": blocks,
        "nodes": [asdict(place) for place in places],
        "asker": outcome.asker,
        "killed": outcome.victim,
        "killed_behind": outcome.killed_behind,
        "route_before": outcome.route_before,
        "same_as_undisturbed": outcome.same_as_undisturbed,
    }


class DemoOutput:
    """Prints the demo: in colour on a terminal, plain elsewhere, and nothing if `quiet`."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._rich = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        self._held, self._free = ("█", "░") if can_show("█░") else ("#", ".")

    def say(self, text: str) -> None:
        """Print one line of progress."""
        if not self._quiet:
            print(self._style("2", without_controls(text)), flush=True)

    def show_map(self, places: Sequence[Place], blocks: int, asker: int) -> None:
        """Print the blocks that each node holds."""
        if self._quiet:
            return
        print(f"\n{self._style('1', 'Blocks of each node')}")
        for place in places:
            held = (self._held if place.start <= block < place.stop else self._free for block in range(blocks))
            bar = self._style(str(30 + 2 * place.number), "".join(held))
            asks = "  asks" if place.number == asker else ""
            print(f"  node {place.number}  {bar}  blocks {place.start}:{place.stop}{asks}")

    def begin_reply(self, asker: int, prompt: str) -> None:
        """Print who asks, and the prompt."""
        if not self._quiet:
            print(f"\n{self._style('1', f'node {asker} asks:')} {without_controls(prompt)}\n", flush=True)

    def stream(self, text: str) -> None:
        """Print a piece of the reply."""
        if not self._quiet:
            print(without_controls(text), end="", flush=True)

    def killed(self, victim: int, count: int) -> None:
        """Print that a node was killed after `count` tokens."""
        if not self._quiet:
            note = f"[node {victim} killed after token {count}]"
            print(self._style("1;31", f" {note} "), end="", flush=True)

    def end_reply(self) -> None:
        """End the reply's line."""
        if not self._quiet:
            print("\n", flush=True)

    def show_figures(self, outcome: DemoResult, places: Sequence[Place]) -> None:
        """Print the routes, the speed and the recoveries of the reply."""
        done = outcome.done
        numbers = {place.peer: place.number for place in places}
        speed = "-" if done["tokens_per_s"] is None else f"{done['tokens_per_s']:.1f} tokens/s"
        same = "yes, as without a kill" if outcome.same_as_undisturbed else "no: two tokens were almost equally likely"
        print(self._style("1", "Figures"))
        rows = (
            ("route before", _route(outcome.route_before, numbers)),
            ("route after", _route(done["route"], numbers)),
            ("reply", f"{len(done['token_ids'])} tokens, {speed}, first token after {done['ttft_s']:.2f} s"),
            ("recoveries", f"{done['recoveries']}, longest gap between two tokens {done['longest_gap_s']:.2f} s"),
            ("same tokens", same),
        )
        for label, value in rows:
            print(f"  {label:<16}{value}")

    def _style(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._rich else text


def _route(route: Sequence[dict[str, Any]], numbers: dict[str, int]) -> str:
    return " -> ".join(f"node {numbers.get(hop['peer'], '?')} ({hop['start']}:{hop['stop']})" for hop in route)


COMMANDS = (
    Command("demo", "watch a swarm of three local nodes survive a kill", run_demo, add_arguments, prints_facts=True),
)

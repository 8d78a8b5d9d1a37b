"""`shoal demo`: a three-node swarm on this machine, one prompt, one node killed in the middle, the reply finished."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from app.cli.command import Command, print_json
from app.core.errors import UsageError
from app.core.terminal_text import without_controls

if TYPE_CHECKING:
    from app.cli.demo_swarm import DemoSwarm, Place

PROMPT = "Explain in a few sentences how a school of fish stays together."
SHARE = 2 / 3  # of the model that each node has room for: no one holds all of it, any two can
MIN_TOKENS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is asked, and of which model."""
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", default=PROMPT, help="what to ask the swarm")
    parser.add_argument("--model", default="starter", metavar="M", help="starter, tiny-random, a folder or a GGUF file")
    parser.add_argument("--max-tokens", type=int, default=96, metavar="N", help="the longest reply (default: 96)")


@dataclass(frozen=True)
class DemoResult:
    """What was seen."""

    done: dict[str, Any]  # the reply's figures
    asker: int
    victim: int | None  # None: the reply ended before anybody could be killed
    killed_behind: int
    route_before: list[dict[str, Any]]
    same_as_undisturbed: bool


def run_demo(arguments: argparse.Namespace) -> int:
    """Show a swarm that survives."""
    from app.cli.demo_swarm import choose_asker, open_demo

    if arguments.max_tokens < MIN_TOKENS:
        raise UsageError(f"--max-tokens: at least {MIN_TOKENS} are needed to see anything happen")
    stage = DemoOutput(quiet=arguments.json)
    with open_demo() as swarm:
        model, blocks = set_up(swarm, arguments.model, stage)
        places = swarm.places()
        asker = choose_asker(places, blocks)
        stage.show_map(places, blocks, asker)
        outcome = perform(swarm, asker, arguments.prompt, arguments.max_tokens, stage)
        if arguments.json:
            print_json(facts(outcome, places, model, blocks))
        else:
            stage.show_figures(outcome, places)
    return 0


def set_up(swarm: DemoSwarm, model: str, stage: DemoOutput) -> tuple[str, int]:
    """Found the swarm and start its nodes: the model that it became, and how many blocks that has."""
    from app.cli.demo_swarm import DemoFailed, memory_for

    stage.say(f"Founding a swarm of the model {model} ...")
    try:
        swarm.found(model)
    except DemoFailed as error:
        if model != "starter":
            raise
        stage.say(f"{error}; a tiny random model, which talks nonsense, takes its place.")
        model = "tiny-random"
        swarm.found(model)
    memory_bytes, blocks = memory_for(model, SHARE)
    stage.say(
        f"Starting {len(swarm.nodes)} nodes, each with room for {-(-blocks * SHARE // 1):.0f} of {blocks} blocks ..."
    )
    for node in swarm.start(memory_bytes):
        stage.say(f"  node {node.number} serves: {node.peer}")
    return model, blocks


def perform(swarm: DemoSwarm, asker: int, prompt: str, max_tokens: int, stage: DemoOutput) -> DemoResult:
    """Ask, kill a hop of the reply's route in the middle, and ask again for comparison."""
    stage.begin_reply(asker, prompt)
    kill_at = max(2, min(max_tokens // 4, 24))
    route: list[dict[str, Any]] = []
    route_before: list[dict[str, Any]] = []
    victim: int | None = None
    numbers = {node.peer: node.number for node in swarm.nodes}
    for count, piece in enumerate(swarm.ask(asker, prompt, max_tokens), 1):
        if "done" in piece:
            break
        stage.stream(piece["text"])
        route = piece.get("route", route)
        if count == kill_at:
            others = [numbers[hop["peer"]] for hop in route if numbers[hop["peer"]] != asker]
            victim, route_before = others[0], route
            swarm.node(victim).kill()
            stage.killed(victim, count)
    stage.end_reply()
    done = piece["done"]
    stage.say("Asking the same again, undisturbed, for comparison ...")
    again = next(piece["done"] for piece in swarm.ask(asker, prompt, max_tokens) if "done" in piece)
    return DemoResult(
        done, asker, victim, kill_at, route_before or done["route"], again["token_ids"] == done["token_ids"]
    )


def facts(outcome: DemoResult, places: Sequence[Place], model: str, blocks: int) -> dict[str, Any]:
    """What `--json` prints: the fields of `chat --json`, and what happened around the reply."""
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
    """Where it is shown: in colour on a terminal, plainly elsewhere, and not at all for programs."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._rich = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        encoding = sys.stdout.encoding or "ascii"
        self._held, self._free = ("█", "░") if encoding.lower().startswith("utf") else ("#", ".")

    def say(self, text: str) -> None:
        """One line about what happens."""
        if not self._quiet:
            print(self._style("2", without_controls(text)), flush=True)

    def show_map(self, places: Sequence[Place], blocks: int, asker: int) -> None:
        """Who holds which blocks."""
        if self._quiet:
            return
        print(f"\n{self._style('1', 'Who holds what')}")
        for place in places:
            held = (self._held if place.start <= block < place.stop else self._free for block in range(blocks))
            bar = self._style(str(30 + 2 * place.number), "".join(held))
            asks = "  asks" if place.number == asker else ""
            print(f"  node {place.number}  {bar}  blocks {place.start}:{place.stop}{asks}")

    def begin_reply(self, asker: int, prompt: str) -> None:
        """The question."""
        if not self._quiet:
            print(f"\n{self._style('1', f'node {asker} asks:')} {without_controls(prompt)}\n", flush=True)

    def stream(self, text: str) -> None:
        """A piece of the reply."""
        if not self._quiet:
            print(without_controls(text), end="", flush=True)

    def killed(self, victim: int, count: int) -> None:
        """Between two tokens, a node died."""
        if not self._quiet:
            note = f"[node {victim} killed behind token {count}]"
            print(self._style("1;31", f" {note} "), end="", flush=True)

    def end_reply(self) -> None:
        """The reply is complete."""
        if not self._quiet:
            print("\n", flush=True)

    def show_figures(self, outcome: DemoResult, places: Sequence[Place]) -> None:
        """What the reply was like."""
        done = outcome.done
        numbers = {place.peer: place.number for place in places}
        speed = "-" if done["tokens_per_s"] is None else f"{done['tokens_per_s']:.1f} tokens/s"
        same = "yes" if outcome.same_as_undisturbed else "no: two tokens were all but equally likely"
        print(self._style("1", "Figures"))
        rows = (
            ("route before", _route(outcome.route_before, numbers)),
            ("route after", _route(done["route"], numbers)),
            ("reply", f"{len(done['token_ids'])} tokens, {speed}, first token after {done['ttft_s']:.2f} s"),
            ("recoveries", f"{done['recoveries']}, longest gap between two tokens {done['longest_gap_s']:.2f} s"),
            ("as undisturbed", same),
        )
        for label, value in rows:
            print(f"  {label:<16}{value}")

    def _style(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._rich else text


def _route(route: Sequence[dict[str, Any]], numbers: dict[str, int]) -> str:
    return " -> ".join(f"node {numbers.get(hop['peer'], '?')} ({hop['start']}:{hop['stop']})" for hop in route)


COMMANDS = (
    Command("demo", "a swarm of three nodes here, one of which dies", run_demo, add_arguments, prints_facts=True),
)

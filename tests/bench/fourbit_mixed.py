"""A swarm whose nodes hold the same weights in unlike formats: are its replies right, and who do audits find?

    python -m tests.bench.fourbit_mixed [--json] [--requests 100]

Real nodes with the starter model, whose file is in 4 bits: the first and the last half of its blocks are each held by a
processor in float32, by a CUDA card in bf16, and by a card in the file's own 4 bits. One more node, faster than they,
sends 1.05 times its results: of the first half in one swarm, of the last in another. A node that hosts nothing asks one
short question after the other and audits the replies, five in a hundred at most.

Figures begin with the half that the liar holds:
`found_after`    requests until the liar was used no more; null: not within `--requests`
`lied`           replies that it took part in
`accused`        honest nodes that are used no more; none should be
`same`           share of the other replies that have the tokens of float32 alone
Without a CUDA card, all nodes compute on the processor.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from app.api.client import Client, client_of
from app.config.home import cache_folder
from app.routing.trust import DISTRUSTED
from tests.bench.swarm_nodes import READY_S, is_covered
from tests.process.node_process import Place, Serving, wait_until

HALVES = ("0:15", "15:30")
AUDIT_S = 45.0  # in which an audit that is due is made
REPLIES_AN_AUDIT = 20
TOKENS = 4
# A node whose results are multiplied, after a pause: the honest ones pause, so that the liar is the fastest and used.
PROGRAM = """
import sys, time
from engine.session_runner import SessionRunner
split = SessionRunner._split
def changed(self, hidden, items):
    time.sleep({pause_s})
    return split(self, hidden * {factor}, items)
SessionRunner._split = changed
from app.cli import main
sys.exit(main())
"""
HONEST, LIAR = PROGRAM.format(pause_s=0.01, factor=1), PROGRAM.format(pause_s=0, factor=1.05)
FLOAT32 = {"SHOAL_DEVICE": "cpu", "SHOAL_WEIGHTS": "own"}
ON_CARD = [{"SHOAL_DEVICE": "cuda:0", "SHOAL_WEIGHTS": weights} for weights in ("own", "int4")]


@dataclass(frozen=True)
class Told:
    """A reply: its tokens, and the peers that computed it."""

    tokens: list[int]
    peers: frozenset[str]


def ask(client: Client, number: int) -> Told:
    """A short greedy reply to a question of its own."""
    text = f"What is {number} times {number + 7}, and why is the number {3 * number} larger?"
    request = {"messages": [{"role": "user", "content": text}], "max_tokens": TOKENS, "temperature": 0.0}
    peers: set[str] = set()
    for piece in client.chat(request):
        peers |= {hop["peer"] for hop in piece.get("route", ())}
        if "done" in piece:
            return Told(piece["done"]["token_ids"], frozenset(peers))
    raise AssertionError("a reply ends with its figures")


class MixedSwarm:
    """A node that asks, and nodes of either half that come one after the other."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        asker = Place(folder / "asker", cache_folder())
        assert asker.shoal("create", "mixed", "--model", "starter").status == 0
        settings = {"SHOAL_KEEP_SESSIONS": "0", "SHOAL_DRAFT": "off"}
        self._stack.enter_context(Serving(asker, "--discovery=invite", **settings)).ready(READY_S)
        self._invite = asker.shoal("invite").out.strip().splitlines()[-1]
        self.client = client_of(asker.home)
        self.peers: list[str] = []

    def add(self, half: str, settings: Mapping[str, str], program: str = HONEST) -> str:
        """Start a node; returns its peer id."""
        place = Place(self._folder / f"node{len(self.peers)}", cache_folder())
        flags = ("--discovery=invite", f"--blocks={half}")
        node = Serving(place, *flags, max_vram="3GB", program=("-c", program), SHOAL_INVITE=self._invite, **settings)
        self._stack.enter_context(node).ready(READY_S)
        self.peers.append(client_of(place.home).get("/control/status")["peer_id"])
        return self.peers[-1]

    def await_all(self) -> None:
        """Wait until the node that asks knows what all others hold."""
        wait_until(lambda: is_covered(self.client, len(self.peers)), "all nodes are known")

    def distrusted(self) -> set[str]:
        """Peers that are used no more."""
        return {view.peer for view in self.client.snapshot().peers if view.score < DISTRUSTED}

    def await_audit(self) -> None:
        """Wait for an audit that may be due, if one is to come."""
        before, until = self.client.snapshot().ever.audits, time.monotonic() + AUDIT_S
        while time.monotonic() < until and self.client.snapshot().ever.audits == before:
            time.sleep(0.5)


def measure_half(folder: Path, half: str, requests: int) -> dict[str, Any]:
    """One swarm, with a liar that holds one of the halves."""
    with ExitStack() as stack:
        swarm = MixedSwarm(folder, stack)
        for each in HALVES:
            swarm.add(each, FLOAT32)
        swarm.await_all()
        truth = [ask(swarm.client, number).tokens for number in range(requests)]
        others = ON_CARD if torch.cuda.is_available() else [FLOAT32]
        for each in HALVES:
            for settings in others:
                swarm.add(each, settings)
        liar = swarm.add(half, others[0], LIAR)
        swarm.await_all()
        found_after, honest, same, lied = None, 0, 0, 0
        for number in range(requests):
            told = ask(swarm.client, number)
            if liar in told.peers:
                lied += 1
            else:
                honest += 1
                same += told.tokens == truth[number]
            if number % REPLIES_AN_AUDIT == REPLIES_AN_AUDIT - 1:
                swarm.await_audit()
            if found_after is None and liar in swarm.distrusted():
                found_after = number + 1
        figures = {
            "found_after": found_after,
            "lied": lied,
            "accused": len(swarm.distrusted() - {liar}),
            "honest_replies": honest,
            "same": round(same / max(1, honest), 3),
            "audits": swarm.client.snapshot().ever.audits,
        }
        print(half, figures, [view.why for view in swarm.client.snapshot().peers], file=sys.stderr, flush=True)
        return figures


def measure(requests: int) -> dict[str, Any]:
    """Both swarms."""
    figures: dict[str, Any] = {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"}
    for name, half in zip(("first", "last"), HALVES, strict=True):
        with tempfile.TemporaryDirectory(prefix="shoal-mixed-") as folder:
            figures |= {f"{name}_{key}": value for key, value in measure_half(Path(folder), half, requests).items()}
    return figures


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--requests", type=int, default=100)
    args = parser.parse_args()
    figures = measure(args.requests)
    print(json.dumps(figures) if args.json else "\n".join(f"{name:>32}  {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()

"""A long session over a hop that drains: its pause with the cache handed over, and with the tokens read again.

    python -m tests.bench.handover [--json] [--tokens 2000]

Real nodes on loopback with the starter model: one has the first half of the blocks, two have the second half. Two
askers have the same prompt continued; in the middle of each reply the node of the second half that carries it drains,
and the other takes its place. The second asker is told never to order a hand-over, so that the tokens are read again.
The pause is the longest time between two tokens. Both replies must have the tokens of an undisturbed one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from app.api.client import Client, client_of
from app.config.home import cache_folder
from tests.bench.conversation import words
from tests.bench.swarm_nodes import BenchSwarm, open_bench_swarm
from tests.process.node_process import Place, Serving, wait_until

SPANS = ("0:15", "15:30", "15:30")
MEMORY = "900MB"
AT = 12  # tokens of the reply before the hop drains
REPLY_TOKENS = 32
PATIENCE_S = 300.0
READS_AGAIN = (
    "import sys; from app.asker import route_session; route_session.MIN_TOKENS = 1 << 30; "
    "from app.cli import main; sys.exit(main())"
)


def prompt_of(client: Client, tokens: int) -> str:
    """Text of about so many tokens."""
    short, long = (ask(client, words(count), 1)["prompt_tokens"] for count in (100, 200))
    return words(200 + round((tokens - long) * 100 / (long - short)))


def ask(client: Client, text: str, tokens: int, drained: list[Client] | None = None) -> dict[str, Any]:
    """A whole greedy reply; the last hop of its route drains in the middle, if it is among `drained`."""
    request = {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, "temperature": 0.0}
    count = 0
    route: list[str] = []
    for piece in client.chat(request, silence_s=PATIENCE_S):
        if "done" in piece:
            done: dict[str, Any] = piece["done"]
            return done
        count += 1
        route = [hop["peer"] for hop in piece.get("route", ())] or route
        if count == AT and drained:
            (victim,) = [node for node in drained if node.get("/control/status")["peer_id"] == route[-1]]
            threading.Thread(target=victim.post, args=("/control/drain", {}), daemon=True).start()
    raise AssertionError("a reply ends with its figures")


def resume(swarm: BenchSwarm) -> None:
    """Let all nodes serve again."""
    for node in swarm.nodes:
        node.post("/control/resume", {})
    wait_until(lambda: all(node.get("/control/status")["state"] == "serving" for node in swarm.nodes), "all serve", 240)


def measure(tokens: int) -> dict[str, Any]:
    """One reply of each kind."""
    with (
        tempfile.TemporaryDirectory() as folder,
        open_bench_swarm(Path(folder), cache_folder(), "starter", nodes=3, memory=MEMORY, spans=SPANS) as swarm,
    ):
        place = Place(Path(folder) / "reader", cache_folder())
        invite = str(swarm.client.post("/control/invite", {})["invite"])
        variables = {"SHOAL_INVITE": invite, "SHOAL_KEEP_SESSIONS": "0", "SHOAL_DRAFT": "off"}
        swarm.client.set_config("draft", "off")
        with Serving(place, "--discovery=invite", program=("-c", READS_AGAIN), **variables) as reader:
            reader.ready()
            text = prompt_of(swarm.client, tokens)
            plain = ask(swarm.client, text, REPLY_TOKENS)
            moved = ask(swarm.client, text, REPLY_TOKENS, swarm.nodes[1:])
            print(f"handed over: {moved['longest_gap_s']:.2f} s", file=sys.stderr)
            resume(swarm)
            again = ask(client_of(place.home), text, REPLY_TOKENS, swarm.nodes[1:])
    for reply in (moved, again):
        assert reply["recoveries"] >= 1, "no hop left"
    return {
        "session_tokens": plain["prompt_tokens"] + AT,
        "pause_s": round(moved["longest_gap_s"], 3),
        "reading_again_s": round(again["longest_gap_s"], 3),
        "handover_ratio": round(moved["longest_gap_s"] / again["longest_gap_s"], 3),
        "undisturbed_gap_s": round(plain["longest_gap_s"], 3),
        "ttft_s": round(plain["ttft_s"], 3),
        "same_tokens": plain["token_ids"] == moved["token_ids"] == again["token_ids"],
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tokens", type=int, default=2000, help="of the session, about")
    arguments = parser.parse_args()
    figures = measure(arguments.tokens)
    print(json.dumps(figures) if arguments.json else "\n".join(f"{name:20} {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()

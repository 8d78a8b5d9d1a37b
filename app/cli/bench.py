"""`shoal bench`: where a token's time goes in the running node's swarm, or how fast this process runs a model."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from app.cli.chat import load_model
from app.cli.command import Command, print_json

if TYPE_CHECKING:
    from app.api.client import Client
    from app.snapshot.views import RouteView, Snapshot

_PROMPT = "Tell me a story about the sea."
_NOTICEABLE = 0.05  # of a token's time
_TOKENS = 64  # enough for several timings of each hop, which reports one every 16 tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --model and --device."""
    words = "measure this model in this process, even if a node runs (default: the node's swarm, else starter)"
    parser.add_argument("--model", metavar="M", help=words)
    parser.add_argument("--device", metavar="D", help="cpu, cuda:0, … (default: the best there is)")


def run_bench(arguments: argparse.Namespace) -> int:
    """Measure the running node's route or, without a node or with an option, a whole model in this process."""
    from app.api.client import running_client

    client = running_client(arguments.home)
    if client is not None and arguments.model is None and arguments.device is None:
        return bench_node(client, as_json=arguments.json)
    return bench_here(arguments.model or "starter", arguments.device, as_json=arguments.json)


def bench_node(client: Client, *, as_json: bool) -> int:
    """Ask the swarm for a short reply, and print where its time went."""
    request = {"messages": [{"role": "user", "content": _PROMPT}], "max_tokens": _TOKENS, "temperature": 0.0}
    done: dict[str, Any] = {}
    for piece in client.chat(request):
        done = piece.get("done", done)
    snapshot = client.snapshot()
    facts = node_facts(snapshot, done)
    if as_json:
        print_json(facts)
        return 0
    for line in node_lines(snapshot, facts):
        print(line)
    return 0


def node_facts(snapshot: Snapshot, done: dict[str, Any]) -> dict[str, Any]:
    """Return speed, links and route of a running node, in seconds and tokens per second; `done` ends its reply."""
    route = snapshot.route
    return {
        "ttft_s": done.get("ttft_s"),
        "tokens_per_s": done.get("tokens_per_s"),
        "recoveries": done.get("recoveries"),
        "guessed_tokens": done.get("guessed_tokens", 0),
        "accepted_tokens": done.get("accepted_tokens", 0),
        "longest_gap_s": done.get("longest_gap_s"),
        "compute": {
            "device": snapshot.device,
            "blocks": 0 if snapshot.start is None or snapshot.stop is None else snapshot.stop - snapshot.start,
            "decode_tokens_per_s": snapshot.tokens_per_s,
            "step_s": None if snapshot.hardware is None else snapshot.hardware.step_s,
        },
        "links": [
            {"peer": peer.peer, "link": peer.link, "rtt_s": peer.rtt_s}
            for peer in snapshot.peers
            if peer.link is not None
        ],
        "route": None
        if route is None
        else {
            **dataclasses.asdict(route),
            "unexplained_s": unexplained_s(route),
            "explained_share": explained_share(route),
        },
    }


def unexplained_s(route: RouteView) -> float | None:
    """Seconds of a token's time beyond those of its hops, the way back and this node; None if a hop's are unknown."""
    return None if route.token_s is None or not route.is_reported else route.token_s - route.known_s


def explained_share(route: RouteView) -> float | None:
    """The part (0 to 1) of a token's time that is accounted for; None if a hop's times are unknown."""
    rest_s = unexplained_s(route)
    return None if rest_s is None or not route.token_s else 1 - max(0.0, rest_s) / route.token_s


def node_lines(snapshot: Snapshot, facts: dict[str, Any]) -> list[str]:
    """Return the lines that show `facts` to the user."""
    speed = facts["tokens_per_s"]
    lines = [f"{snapshot.swarm}: {_ms(facts['ttft_s'])} to the first token, then {speed or 0:.1f} tokens/s"]
    route = snapshot.route
    if route is None:
        return lines
    lines.append("Where a token's time goes:")
    for hop in route.hops:
        who = f"blocks {hop.start}:{hop.stop} at {hop.peer}"
        spent = f"{_ms(hop.queue_s)} waiting, {_ms(hop.compute_s)} computing, {_ms(hop.host_s)} sending on"
        lines.append(f"  {who}: {_ms(hop.link_s)} link, {spent}")
    lines.append(
        f"  back here: {_ms(route.return_s)}; embedding, head and sampling: {_ms(route.ends_s)}; "
        f"sending and receiving: {_ms(route.host_s)}"
    )
    share = facts["route"]["explained_share"]
    rest = "" if share is None else f", of which {share:.0%} are accounted for"
    lines.append(f"  in all {_ms(route.token_s)}{rest}")
    return [*lines, *over_the_whole_reply(route.token_s, facts)]


def over_the_whole_reply(token_s: float | None, facts: dict[str, Any]) -> list[str]:
    """Say why the reply's speed is another than that of the token above, if it is: times of a token are its latest."""
    speed = facts["tokens_per_s"]
    if not token_s or not speed or abs(1 / speed - token_s) < _NOTICEABLE * token_s:
        return []
    why = []
    if facts["guessed_tokens"]:
        why.append(f"{facts['accepted_tokens']} of {facts['guessed_tokens']} guesses were right")
    if facts["recoveries"]:
        why.append(f"the route was repaired {facts['recoveries']} times")
    why.append(f"the longest wait was {_ms(facts['longest_gap_s'])}")
    return [f"  over the whole reply {_ms(1 / speed)}: {', '.join(why)}"]


def _ms(seconds: float | None) -> str:
    return "? ms" if seconds is None else f"{seconds * 1000:.1f} ms"


def bench_here(name: str, device: str | None, *, as_json: bool) -> int:
    """Load a whole model in this process, and print how fast its blocks run."""
    from engine.benchmark import measure_span
    from engine.model.hosted_span import HostedSpan

    model = load_model(name, device)
    throughput = measure_span(HostedSpan([model.span]))
    facts = {
        "model": name,
        "device": str(model.span.options.device),
        "dtype": str(model.span.options.dtype).removeprefix("torch."),
        "blocks": model.config.n_blocks,
        "weight_bytes": model.span.weight_bytes,
        **dataclasses.asdict(throughput),
    }
    if as_json:
        print_json(facts)
        return 0
    print(f"{facts['model']}: {facts['blocks']} blocks on {facts['device']} in {facts['dtype']}")
    print(f"  decode           {throughput.decode_tokens_per_s:8.1f} tokens/s")
    if throughput.batch8_tokens_per_s is not None:
        print(f"  decode, 8 chats  {throughput.batch8_tokens_per_s:8.1f} tokens/s in all")
    print(f"  prompt           {throughput.prefill_tokens_per_s:8.1f} tokens/s")
    return 0


COMMANDS = (Command("bench", "measure this machine, or the running node's route", run_bench, add_arguments, True),)

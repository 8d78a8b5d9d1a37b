"""Replies through real processes over libp2p on loopback, beside the same model in one process.

    python -m tests.bench.sessions [--model tiny-random|starter|PATH] [--nodes 3] [--streams 8] [--tokens 64] [--json]

Spans are given, membership is a list: what is measured is the session path alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch
import trio

from app.asker import Asker, ReplyFigures
from app.block_server import BlockServer
from app.places import cache_folder
from app.records import Announcement
from app.runner import DeviceThread
from app.span import Span
from engine.asking import SwarmEnds, load_swarm_ends
from engine.block import Holding
from engine.local import LocalModel, load_local
from engine.reply import ReplySettings
from engine.runner import SessionRunner
from engine.sampler import Sampling
from engine.sources.base import ModelSource
from engine.sources.opening import open_source
from engine.span import SpanOptions, load_span
from p2p.identity import Identity
from p2p.node import Libp2pNetwork, NetworkConfig

CPU = torch.device("cpu")
GREEDY = Sampling(temperature=0)
QUESTION = "Explain to a child why fish swim in shoals, in five sentences."


def network_here() -> Libp2pNetwork:
    config = NetworkConfig(listen=("/ip4/127.0.0.1/tcp/0",), discovery=frozenset())
    return Libp2pNetwork(Identity.generate(), config)


async def serve(model: str, span: Span) -> None:
    """A node: says who it is, and serves until its input ends."""
    sys.setswitchinterval(0.0005)
    source = open_source(model, cache_folder())
    options = SpanOptions(CPU, torch.float32, packed=True, kv_bytes=1 << 28)
    runner = SessionRunner(load_span(source, span.start, span.stop, options))
    network = network_here()
    async with network.running(), trio.open_nursery() as nursery:
        server = BlockServer(network, runner, DeviceThread())
        await nursery.start(server.run)
        print(json.dumps({"peer": network.peer_id, "addresses": list(network.addresses())}), flush=True)
        await trio.lowlevel.wait_readable(sys.stdin.fileno())  # the end of input can be read, too
        print(json.dumps(vars(server.figures)), flush=True)
        nursery.cancel_scope.cancel()


async def stream(asker: Asker, ends: SwarmEnds, prompt: list[int], tokens: int) -> ReplyFigures:
    async with asker.reply(prompt, ReplySettings(tokens, GREEDY), max_tokens=tokens) as reply:
        async for _ in reply:
            pass
    return reply.figures


def local_reply(local: LocalModel, prompt: list[int], tokens: int) -> tuple[list[int], float, float]:
    reply = local.reply(prompt, ReplySettings(tokens, GREEDY))
    "".join(reply)
    assert reply.figures is not None
    return reply.writer.token_ids, reply.figures.ttft_s, reply.figures.tokens_per_s or 0.0


async def measure(
    source: ModelSource, members: list[Announcement], addresses: dict[str, list[str]], arguments: argparse.Namespace
) -> dict[str, float | bool]:
    sys.setswitchinterval(0.0005)
    local = load_local(source, SpanOptions(CPU, torch.float32, packed=True, kv_bytes=1 << 28))
    ends = load_swarm_ends(source, Holding(CPU, torch.float32, packed=True))
    prompt = ends.prompt_ids([{"role": "user", "content": QUESTION}])
    long_prompt = (prompt * (512 // len(prompt) + 1))[:512]
    network = network_here()
    async with network.running(), trio.open_nursery() as nursery:
        for peer, known in addresses.items():
            network.learn(peer, known)
        asker = Asker(network, ends, DeviceThread(), lambda: members)
        await nursery.start(asker.run)
        await stream(asker, ends, prompt, 8)
        ratios, swarm_speeds, local_speeds, ttft_ratios, same = [], [], [], [], True
        for _ in range(arguments.rounds):
            token_ids, _, local_speed = await trio.to_thread.run_sync(local_reply, local, prompt, arguments.tokens)
            figures = await stream(asker, ends, prompt, arguments.tokens)
            same = same and figures.token_ids == token_ids
            swarm_speeds.append(figures.tokens_per_s or 0.0)
            local_speeds.append(local_speed)
            ratios.append(swarm_speeds[-1] / local_speed)
            _, local_ttft_s, _ = await trio.to_thread.run_sync(local_reply, local, long_prompt, 2)
            long_figures = await stream(asker, ends, long_prompt, 2)
            ttft_ratios.append((long_figures.ttft_s or 0.0) / local_ttft_s)
        replies: list[ReplyFigures] = []

        async def one_of_many() -> None:
            replies.append(await stream(asker, ends, prompt, arguments.tokens))

        begin = time.perf_counter()
        async with trio.open_nursery() as streams:
            for _ in range(arguments.streams):
                streams.start_soon(one_of_many)
        together = arguments.streams * arguments.tokens / (time.perf_counter() - begin)
        nursery.cancel_scope.cancel()
    return {
        "same_tokens": same,
        "local_tokens_per_s": round(median(local_speeds), 2),
        "swarm_tokens_per_s": round(median(swarm_speeds), 2),
        "swarm_vs_local": round(median(ratios), 3),
        "overhead_ms_per_hop": round(
            1000 * (1 / median(swarm_speeds) - 1 / median(local_speeds)) / max(len(members), 1), 3
        ),
        f"streams{arguments.streams}_tokens_per_s": round(together, 2),
        f"streams{arguments.streams}_vs_local": round(together / median(local_speeds), 3),
        "recoveries": sum(figures.recoveries for figures in replies),
        "ttft_512_vs_local": round(median(ttft_ratios), 3),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="starter")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", type=Span.parse)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.serve is not None:
        trio.run(serve, arguments.model, arguments.serve)
        return
    source = open_source(arguments.model, cache_folder())
    count, nodes = source.config.n_blocks, arguments.nodes
    spans = [Span(count * index // nodes, count * (index + 1) // nodes) for index in range(nodes)]
    command = [sys.executable, "-m", "tests.bench.sessions", "--model", arguments.model, "--serve"]
    children = [
        subprocess.Popen(
            [*command, str(span)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).resolve().parents[2],
        )
        for span in spans
    ]
    try:
        members, addresses = [], {}
        for child, span in zip(children, spans, strict=True):
            assert child.stdout is not None
            said = json.loads(child.stdout.readline())
            addresses[said["peer"]] = said["addresses"]
            members.append(Announcement(said["peer"], 1, 0, "", "serving", span, 10.0, 100.0, 1 << 30))
        result: dict[str, object] = dict(trio.run(measure, source, members, addresses, arguments))
        for index, child in enumerate(children):
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.close()
            figures = json.loads(child.stdout.readline())
            result[f"node{index}_batch"] = round(figures["urgent_rows"] / max(figures["urgent_steps"], 1), 2)
    finally:
        for child in children:
            child.terminate()
    print(json.dumps(result) if arguments.json else "\n".join(f"{key:28} {value}" for key, value in result.items()))


if __name__ == "__main__":
    main()

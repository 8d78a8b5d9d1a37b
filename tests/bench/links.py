"""What links cost and carry.

    python -m tests.bench.links [--json] [--no-costs] [--no-replies]

- A call and a stream message in our own code, without libp2p and encryption: both sides run in this process, so a
  figure is the sum of both.
- `bandwidth_error_*`: how far the measured speed of a link between two real nodes is from that of the narrow proxy
  between them (`tests.bench.delay`), for several speeds; from single bursts as probes cause, and from a long transfer.
- `prompt_bytes_ratio`: bytes on all links while the starter model reads a prompt of 512 tokens over three hops with
  rows of int8, over those with float32; `top1_int8`: share of 2,000 tokens of English text after which the most likely
  next token is the same with both.
"""

from __future__ import annotations

import argparse
import decimal
import json
import logging
import math
import pydoc
import random
import statistics
import subprocess
import textwrap
import threading
import time
import unittest
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import trio
from trio.testing import MockClock

from app.asker.route_session import RouteSession
from app.config.home import cache_folder
from app.core.network import FrameStream, Network, Priority
from app.membership.link_probe import BURST_BYTES
from app.session.frame import DTYPE_NAMES
from engine.model.block import WeightOptions
from engine.model.hosted_span import HostedSpan
from engine.model.span import SpanOptions, load_span
from engine.session_runner import SessionRunner
from engine.sources.opening import open_source
from engine.swarm_ends import SwarmEnds, load_swarm_ends
from engine.wire import to_tensor
from p2p.link.quota import Limits
from p2p.memory.fabric import open_fabric
from tests.app.session_swarm import SessionSwarm
from tests.p2p.network_contract import echo, echo_stream
from tests.p2p.networks import wired_world
from tests.p2p.nodes import measured_bandwidth

PROTOCOL = "/bench/1/echo"
CPU = torch.device("cpu")
PROMPT_TOKENS, TOP1_TOKENS, CHUNK_TOKENS = 512, 2000, 64


async def _median_us(step: Callable[[], Awaitable[object]], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        await step()
        times.append(time.perf_counter() - started)
    return round(statistics.median(times) * 1e6, 1)


async def _round_trip(stream: FrameStream, body: bytes) -> None:
    await stream.send(body)
    await stream.receive()


async def _empty_pipe_us(repeats: int) -> float:
    """The floor: trio's memory pipe, two tasks, no link."""
    here, there = trio.testing.memory_stream_pair()

    async def answer() -> None:
        while True:
            await there.send_all(await there.receive_some(65536))

    async def step() -> None:
        await here.send_all(b"x")
        await here.receive_some(65536)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer)
        floor = await _median_us(step, repeats)
        nursery.cancel_scope.cancel()
    return floor


async def _one_way_us(sender: Network, receiver: Network, messages: int) -> float:
    """Microseconds a message, both sides together, when many small ones are sent in a row."""
    done = trio.Event()

    async def count(stream: FrameStream) -> None:
        for _ in range(messages):
            await stream.receive()
        done.set()

    receiver.accept("/bench/1/count", count)
    stream = await sender.open(receiver.peer_id, "/bench/1/count")
    started = time.perf_counter()
    for number in range(messages):
        await stream.send(b"x" * 1024)
        if number % 64 == 0:
            await stream.wait_room()
    await done.wait()
    return round((time.perf_counter() - started) / messages * 1e6, 1)


def _sockets() -> tuple[trio.SocketStream, trio.SocketStream]:
    here, there = trio.socket.socketpair()
    return trio.SocketStream(here), trio.SocketStream(there)


async def _bulk_mb_s(repeats: int) -> float:
    """Megabytes a second one way in calls of 16 MiB, over a pair of sockets: memory pipes slow down when they fill."""

    async def size(peer: str, body: bytes) -> bytes:
        return b"%d" % len(body)

    async with wired_world() as world:
        world.pipe = _sockets
        a, b = await world.node(), await world.node()
        b.serve("size", size)
        body = bytes(16 * 2**20)
        best_s = math.inf
        for _ in range(repeats):
            started = time.perf_counter()
            await a.call(b.peer_id, "size", body, timeout_s=60, priority=Priority.BULK)
            best_s = min(best_s, time.perf_counter() - started)
        return round(len(body) / best_s / 1e6, 1)


async def bandwidth_errors() -> dict[str, float]:
    """How far measured speeds are from the proxy's, as shares of it."""
    found = {}
    for name, rtt_s, size, bursts in (("probe", 0.02, BURST_BYTES, 1), ("bulk", 0.02, 4 * 2**20, 2)):
        for mbit in (10, 50, 100):
            real = mbit * 1e6 / 8
            measured = await measured_bandwidth(real, rtt_s, size, bursts)
            found[f"bandwidth_error_{name}_{mbit}mbit"] = round(abs(measured / real - 1), 3)
    return found


def _text() -> str:
    modules = (argparse, threading, subprocess, logging, textwrap, pydoc, statistics, random, json, unittest, decimal)
    return Path("LICENSE").read_text() + "\n".join(module.__doc__ or "" for module in modules)


async def replies() -> dict[str, float]:
    """Bytes and next tokens with rows of int8, beside float32."""
    source = open_source("starter", cache_folder())
    ends = load_swarm_ends(source, WeightOptions(CPU, torch.float32))
    tokens = ends.text_ids(_text())[: TOP1_TOKENS + 1]
    assert len(tokens) == TOP1_TOKENS + 1, f"the text has only {len(tokens)} tokens"
    best, carried = {}, {}
    for wire in ("f32", "int8"):
        async with open_fabric() as fabric, trio.open_nursery() as nursery:
            swarm = SessionSwarm(fabric, nursery)
            for name, (start, stop) in {"a": (0, 10), "b": (10, 20), "c": (20, 30)}.items():
                span = load_span(source, start, stop, SpanOptions(CPU, torch.float32, kv_bytes=1 << 27))
                await swarm.serve(name, SessionRunner(HostedSpan([span])))
                if wire == "int8":
                    rates = tuple((other, 1e6) for other in ("a", "b", "c", "asker") if other != name)
                    swarm.announcements[name] = replace(swarm.announcements[name], rates=rates, wires=("int8",))
            asker = await swarm.asker(ends=ends)
            async with asker.session(PROMPT_TOKENS + 1) as session:
                await session.advance(tokens[:PROMPT_TOKENS])
                assert bool(session.wires) == (wire == "int8")
            carried[wire] = sum(node.traffic.bytes_out for node in fabric.nodes.values())
            async with asker.session(len(tokens)) as session:
                best[wire] = await _most_likely(session, ends, tokens)
            nursery.cancel_scope.cancel()
    alike = sum(one == other for one, other in zip(best["f32"], best["int8"], strict=True))
    return {
        "prompt_bytes_ratio": round(carried["int8"] / carried["f32"], 4),
        "top1_int8": round(alike / len(best["f32"]), 4),
        "top1_tokens": len(best["f32"]),
    }


async def _most_likely(session: RouteSession, ends: SwarmEnds, tokens: Sequence[int]) -> list[int]:
    """The most likely next token after each of the tokens but the first."""
    await session.advance(tokens[:1])
    found: list[int] = []
    for at in range(1, len(tokens), CHUNK_TOKENS):
        chunk = tokens[at : at + CHUNK_TOKENS]
        frame = await session.advance(chunk[:1], guesses=chunk[1:])
        rows = to_tensor([frame.body], DTYPE_NAMES[frame.dtype], ends.hidden_size)
        assert len(rows) == len(chunk), "the route was repaired"
        with torch.inference_mode():
            found += ends.both.logits(rows).argmax(dim=-1).tolist()
    return found


async def measure(repeats: int) -> dict[str, float]:
    """All figures."""
    async with wired_world() as world:
        world.limits = Limits(requests_per_s=1e9, request_burst=1e9)
        a, b = await world.node(), await world.node()
        b.serve("echo", echo)
        b.accept(PROTOCOL, echo_stream)
        stream = await a.open(b.peer_id, PROTOCOL)
        step = bytes(8192)
        return {
            "pipe_round_trip_us": await _empty_pipe_us(repeats),
            "stream_round_trip_8k_us": await _median_us(lambda: _round_trip(stream, step), repeats),
            "call_round_trip_8k_us": await _median_us(lambda: a.call(b.peer_id, "echo", step, timeout_s=5), repeats),
            "one_way_1k_us": await _one_way_us(a, b, repeats),
            "bulk_mb_s": await _bulk_mb_s(max(repeats // 250, 3)),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=5000)
    parser.add_argument("--no-costs", action="store_true")
    parser.add_argument("--no-replies", action="store_true")
    options = parser.parse_args()
    figures = {} if options.no_costs else trio.run(measure, options.repeats)
    figures |= trio.run(bandwidth_errors)
    if not options.no_replies:
        figures |= trio.run(replies, clock=MockClock(autojump_threshold=0))  # computing takes none of its time
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:28} {value}")


if __name__ == "__main__":
    main()

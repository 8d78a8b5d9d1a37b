"""What a token costs on a node's event loop, without any model: microseconds of CPU time of the loop's thread.

    python -m tests.bench.host_path [--json] [--profile]

An asker and its block server write a reply with blocks, head and sampler that do nothing: `alone` within one node,
`hop` with a second node that is reached over real libp2p on loopback, both on this loop, so that its figure is the sum
of both sides. CPU time, so that other programs disturb it little; the least of several runs counts.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import trio

from app.asker.asker import Asker, AskerOptions
from app.asker.route_session import SessionSettings
from app.core.compute import StepWork, TokenChoice
from app.core.device_thread import DeviceThread
from app.core.network import Network
from app.core.span import Span
from app.serving.block_server import BlockServer
from app.swarm.records import Announcement
from p2p.memory.fabric import open_fabric
from tests.p2p.nodes import libp2p_world

WIDTH, BLOCKS = 4096, 32
ROW = bytes(2 * WIDTH)  # bf16
TOKENS, RUNS = 400, 7


class Result(NamedTuple):
    """A session's output of a step."""

    data: bytes
    dtype: str


class Piece(NamedTuple):
    """A token."""

    token_id: int
    text: str
    finish_reason: str | None
    embedding: bytes
    logprob: None = None


class NoBlocks:
    """Blocks that return zeros."""

    start, stop, hidden_size, context_length = 0, BLOCKS, WIDTH, 1 << 20
    kv_free_tokens = kv_total_tokens = 1 << 30
    kv_page_tokens = 1
    cache_format, cache_row_bytes = "none", 1

    def open(self, session: bytes, tokens: int, adapter: Any = None) -> None: ...
    def load_adapter(self, rank: int, alpha: float, targets: tuple[str, ...], vectors: Any) -> object: ...
    def fork(self, session: bytes, tokens: int, source: bytes, length: int) -> None: ...
    def take_over(self, session: bytes, tokens: int, source: bytes, length: int) -> None: ...
    def resize(self, session: bytes, tokens: int) -> None: ...
    def close(self, session: bytes) -> None: ...
    def truncate(self, session: bytes, length: int) -> None: ...
    def import_cache(self, session: bytes, blocks: tuple[int, int], position: int, data: memoryview) -> None: ...

    def export_cache(self, session: bytes, blocks: tuple[int, int], start: int, stop: int) -> bytes:
        return b""

    def adapter_bytes(self, rank: int, targets: tuple[str, ...]) -> int:
        return 0

    def tokens_freed_by(self, sessions: Iterable[bytes]) -> int:
        return 0

    def prepare(self) -> bool:
        return False

    def launch(self, work: Sequence[StepWork]) -> None:
        return None

    def launch_ahead(self, work: Sequence[StepWork], rows: Any) -> None:
        return None

    def accept(self, session: bytes, length: int) -> None: ...

    def step(self, work: Sequence[StepWork]) -> list[Result]:
        return [Result(ROW * item.rows, "bf16") for item in work]


class NoEnds:
    """Head and sampler that choose token 0."""

    n_blocks, hidden_size, context_length, dtype = BLOCKS, WIDTH, 1 << 20, "bf16"

    def embed(self, token_ids: Sequence[int], wire: str = "") -> bytes:
        return ROW * len(token_ids)

    def begin(self, prompt_ids: Sequence[int], settings: Any) -> Any:
        return _NoReply()

    def choose(self, choices: Sequence[TokenChoice]) -> list[list[Piece]]:
        return [[Piece(0, "x", None, ROW)] for _ in choices]

    def launch(self, choices: Sequence[TokenChoice]) -> None:
        return None

    def launch_ahead(self, choices: Sequence[TokenChoice], rows: Any) -> None:
        return None

    def deviation(self, one: Sequence[Any], other: Sequence[Any]) -> tuple[float, float]:
        return 0.0, 0.0


class _NoReply:
    pass


def announcement(peer: str) -> Announcement:
    """What a node with all blocks announces."""
    return Announcement(peer, 1, 0, "", "serving", Span(0, BLOCKS), 100.0, 1000.0, 1 << 30)


async def least_us(asker: Asker, profile: cProfile.Profile | None) -> float:
    """Microseconds of this thread for a token."""
    found = []
    for number in range(RUNS):
        async with asker.reply([1, 2, 3], None, max_tokens=TOKENS + 50) as reply:
            for _ in range(20):  # set the route up and warm up
                await anext(reply)
            if profile is not None and number:
                profile.enable()
            began = time.thread_time()
            for _ in range(TOKENS):
                await anext(reply)
            found.append((time.thread_time() - began) / TOKENS * 1e6)
            if profile is not None:
                profile.disable()
    return round(min(found), 1)


async def reply_over(here: Network, server: Network, profile: cProfile.Profile | None) -> float:
    """Let an asker write over the blocks of `server`, which may be its own node."""
    async with trio.open_nursery() as nursery:
        blocks = BlockServer(server, NoBlocks(), DeviceThread("no device"))
        await nursery.start(blocks.run)
        own = blocks.attend if server is here else None
        options = AskerOptions(SessionSettings(), rng=random.Random(1), guesser=lambda prompt, cost: None)
        members = [announcement(server.peer_id)]
        asker = Asker(here, NoEnds(), DeviceThread("no head"), lambda: members, own_server=own, options=options)
        await nursery.start(asker.run)
        figure = await least_us(asker, profile)
        nursery.cancel_scope.cancel()
    return figure


async def measure(profile: cProfile.Profile | None = None) -> dict[str, float]:
    """Both figures."""
    async with open_fabric() as fabric:
        node = fabric.node("here")
        alone = await reply_over(node, node, profile)
    async with libp2p_world() as world:
        here, there = await world.node(), await world.node()
        here.learn(there.peer_id, there.addresses())
        hop = await reply_over(here, there, None)
    return {"alone_us": alone, "hop_us": hop}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--profile", action="store_true", help="print where the loop's time goes within one node")
    args = parser.parse_args()
    profile = cProfile.Profile() if args.profile else None
    figures = trio.run(measure, profile)
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
    print(json.dumps(figures) if args.json else "\n".join(f"{name:>10}  {us:.0f}" for name, us in figures.items()))


if __name__ == "__main__":
    main()

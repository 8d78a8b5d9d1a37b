"""CPU time to find one route through 80 blocks, in swarms of 100 to 10,000 members. Prints one JSON object.

    python -m tests.bench.routing [--rounds 5]

Members serve 4 to 16 blocks each and announce round-trip times to twelve others and speeds of eight links; the asker
has measured 40 of them, and before each search one in thirty announces new figures. `find_s` is the CPU time of
`RoutePlanner.find`, the median over the rounds; `longest_s` is the most that the event loop was kept at a stretch in
any round; `whole_model` is the same if every member serves all blocks.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import replace
from statistics import median
from types import SimpleNamespace
from typing import Any

import trio

from app.core.span import Span
from app.routing.planner import RoutePlanner
from app.routing.route import RouteRequest
from app.swarm.records import MAX_RATES, MAX_RTTS, Announcement, tail

BLOCKS = 80
SIZES = (100, 1000, 10_000)
MEASURED = 40  # peers that the asker has a link to
CHANGED = 30  # one in so many members has announced new figures since the search before


class Steps(trio.abc.Instrument):
    """CPU seconds of all steps of tasks, and of the longest; a step is what runs between two checkpoints."""

    def __init__(self) -> None:
        self.total_s = self.longest_s = self._began_s = 0.0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._began_s = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        took_s = time.thread_time() - self._began_s
        self.total_s += took_s
        self.longest_s = max(self.longest_s, took_s)


def peer(number: int) -> str:
    """An id as long as a real one."""
    return f"12D3KooW{number:044d}"


def swarm(count: int, rng: random.Random, shortest: int = 4, longest: int = 16) -> list[Announcement]:
    """Members that serve so many blocks each."""
    members = []
    for number in range(count):
        length = rng.randint(shortest, longest)
        start = rng.randint(0, BLOCKS - length)
        rtts = tuple((tail(peer(rng.randrange(count))), rng.random() / 5) for _ in range(MAX_RTTS))
        rates = tuple((tail(peer(rng.randrange(count))), rng.uniform(1e6, 1e8)) for _ in range(MAX_RATES))
        speed = rng.uniform(50, 100)
        span = Span(start, start + length)
        said = Announcement(peer(number), 1, 2**60, "", "serving", span, speed, 500.0, 1 << 30, rtts=rtts, rates=rates)
        members.append(said)
    return members


def seconds(members: list[Announcement], rounds: int, rng: random.Random) -> dict[str, float]:
    """CPU seconds to find a route, and the longest stretch on the event loop."""
    links = [
        SimpleNamespace(
            peer=peer(rng.randrange(len(members))), rtt_s=rng.random() / 10, down_bytes_per_s=1e7, kind="wan"
        )
        for _ in range(MEASURED)
    ]
    network: Any = SimpleNamespace(peer_id="me", links=lambda: links, source=lambda peer: "")
    planner = RoutePlanner(network, lambda: members)
    request = RouteRequest(Span(0, BLOCKS), tokens=1000, prompt_tokens=100, row_bytes=8192)
    runs = []
    for _ in range(rounds):
        for number in rng.sample(range(len(members)), len(members) // CHANGED):
            members[number] = replace(members[number], busy=rng.random())
        runs.append(Steps())
        trio.run(planner.find, (), request, (), instruments=[runs[-1]])
    return {
        "find_s": round(median(run.total_s for run in runs), 5),
        "longest_s": round(max(run.longest_s for run in runs), 5),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    rng = random.Random(1)
    seconds(swarm(SIZES[0], random.Random(2), BLOCKS, BLOCKS), 1, random.Random(2))  # loads numpy, as a node has
    figures = {}
    for count in SIZES:
        spread = seconds(swarm(count, rng), rounds, rng)
        figures[str(count)] = {**spread, "whole_model": seconds(swarm(count, rng, BLOCKS, BLOCKS), rounds, rng)}
    print(json.dumps({"blocks": BLOCKS, "members": figures}))


if __name__ == "__main__":
    main()

"""Seconds to find one route through 80 blocks, in swarms of 100 to 10,000 members. Prints one JSON object.

    python -m tests.bench.routing [--rounds 5]

Members serve 4 to 16 blocks each and announce round-trip times to twelve others; the asker has measured 40 of them.
Each figure is the median over the rounds; `links` is what reading the members' claims takes before each search, and
`whole_model` is the search if every member serves all blocks.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from statistics import median

from app.core.span import Span
from app.routing.estimates import link_seconds
from app.routing.route import RouteRequest
from app.routing.search import find_route
from app.swarm.records import MAX_RTTS, Announcement, tail

BLOCKS = 80
SIZES = (100, 1000, 10_000)
MEASURED = 40  # peers that the asker has a link to


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
        speed = rng.uniform(50, 100)
        span = Span(start, start + length)
        members.append(Announcement(peer(number), 1, 2**60, "", "serving", span, speed, 500.0, 1 << 30, rtts=rtts))
    return members


def seconds(members: list[Announcement], rounds: int, rng: random.Random) -> tuple[float, float]:
    """Median seconds to read the claims, and to find a route."""
    measured_s = {peer(rng.randrange(len(members))): rng.random() / 10 for _ in range(MEASURED)}
    request = RouteRequest(Span(0, BLOCKS), tokens=1000)
    links_s, found_s = [], []
    for _ in range(rounds):
        begin = time.perf_counter()
        links = link_seconds("me", measured_s, members)
        read = time.perf_counter()
        find_route(members, request, links)
        links_s.append(read - begin)
        found_s.append(time.perf_counter() - read)
    return median(links_s), median(found_s)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    rng = random.Random(1)
    figures = {}
    for count in SIZES:
        links_s, found_s = seconds(swarm(count, rng), rounds, rng)
        _, whole_s = seconds(swarm(count, rng, BLOCKS, BLOCKS), rounds, rng)
        figures[str(count)] = {
            "find_route_s": round(found_s, 5), "links_s": round(links_s, 5), "whole_model_s": round(whole_s, 5)
        }  # fmt: skip
    print(json.dumps({"blocks": BLOCKS, "members": figures}))


if __name__ == "__main__":
    main()

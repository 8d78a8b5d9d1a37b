"""How well nodes could be placed by somebody who knows everything and moves everybody for free.

What a swarm reaches is judged against the fractional bound, as if a node's blocks could be spread at will. Spans are
whole and contiguous, so that even the best placement stays below it: by how much is estimated here, by simulated
annealing. It finds no proof, only placements: the true best lies between its answer and the bound.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from app.core.span import Span
from tests.sim.world import NodeSpec

SHARPNESS = 30.0  # how much more the weakest block counts than the others
HOT, COLD = 0.03, 0.0003


@dataclass(frozen=True)
class Placement:
    """Where each node stands, and the weakest block's throughput over the fractional bound."""

    spans: tuple[Span, ...]
    weakest_share: float


def fractional_bound(nodes: Sequence[NodeSpec], n_blocks: int) -> float:
    """Tokens/s of every block if work could be spread at will."""
    return sum(min(node.blocks, n_blocks) * node.tokens_per_s for node in nodes) / n_blocks


def best_placement(nodes: Sequence[NodeSpec], n_blocks: int, *, seed: int = 1, tries: int = 60_000) -> Placement:
    """The best placement that was found."""
    rng, bound = random.Random(seed), fractional_bound(nodes, n_blocks)
    lengths = [min(node.blocks, n_blocks) for node in nodes]
    starts = [rng.randrange(n_blocks - length + 1) for length in lengths]
    shares = [0.0] * n_blocks  # each block's throughput over the bound
    for node, start, length in zip(nodes, starts, lengths, strict=True):
        for block in range(start, start + length):
            shares[block] += node.tokens_per_s / bound
    best, best_share = list(starts), min(shares)
    total = sum(map(_pain, shares))
    for turn in range(tries):
        heat = HOT * (COLD / HOT) ** (turn / tries)
        who = rng.randrange(len(nodes))
        length, old, new = lengths[who], starts[who], rng.randrange(n_blocks - lengths[who] + 1)
        speed = nodes[who].tokens_per_s / bound
        touched = {*range(old, old + length), *range(new, new + length)}
        before = sum(_pain(shares[block]) for block in touched)
        _shift(shares, old, new, length, speed)
        after = total - before + sum(_pain(shares[block]) for block in touched)
        # In units of the weakest block's share, whatever that is: sums of such exponentials are all but their largest.
        worse = math.log(after / total) / SHARPNESS
        if worse > 0 and rng.random() >= math.exp(-worse / heat):
            _shift(shares, new, old, length, speed)
            continue
        starts[who], total = new, after
        if min(shares) > best_share:
            best, best_share = list(starts), min(shares)
    return Placement(tuple(Span(at, at + size) for at, size in zip(best, lengths, strict=True)), best_share)


def _pain(share: float) -> float:
    """What a block's want of service costs: the weakest count for almost all of it."""
    return math.exp(-SHARPNESS * share)


def _shift(shares: list[float], old: int, new: int, length: int, speed: float) -> None:
    for block in range(old, old + length):
        shares[block] -= speed
    for block in range(new, new + length):
        shares[block] += speed

"""Who trains which blocks of a job, and which way each micro-batch takes through them. Pure.

Several members may hold a block. A way leads through one holder of each block; micro-batches are drawn over the ways by
virtual time, so that faster holders take more. What the holders of a block have summed up is then reduced for each run
of blocks with equal holders, because the spans of members overlap.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from app.core.span import Span
from app.routing.route import Hop, Route
from app.training.wire import MAX_WAYS, HopWay

_WALKS = 6 * MAX_WAYS  # attempts to find a further way
_NEW_SHARE = 0.3  # of the latest observation in a peer's cost
_MOST_CHANGE = 8.0  # of a cost that was observed before, in one observation


class Run(NamedTuple):
    """Consecutive blocks with the same holders, sorted by peer id."""

    span: Span
    peers: tuple[str, ...]


@dataclass(frozen=True)
class WayPlan:
    """Who takes part in an epoch with which blocks, and the ways through them."""

    hops: Route
    runs: tuple[Run, ...]
    ways: tuple[Route, ...]

    def shared(self, peer: str) -> tuple[Span, ...]:
        """The blocks of a peer that others hold too, run by run."""
        return tuple(run.span for run in self.runs if peer in run.peers and len(run.peers) > 1)

    @property
    def shared_runs(self) -> tuple[Run, ...]:
        """The runs of blocks that several peers hold."""
        return tuple(run for run in self.runs if len(run.peers) > 1)

    def can_lose(self, *peers: str) -> bool:
        """True if others hold every block of these peers."""
        return all(not set(run.peers) <= set(peers) for run in self.runs)

    def without(self, *peers: str) -> WayPlan:
        """Return the plan of the others, each with the blocks that it has."""
        return plan_ways(tuple(hop for hop in self.hops if hop.peer not in peers))

    @property
    def depth(self) -> int:
        """Most hops on a way."""
        return max(map(len, self.ways))

    def trainers(self, span: Span) -> frozenset[str]:
        """The peers that train the blocks of a run on some way."""
        return frozenset(holder_of(way, span.start) for way in self.ways)

    def way_around(self, way: int, span: Span, peer: str, order: Sequence[int]) -> int:
        """Return the way on which one of the blocks' trainers trains them, and that leads to fewest others beside it.

        Others than the hops of this way could falsify what is to be compared. Of equals it is the first in an `order`
        of all ways: a lot, or peer ids would decide who they are.
        """
        own = {hop.peer for hop in self.ways[way]}
        around = [number for number in order if holder_of(self.ways[number], span.start) == peer]
        return min(around, key=lambda number: len({hop.peer for hop in self.ways[number]} - own))


def taking_part(route: Route, holders: Sequence[Hop], most: int) -> Route:
    """Return who trains which blocks: the hops of a route, and further holders while no block has more than `most`.

    A hop of the route may take further blocks that it holds; a further holder takes its longest stretch of blocks that
    need one more.
    """
    counts = Counter(block for hop in route for block in hop.span.blocks())
    spans = {hop.peer: hop.span for hop in route}
    for peer, held in holders:
        own = spans.get(peer)
        free = [block for block in held.blocks() if counts[block] < most or (own is not None and block in own)]
        span = _stretch(free, own)
        if span is not None:
            counts.update(block for block in span.blocks() if own is None or block not in own)
            spans[peer] = span
    return tuple(Hop(peer, span) for peer, span in spans.items())


def _stretch(blocks: Sequence[int], within: Span | None) -> Span | None:
    """Return the longest stretch of consecutive blocks, or the one that covers `within`; None if there is none."""
    found = stretches(blocks)
    if within is not None:
        return next((span for span in found if span.covers(within)), None)
    return max(found, key=len, default=None)


def stretches(blocks: Sequence[int]) -> list[Span]:
    """Return the stretches of consecutive blocks among some in ascending order."""
    found: list[Span] = []
    for block in blocks:
        if found and found[-1].stop == block:
            found[-1] = Span(found[-1].start, block + 1)
        else:
            found.append(Span(block, block + 1))
    return found


def plan_ways(hops: Route) -> WayPlan:
    """Return the runs of blocks with equal holders, and at most `MAX_WAYS` ways; the first is that with fewest hops.

    The hops must hold all blocks from the first to the last. Who is on no way, such as one whose blocks lie within
    those of another, does not take part.
    """
    bounds = sorted({bound for hop in hops for bound in (hop.span.start, hop.span.stop)})
    runs = []
    for start, stop in pairwise(bounds):
        peers = tuple(sorted(hop.peer for hop in hops if start in hop.span))
        assert peers, f"nobody holds block {start}"
        runs.append(Run(Span(start, stop), peers))
    rng = random.Random(0)  # the same plan each time
    found = {_shortest(hops, bounds[-1]): None}
    for _ in range(_WALKS):
        way = _walk(runs, rng)
        if way is not None:
            found[way] = None
        if len(found) == MAX_WAYS:
            break
    used = {hop.peer for way in found for hop in way}
    if len(used) < len(hops):
        return plan_ways(tuple(hop for hop in hops if hop.peer in used))
    return WayPlan(hops, tuple(runs), tuple(sorted(found, key=lambda way: (len(way), way))))


def _shortest(hops: Route, stop: int) -> Route:
    """Return a way with the fewest hops: each time the peer that holds the most of what comes next."""
    way: list[Hop] = []
    block = min(hop.span.start for hop in hops)
    while block < stop:
        best = max((hop for hop in hops if block in hop.span), key=lambda hop: hop.span.stop)
        way.append(Hop(best.peer, Span(block, best.span.stop)))
        block = best.span.stop
    return tuple(way)


def _walk(runs: Sequence[Run], rng: random.Random) -> Route | None:
    """Return a way drawn by lot; None if it would lead to a peer a second time."""
    way: list[Hop] = []
    for run in runs:
        goes_on = bool(way) and way[-1].peer in run.peers
        if goes_on and rng.random() < 0.5:
            peer = way[-1].peer
        else:
            left = [peer for peer in run.peers if all(peer != hop.peer for hop in way[:-1])]
            if not left:
                return None
            peer = rng.choice(left)
        if way and way[-1].peer == peer:
            way[-1] = Hop(peer, Span(way[-1].span.start, run.span.stop))
        else:
            way.append(Hop(peer, run.span))
    return tuple(way)


def parts_of(plan: WayPlan, peer: str) -> tuple[HopWay, ...]:
    """Return a peer's part of every way that leads through it."""
    found = []
    for number, way in enumerate(plan.ways):
        peers = ["", *(hop.peer for hop in way), ""]
        if peer in peers:
            at = peers.index(peer)
            found.append(HopWay(number, way[at - 1].span, peers[at - 1], peers[at + 1]))
    return tuple(found)


def holder_of(way: Route, block: int) -> str:
    """Return the peer that trains a block on a way."""
    return next(hop.peer for hop in way if block in hop.span)


def assigned(plan: WayPlan, ways: Mapping[int, int], peer: str, span: Span) -> frozenset[int]:
    """Return the micro-batches whose ways (micro-batch -> number of its way) lead through a peer for these blocks."""
    return frozenset(number for number, way in ways.items() if holder_of(plan.ways[way], span.start) == peer)


class Drawn(NamedTuple):
    """The way of a micro-batch, and the seconds after which it should be back."""

    way: int
    expected_s: float


class VirtualTimes:
    """Draws ways: each peer has a time at which it would be free, and the way that would be through first is taken."""

    def __init__(self) -> None:
        self._cost_s: dict[str, float] = {}  # peer -> for one row and block, as observed
        self._free_at: dict[str, float] = {}

    def begin_step(self) -> None:
        """Nothing is under way: everybody is free."""
        self._free_at.clear()

    def draw(self, ways: Sequence[Route], rows: int, now_s: float) -> Drawn:
        """Take the way on which so many rows would be through first, and add the work to its peers."""
        ends = [self._ends(way, rows, now_s) for way in ways]
        best = min(range(len(ways)), key=lambda way: ends[way][-1])
        self._free_at.update({hop.peer: end for hop, end in zip(ways[best], ends[best], strict=True)})
        return Drawn(best, ends[best][-1] - now_s)

    def least_s(self, ways: Sequence[Route], rows: int) -> float:
        """Seconds in which so many rows would be through on the fastest way if everybody were free."""
        return min(rows * sum(len(hop.span) * self._cost(hop.peer) for hop in way) for way in ways)

    def came_back(self, way: Route, drawn: Drawn, took_s: float) -> None:
        """Correct the costs of a way's peers by the time that a micro-batch took."""
        ratio = max(took_s, 1e-9) / max(drawn.expected_s, 1e-9)
        for hop in way:
            if hop.peer in self._cost_s:
                bounded = min(max(ratio, 1 / _MOST_CHANGE), _MOST_CHANGE)
                self._cost_s[hop.peer] *= 1 - _NEW_SHARE + _NEW_SHARE * bounded
            else:
                self._cost_s[hop.peer] = self._cost(hop.peer) * ratio

    def _ends(self, way: Route, rows: int, now_s: float) -> list[float]:
        ends: list[float] = []
        for hop in way:
            begin = max(ends[-1] if ends else now_s, self._free_at.get(hop.peer, now_s))
            ends.append(begin + rows * len(hop.span) * self._cost(hop.peer))
        return ends

    def _cost(self, peer: str) -> float:
        """Seconds for a row and block; a peer that was not used yet counts as the fastest, so that it will be."""
        return self._cost_s.get(peer, min(self._cost_s.values(), default=1e-3))

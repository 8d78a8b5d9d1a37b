"""Chooses which machines take how many blocks, so that a token or a training step takes the least time.

Exact for replies, and within `TOLERANCE` for training: a choice that is only good would make a forecast worse when a
machine gets faster. Knows blocks and seconds only.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

TOLERANCE = 1e-3
MAX_TRIES = 48  # covers that `fastest_pipeline` compares at most


@dataclass(frozen=True)
class StageCandidate:
    """A machine that could take up to `most` blocks."""

    name: str
    most: int
    block_s: float
    entry_s: float = 0.0  # once, if it takes any
    return_s: float = 0.0  # of the farthest machine used this is added once: the way back
    link_s: float = 0.0  # of a pipeline's micro-batch: its stage is never faster than its link
    beside_s: float = 0.0  # other work of a micro-batch on this machine: the head, where it asks


@dataclass(frozen=True)
class Share:
    """A machine and the number of blocks that it takes."""

    machine: StageCandidate
    blocks: int


Cover = tuple[Share, ...]


def cheapest_cover(candidates: Sequence[StageCandidate], blocks: int) -> Cover | None:
    """Return the cover of all blocks with the least sum of entries, blocks and way back; None if there is none.

    The shares are ordered by their way back, the nearest machine first.
    """
    best = [0.0] + [inf] * blocks  # seconds of the cheapest cover of so many blocks
    taken: list[list[int]] = []  # by machine: how many blocks it takes in that cover
    ordered = sorted((c for c in candidates if c.most > 0), key=lambda c: c.return_s)
    found_s, last = inf, 0
    for number, candidate in enumerate(ordered, 1):
        best, took = _with(candidate, best)
        taken.append(took)
        # All machines so far are at most as far as this one, so this is exact if it is used, and not below if not.
        if best[blocks] + candidate.return_s < found_s:
            found_s, last = best[blocks] + candidate.return_s, number
    if found_s == inf:
        return None
    shares: list[Share] = []
    left = blocks
    for candidate, took in zip(reversed(ordered[:last]), reversed(taken[:last]), strict=True):
        if took[left]:
            shares.append(Share(candidate, took[left]))
            left -= took[left]
    return tuple(reversed(shares))


def _with(candidate: StageCandidate, best: list[float]) -> tuple[list[float], list[int]]:
    """Return the cheapest seconds with one machine more, and the blocks it takes: a minimum over a sliding window."""
    each_s, most = candidate.block_s, candidate.most
    window: deque[tuple[float, int]] = deque()
    seconds, took = best[:1], [0]
    for n in range(1, len(best)):
        if best[n - 1] < inf:
            value = best[n - 1] - (n - 1) * each_s
            while window and window[-1][0] >= value:
                window.pop()
            window.append((value, n - 1))
        while window and window[0][1] < n - most:
            window.popleft()
        with_it_s = candidate.entry_s + n * each_s + window[0][0] if window else inf
        seconds.append(min(best[n], with_it_s))
        took.append(n - window[0][1] if with_it_s < best[n] else 0)
    return seconds, took


def pipeline_seconds(cover: Cover, micro_batches: int, least_s: float = 0.0) -> float:
    """Seconds of a step: the first micro-batch through all stages, then each other after the slowest stage or link."""
    return fill_seconds(cover) + (micro_batches - 1) * max(least_s, slowest_seconds(cover))


def fill_seconds(cover: Cover) -> float:
    """Seconds of one micro-batch through all stages, links and the way back from the farthest included."""
    stages_s = sum(share.machine.entry_s + share.blocks * share.machine.block_s for share in cover)
    return stages_s + max(share.machine.return_s for share in cover)


def slowest_seconds(cover: Cover) -> float:
    """Seconds of the slowest stage or link for one micro-batch."""
    return max(max(s.blocks * s.machine.block_s + s.machine.beside_s, s.machine.link_s) for s in cover)


def fastest_pipeline(
    candidates: Sequence[StageCandidate], blocks: int, micro_batches: int, least_s: float = 0.0
) -> Cover | None:
    """Return the cover whose pipeline step is shortest; None if there is none. `least_s` bounds every stage from below.

    Branch and bound over the slowest stage: a cover with a bound on it is found exactly.
    """
    usable = [c for c in candidates if c.most > 0]
    bounds = sorted(
        {max(least_s, c.link_s, n * c.block_s + c.beside_s) for c in usable for n in range(1, min(c.most, blocks) + 1)}
    )
    low = bisect_left(bounds, True, key=lambda bound: sum(_fitting(c, bound) for c in usable) >= blocks)
    if low == len(bounds):
        return None

    def within(bound: int) -> Cover:
        limited = [replace(c, most=most) for c in usable if (most := _fitting(c, bounds[bound]))]
        cover = cheapest_cover(limited, blocks)
        assert cover is not None
        return cover

    def steady(bound_s: float) -> float:
        return (micro_batches - 1) * bound_s

    best = within(low)
    best_s = pipeline_seconds(best, micro_batches, least_s)
    # Each range of bounds with its least possible seconds: no cover of it fills faster than that of a larger bound.
    ranges = [(steady(bounds[low]), low + 1, len(bounds) - 1)]
    for _ in range(MAX_TRIES):
        least, first, last = heapq.heappop(ranges) if ranges else (inf, 0, 0)
        if least * (1 + TOLERANCE) >= best_s:
            break
        if first > last:
            continue
        cover = within(last)
        cover_s, fill_s = pipeline_seconds(cover, micro_batches, least_s), fill_seconds(cover)
        if cover_s < best_s:
            best, best_s = cover, cover_s
        middle = (first + last) // 2
        for begin, end in ((first, middle), (middle + 1, last - 1)):
            if begin <= end and end < last:
                heapq.heappush(ranges, (fill_s + steady(bounds[begin]), begin, end))
    return best


def _fitting(candidate: StageCandidate, bound_s: float) -> int:
    """Blocks that a machine can take if no stage or link may take longer than `bound_s`."""
    if candidate.link_s > bound_s:
        return 0
    if candidate.block_s == 0:
        return candidate.most
    # A bound is itself the time of some number of blocks; rounding must not lose that block.
    return max(0, min(candidate.most, int((bound_s - candidate.beside_s) / candidate.block_s + 1e-9)))

"""How well each block is served, by what the members announce; what a single one can claim is bounded. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from app.core.span import Span
from app.swarm.records import Announcement

# Who counts as a holder of its span: it serves now, or will in a moment.
SERVES = frozenset({"serving"})
COMING = frozenset({"serving", "loading", "fetching", "joining"})

# A figure counts up to so many times the members' median, or up to this share of what an average block is offered:
# whoever claims more cannot make others give up a region, and no block is left to rest on one fast node.
MEDIANS = 4.0
LEVEL_SHARE = 0.25
UNMEASURED_TOKENS_PER_S = 1.0  # where nobody has a figure yet
THIN = 1e-6  # what the speed of a block's only holder is worth beside one that has two


@dataclass(frozen=True)
class Coverage:
    """For every block: the tokens/s of its holders together, how many there are, and how many serve already."""

    speeds: Sequence[float]
    holders: Sequence[int]
    serving: Sequence[int]
    cap: float = float("inf")  # the tokens/s that one node counts for at most
    usual: float = UNMEASURED_TOKENS_PER_S  # the tokens/s of a node that has no figure

    def trusted(self, tokens_per_s: float) -> float:
        """What a node's figure counts for."""
        return min(tokens_per_s if tokens_per_s > 0 else self.usual, self.cap)

    def plus(self, span: Span, tokens_per_s: float) -> Coverage:
        """With one more node, which serves."""
        speed = self.trusted(tokens_per_s)
        speeds, holders, serving = list(self.speeds), list(self.holders), list(self.serving)
        for block in span.blocks():
            speeds[block] += speed
            holders[block] += 1
            serving[block] += 1
        return Coverage(speeds, holders, serving, self.cap, self.usual)

    def worth(self, extra: float = 0.0) -> list[float]:
        """What each block's service is worth with `extra` tokens/s more: nothing in a hole, little on one holder."""
        more = 1 if extra else 0
        return [
            (speed + extra) * (1.0 if holders + more > 1 else THIN)
            for speed, holders in zip(self.speeds, self.holders, strict=True)
        ]


def survey(members: Iterable[Announcement], n_blocks: int, *own: float) -> Coverage:
    """What the members offer together; `own` figures take part in what is usual."""
    placed: list[tuple[int, int, float, bool]] = []
    figures = [speed for speed in own if speed > 0]
    for member in members:
        span, state, speed = member.growing or member.span, member.state, member.decode_tokens_per_s
        if span is None or state not in COMING or span.start >= n_blocks:
            continue
        # What is still on its way will be there in a moment, but nobody may leave a block to it.
        placed.append((span.start, min(span.stop, n_blocks), speed, state in SERVES and member.growing is None))
        if speed > 0:
            figures.append(speed)
    figures.sort()
    usual = figures[len(figures) // 2] if figures else UNMEASURED_TOKENS_PER_S
    modest = MEDIANS * usual
    work = 0.0
    for start, stop, speed, _ in placed:
        work += (stop - start) * (usual if speed <= 0 else modest if speed > modest else speed)
    return _added_up(placed, n_blocks, max(modest, LEVEL_SHARE * work / n_blocks), usual)


def _added_up(placed: Iterable[tuple[int, int, float, bool]], n_blocks: int, cap: float, usual: float) -> Coverage:
    """The sum over (start, stop, tokens/s, whether it serves): differences first, so that long spans cost no more."""
    speeds, holders, serving = [0.0] * (n_blocks + 1), [0] * (n_blocks + 1), [0] * (n_blocks + 1)
    for start, stop, speed, serves in placed:
        counts = usual if speed <= 0 else cap if speed > cap else speed
        speeds[start] += counts
        speeds[stop] -= counts
        holders[start] += 1
        holders[stop] -= 1
        if serves:
            serving[start] += 1
            serving[stop] -= 1
    held = list(accumulate(holders))[:n_blocks]
    # The differences leave a rest of rounding where nobody is.
    offered = [speed if count else 0.0 for speed, count in zip(accumulate(speeds), held, strict=False)]
    return Coverage(offered, held, list(accumulate(serving))[:n_blocks], cap, usual)

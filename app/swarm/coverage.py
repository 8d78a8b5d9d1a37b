"""Coverage of each block of a model, summed over the members' announcements. Pure.

A single member's claimed speed counts only up to a cap. `app.hosting.placement` decides from it what to host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from app.core.span import Span
from app.swarm.records import Announcement

# States whose span counts as served now, and as held: the latter will serve soon.
SERVES = frozenset({"serving"})
COMING = frozenset({"serving", "loading", "fetching", "joining"})

# A member's tokens/s count up to MEDIANS times the median, or LEVEL_SHARE of the tokens/s of an average block if that
# is more: a member that claims more cannot make others abandon a region, and no block depends on one fast node.
MEDIANS = 4.0
LEVEL_SHARE = 0.25
UNMEASURED_TOKENS_PER_S = 1.0  # assumed if no member has measured its speed yet
THIN = 1e-6  # factor on the speed of a block with a single holder, against one with two


@dataclass(frozen=True)
class Coverage:
    """For every block: the summed tokens/s of its holders, their number, and how many of them serve already."""

    speeds: Sequence[float]
    holders: Sequence[int]
    serving: Sequence[int]
    cap: float = float("inf")  # tokens/s that one node counts for at most
    usual: float = UNMEASURED_TOKENS_PER_S  # tokens/s assumed for a node without a measurement

    def trusted(self, tokens_per_s: float) -> float:
        """Return the tokens/s that a node's claim counts for: at most `cap`, and `usual` if it has none."""
        return min(tokens_per_s if tokens_per_s > 0 else self.usual, self.cap)

    def plus(self, span: Span, tokens_per_s: float) -> Coverage:
        """Return the coverage with one more node that serves `span`."""
        speed = self.trusted(tokens_per_s)
        speeds, holders, serving = list(self.speeds), list(self.holders), list(self.serving)
        for block in span.blocks():
            speeds[block] += speed
            holders[block] += 1
            serving[block] += 1
        return Coverage(speeds, holders, serving, self.cap, self.usual)

    def worth(self, extra: float = 0.0) -> list[float]:
        """Value of each block's service with `extra` tokens/s added: 0 without a holder, near 0 with one (`THIN`)."""
        more = 1 if extra else 0
        return [
            (speed + extra) * (1.0 if holders + more > 1 else THIN)
            for speed, holders in zip(self.speeds, self.holders, strict=True)
        ]


def coverage_of(members: Iterable[Announcement], n_blocks: int, *own: float) -> Coverage:
    """Compute the coverage by the members; `own` tokens/s of this node count in the median only."""
    placed: list[tuple[int, int, float, bool]] = []
    speeds = [speed for speed in own if speed > 0]
    for member in members:
        span, state, speed = member.growing or member.span, member.state, member.decode_tokens_per_s
        if span is None or state not in COMING or span.start >= n_blocks:
            continue
        # A span that is still being loaded counts as held, but not as serving: others must not leave its blocks yet.
        placed.append((span.start, min(span.stop, n_blocks), speed, state in SERVES and member.growing is None))
        if speed > 0:
            speeds.append(speed)
    speeds.sort()
    usual = speeds[len(speeds) // 2] if speeds else UNMEASURED_TOKENS_PER_S
    modest = MEDIANS * usual
    work = 0.0
    for start, stop, speed, _ in placed:
        work += (stop - start) * (usual if speed <= 0 else modest if speed > modest else speed)
    return _sum_up(placed, n_blocks, max(modest, LEVEL_SHARE * work / n_blocks), usual)


def _sum_up(placed: Iterable[tuple[int, int, float, bool]], n_blocks: int, cap: float, usual: float) -> Coverage:
    """Sum up (start, stop, tokens/s, serves) by prefix sums, so that the cost does not depend on the spans' lengths."""
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
    # Prefix sums leave rounding errors where a block has no holder.
    offered = [speed if count else 0.0 for speed, count in zip(accumulate(speeds), held, strict=False)]
    return Coverage(offered, held, list(accumulate(serving))[:n_blocks], cap, usual)

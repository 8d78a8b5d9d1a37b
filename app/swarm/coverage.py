"""Coverage of each block of a model, summed over the members' announcements. Pure.

A single member's claimed speed counts only up to a cap. `app.hosting.placement` decides from it what to host.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

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
_UNITS = 2**20  # of one token/s
_FASTEST_TOKENS_PER_S = 1e9  # that a claim can stand for in the sums; far beyond every cap
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


def coverage_of(members: Iterable[Announcement], n_blocks: int, own: float = 0.0) -> Coverage:
    """Compute the coverage by the members; `own` tokens/s of this node count in the median only."""
    return CoverageTally(n_blocks, members).coverage(own)


class _Place(NamedTuple):
    """One member's part of the coverage."""

    tokens_per_s: float  # 0: not measured yet
    start: int
    stop: int
    serves: bool


class CoverageTally:
    """Sums over announcements from which the coverage is computed; kept up to date, no sum over all is needed again.

    Sums are kept as the differences between a block and the one before, so that a member's span may be of any length,
    and in whole numbers, which give the same sums in any order.
    """

    def __init__(self, n_blocks: int, members: Iterable[Announcement] = ()) -> None:
        self._n_blocks = n_blocks
        self._units, self._unmeasured, self._holders, self._serving = ([0] * (n_blocks + 1) for _ in range(4))
        self._work = self._unmeasured_blocks = 0  # blocks x units of those measured, and blocks of the others
        self._measured: list[_Place] = []  # the slowest first
        for member in members:
            place = self._place(member)
            if place is not None:
                self._count(place, 1)
                if place.tokens_per_s:
                    self._measured.append(place)
        self._measured.sort()

    def add(self, member: Announcement) -> None:
        """Count a member."""
        place = self._place(member)
        if place is not None:
            self._count(place, 1)
            if place.tokens_per_s:
                insort(self._measured, place)

    def remove(self, member: Announcement) -> None:
        """Count a member no longer; it must have been added with the same announcement."""
        place = self._place(member)
        if place is not None:
            self._count(place, -1)
            if place.tokens_per_s:
                del self._measured[bisect_left(self._measured, place)]

    def coverage(self, own: float = 0.0) -> Coverage:
        """Compute the coverage; `own` tokens/s of this node count in the median only."""
        usual = self._median(own)
        modest = MEDIANS * usual
        # Blocks x tokens/s of all members, none of them faster than `modest`.
        work = self._work + self._unmeasured_blocks * _units(usual)
        work -= sum((place.stop - place.start) * _excess(place, modest) for place in self._faster(modest))
        cap = max(modest, LEVEL_SHARE * work / _UNITS / self._n_blocks)
        units = self._units.copy()
        if self._unmeasured_blocks:
            each = _units(usual)
            units = [known + each * unknown for known, unknown in zip(units, self._unmeasured, strict=True)]
        for place in self._faster(cap):
            units[place.start] -= _excess(place, cap)
            units[place.stop] += _excess(place, cap)
        speeds = [block / _UNITS for block in accumulate(units[:-1])]
        holders, serving = (list(accumulate(counts[:-1])) for counts in (self._holders, self._serving))
        return Coverage(speeds, holders, serving, cap, usual)

    def _place(self, member: Announcement) -> _Place | None:
        span, state = member.growing or member.span, member.state
        if span is None or state not in COMING or span.start >= self._n_blocks:
            return None
        # A span that is still being loaded counts as held, but not as serving: others must not leave its blocks yet.
        serves = state in SERVES and member.growing is None
        speed = min(max(member.decode_tokens_per_s, 0.0), _FASTEST_TOKENS_PER_S)
        return _Place(speed, span.start, min(span.stop, self._n_blocks), serves)

    def _count(self, place: _Place, sign: int) -> None:
        tokens_per_s, start, stop, serves = place
        if tokens_per_s:
            units = sign * _units(tokens_per_s)
            self._units[start] += units
            self._units[stop] -= units
            self._work += units * (stop - start)
        else:
            self._unmeasured[start] += sign
            self._unmeasured[stop] -= sign
            self._unmeasured_blocks += sign * (stop - start)
        self._holders[start] += sign
        self._holders[stop] -= sign
        if serves:
            self._serving[start] += sign
            self._serving[stop] -= sign

    def _median(self, own: float) -> float:
        measured, middle = self._measured, (len(self._measured) + (own > 0)) // 2
        if own > 0:
            place = bisect_left(measured, own, key=_speed_of)
            if place == middle:
                return own
            middle -= place < middle
        return measured[middle].tokens_per_s if measured else UNMEASURED_TOKENS_PER_S

    def _faster(self, tokens_per_s: float) -> Sequence[_Place]:
        return self._measured[bisect_right(self._measured, tokens_per_s, key=_speed_of) :]


_speed_of = itemgetter(0)


def _units(tokens_per_s: float) -> int:
    return round(_UNITS * tokens_per_s)


def _excess(place: _Place, cap: float) -> int:
    return _units(place.tokens_per_s) - _units(cap)

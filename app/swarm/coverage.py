"""Coverage of each block of a model, summed over the members' announcements. Pure.

Peer ids are free and addresses are not, so the members of one home (`app.serving.homes`) count together as one holder
of a block, and their claimed speeds only up to one cap. `app.hosting.placement` decides from it what to host.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import itemgetter
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from app.core.span import Span
from app.swarm.records import Announcement

# States whose span counts as served now, and as held: the latter will serve soon.
SERVES = frozenset({"serving"})
COMING = frozenset({"serving", "loading", "fetching", "joining"})

# A home's tokens/s count up to MEDIANS times the median, or LEVEL_SHARE of the tokens/s of an average block if that is
# more: one that claims more cannot make others abandon a region, and no block depends on one fast node.
MEDIANS = 4.0
LEVEL_SHARE = 0.25
UNMEASURED_TOKENS_PER_S = 1.0  # assumed if no member has measured its speed yet
_UNITS = 2**20  # of one token/s
_FASTEST_TOKENS_PER_S = 1e9  # that a claim can stand for in the sums; far beyond every cap
THIN = 1e-6  # factor on the speed of a block with a single holder, against one with two


@dataclass(frozen=True)
class Coverage:
    """For every block: the summed tokens/s of the homes that hold it, their number, and how many serve it already."""

    speeds: Sequence[float]
    holders: Sequence[int]
    serving: Sequence[int]
    cap: float = float("inf")  # tokens/s that one home counts for at most
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


def coverage_of(
    members: Iterable[Announcement], n_blocks: int, own: float = 0.0, homes: Mapping[str, str] = MappingProxyType({})
) -> Coverage:
    """Compute the coverage by the members; `own` tokens/s of this node count in the median only.

    `homes` has the home of each peer; a peer that is not in it is a home of its own.
    """
    return CoverageTally(n_blocks, members, homes).coverage(own)


class _Place(NamedTuple):
    """The part of the coverage that one member has, or one home over blocks that the same of its members hold."""

    tokens_per_s: float  # 0: not measured yet
    start: int
    stop: int
    serves: bool


class CoverageTally:
    """Sums over announcements from which the coverage is computed; kept up to date, no sum over all is needed again.

    Sums are kept as the differences between a block and the one before, so that a member's span may be of any length,
    and in whole numbers, which give the same sums in any order.
    """

    def __init__(
        self,
        n_blocks: int,
        members: Iterable[Announcement] = (),
        homes: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._n_blocks, self._homes = n_blocks, homes
        self._units, self._unmeasured, self._holders, self._serving = ([0] * (n_blocks + 1) for _ in range(4))
        self._work = self._unmeasured_blocks = 0  # blocks x units of those measured, and blocks of the others
        self._measured: list[_Place] = []  # the slowest first
        self._fastest: list[float] = []  # tokens/s of the fastest member of each home, the slowest first
        self._places: defaultdict[str, list[_Place]] = defaultdict(list)  # home -> its members
        for member in members:
            if (place := self._place(member)) is not None:
                self._places[self._home(member)].append(place)
        for places in self._places.values():
            self._count(places, 1)

    def add(self, member: Announcement) -> None:
        """Count a member."""
        self._change(member, list.append)

    def remove(self, member: Announcement) -> None:
        """Count a member no longer; it must have been added with the same announcement."""
        self._change(member, list.remove)

    def _change(self, member: Announcement, change: Callable[[list[_Place], _Place], None]) -> None:
        place = self._place(member)
        if place is not None:
            places = self._places[self._home(member)]
            self._count(places, -1)
            change(places, place)
            self._count(places, 1)

    def _home(self, member: Announcement) -> str:
        return self._homes.get(member.peer, member.peer)

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

    def _count(self, home: Sequence[_Place], sign: int) -> None:
        """Count the members of one home, or count them no longer (`sign` -1)."""
        change = insort if sign > 0 else _take
        for place in _together(home):
            tokens_per_s, start, stop, serves = place
            if tokens_per_s:
                units = sign * _units(tokens_per_s)
                self._units[start] += units
                self._units[stop] -= units
                self._work += units * (stop - start)
                change(self._measured, place)
            else:
                self._unmeasured[start] += sign
                self._unmeasured[stop] -= sign
                self._unmeasured_blocks += sign * (stop - start)
            self._holders[start] += sign
            self._holders[stop] -= sign
            if serves:
                self._serving[start] += sign
                self._serving[stop] -= sign
        fastest = max((place.tokens_per_s for place in home), default=0.0)
        if fastest:
            change(self._fastest, fastest)

    def _median(self, own: float) -> float:
        measured, middle = self._fastest, (len(self._fastest) + (own > 0)) // 2
        if own > 0:
            place = bisect_left(measured, own)
            if place == middle:
                return own
            middle -= place < middle
        return measured[middle] if measured else UNMEASURED_TOKENS_PER_S

    def _faster(self, tokens_per_s: float) -> Sequence[_Place]:
        return self._measured[bisect_right(self._measured, tokens_per_s, key=_speed_of) :]


_speed_of = itemgetter(0)
_Item = TypeVar("_Item", float, _Place)


def _take(found: list[_Item], item: _Item) -> None:
    """Remove an item from a sorted list that has it."""
    del found[bisect_left(found, item)]


def _together(home: Sequence[_Place]) -> Sequence[_Place]:
    """Return the places of one home's members as places that do not overlap, with the sums of their tokens/s."""
    if len(home) < 2:
        return home
    changes: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0, 0])  # block -> of units, holders, serving ones
    for place in home:
        for block, sign in ((place.start, 1), (place.stop, -1)):
            change = changes[block]
            change[0] += sign * _units(place.tokens_per_s)
            change[1] += sign
            change[2] += sign * place.serves
    blocks = sorted(changes)
    sums = accumulate(map(changes.__getitem__, blocks), lambda a, b: [x + y for x, y in zip(a, b, strict=True)])
    return [
        _Place(units / _UNITS, start, stop, serving > 0)
        for (start, stop), (units, holders, serving) in zip(pairwise(blocks), sums, strict=False)
        if holders
    ]


def _units(tokens_per_s: float) -> int:
    return round(_UNITS * tokens_per_s)


def _excess(place: _Place, cap: float) -> int:
    return _units(place.tokens_per_s) - _units(cap)

"""Who lied, from answers to the same tokens over different routes. Pure.

Answers that agree form a group. An explanation is a smallest set of peers such that all routes without them agree, and
all routes with them (strictly) say something else. Routes are tried until one explanation is left, or no other route
could tell those that are left apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from app.routing.route import Route
from app.swarm.records import Announcement

_MOST_LIARS = 2  # beyond it there are too many stories to tell apart


class Tolerance(NamedTuple):
    """How far two honest answers may lie apart."""

    relative: float  # mean length of the difference, over the length of the answer
    scale: float  # one answer as a multiple of the other, less 1


# Float32 hops differ by 1e-4 at most, whatever the batch. Int8 weights and 16-bit floats moved answers by 0.06 at most,
# and their length by less than 0.01; a wrong cache moves them by 0.6 and more.
EXACT = Tolerance(0.01, 0.004)
ROUGH = Tolerance(0.15, 0.025)


class Deviation(NamedTuple):
    """How far two answers lie apart; as in `Tolerance`."""

    relative: float
    scale: float

    def within(self, tolerance: Tolerance) -> bool:
        """Whether honest peers may differ so much; what is not a number never is."""
        return self.relative <= tolerance.relative and abs(self.scale) <= tolerance.scale


def precisions(route: Route, members: Iterable[Announcement]) -> tuple[str, ...]:
    """For each block of a route in which numbers it is computed, as its holder says."""
    said = {m.peer: f"{m.quantisation} {m.dtype}" for m in members}
    return tuple(said.get(hop.peer, "?") for hop in route for _ in hop.span.blocks())


def tolerance(one: Sequence[str], other: Sequence[str]) -> Tolerance:
    """What may lie between answers computed in these precisions: float32 adds nothing, rounding must be the same."""
    exact = one == other and all(precision.endswith(" f32") for precision in one)
    return EXACT if exact else ROUGH


@dataclass(frozen=True)
class Observation:
    """An answer: who took part, and the group of answers that it agrees with."""

    peers: frozenset[str]
    group: int


Explanation = frozenset[str]


def explanations(seen: Sequence[Observation], not_accused: Collection[str]) -> tuple[list[Explanation], bool]:
    """The smallest sets of liars that explain all answers, and whether they then lied every time."""
    peers = sorted(frozenset[str]().union(*(one.peers for one in seen)) - set(not_accused))
    for size in range(1, _MOST_LIARS + 1):
        for always in (True, False):
            found = [frozenset(liars) for liars in combinations(peers, size) if _explains(liars, seen, always)]
            if found:
                return found, always
    return [], False


def _explains(liars: Collection[str], seen: Sequence[Observation], always: bool) -> bool:
    clean = {one.group for one in seen if one.peers.isdisjoint(liars)}
    if len(clean) > 1:
        return False
    return not (always and any(one.group in clean for one in seen if not one.peers.isdisjoint(liars)))


def undecided(peers: Collection[str], stories: Sequence[Explanation], seen: Sequence[Observation]) -> int:
    """How many explanations would be left at worst after an answer in which these peers take part."""
    if any(one.peers == set(peers) for one in seen):
        return len(stories)  # the same again
    expected: Counter[object] = Counter()
    for liars in stories:
        if liars.isdisjoint(peers):
            clean = next((one.group for one in seen if one.peers.isdisjoint(liars)), None)
            expected["another" if clean is None else clean] += 1
        else:
            expected["a lie"] += 1
    return max(expected.values(), default=0)


def blame(stories: Sequence[Explanation]) -> Mapping[str, float]:
    """How likely each peer is to have lied, all explanations being equal."""
    counts = Counter(peer for liars in stories for peer in liars)
    return {peer: count / len(stories) for peer, count in counts.items()}

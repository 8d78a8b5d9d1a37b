"""Finds the peers that returned wrong results, from answers to the same tokens over different routes. Pure.

Answers that agree form a group. An explanation is a smallest set of peers such that all routes without them agree, and
all routes with them (strictly) give another answer. Routes are tried until one explanation is left, or no other route
could tell the remaining ones apart. The one that is left must be confirmed by a second wrong answer: a liar that
recognises audits and answers well there would otherwise have another peer of its route convicted by elimination.

Answers that are alike by `COARSE` alone are unclear: they may agree or not. They contradict no explanation, confirm
none, and clear nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain, combinations, combinations_with_replacement, product
from math import prod
from operator import or_
from typing import NamedTuple

from app.core.span import Span
from app.routing.route import Route
from app.session.frame import INT8
from app.swarm.records import Announcement, is_coarse

_OVER = f" over {INT8}"  # at the end of a block's precision: rows were rounded on the way
_IN_CACHE = " int8 cache"  # and before that: keys and values were rounded in the cache
_ROUNDS_ROWS = frozenset({"stored f32", "int4 f32"})  # formats whose products round a hop's rows to 8 bits on a CPU
_NUMBERS = {"stored f32": "none f32"}  # formats with the same weights
_MOST_LIARS = 2  # with more there are too many explanations to tell apart
EARLIER_WEIGHT = 2.0  # how much more likely one whole earlier doubt makes a peer's guilt, against one without


class Tolerance(NamedTuple):
    """Largest difference between two honest answers; `COARSE` is so large that less shows nothing."""

    relative: float  # mean length of the difference, over the length of the answer
    scale: float  # one answer as a multiple of the other, less 1


# Float32 hops differ by 1e-4 at most, whatever the batch; with weights in a grid, whose products round single rows but
# not long prompts, by 0.03, and in length by 0.0012 (30 blocks in 4 bits); with a cache in 8 bits by 0.014, single
# tokens by 0.034, and in length by 0.005 (30 blocks, against another form or in other chunks). Floats of 16 bits moved
# answers by 0.034 at most, and their length by 0.009; int8 weights by 0.074 and 0.019 (starter model on an H200, 100
# texts, three answers each); a wrong cache moves them by 0.6 and more. Float32 hops with rows of int8 on every link
# differ by 0.03 at most, and in length by 0.003. A hop that sends 1.05 times its results moves the length by 0.05 if it
# has the last blocks, else by 0.011 to 0.017: among other formats than float32 only the former is found. Weights
# rounded to 4 bits moved the answers of a small model by 0.3, of one with random weights by 0.46, and their length by
# 0.03: beside them an audit finds only results that have little to do with the right ones.
EXACT = Tolerance(0.01, 0.004)
ROUNDED = Tolerance(0.1, 0.01)
ROUGH = Tolerance(0.15, 0.025)
COARSE = Tolerance(0.7, 0.25)


class Deviation(NamedTuple):
    """Difference between two answers; fields as in `Tolerance`."""

    relative: float
    scale: float

    def within(self, tolerance: Tolerance) -> bool:
        """True if honest peers may differ by this much; NaN is never within."""
        return self.relative <= tolerance.relative and abs(self.scale) <= tolerance.scale


def precisions(
    routes: Sequence[Route], announced: Iterable[tuple[str, str]], *, rounded: bool = False
) -> tuple[str, ...]:
    """For each block, the number format of the peers that computed it on any of these routes.

    `announced` has peers with their formats when they were chosen; what they say later could be made to fit a lie.
    Several formats are joined, and "?" stands for a peer that was not known: such blocks are never compared as exact.
    Neither are those of sessions whose rows were `rounded` on the way.
    """
    by_peer: dict[str, set[str]] = {}
    for peer, number_format in announced:
        by_peer.setdefault(peer, set()).add(number_format)
    formats: dict[int, set[str]] = {}
    for route in routes:
        for hop in route:
            for block in hop.span.blocks():
                formats.setdefault(block, set()).update(by_peer.get(hop.peer, {"?"}))
    over = _OVER if rounded else ""
    return tuple(" or ".join(sorted(formats[block])) + over for block in sorted(formats))


def computes_alike(member: Announcement, precisions: Sequence[str]) -> bool:
    """True if a member computes the blocks that it hosts in the formats in which they were computed."""
    part = None if member.span is None else member.span.overlap(Span(0, len(precisions)))
    if part is None:
        return True
    return {*precisions[part.start : part.stop]} <= {member.number_format, member.number_format + _OVER}


def tolerance(one: Sequence[str], other: Sequence[str]) -> Tolerance:
    """The tolerance between answers of these precisions: exact only if every block was float32 in both, alike.

    It is coarse if only one of them has some block's weights rounded to 4 bits. Weights in the grid of their file are
    the very numbers of the file, so they are compared with these, as rounded; so is what a cache in 8 bits gives, with
    what another gives.
    """
    computed_one, computed_other = (
        [text.removesuffix(_OVER).removesuffix(_IN_CACHE) for text in precisions] for precisions in (one, other)
    )
    is_float = all(precision.endswith(" f32") and " or " not in precision for precision in computed_one)
    numbers_one, numbers_other = (
        [_NUMBERS.get(text, text) for text in each] for each in (computed_one, computed_other)
    )
    unlike = [pair for pair in zip(numbers_one, numbers_other, strict=True) if pair[0] != pair[1]]
    if any(is_coarse(text) for pair in unlike for text in pair):
        return COARSE
    if not is_float or numbers_one != numbers_other:
        return ROUGH
    is_exact = (*one, *other) == (*computed_one, *computed_other) and not _ROUNDS_ROWS & {*one, *other}
    return EXACT if is_exact else ROUNDED


@dataclass(frozen=True)
class Observation:
    """One answer: the peers that took part, and the group of answers that it agrees with."""

    peers: frozenset[str]
    group: int
    unclear: frozenset[int] = frozenset()  # other groups that it may agree with: the formats differ too much to tell
    links: frozenset[frozenset[str]] = frozenset()  # pairs of these of which one had its rows from the other


Explanation = frozenset[str]


def minimal_liar_sets(seen: Sequence[Observation], not_accused: Collection[str]) -> tuple[list[Explanation], bool]:
    """Return the smallest sets of liars that explain all answers, and whether they then lied every time."""
    evidence = _Evidence(seen, not_accused)
    for size in range(1, _MOST_LIARS + 1):
        for always in (True, False):
            found = evidence.explanations(size, always=always)
            if found:
                return found, always
    return [], False


def is_confirmed(liars: Explanation, seen: Sequence[Observation]) -> bool:
    """True if at least two answers with one of these peers are wrong: a single answer is not enough to accuse.

    Only for sets that explain the answers if their members lied every time.
    """
    return wrong_answers(liars, seen) >= 2


def wrong_answers(liars: Explanation, seen: Sequence[Observation]) -> int:
    """Number of answers with one of these peers that disagree with one without them, if there are any without."""
    return len(_wrong(liars, seen))


def _wrong(liars: Explanation, seen: Sequence[Observation]) -> list[Observation]:
    unclear, clean = _unclear_pairs(seen), {one.group for one in seen if one.peers.isdisjoint(liars)}
    with_them = [one for one in seen if not one.peers.isdisjoint(liars)]
    differs = [one for one in with_them if one.group not in clean]
    return [one for one in differs if not clean or any({one.group, other} not in unclear for other in clean)]


def beside(
    liars: Explanation, seen: Sequence[Observation], not_accused: Collection[str], home_of: Callable[[str], str]
) -> dict[str, frozenset[str]]:
    """Return the homes that had a peer next to these in every wrong answer, each with these peers.

    Such a home may itself have sent wrong rows, to these alone, or wrong ones of what these sent: no answer tells.
    """
    found: list[dict[str, set[str]]] = []
    for one in _wrong(liars, seen):
        by_home: dict[str, set[str]] = {}
        for peer in {peer for link in one.links if link & liars for peer in link} - liars - set(not_accused):
            by_home.setdefault(home_of(peer), set()).add(peer)
        found.append(by_home)
    always = set.intersection(*(set(by_home) for by_home in found)) if found else set[str]()
    return {home: frozenset().union(*(by_home[home] for by_home in found)) for home in always}


def comparable(seen: Sequence[Observation]) -> list[Observation]:
    """Return the answers that agree or disagree with every other one."""
    unclear = frozenset[int]().union(*_unclear_pairs(seen))
    return [one for one in seen if one.group not in unclear]


def _unclear_pairs(seen: Sequence[Observation]) -> set[frozenset[int]]:
    """Return the pairs of groups that may be one."""
    return {frozenset((one.group, other)) for one in seen for other in one.unclear}


def occasional_liar_sets(seen: Sequence[Observation], not_accused: Collection[str]) -> list[Explanation]:
    """Return the smallest sets of liars that explain all answers if they may have lied only sometimes."""
    evidence = _Evidence(seen, not_accused)
    for size in range(1, _MOST_LIARS + 1):
        found = evidence.explanations(size, always=False)
        if found:
            return found
    return []


class _Evidence:
    """Who took part in which answers, as sets of bits: peers of the same answers are judged together.

    With long routes there are tens of thousands of pairs of peers, but few kinds of them.
    """

    def __init__(self, seen: Sequence[Observation], not_accused: Collection[str]) -> None:
        self._all, self._unclear = (1 << len(seen)) - 1, _unclear_pairs(seen)
        self._groups: dict[int, int] = {}  # group -> its answers
        answers: dict[str, int] = {}  # peer -> answers in which it took part
        for number, one in enumerate(seen):
            self._groups[one.group] = self._groups.get(one.group, 0) | 1 << number
            for peer in one.peers - set(not_accused):
                answers[peer] = answers.get(peer, 0) | 1 << number
        self._alike: dict[int, list[str]] = {}  # answers -> peers that took part in exactly these
        for peer in sorted(answers):
            self._alike.setdefault(answers[peer], []).append(peer)

    def explanations(self, size: int, *, always: bool) -> list[Explanation]:
        """Return all sets of so many peers that explain the answers."""
        found: list[Explanation] = []
        for kinds in combinations_with_replacement(self._alike, size):
            if self._explains(reduce(or_, kinds), always):
                times = Counter(kinds)
                chosen = product(*(combinations(self._alike[kind], count) for kind, count in times.items()))
                found += [frozenset(chain.from_iterable(liars)) for liars in chosen]
        return sorted(found, key=sorted)

    def _explains(self, involved: int, always: bool) -> bool:
        """True if no two answers without the liars disagree and, with `always`, no other one agrees with them."""
        clean = [group for group, answers in self._groups.items() if answers & ~involved & self._all]
        if any(frozenset(pair) not in self._unclear for pair in combinations(clean, 2)):
            return False
        return not (always and any(self._groups[group] & involved for group in clean))


def worst_case_remaining(peers: Collection[str], stories: Sequence[Explanation], seen: Sequence[Observation]) -> int:
    """Number of explanations left, at worst, after one more answer in which these peers take part."""
    if any(one.peers == set(peers) for one in seen):
        return len(stories)  # this answer is known already
    expected: Counter[object] = Counter()
    for liars in stories:
        if liars.isdisjoint(peers):
            clean = next((one.group for one in seen if one.peers.isdisjoint(liars)), None)
            expected["another" if clean is None else clean] += 1
        else:
            expected["a lie"] += 1
    return max(expected.values(), default=0)


def blame_of_homes(suspects: Sequence[Explanation], doubt: Callable[[str], float]) -> Mapping[str, float]:
    """Share of each peer where one of these homes lied, whichever; a home's share is divided among its peers."""
    weights = [1 + EARLIER_WEIGHT * max(map(doubt, peers)) for peers in suspects]
    return {
        peer: weight / sum(weights) / len(peers)
        for peers, weight in zip(suspects, weights, strict=True)
        for peer in peers
    }


def blame(stories: Sequence[Explanation], doubt: Callable[[str], float] = lambda peer: 0.0) -> Mapping[str, float]:
    """Probability that each peer lied, if explanations are as likely as the earlier doubts about their peers say.

    Without earlier doubts all are equally likely.
    """
    weights = [prod(1 + EARLIER_WEIGHT * doubt(peer) for peer in liars) for liars in stories]
    shares: Counter[str] = Counter()
    for liars, weight in zip(stories, weights, strict=True):
        for peer in liars:
            shares[peer] += weight / sum(weights)  # type: ignore[assignment]
    return dict(shares)

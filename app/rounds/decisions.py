"""Decisions of a round, as pure functions: who leads, how long others are waited for, whose word weighs how much."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from types import MappingProxyType
from typing import NamedTuple

LEAST_AGREEMENT = 0.2  # of the usual agreement of the others, below which a change is doubted
# Besides, a doubted change agrees by so many median deviations less than is usual. Where a model has little left to
# learn, directions differ by chance: of 59 honest islands, one in six agreed by less than that fifth in every round.
AGREEMENT_DEVIATIONS = 4.0
NORM_FACTOR = 5.0  # a change is doubted if its norm is so many times the median, or a fraction of it
NORM_PER_STEPS = 2.0  # or so many times the median of all norms by their steps, if that is more
LEAST_LIKENESS = 0.99  # cosine with the last merged change, from which on a change may be a replay of it
MOST_LIKENESS = 0.98  # of the others; beyond it a replay cannot be told from an honest change
REPLAY_FACTOR = 5.0  # a replay is so many times nearer to the last merged change than that of any other member
# Slower links, each way, are not waited for in an exchange: 1 Mbit/s, for those with 2 up that others use too.
SLOWEST_BYTES_PER_S = 125e3
REQUEST_S = 2.0  # that the leaves of one request take, at the speed of their link
UNMEASURED_BYTES_PER_S = 250e3  # speed of a link before it was measured, which soon happens
SLOWER = 3.0  # a link may be so many times slower than it was, because others use it too
SPARE_S = 1.0  # of a request, besides the other's wait and the bytes
MOST_REST = 16  # rounds in which a member that failed again and again is not expected
KEPT_RESTS = 64  # rounds after which the failures of one that did not come back are forgotten
DOUBTED_ROUNDS = 2  # in a row, after which a member is left out
MANY = 8  # members, above which it takes a round more: with more of them, more are odd by chance
UTILISATION = 0.93  # the share of the time that islands are to make steps, so that it stays above 0.9 for all of them
_CODEC_BYTES = {"f32": 4.0, "int8": 1.0, "int4": 0.5}  # a number, from the most to the fewest
# A round may need so many times the fewest steps for its overhead, before the next smaller format is taken. int4 costs
# a little loss, and rounds of many more steps cost more: 1.019 to 1.026 and 1.032 to 1.039 times the loss of short
# rounds, where a link became ten times slower.
_CODEC_LONGER = {"f32": 1.0, "int8": 2.0, "int4": float("inf")}
PAST_UNITS = 1000  # a cosine of one in a result's `past`
_NO_STEPS: Mapping[str, int] = MappingProxyType({})
MOST_GROWTH, MOST_SHRINKING = 2.0, 1.25  # factors by which the number of steps changes from round to round, at most


def leading_order(job: bytes, number: int, peers: Iterable[str]) -> list[str]:
    """Return peers in the order in which they lead a round: by a hash, so that nobody leads more often by choice."""
    return sorted(set(peers), key=lambda peer: hashlib.sha256(job + number.to_bytes(8, "big") + peer.encode()).digest())


def grace_s(lags_s: Sequence[float], *, least_s: float, most_s: float) -> float:
    """Return how long late members are waited for: the median of past lags and three median deviations, in bounds."""
    if not lags_s:
        return most_s
    middle = median(lags_s)
    return min(most_s, max(least_s, middle + 3 * median(abs(lag - middle) for lag in lags_s)))


def quorum(expected: int) -> int:
    """Return how many members a round needs: more than half of those expected, all of two.

    So no two rounds of a quorum are made by different members.
    """
    return min(expected, max(2, expected // 2 + 1))


def merge_weights(tokens: Mapping[str, int]) -> dict[str, float]:
    """Return the weight of each member's change: its claimed tokens, at most twice the median claim."""
    most = 2 * median(tokens.values())
    return {peer: float(min(count, most)) for peer, count in tokens.items()}


def share_ranges(leaves: int, members: int) -> list[range]:
    """Return the leaves that each member merges: contiguous, of sizes that differ by one at most."""
    bounds = [leaves * index // members for index in range(members + 1)]
    return [range(first, stop) for first, stop in pairwise(bounds)]


def taken_from(merger: str, me: str, near: Collection[str], seed: bytes) -> str:
    """Return from whom a member takes the share that another one merged: from that one, or from a near one that has it.

    `near` are members on the same local network. Of them and itself, one is drawn for each far merger, which takes the
    share over the slow link for all. Where members do not agree on who is near, they still never wait for each other in
    a circle: the one drawn comes before whoever waits for it in an order that all have.
    """
    drawn = min({me, *near}, key=lambda peer: hashlib.sha256(seed + f"{merger}/{peer}".encode()).digest())
    return merger if merger in near or drawn == me else drawn


def to_leave_out(
    members: Sequence[str],
    accusations: Mapping[str, Iterable[str]],
    roots: Mapping[str, bytes],
    circles: Mapping[str, Iterable[Collection[str]]] | None = None,
    *,
    standings: Mapping[str, float] | None = None,
    repeated: Collection[tuple[str, str]] = (),
) -> set[str]:
    """Return the members without whom a failed exchange is repeated; `accusations` are accuser -> accused.

    `circles` are groups of others with whom a member exchanges, which see it fail in one stage; without them, it is all
    others. One who accuses more than half of a circle, and at least two, is taken to be the one at fault. Nobody
    can tell whether the few of a circle who accuse somebody are right. So accuser and accused both go, and a false
    accusation gains nothing, unless one of them has less than half of the other's standing and goes alone. Who accuses
    the same member as before (`repeated`) goes with it: else it could keep a newcomer out for ever. Without accusations
    it is whoever ended with another root than most, where no root (empty) is one as well.
    """
    known = {
        accuser: {one for one in accused if one in members}
        for accuser, accused in accusations.items()
        if accuser in members
    }

    def is_most(some: set[str], peer: str) -> bool:
        for circle in [{*members} - {peer}] if circles is None else circles[peer]:
            found = len(some & {peer, *circle})
            if 2 * found > len(circle) and found >= min(2, len(members) - 1):
                return True
        return False

    faulty = {accuser for accuser, accused in known.items() if len(accused) >= 2 and is_most(accused, accuser)}
    accusers: dict[str, set[str]] = {}
    for accuser in known.keys() - faulty:
        for one in known[accuser] - faulty:
            accusers.setdefault(one, set()).add(accuser)
    found = set(faulty)
    for one, who in accusers.items():
        if is_most(who, one):
            found.add(one)
        else:
            found.update(*(_at_fault(accuser, one, standings or {}, repeated) for accuser in who))
    if found or len(set(roots.values())) < 2:
        return found
    counts = Counter(roots.values())
    usual = max(counts, key=lambda root: (counts[root], bool(root), root))
    return {peer for peer in members if roots.get(peer) != usual}


def _at_fault(
    accuser: str, accused: str, standings: Mapping[str, float], repeated: Collection[tuple[str, str]]
) -> set[str]:
    """Return who of two goes, one of whom accuses the other."""
    ours, theirs = standings.get(accuser, 0.0), standings.get(accused, 0.0)
    if 2 * ours < theirs:
        return {accuser}
    return {accused} if 2 * theirs < ours and (accuser, accused) not in repeated else {accuser, accused}


def standings_of(
    members: Iterable[str], counted: Sequence[Collection[str]], failed: Collection[Collection[str]]
) -> dict[str, float]:
    """Return how much members are to be believed when exchanges fail: rounds that they made of late, per failure.

    `counted` has the members that made each of the last rounds, `failed` those that others left out of exchanges.
    """
    return {peer: sum(peer in one for one in counted) / (1 + sum(peer in one for one in failed)) for peer in members}


def exchange_limit_s(change_bytes: int, steps_s: float, *, least_s: float) -> float:
    """Return how long an exchange of changes of so many bytes may take, after steps that took `steps_s`.

    A member sends and takes up to twice a change. But one that delays an exchange costs the others no more than
    `least_s` and as long again as the steps took.
    """
    return least_s + min(2 * change_bytes / SLOWEST_BYTES_PER_S, steps_s)


def request_leaves(leaf_bytes: int, bytes_per_s: float | None, most: int) -> int:
    """Return how many leaves to ask for at once: as many as come within about `REQUEST_S`, so that few are lost."""
    return max(1, min(most, int((bytes_per_s or UNMEASURED_BYTES_PER_S) * REQUEST_S / leaf_bytes)))


def request_timeout_s(size_bytes: int, bytes_per_s: float | None, *, wait_s: float, lost: int, left_s: float) -> float:
    """Return how long to wait for an answer of so many bytes, for which the other waits up to `wait_s` itself.

    It doubles with each answer that did not come, for a link that became slow. An answer that is lost costs at most a
    quarter of the time left for the exchange, so that two of them leave more than half of it.
    """
    usual_s = wait_s + SPARE_S + SLOWER * size_bytes / (bytes_per_s or UNMEASURED_BYTES_PER_S)
    return max(0.1, min(usual_s * 2.0**lost, max(left_s / 4, wait_s + SPARE_S), left_s))


class Rest(NamedTuple):
    """A member that failed in exchanges which others finished."""

    failures: int  # in a row
    until: int  # the round in which it is expected again


def rests_after(
    rests: Mapping[str, Rest], number: int, *, failed: Iterable[str], counted: Iterable[str]
) -> dict[str, Rest]:
    """Return who rests after a round in which some failed in an exchange, and others were counted.

    The first failure costs nothing; then each one in a row doubles the rest. Half of it is drawn, so that of two who
    fail only with each other one comes back before the other, and is counted without it.
    """
    kept = {peer: one for peer, one in rests.items() if one.until + KEPT_RESTS > number}
    for peer in failed:
        failures = kept[peer].failures + 1 if peer in kept else 1
        half = min(MOST_REST, 2 ** (failures - 1)) // 2
        drawn = hashlib.sha256(number.to_bytes(8, "big") + peer.encode()).digest()
        rounds = half + 1 + int.from_bytes(drawn[:8], "big") % half if half else 0
        kept[peer] = Rest(failures, number + 1 + rounds)
    return {peer: one for peer, one in kept.items() if peer not in set(counted)}


def resting(rests: Mapping[str, Rest], number: int) -> set[str]:
    """Return the members that are not expected in a round."""
    return {peer for peer, one in rests.items() if one.until > number}


class Missed(NamedTuple):
    """A member that was there and did not arrive in rounds that others made."""

    rounds: int  # in a row
    last: int  # the last of them


def missed_after(
    missed: Mapping[str, Missed], number: int, *, absent: Iterable[str], counted: Iterable[str]
) -> dict[str, Missed]:
    """Return who has missed rounds after one in which some were absent, and others were counted."""
    kept = {peer: one for peer, one in missed.items() if one.last + KEPT_RESTS > number}
    kept |= {peer: Missed(kept[peer].rounds + 1 if peer in kept else 1, number) for peer in absent}
    return {peer: one for peer, one in kept.items() if peer not in set(counted)}


def in_line(peers: Iterable[str], *, recent: Collection[str], missed: Mapping[str, Missed], lot: bytes) -> list[str]:
    """Return peers in the order in which they get the free places of the next round.

    Those that took part in one of the last rounds come first, then newcomers, and last whoever missed more than one
    round in a row: that one has a place only where nobody else wants it. The `lot` decides among equals; nobody knows
    it before the round is over.
    """

    def rank(peer: str) -> tuple[bool, bool, bytes]:
        is_doubtful = peer in missed and missed[peer].rounds > 1
        return is_doubtful, peer not in recent, hashlib.sha256(lot + peer.encode()).digest()

    return sorted(set(peers), key=rank)


class Measured(NamedTuple):
    """A member's change beside those of the others, over all its parts: norm, and cosine with their middle."""

    norm: float
    agreement: float


def measured(members: Iterable[str], reports: Sequence[Mapping[str, tuple[float, float]]]) -> dict[str, Measured]:
    """Join what the members that merged a share say of each other's change: the median over the shares."""
    found = {}
    for peer in members:
        if pairs := [report[peer] for report in reports if peer in report]:
            found[peer] = Measured(median(pair[0] for pair in pairs), median(pair[1] for pair in pairs))
    return found


def few_steps(steps: Mapping[str, int]) -> set[str]:
    """Return the members that made less than half of the usual steps: what they did shows little of where to go."""
    usual = median(steps.values())
    return {peer for peer, own in steps.items() if 2 * own < usual}


def doubted(figures: Mapping[str, Measured], few: Collection[str] = ()) -> dict[str, str]:
    """Return the members whose change is unlike those of the others, and why; with fewer than three, nobody."""
    return odd_directions(figures, few) | odd_norms(figures, few)


def odd_directions(figures: Mapping[str, Measured], few: Collection[str] = ()) -> dict[str, str]:
    """Return the members whose change points elsewhere than those of the others, and by how much.

    With fewer than three, nobody; and that of one with `few` steps, which weighs little, need not agree.
    """
    if len(figures) < 3:
        return {}
    usual = median(one.agreement for one in figures.values())
    spread = median(abs(one.agreement - usual) for one in figures.values())
    least = min(LEAST_AGREEMENT * usual, usual - AGREEMENT_DEVIATIONS * spread)
    return {
        peer: f"its change agrees by {one.agreement:.2f} with the others, usual is {usual:.2f}"
        for peer, one in figures.items()
        if peer not in few and usual > 0 and one.agreement < least
    }


def odd_norms(
    figures: Mapping[str, Measured], few: Collection[str] = (), steps: Mapping[str, int] = _NO_STEPS
) -> dict[str, str]:
    """Return the members whose change is far longer than those of the others, or far shorter, and by how much.

    With fewer than three, nobody. That of one with `few` steps may be short, and that of one with more steps than is
    usual as much longer: a fast card makes all of them in a round in which slow ones stop after a few.
    """
    if len(figures) < 3:
        return {}
    usual = median(one.norm for one in figures.values())
    # Of one median, not of those of norms and steps: a liar would be among the long in one and the short in the other.
    per_step = median(one.norm / max(steps.get(peer, 1), 1) for peer, one in figures.items())
    most = {peer: max(NORM_FACTOR * usual, NORM_PER_STEPS * steps.get(peer, 1) * per_step) for peer in figures}
    return {
        peer: f"its change has the norm {one.norm:.3g}, the median is {usual:.3g}"
        for peer, one in figures.items()
        if not (0 if peer in few else usual / NORM_FACTOR) <= one.norm <= most[peer]
    }


def first_to_commit(changes: Mapping[str, bytes]) -> list[str]:
    """Return the members, in the given order, without those that commit to a change which one before them has.

    Whoever hears a commitment can repeat it at once, and one that leads can have the change itself in several attempts.
    """
    first: dict[bytes, str] = {}
    for peer, change in changes.items():
        first.setdefault(change, peer)
    return list(first.values())


def copied(changes: Mapping[str, bytes]) -> dict[str, str]:
    """Return the members that committed to the same change as another one, and why that is doubted; if all did, nobody.

    Islands read different text, and no honest member takes part in a list in which two commit to the same: those who
    do work together, so that its weight is doubled.
    """
    counts = Counter(changes.values())
    found = {peer: "another member sent the same change" for peer, change in changes.items() if counts[change] > 1}
    return found if len(found) < len(changes) else {}


def past_likeness(
    members: Sequence[str], reports: Sequence[Mapping[str, object]], pasts: Sequence[Sequence[int]]
) -> dict[str, float]:
    """Join what members say of how like each change is to that merged in the last round; nothing if too few know that.

    It is the median over the shares, of more than half of the members that report on a share at all.
    """
    told = [past for report, past in zip(reports, pasts, strict=True) if report]
    known = [past for past in told if len(past) == len(members)]
    if 2 * len(known) <= len(told):
        return {}
    return {peer: median(past[at] for past in known) / PAST_UNITS for at, peer in enumerate(members)}


def replayed(likeness: Mapping[str, float]) -> dict[str, str]:
    """Return the members that sent the last round's merged change, or nearly, and why; with fewer than three, nobody.

    While a model learns something simple, honest changes of two rounds are alike as well, but those of several members:
    one is doubted only if no other comes near. Two who both send the merged change are found as copies of each other.
    """
    if len(likeness) < 3:
        return {}
    why = {}
    for peer, one in likeness.items():
        next_one = max(other for name, other in likeness.items() if name != peer)
        if one >= LEAST_LIKENESS and next_one <= MOST_LIKENESS and REPLAY_FACTOR * (1 - one) <= 1 - next_one:
            why[peer] = f"its change is like the merged one of the last round by {one:.3f}, the next by {next_one:.3f}"
    return why


def left_out_after(history: Sequence[Iterable[str]], members: int = 0) -> set[str]:
    """Return the members that were doubted in each of the last rounds of so many; the newest round comes last."""
    rounds = DOUBTED_ROUNDS + (members > MANY)
    recent = [set(peers) for peers in history[-rounds:]]
    return set.intersection(*recent) if len(recent) == rounds else set()


def next_codec(codec: str, step_s: float, overhead_s: float, *, least: int, known: Sequence[str]) -> str:
    """Return the number format of the next round, of those that the job allows.

    It is the next smaller one if rounds would need too many steps to bear the overhead with this one: so many that too
    little time is left to steps otherwise (`_CODEC_LONGER`). It is the next larger one if that would need few enough.
    """
    formats = [one for one in _CODEC_BYTES if one in known]
    if codec not in formats or step_s <= 0:
        return codec if codec in formats else known[0]
    at = formats.index(codec)
    bearable_s = least * step_s * (1 - UTILISATION) / UTILISATION
    if overhead_s > _CODEC_LONGER[codec] * bearable_s:
        return formats[min(at + 1, len(formats) - 1)]
    larger = formats[max(at - 1, 0)]
    larger_s = overhead_s * _CODEC_BYTES[larger] / _CODEC_BYTES[codec]
    return larger if larger_s <= _CODEC_LONGER[larger] * bearable_s else codec


def lasting_overhead_s(here_s: float, past_s: Sequence[float]) -> float:
    """Return what a round costs besides its steps, from this round's overhead and those of the last rounds.

    Past rounds count but for the longest of them, which may have had a moment in which machines were frozen.
    """
    return max([here_s, *sorted(past_s)[:-1]])


def next_every(every: int, step_s: float, overhead_s: float, *, least: int, most: int) -> int:
    """Return the steps of the next round: as few as keep its overhead at a small share of the time.

    They change gradually, and sooner to more than to fewer: a link that became slow costs time in every round.
    """
    if step_s <= 0:
        return min(max(every, least), most)
    wanted = overhead_s / step_s * UTILISATION / (1 - UTILISATION)
    bounded = min(max(wanted, every / MOST_SHRINKING), every * MOST_GROWTH)
    return min(max(round(bounded), least), most)

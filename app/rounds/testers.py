"""Whose change of a round is tested, by whom, and what follows from it. Pure.

The lot is drawn from the root of the state after the round: nobody knows it before all have committed to their changes.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean, median_low, stdev
from typing import NamedTuple

ROUNDS_A_TEST = 8  # one round in so many, in the mean, has a change tested that nobody doubts
TESTERS = 3  # of one change
MOST_TESTED = 2  # changes of one round
MOST_SEQUENCES = 16  # of what a member read, with which its change is tested
HARM_READ, HARM_UNSEEN = 1050, 1200  # thousandths of the loss before, above which a change does harm
# The same for unseen text if the change lowers the loss on what its author read: that comes from training, and the few
# unseen sequences of a small job alone were up to 1.2 times as bad with honest changes.
HARM_UNSEEN_TRAINED = 1500
# Thousandths of the loss before on what its author read, at most, that show a change to come from training: noise and
# zeros do not lower it.
TRAINED = 995
HARM_ROUNDS = 4  # in a row, of which two with harm leave a member out
LEAST_LOSS = 1.0  # by which a loss before is measured
# Standard errors, over the sequences of a text, by which a change has to do more harm than none and than the tester's
# own; for few sequences more, since they show little of how far they differ: with two it is six, with sixteen 2.3.
NOISE, NOISE_OF_FEW = 2.0, 4.0
RATIO_UNITS, MOST_RATIO = 1000, 10**6  # of a loss that is as before in a result's `tested`; of the worst
# Thousandths by which a gradient may be off: those of honest islands were off by 70 at most, with weights of 16 bits
# against 32; that of another text by about 1000.
WRONG_STEP = 500


class DrawnTest(NamedTuple):
    """A member whose change of the last round is tested, and by whom."""

    peer: str
    testers: tuple[str, ...]


def drawn_tests(root: bytes, members: Sequence[str], doubted: Collection[str]) -> tuple[DrawnTest, ...]:
    """Return the tests of a round's changes: of members that were doubted, and now and then of one more by lot.

    With fewer than three members there are none: the word of one tester is not enough to doubt another.
    """
    if len(members) < 3:
        return ()

    def lot(what: str, peer: str = "") -> bytes:
        return hashlib.sha256(root + f"{what}/{peer}".encode()).digest()

    tested = sorted({*doubted} & {*members}, key=lambda peer: lot("tested", peer))
    if int.from_bytes(lot("round")[:8], "big") % ROUNDS_A_TEST == 0:
        tested.append(min(members, key=lambda peer: lot("tested", peer)))
    return tuple(
        DrawnTest(one, tuple(sorted({*members} - {one}, key=lambda peer: lot(one, peer))[:TESTERS]))
        for one in list(dict.fromkeys(tested))[:MOST_TESTED]
    )


def drawn_steps(root: bytes, tester: str, steps: int, batch: int) -> list[tuple[int, int]]:
    """Return some of the sequences that a member read in a round, as steps and rows: others for every tester."""
    drawn = random.Random(root + tester.encode()).sample(range(steps * batch), min(MOST_SEQUENCES, steps * batch))
    return [divmod(one, batch) for one in sorted(drawn)]


def drawn_trace(root: bytes, peer: str, count: int) -> int:
    """Return which of the traces of a member's round is computed again, the same one by all its testers."""
    return int.from_bytes(hashlib.sha256(root + f"trace/{peer}".encode()).digest()[:8], "big") % count


def step_error(before: float, after: float, claimed: Sequence[float], found: Sequence[float]) -> int:
    """Return how far a claimed gradient is from the one found, by their sketches, in thousandths of the longer one.

    `before` and `after` are losses on the step's text of the weights before the round and before the step. Never 0,
    which says that nothing was computed. The worst is for weights that nobody trains with: without any gradient, or
    with a far larger loss than before the round, since a gradient is easily known where a model computes nothing.
    """
    lengths = [math.hypot(*one) for one in (claimed, found)]
    if not after <= 2 * before + 1 or not all(map(math.isfinite, lengths)) or not lengths[1]:
        return MOST_RATIO
    if len(claimed) != len(found):
        return MOST_RATIO
    return max(1, round(RATIO_UNITS * math.dist(claimed, found) / max(lengths)))


def loss_ratio(before: Sequence[float], after: Sequence[float], own: Sequence[float]) -> int:
    """Return what a change makes of the loss on a text, in thousandths of the one before, as a result names it.

    The losses are of each sequence: before, with the change, and with the tester's `own` change of the same round. Harm
    is only what is worse than both of these beyond the noise: where steps are large and few, the changes of all do harm
    at times, to one sequence more than to another. Less than that is 1000, and 0 says that nothing can be told. What a
    loss grows or shrinks by is measured by one nat at least: below that, chance alone makes large shares.
    """
    if len(before) < 2 or not all(map(math.isfinite, (*before, *own))):
        return 0
    if not all(map(math.isfinite, after)):
        return MOST_RATIO
    usual = fmean(before)
    more = fmean(after) - usual
    if more > 0:
        more = max(0.0, min(_surely_more(after, before), _surely_more(after, own)))
    return max(1, min(MOST_RATIO, round(RATIO_UNITS * (1 + more / max(usual, LEAST_LOSS)))))


def _surely_more(losses: Sequence[float], others: Sequence[float]) -> float:
    """Return by how much losses are larger than others on the same sequences, in the mean and less the noise."""
    differences = [loss - other for loss, other in zip(losses, others, strict=True)]
    count = len(differences)
    return fmean(differences) - (NOISE + NOISE_OF_FEW / (count - 1)) * stdev(differences) / math.sqrt(count)


def harmful(tests: Sequence[DrawnTest], told: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return the members whose change of the last round made the loss larger, and by how much, as testers say.

    `told` are the ratios of each tester: for each test that of the text which the member read, and that of the text to
    validate with; 0 is not measured. More than half of a test's testers have to say so, and at least two.
    """
    why = {}
    for peer, (read, unseen) in _ratios(tests, told).items():
        is_trained = read is not None and read < RATIO_UNITS
        most = HARM_UNSEEN_TRAINED if is_trained else HARM_UNSEEN
        for ratio, limit, text in ((read, HARM_READ, "text that it read"), (unseen, most, "unseen text")):
            if ratio is not None and ratio > limit:
                times = ratio / RATIO_UNITS
                why[peer] = f"its change of the last round makes the loss on {text} {times:.2f} times as large"
    return why


def trained(tests: Sequence[DrawnTest], told: Mapping[str, Sequence[int]]) -> set[str]:
    """Return the members whose change of the last round lowers the loss on what they read, as testers say."""
    return {peer for peer, (read, _) in _ratios(tests, told).items() if read is not None and read <= TRAINED}


def _ratios(tests: Sequence[DrawnTest], told: Mapping[str, Sequence[int]]) -> dict[str, tuple[int | None, int | None]]:
    """Return what testers agree on of each tested member: the ratios for the text that it read and for unseen text."""
    found = {}
    for at, test in enumerate(tests):
        pairs = [told[peer][2 * at : 2 * at + 2] for peer in test.testers if len(told.get(peer, ())) == 2 * len(tests)]
        read, unseen = (_agreed(test, [pair[side] for pair in pairs]) for side in (0, 1))
        found[test.peer] = read, unseen
    return found


def miscomputed(tests: Sequence[DrawnTest], told: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return the members that showed a step of the last round which their text does not give, as testers say.

    `told` is by how much each tester found the gradient of each test's step to be off; 0 is not computed. More than
    half of a test's testers have to say so, and at least two.
    """
    why = {}
    for at, test in enumerate(tests):
        error = _agreed(test, [told[peer][at] for peer in test.testers if len(told.get(peer, ())) == len(tests)])
        if error is not None and error > WRONG_STEP:
            share = f"off by {error / RATIO_UNITS:.2f} of its length" if error < MOST_RATIO else "made up"
            why[test.peer] = f"a step of its last round was computed again: its gradient is {share}"
    return why


def _agreed(test: DrawnTest, figures: Sequence[int]) -> int | None:
    """Return what a test's testers found, where 0 is nothing; None if too few found something.

    It is their median, of an even number the lower one, so that one tester alone cannot decide.
    """
    found = [figure for figure in figures if figure]
    return median_low(found) if len(found) >= 2 and 2 * len(found) > len(test.testers) else None

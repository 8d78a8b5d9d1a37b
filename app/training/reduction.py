"""Makes one sum of what the holders of some blocks have summed up, and finds who stands apart. Numbers only: no I/O.

The rule depends on how many holders have micro-batches in a step. One: its sums. Two: both added up. Three or more:
centred clipping, by which nobody moves the mean further than the median holder stands from it. Clipping alone lets one
liar of three do harm all the same, so those that stand apart are found here too; whether they lied is decided by
computing their micro-batches again (`app.training.audits`), never by the distance alone: micro-batches differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple, TypeAlias

import numpy
import numpy.typing

Numbers: TypeAlias = numpy.typing.NDArray[numpy.float32]
_Wide: TypeAlias = numpy.typing.NDArray[numpy.float64]

# Honest holders differ by rounding: 1e-4 in float32, a few hundredths in 16 bits or with int8 weights, and more where
# the gradients of micro-batches cancel each other. Who stays below this does no harm.
TOLERANCE = 0.2
APART = 3.0  # times the distance of the median holder
LARGE = 5.0  # times the length of the median holder's gradient, or as much less
_ROUNDS = 5


class HolderSums(NamedTuple):
    """The summed gradients of one holder for a run of blocks, and how many tokens they are of, which is not zero."""

    peer: str
    tokens: int
    sums: Numbers


def reduced(shares: Sequence[HolderSums], *, clipped: bool = True) -> Numbers:
    """Return the sum over all micro-batches; with three or more holders by centred clipping unless that is off.

    The order of additions is that of the peer ids, whatever the order of the shares.
    """
    shares = sorted(shares, key=lambda share: share.peer)
    if len(shares) < 3 or not clipped:
        total = shares[0].sums.copy()
        for share in shares[1:]:
            total += share.sums
        return total
    tokens = sum(share.tokens for share in shares)
    means = [_mean(share) for share in shares]
    centre: _Wide = numpy.median(numpy.stack(means), axis=0)
    for _ in range(_ROUNDS):
        distances = [_length(mean - centre) for mean in means]
        reach = median(distances)
        moved = numpy.zeros_like(centre)
        for share, mean, distance in zip(shares, means, distances, strict=True):
            moved += (share.tokens / tokens * min(1.0, reach / distance if distance else 1.0)) * (mean - centre)
        centre = centre + moved
    return (centre * tokens).astype(numpy.float32)


def standing_apart(shares: Sequence[HolderSums]) -> list[str]:
    """Return the holders whose gradients are far from the others', the farthest first.

    Of two that disagree in direction or length both stand apart, as nobody can say which does.
    """
    if len(shares) < 2:
        return []
    means = {share.peer: _mean(share) for share in shares}
    lengths = {peer: _length(mean) for peer, mean in means.items()}
    if len(shares) == 2:
        (one, other) = means
        longer, shorter = max(lengths.values()), min(lengths.values())
        agree = longer <= LARGE * shorter and _cosine(means[one], means[other]) > 0
        return [] if agree else sorted(means)
    centre = numpy.median(numpy.stack(list(means.values())), axis=0)
    # A mean over fewer tokens is further from the centre for that alone.
    usual_tokens = median(share.tokens for share in shares)
    distances = {
        share.peer: _length(means[share.peer] - centre) * math.sqrt(share.tokens / usual_tokens) for share in shares
    }
    scores = {}
    for peer in means:
        reach, usual = median(distances.values()), median(lengths.values())
        far = distances[peer] / reach / APART if reach else 0.0
        long = (
            max(lengths[peer] / usual, usual / lengths[peer] if lengths[peer] else math.inf) / LARGE if usual else 0.0
        )
        scores[peer] = max(far, long)
    return sorted((peer for peer in scores if scores[peer] > 1), key=lambda peer: (-scores[peer], peer))


def agreement(shares: Sequence[HolderSums]) -> Mapping[str, float]:
    """Return each holder's cosine with the sum of the others, -1 to 1; 0 where one of them is zero."""
    means = {share.peer: _mean(share) for share in shares}
    return {
        peer: _cosine(mean, sum((other for name, other in means.items() if name != peer), numpy.zeros_like(mean)))
        for peer, mean in means.items()
    }


def deviation(one: Numbers, other: Numbers) -> float:
    """Return the length of the difference over the larger length; 0 for two zeros, infinite if not finite."""
    first, second = one.astype(numpy.float64), other.astype(numpy.float64)
    if not (is_finite(one) and is_finite(other)):
        return math.inf
    longer = max(_length(first), _length(second))
    return _length(first - second) / longer if longer else 0.0


def squared_norm(sums: Numbers) -> float:
    """Return the squared norm, computed in float64."""
    return float(numpy.square(sums, dtype=numpy.float64).sum())


def from_bytes(data: bytes | bytearray | memoryview) -> Numbers:
    """Return the float32 numbers in some bytes."""
    return numpy.frombuffer(data, "<f4")


def is_finite(sums: Numbers) -> bool:
    """True if no number is NaN or infinite."""
    return bool(numpy.isfinite(sums).all())


def _mean(share: HolderSums) -> _Wide:
    return share.sums.astype(numpy.float64) / share.tokens


def _length(numbers: _Wide) -> float:
    # not by a product of vectors: BLAS would use all cores for it, which the device's thread needs
    return math.sqrt(float(numpy.square(numbers).sum()))


def _cosine(one: _Wide, other: _Wide) -> float:
    lengths = _length(one) * _length(other)
    return float((one * other).sum()) / lengths if lengths else 0.0

"""Training in rounds: islands take some steps on their own, then average what they learned. Pure arithmetic."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

_POINTS = 4000  # of the numerical integral; its error is below a hundredth for a thousand islands
SPREAD = 0.5  # of the logarithm of an island's time, until measured


def averaging_seconds(copies: int, size_bytes: float, bytes_per_s: float, away_s: float = 0.0) -> float:
    """Seconds to average `size_bytes` among copies, each over a connection with this narrower direction."""
    return 0.0 if copies < 2 else 2 * (copies - 1) / copies * size_bytes / bytes_per_s + 2 * away_s


@lru_cache(maxsize=1024)
def straggling(islands: int, quorum: int, spread: float = SPREAD) -> float:
    """Return how much longer than the mean island the `quorum`-th of them takes; their times are log-normal."""
    if spread == 0 or islands == 1:
        return 1.0
    assert 1 <= quorum <= islands
    normal = NormalDist()
    # The quorum-th of n uniform numbers has a beta distribution; the integral goes over its density.
    log_norm = math.lgamma(islands + 1) - math.lgamma(quorum) - math.lgamma(islands - quorum + 1)
    total = weight = 0.0
    for i in range(_POINTS):
        u = (i + 0.5) / _POINTS
        u = u * u * (3 - 2 * u)  # more points at both ends
        density = math.exp(log_norm + (quorum - 1) * math.log(u) + (islands - quorum) * math.log1p(-u))
        x = (i + 0.5) / _POINTS
        density *= 6 * x * (1 - x)
        total += density * math.exp(spread * normal.inv_cdf(u))
        weight += density
    return total / weight / math.exp(spread**2 / 2)


def round_seconds(
    every: int, step_s: float, exchange_s: float, *, hidden_s: float = 0.0, stretch: float = 1.0
) -> float:
    """Seconds of a round: `every` steps, stretched by waiting for slow islands, and the exchange that is not hidden."""
    return every * step_s * stretch + max(0.0, exchange_s - hidden_s)


def utilisation(computing_s: float, exchange_s: float) -> float:
    """Share of a round that is spent computing."""
    return computing_s / (computing_s + exchange_s)


def round_with(exchange_s: float, share: float) -> float:
    """Seconds that a round must last so that its exchange leaves this share of it for computing."""
    return exchange_s / (1 - share)


def steps_needed(step_s: float, exchange_s: float, share: float = 0.9) -> int:
    """Return how many steps a round needs so that at least this share of it is spent computing."""
    return max(1, math.ceil(share / (1 - share) * exchange_s / step_s - 1e-9))


def doubling_speedup(granularity: float) -> float:
    """Speed-up by twice as many machines; granularity is computing time over communicating time."""
    return (granularity + 1) / (granularity / 2 + 1)


def lost_share(failures_per_hour: float, snapshot_s: float, restore_s: float) -> float:
    """Share of the time, below 1, that failures cost: half a snapshot interval is computed again after restoring."""
    return min(0.99, failures_per_hour * (snapshot_s / 2 + restore_s) / 3600)

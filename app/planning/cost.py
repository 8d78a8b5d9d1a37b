"""Energy, money, and the odds of dishonest machines. Pure arithmetic."""

from __future__ import annotations

import math

JOULES_PER_KWH = 3.6e6
RENTED_FLOPS_PER_S = 989e12  # peak of the card whose hour `--rent` prices: an H100 SXM, by its data sheet
RENTED_SHARE = 0.4  # of its peak that training reaches


def energy_kwh(watts: float, seconds: float) -> float:
    """Energy of machines that take these watts in all."""
    return watts * seconds / JOULES_PER_KWH


def rented_cost(flops: float, hour_price: float) -> float:
    """Price of computing the same on rented cards."""
    return flops / (RENTED_FLOPS_PER_S * RENTED_SHARE) / 3600 * hour_price


def dishonest_majority(holders: int, dishonest_share: float) -> float:
    """Probability that more than half of the holders of a block are dishonest, if they are drawn at random."""
    return sum(
        math.comb(holders, k) * dishonest_share**k * (1 - dishonest_share) ** (holders - k)
        for k in range(holders // 2 + 1, holders + 1)
    )

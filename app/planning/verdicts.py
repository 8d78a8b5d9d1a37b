"""The limits of a task: each with the number that decides it, its threshold, and the setting that would change it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

STRAGGLERS = 1.5  # the slowest machine may take this multiple of the usual one
DISHONEST = 0.1  # share of dishonest machines that is assumed
POISONED = 0.05  # probability of a dishonest majority that is still accepted
UNLIKE = 0.03  # loss on one's own data that may be worse than the average model's
# A limit that fails comes before one that is merely the largest part, in this order.
_ORDER = ("memory", "bandwidth", "stragglers", "cost", "provenance", "unlike_data", "latency", "compute")
_CHANGES = {
    "memory": "more memory, more machines, a smaller model, or adapters instead of all weights",
    "bandwidth": "more steps between exchanges (--every), fewer bytes (--wire), or faster connections",
    "stragglers": "leave the slowest machine out, or give it fewer blocks",
    "unlike_data": "mix the data before it is shared out",
    "cost": "a lower price (--price), or rented machines (--rent)",
    "poisoning": "more holders of each part, or trusted peers only",
    "provenance": "name the source and licence of all data",
    "latency": "nearer machines, or fewer of them",
    "compute": "faster machines",
}


@dataclass(frozen=True)
class Verdict:
    """One limit; `value` is None where nothing was measured or asked, and `passed` with it."""

    name: str
    value: float | None
    threshold: float
    passed: bool | None
    change: str


def at_most(name: str, value: float | None, threshold: float) -> Verdict:
    """Return the verdict of a value that should not exceed its threshold."""
    return Verdict(name, value, threshold, None if value is None else value <= threshold, _CHANGES[name])


def at_least(name: str, value: float | None, threshold: float) -> Verdict:
    """Return the verdict of a value that should reach its threshold."""
    return Verdict(name, value, threshold, None if value is None else value >= threshold, _CHANGES[name])


def memory_verdict(held_blocks: int, blocks: int) -> Verdict:
    """Judge the blocks that all machines together can hold, as a share of the model's."""
    return at_least("memory", held_blocks / blocks, 1.0)


def straggler_verdict(seconds: Sequence[float]) -> Verdict:
    """Judge the slowest time against the middle one; of two, the middle one is the first in order."""
    ordered = sorted(seconds)
    middle = ordered[(len(ordered) - 1) // 2] if ordered else 0.0
    return at_most("stragglers", ordered[-1] / middle if middle > 0 else None, STRAGGLERS)


def cost_verdict(cost: float | None, rented: float | None) -> Verdict:
    """Judge the cost of the energy as a share of what renting the same computation costs."""
    return at_most("cost", None if cost is None or not rented else cost / rented, 1.0)


def trust_verdicts(holders: int) -> tuple[Verdict, ...]:
    """Judge dishonest machines by the holders of each part (0: this machine alone); data is not known beforehand."""
    odds = dishonest_majority(holders, DISHONEST) if holders else 0.0
    return at_most("poisoning", odds, POISONED), at_most("unlike_data", None, UNLIKE), at_least("provenance", None, 1.0)


def share_verdicts(parts: Mapping[str, float]) -> tuple[Verdict, Verdict]:
    """Judge the shares of a token's time that links, with the overhead of hops over them, and computing take."""
    waiting = parts["links"] + parts["hops"] if parts["links"] > 0 else 0.0
    share = waiting / sum(parts.values())
    return at_most("latency", share, 0.5), at_most("compute", 1 - share, 0.5)


def the_limit(verdicts: Sequence[Verdict]) -> str:
    """Return the name of the limit that rules: the first one that fails in their order, else computing.

    Poisoning only warns: the share of dishonest machines is assumed.
    """
    failed = {verdict.name for verdict in verdicts if verdict.passed is False and verdict.name != "poisoning"}
    return next((name for name in _ORDER if name in failed), "compute")


def dishonest_majority(holders: int, dishonest_share: float) -> float:
    """Probability that more than half of the holders of a block are dishonest, if they are drawn at random."""
    return sum(
        math.comb(holders, k) * dishonest_share**k * (1 - dishonest_share) ** (holders - k)
        for k in range(holders // 2 + 1, holders + 1)
    )

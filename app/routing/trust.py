"""How far this node trusts a peer: a number from what was seen of it, and words that say why. Pure; the clock is given.

What was seen is a list of `Outcome`s. Each fades with time, so that a peer that was mended, or wronged, comes back; and
agreement with others makes up for doubt, but not for a lie. Being slow, busy or gone is never taken for lying. Who lied
is worked out by `app.asker.audit`; that somebody below `DISTRUSTED` is not used at all is up to `app.asker.asker`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

HOUR_S = 3600.0
DISTRUSTED = 0.2  # below it, a peer is not used
KEPT = 24  # outcomes of one peer
REMEMBERED_PEERS = 1024

Verdict = Literal["agreed", "doubted", "lied", "failed"]

# After so long, an outcome counts half.
HALF_LIFE_S: dict[Verdict, float] = {
    "agreed": 24 * HOUR_S,
    "doubted": 12 * HOUR_S,
    "lied": 7 * 24 * HOUR_S,
    "failed": 0.25 * HOUR_S,
}
# What a whole, fresh outcome leaves of the score; and how low all of its kind together can bring it.
LEAVES: dict[Verdict, float] = {"doubted": 0.5, "lied": 0.05, "failed": 0.9}
FLOOR: dict[Verdict, float] = {"doubted": 0.25, "lied": 0.0, "failed": 0.5}
FORGIVES = 0.25  # of a doubt, by one agreement
PENALTY_S = 0.05  # a token, for a peer at half the full score


class Outcome(NamedTuple):
    """One thing that was seen of a peer."""

    at_s: float  # wall clock
    verdict: Verdict
    weight: float = 1.0  # a doubt that others share weighs less
    note: str = ""


@dataclass(frozen=True)
class Standing:
    """Where a peer stands with this node."""

    score: float = 1.0  # 0 to 1
    why: str = ""

    @property
    def trusted(self) -> bool:
        """Whether it may be used."""
        return self.score >= DISTRUSTED

    @property
    def penalty_s(self) -> float:
        """Seconds a token that a route may take longer in order to go without it."""
        return PENALTY_S * (1 / max(self.score, 0.01) - 1)


def standing(outcomes: Iterable[Outcome], now_s: float) -> Standing:
    """What all that was seen of a peer amounts to."""
    sums: dict[Verdict, float] = {"agreed": 0.0, "doubted": 0.0, "lied": 0.0, "failed": 0.0}
    latest: dict[Verdict, Outcome] = {}
    for outcome in outcomes:
        age_s = max(now_s - outcome.at_s, 0.0)
        sums[outcome.verdict] += outcome.weight * 0.5 ** (age_s / HALF_LIFE_S[outcome.verdict])
        if outcome.verdict not in latest or outcome.at_s >= latest[outcome.verdict].at_s:
            latest[outcome.verdict] = outcome
    sums["doubted"] = max(sums["doubted"] - FORGIVES * sums["agreed"], 0.0)
    score = 1.0
    for verdict, leaves in LEAVES.items():
        score *= max(leaves ** sums[verdict], FLOOR[verdict])
    if score > 0.99:
        return Standing()
    worst = min(LEAVES, key=lambda verdict: LEAVES[verdict] ** sums[verdict])
    return Standing(round(score, 3), f"{latest[worst].note}, {_ago(now_s - latest[worst].at_s)}")


def added(outcomes: Sequence[Outcome], outcome: Outcome) -> tuple[Outcome, ...]:
    """With one more outcome, and the least telling of the old ones forgotten where there are too many."""
    kept = [*outcomes, outcome]
    if len(kept) > KEPT:
        order: tuple[Verdict, ...] = ("failed", "agreed", "doubted", "lied")
        kept.remove(min(kept[:-1], key=lambda old: (order.index(old.verdict), old.at_s)))
    return tuple(kept)


def _ago(age_s: float) -> str:
    for unit_s, name in ((24 * HOUR_S, "day"), (HOUR_S, "hour"), (60.0, "minute")):
        if age_s >= unit_s:
            count = int(age_s / unit_s)
            return f"{count} {name}{'s' if count > 1 else ''} ago"
    return "just now"

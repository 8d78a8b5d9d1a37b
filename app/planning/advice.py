"""Advice by rule from two estimates, of the machine that asks and of all machines: who should do the task, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from app.core.units import format_size

Advice = Literal["alone", "swarm", "other_swarm", "not_at_all"]
ALMOST = 0.9  # alone is preferred from this share of the swarm's speed on


@dataclass(frozen=True)
class Estimate:
    """Speed, time, energy and cost of a task; `parts` are seconds by name, of a token or of a round."""

    tokens_per_s: float
    first_token_s: float | None
    seconds: float
    energy_kwh: float | None  # None: the watts of a machine are not known
    cost: float | None  # of the energy and of sent bytes, as far as prices were given; None: no price, or no watts
    parts: Mapping[str, float]
    sent_bytes: float = 0.0  # from one machine to another, for the whole task
    idle: float | None = None  # share of a training step that its machines wait for each other
    utilisation: float | None = None  # share of a training round that is not spent on the exchange

    def sped_up(self, factor: float) -> Estimate:
        """Return the estimate of a task that is `factor` times as fast in each of its parts."""
        return replace(
            self,
            tokens_per_s=self.tokens_per_s * factor,
            first_token_s=None if self.first_token_s is None else self.first_token_s / factor,
            seconds=self.seconds / factor,
            energy_kwh=None if self.energy_kwh is None else self.energy_kwh / factor,
            cost=None if self.cost is None else self.cost / factor,
            parts={name: part_s / factor for name, part_s in self.parts.items()},
        )


def advise(
    alone: Estimate | None, swarm: Estimate | None, *, lacking_bytes: int, within_s: float | None, limit: str
) -> tuple[Advice, str]:
    """Return the advice and its reason in one sentence; None is an estimate of machines that cannot hold the model."""
    if swarm is None:
        return "not_at_all", f"the machines together cannot hold the model: {format_size(lacking_bytes)} are lacking."
    if within_s is not None and min(e.seconds for e in (alone, swarm) if e is not None) > within_s:
        return (
            "not_at_all",
            f"it takes {duration(swarm.seconds)}, longer than {duration(within_s)}; the limit is {limit}.",
        )
    if alone is None:
        return "swarm", f"this machine lacks {format_size(lacking_bytes)} to do it alone."
    if swarm == alone:
        return "alone", "no other machine would make it faster."
    share = alone.tokens_per_s / swarm.tokens_per_s
    if share >= ALMOST:
        return "alone", f"this machine alone reaches {share:.0%} of the swarm's speed."
    in_time = within_s is not None and alone.seconds <= within_s
    if in_time and alone.cost is not None and swarm.cost is not None and alone.cost < swarm.cost:
        return "alone", f"this machine alone is done in time and costs {alone.cost:.2f} instead of {swarm.cost:.2f}."
    return "swarm", f"the swarm is {1 / share:.1f} times as fast as this machine alone."


def duration(seconds: float) -> str:
    """Return a time in its largest unit of which there are at least two."""
    for unit, size in (("years", 365 * 86400), ("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"

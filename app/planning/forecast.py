"""The whole forecast of a task: estimates for the swarm and for this machine alone, the limits, and the advice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from app.planning.advice import Advice, Estimate, advise
from app.planning.cost import energy_kwh, rented_cost
from app.planning.devices import passes_of
from app.planning.machines import Fleet
from app.planning.memory import Holding, held_for_replies, held_for_training
from app.planning.replies import ReplySpeed, ReplyTask, replies_over
from app.planning.rounds import averaging_seconds, lost_share, round_seconds, steps_needed, straggling
from app.planning.training_step import StepTask, StepTime, step_time
from app.planning.verdicts import (
    Verdict,
    at_most,
    cost_verdict,
    memory_verdict,
    share_verdicts,
    straggler_verdict,
    the_limit,
    trust_verdicts,
)
from engine.budget import adapter_weights, block_weights
from engine.config import ModelConfig

# Bytes a weight that an exchange sends; sparse: one weight in 32, with two bits and its place.
WIRES = {"f32": 4.0, "bf16": 2.0, "int8": 1.0, "sparse": 4.0 / 120}
UNCERTAIN, VERY_UNCERTAIN = 0.2, 0.5  # share by which a forecast may be off: from measurements, with assumed values


@dataclass(frozen=True)
class Terms:
    """What the user asks of a task besides its size; prices are in one currency, None where none was given."""

    tokens: int
    within_s: float | None = None
    price_kwh: float | None = None
    rent_hour: float | None = None
    every: int = 50  # steps between two exchanges
    wire: str = "int8"
    spread: float = 0.0  # of the islands' times around their usual one
    failures_per_hour: float = 0.0
    snapshot_s: float = 600.0
    restore_s: float = 60.0


@dataclass(frozen=True)
class Forecast:
    """A forecast, with all that its advice follows from."""

    task: str
    swarm: Estimate | None
    alone: Estimate | None
    lacking_bytes: int  # for this machine alone; for all machines if they cannot hold the model either
    verdicts: tuple[Verdict, ...]
    limit: str
    advice: Advice
    why: str
    machines: tuple[str, ...]  # that take part
    assumed: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the fields of `shoal plan --json`."""
        swarm, alone = self.swarm, self.alone
        off = VERY_UNCERTAIN if self.assumed else UNCERTAIN
        speed = None if swarm is None else swarm.tokens_per_s
        return {
            "task": self.task,
            "tokens_per_s": speed,
            "first_token_s": None if swarm is None else swarm.first_token_s,
            "seconds": None if swarm is None else swarm.seconds,
            "energy_kwh": None if swarm is None else swarm.energy_kwh,
            "cost": None if swarm is None else swarm.cost,
            "alone": None if alone is None else asdict(alone),
            "lacking_bytes": self.lacking_bytes,
            "limit": self.limit,
            "verdicts": [asdict(verdict) for verdict in self.verdicts],
            "advice": self.advice,
            "why": self.why,
            "parts": {} if swarm is None else dict(swarm.parts),
            "assumed": list(self.assumed),
            "low": None if speed is None else speed * (1 - off),
            "high": None if speed is None else speed * (1 + off),
            "machines": list(self.machines),
        }


# --- replies ---------------------------------------------------------------------------------------------------------


def forecast_replies(fleet: Fleet, config: ModelConfig, task: ReplyTask, terms: Terms) -> Forecast:
    """Forecast replies over the machines of a fleet, and on the machine that asks alone."""
    swarm_speed, alone_speed = replies_over(fleet, config, task), replies_over(fleet.alone(), config, task)
    holdings = [held_for_replies(config, machine) for machine in fleet.machines]
    memory = memory_verdict(sum(held.blocks for held in holdings), config.n_blocks)
    lacking = _lacking(held_for_replies(config, fleet.here), holdings, config.n_blocks)
    return conclude_replies(fleet, swarm_speed, alone_speed, terms, (memory, _straggling_hops(swarm_speed)), lacking)


def _straggling_hops(speed: ReplySpeed | None) -> Verdict:
    """Judge the time of all blocks beside that of the same blocks on machines like the middle one of the route."""
    if speed is None:
        return straggler_verdict(())
    paces = sorted(speed.block_s[hop.peer] for hop in speed.route)
    usual_s = paces[(len(paces) - 1) // 2] * sum(len(hop.span) for hop in speed.route)
    return straggler_verdict((usual_s, max(usual_s, speed.parts["blocks"])))


def conclude_replies(
    fleet: Fleet,
    swarm_speed: ReplySpeed | None,
    alone_speed: ReplySpeed | None,
    terms: Terms,
    verdicts: tuple[Verdict, ...],
    lacking_bytes: int,
) -> Forecast:
    """Return the forecast of replies whose speeds are known."""
    swarm = _reply_estimate(fleet, swarm_speed, terms)
    alone = _reply_estimate(fleet, alone_speed, terms)
    names = () if swarm_speed is None else tuple(hop.peer for hop in swarm_speed.route)
    others = set(names) - {fleet.here.name}
    shares = share_verdicts(swarm.parts) if swarm is not None else ()
    verdicts = (*verdicts, *shares, cost_verdict(None, None), *trust_verdicts(1 if others else 0))
    return _concluded("chat", fleet, swarm, alone, verdicts, lacking_bytes, terms, names)


def _reply_estimate(fleet: Fleet, speed: ReplySpeed | None, terms: Terms) -> Estimate | None:
    if speed is None:
        return None
    seconds = (speed.first_token_s or 0.0) + terms.tokens / speed.tokens_per_s
    used = {hop.peer for hop in speed.route} | {fleet.here.name}
    watts = sum(machine.watts for machine in fleet.machines if machine.name in used)
    energy = energy_kwh(watts, seconds)
    cost = None if terms.price_kwh is None else energy * terms.price_kwh
    return Estimate(speed.tokens_per_s, speed.first_token_s, seconds, energy, cost, speed.parts)


# --- training --------------------------------------------------------------------------------------------------------


def forecast_training(fleet: Fleet, config: ModelConfig, task: StepTask, terms: Terms) -> Forecast:
    """Forecast fine-tuning (adapters) or training (all weights) over the islands of a fleet, and on one machine.

    Islands too slow to be worth waiting for are left out.
    """
    islands = _islands(fleet)
    steps = [(island, step) for island in islands if (step := step_time(island, config, task)) is not None]
    steps.sort(key=lambda pair: pair[1].seconds)
    options = [_rounds(steps[:count], config, task, terms) for count in range(1, len(steps) + 1)]
    swarm = max(options, key=lambda option: option.tokens_per_s, default=None)
    used = steps[: options.index(swarm) + 1] if swarm is not None else []
    alone_step = step_time(fleet.alone(), config, task)
    alone = None if alone_step is None else _rounds([(fleet.alone(), alone_step)], config, task, terms)
    if alone is not None and (swarm is None or alone.tokens_per_s > swarm.tokens_per_s):
        swarm, used = alone, [(fleet.alone(), alone_step)] if alone_step is not None else []
    holdings = [held_for_training(config, machine, task.memory) for machine in fleet.machines]
    by_island = [sum(held_for_training(config, m, task.memory).blocks for m in island.machines) for island in islands]
    kind = "train" if task.rank is None else "finetune"
    rented = (
        None if terms.rent_hour is None else rented_cost(_flops(fleet, config, task, terms.tokens), terms.rent_hour)
    )
    names = tuple(name for _, step in used for name in step.machines)
    verdicts = (
        memory_verdict(max(by_island), config.n_blocks),
        _bandwidth(steps, len(used), config, task, terms),
        straggler_verdict(_paces(steps, fleet)),
        cost_verdict(None if swarm is None else swarm.cost, rented),
        *trust_verdicts(len(used) if set(names) - {fleet.here.name} else 0),
    )
    here = held_for_training(config, fleet.here, task.memory)
    lacking = _lacking(here, holdings, config.n_blocks)
    return _concluded(kind, fleet, swarm, alone, verdicts, lacking, terms, names)


def exchanged_bytes(config: ModelConfig, task: StepTask, wire: str) -> float:
    """Bytes of what an island learned, as it is sent to others."""
    each = block_weights(config) if task.rank is None else adapter_weights(config, task.rank)
    return config.n_blocks * each * WIRES[wire]


def _islands(fleet: Fleet) -> list[Fleet]:
    """Return the fleet of each island; the first machine of an island without the one that asks runs its head."""
    names = dict.fromkeys(machine.island for machine in fleet.machines)
    found = []
    for name in names:
        machines = tuple(machine for machine in fleet.machines if machine.island == name)
        here = fleet.here if fleet.here in machines else machines[0]
        members = {machine.name for machine in machines}
        links = tuple(link for link in fleet.links if {link.a, link.b} <= members)
        found.append(replace(fleet, here=here, machines=machines, links=links))
    return found


def _rounds(steps: Sequence[tuple[Fleet, StepTime]], config: ModelConfig, task: StepTask, terms: Terms) -> Estimate:
    """Estimate training by these islands, whose slowest is last."""
    slowest = steps[-1][1]
    stretch = straggling(len(steps), len(steps), terms.spread)
    exchange_s = _exchange_seconds(steps, config, task, terms)
    round_s = round_seconds(terms.every, slowest.seconds, exchange_s, stretch=stretch)
    lost = lost_share(terms.failures_per_hour, terms.snapshot_s, terms.restore_s)
    tokens_per_s = len(steps) * terms.every * task.tokens / round_s * (1 - lost)
    seconds = terms.tokens / tokens_per_s
    parts = {name: terms.every * part_s for name, part_s in slowest.parts.items()}
    if len(steps) > 1:
        parts |= {"exchange": exchange_s, "stragglers": round_s - exchange_s - terms.every * slowest.seconds}
    used = [machine for fleet, step in steps for machine in fleet.machines if machine.name in step.machines]
    energy = energy_kwh(sum(machine.watts for machine in used), seconds)
    cost = None if terms.price_kwh is None else energy * terms.price_kwh
    return Estimate(tokens_per_s, None, seconds, energy, cost, parts)


def _exchange_seconds(
    steps: Sequence[tuple[Fleet, StepTime]], config: ModelConfig, task: StepTask, terms: Terms
) -> float:
    """Seconds of one exchange among islands; each sends over the narrowest connection of its machines."""
    if len(steps) < 2:
        return 0.0
    used = [machine for fleet, step in steps for machine in fleet.machines if machine.name in step.machines]
    narrowest = min(machine.bytes_per_s for machine in used)
    away_s = max(machine.rtt_s / 2 for machine in used)
    return averaging_seconds(len(steps), exchanged_bytes(config, task, terms.wire), narrowest, away_s)


def _bandwidth(
    steps: Sequence[tuple[Fleet, StepTime]], used: int, config: ModelConfig, task: StepTask, terms: Terms
) -> Verdict:
    """Judge the slowest link beside the slowest stage, then the steps needed to compute nine tenths of the time.

    All islands count, also those left out because of the exchange: it would be hidden otherwise.
    """
    ratio = max((step.link_s / step.stage_s for _, step in steps), default=None)
    if len(steps) < 2 or (ratio is not None and ratio > 1):
        return at_most("bandwidth", ratio, 1.0)
    needed = steps_needed(steps[used - 1][1].seconds, _exchange_seconds(steps, config, task, terms))
    return at_most("bandwidth", needed, terms.every)


def _paces(steps: Sequence[tuple[Fleet, StepTime]], fleet: Fleet) -> list[float]:
    """Return the seconds to compare for stragglers: of islands, or of the machines of the only one."""
    if len(steps) > 1:
        return [step.seconds for _, step in steps]
    return [1 / machine.flops_per_s for machine in fleet.machines]


def _flops(fleet: Fleet, config: ModelConfig, task: StepTask, tokens: int) -> float:
    passes = passes_of(replace(fleet.here, kind="gpu"), all_weights=task.rank is None, recomputed=task.recomputed)
    return passes * 2 * config.n_blocks * block_weights(config) * tokens


# --- both ------------------------------------------------------------------------------------------------------------


def _lacking(here: Holding, holdings: Sequence[Holding], blocks: int) -> int:
    """Bytes lacking on this machine for the whole model, or on all together if they cannot hold it either."""
    missing = blocks - sum(held.blocks for held in holdings)
    if missing <= 0 or len(holdings) == 1:
        return here.lacking_bytes
    return missing * min(held.block_bytes for held in holdings)


def _concluded(
    task: str,
    fleet: Fleet,
    swarm: Estimate | None,
    alone: Estimate | None,
    verdicts: tuple[Verdict, ...],
    lacking_bytes: int,
    terms: Terms,
    machines: tuple[str, ...],
) -> Forecast:
    limit = the_limit(verdicts)
    advice, why = advise(alone, swarm, lacking_bytes=lacking_bytes, within_s=terms.within_s, limit=limit)
    return Forecast(task, swarm, alone, lacking_bytes, verdicts, limit, advice, why, machines, fleet.assumed)

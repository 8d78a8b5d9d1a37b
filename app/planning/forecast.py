"""The whole forecast of a task: estimates for the swarm and for this machine alone, the limits, and the advice."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from app.planning.advice import ALMOST, Advice, Estimate, advise
from app.planning.devices import MANY_ROWS, PASSES, block_time_s, head_time_s
from app.planning.machines import Fleet, MachineSpec
from app.planning.memory import Holding, held_for_replies, held_for_training
from app.planning.replies import ReplySpeed, ReplyTask, replies_over
from app.planning.rounds import averaging_seconds, lost_share, round_seconds, steps_needed, straggling, utilisation
from app.planning.training_step import StepTask, StepTime, ends_weights, step_time
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
from app.snapshot.views import OfferView
from engine.budget import adapter_weights, block_weights
from engine.config import ModelConfig

JOULES_PER_KWH = 3.6e6
RENTED_FLOPS_PER_S = 989e12  # peak of the card whose hour `--rent` prices: an H100 SXM, by its data sheet
RENTED_SHARE = 0.4  # of its peak that training reaches

# Bytes a weight that an exchange sends; sparse: one weight in 32, with two bits and its place.
WIRES = {"f32": 4.0, "bf16": 2.0, "int8": 1.0, "int4": 0.53, "sparse": 4.0 / 120}
UNCERTAIN, VERY_UNCERTAIN = 0.2, 0.5  # share by which a forecast may be off: from measurements, with assumed values


@dataclass(frozen=True)
class Terms:
    """What the user asks of a task besides its size; prices are in one currency, None where none was given."""

    tokens: int
    within_s: float | None = None
    price_kwh: float | None = None
    rent_hour: float | None = None
    egress_gb: float | None = None  # price of 10⁹ bytes that machines send to others
    every: int = 50  # steps between two exchanges
    wire: str = "int8"
    spread: float = 0.0  # of the islands' times around their usual one
    failures_per_hour: float = 0.0
    snapshot_s: float = 600.0
    restore_s: float = 60.0
    held_rows: int = 0  # tokens that every island validates with after a round


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
    correction: float | None = None  # that the speeds were multiplied by, from past forecasts

    def corrected(self, factor: float | None) -> Forecast:
        """Return the forecast with all speeds multiplied by what past forecasts were off by; the advice stays."""
        if factor is None:
            return self
        swarm, alone = (None if e is None else e.sped_up(factor) for e in (self.swarm, self.alone))
        return replace(self, swarm=swarm, alone=alone, correction=factor)

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
            "sent_bytes": None if swarm is None else swarm.sent_bytes,
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
            "correction": self.correction,
            "idle": None if swarm is None else swarm.idle,
            "utilisation": None if swarm is None else swarm.utilisation,
        }


# --- replies ---------------------------------------------------------------------------------------------------------


def forecast_replies(fleet: Fleet, config: ModelConfig, task: ReplyTask, terms: Terms) -> Forecast:
    """Forecast replies over the machines of a fleet, and on the machine that asks alone."""
    swarm_speed, alone_speed = replies_over(fleet, config, task), replies_over(fleet.alone(), config, task)
    holdings = [held_for_replies(config, machine) for machine in fleet.machines]
    memory = memory_verdict(sum(held.blocks for held in holdings), config.n_blocks)
    lacking = _lacking(held_for_replies(config, fleet.here), holdings, config.n_blocks)
    return conclude_replies(fleet, swarm_speed, alone_speed, terms, (memory, straggling_hops(swarm_speed)), lacking)


def straggling_hops(speed: ReplySpeed | None) -> Verdict:
    """Judge how much slower the route is than if every hop were as fast as its median hop."""
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
    sending_s = None if swarm_speed is None else swarm_speed.sending_s
    share = None if sending_s is None or swarm is None else sending_s / swarm.seconds
    bandwidth = at_most("bandwidth", share, 0.5)
    verdicts = (*verdicts, bandwidth, *shares, cost_verdict(None, None), *trust_verdicts(1 if others else 0))
    return _concluded("chat", fleet, swarm, alone, verdicts, lacking_bytes, terms, names)


def _reply_estimate(fleet: Fleet, speed: ReplySpeed | None, terms: Terms) -> Estimate | None:
    if speed is None:
        return None
    seconds = (speed.first_token_s or 0.0) + terms.tokens / speed.tokens_per_s
    used = {hop.peer for hop in speed.route} | {fleet.here.name}
    sent = speed.row_bytes * terms.tokens
    energy, cost = _energy_and_cost([m for m in fleet.machines if m.name in used], len(used), seconds, sent, terms)
    return Estimate(speed.tokens_per_s, speed.first_token_s, seconds, energy, cost, speed.parts, sent)


def forecast_offer(offer: OfferView, terms: Terms) -> Forecast:
    """Forecast replies over a swarm that this node is not in, from what is known of it; its route has no parts."""
    swarm, alone = (
        None if speed is None else Estimate(speed, None, terms.tokens / speed, None, None, {"token": 1 / speed})
        for speed in (offer.tokens_per_s, offer.alone_tokens_per_s)
    )
    lacking = 0 if alone is not None or offer.fit is None else max(1, offer.fit.lacking_bytes)
    verdicts = (memory_verdict(int(swarm is not None), 1), *trust_verdicts(1))
    said = "the speed of its members is what they announce; nobody else uses them meanwhile"
    limit = the_limit(verdicts)
    if swarm is None and alone is not None:
        block = offer.missing_block
        why = "no member of it was reached" if block is None else f"nobody there serves block {block}"
        said = f"no swarm: this machine alone is forecast ({why})"
        swarm, limit = alone, "compute"
    advice, why = advise(alone, swarm, lacking_bytes=lacking, within_s=terms.within_s, limit=limit)
    return Forecast("chat", swarm, alone, lacking, verdicts, limit, advice, why, (), (said,))


def with_other_swarms(found: Forecast, offers: Sequence[OfferView]) -> Forecast:
    """Return the forecast with the advice to use another swarm, if one with the same model is clearly faster.

    `offers` are the swarms with that model. Nothing changes if the task is not to be done at all.
    """
    best = max(offers, key=lambda offer: offer.tokens_per_s or 0.0, default=None)
    known = max((e.tokens_per_s for e in (found.swarm, found.alone) if e is not None), default=0.0)
    if best is None or best.tokens_per_s is None or found.advice == "not_at_all":
        return found
    if known >= ALMOST * best.tokens_per_s:
        return found
    why = f"{best.target} serves the same model at {best.tokens_per_s:.1f} tokens/s."
    return replace(found, advice="other_swarm", why=why)


# --- training --------------------------------------------------------------------------------------------------------


def forecast_training(fleet: Fleet, config: ModelConfig, task: StepTask, terms: Terms) -> Forecast:
    """Forecast fine-tuning (adapters) or training (all weights) over the islands of a fleet, and on one machine."""
    options = [_joint(islands, config, task, terms) for islands in _groupings(fleet)]
    joint = max(options, key=lambda option: 0.0 if option.estimate is None else option.estimate.tokens_per_s)
    alone = _joint([fleet.alone()], config, task, terms).estimate
    rented = None if terms.rent_hour is None else rented_cost(_flops(config, task, terms.tokens), terms.rent_hour)
    names = tuple(name for _, step in joint.used for name in step.machines)
    holdings = {m.name: _trained_here(fleet, m, config, task) for m in fleet.machines}
    most_held = max(
        sum(_trained_here(island, machine, config, task).blocks for machine in island.machines)
        for island in joint.islands
    )
    verdicts = (
        memory_verdict(most_held, config.n_blocks),
        _bandwidth(joint, config, task, terms),
        straggler_verdict(_paces(joint)),
        cost_verdict(None if joint.estimate is None else joint.estimate.cost, rented),
        *trust_verdicts(len(joint.used) if set(names) - {fleet.here.name} else 0),
    )
    lacking = _lacking(holdings[fleet.here.name], list(holdings.values()), config.n_blocks)
    kind = "train" if task.rank is None else "finetune"
    if task.rank is None and any(len(step.machines) > 1 for _, step in joint.used):
        said = "machines that hold a model in training together, which `shoal train` does not do: each must hold all"
        fleet = replace(fleet, assumed=(*fleet.assumed, said))
    return _concluded(kind, fleet, joint.estimate, alone, verdicts, lacking, terms, names)


def _trained_here(fleet: Fleet, machine: MachineSpec, config: ModelConfig, task: StepTask) -> Holding:
    asks = machine.name == fleet.here.name
    return held_for_training(config, machine, task.memory(len(fleet.machines)), asks=asks)


def rounds_of(islands: Sequence[Fleet], config: ModelConfig, task: StepTask, terms: Terms) -> Estimate | None:
    """Estimate training by all of these islands, worth waiting for or not; None if one has too little memory."""
    steps = _island_steps(islands, config, task)
    return _rounds(steps, config, task, terms) if len(steps) == len(islands) else None


Steps = Sequence[tuple[Fleet, StepTime]]


@dataclass(frozen=True)
class _Joint:
    """Training by islands together: all of them, those that can hold the model, and those worth waiting for."""

    islands: Sequence[Fleet]
    steps: Steps
    used: Steps
    estimate: Estimate | None


def _joint(islands: Sequence[Fleet], config: ModelConfig, task: StepTask, terms: Terms) -> _Joint:
    """Return the fastest way to train with these islands; those with slow steps or exchanges are left out."""
    steps = _island_steps(islands, config, task)
    fastest, used = 0.0, list[tuple[Fleet, StepTime]]()
    for count in range(1, len(steps) + 1):
        exchanges_s = [_island_exchange_s(pair, count, config, task, terms) for pair in steps]
        stretch = straggling(count, count, terms.spread)
        chosen: list[tuple[float, int]] = []  # the `count` fastest exchanges of the islands so far, the slowest on top
        for number, (_, step) in enumerate(steps):
            heapq.heappush(chosen, (-exchanges_s[number], number))
            if len(chosen) > count:
                heapq.heappop(chosen)
            rate = count / round_seconds(terms.every, step.seconds, -chosen[0][0], stretch=stretch)
            if len(chosen) == count and rate > fastest:
                fastest, used = rate, [steps[number] for number in sorted(number for _, number in chosen)]
    return _Joint(islands, steps, used, _rounds(used, config, task, terms) if used else None)


def _island_steps(islands: Sequence[Fleet], config: ModelConfig, task: StepTask) -> Steps:
    """Return the steps of the islands that can hold the model, the fastest first; those of one host share its cores."""
    made = [(island, step) for island in islands if (step := step_time(island, config, task)) is not None]
    crowd = Counter(host for pair in made for host in _hosts(pair))
    steps = [(island, step.slowed(max(crowd[host] for host in _hosts((island, step))))) for island, step in made]
    return sorted(steps, key=lambda pair: pair[1].seconds)


def _hosts(pair: tuple[Fleet, StepTime]) -> set[str]:
    """Return the hosts whose cores an island uses."""
    return {machine.host or machine.name for machine in pair[0].machines if machine.name in pair[1].machines}


def exchanged_bytes(config: ModelConfig, task: StepTask, wire: str) -> float:
    """Bytes of what an island learned, as it is sent to others."""
    if task.rank is not None:
        return config.n_blocks * adapter_weights(config, task.rank) * WIRES[wire]
    return (config.n_blocks * block_weights(config) + ends_weights(config)) * WIRES[wire]


def _groupings(fleet: Fleet) -> list[list[Fleet]]:
    """Return the ways to divide a fleet into islands: as it says, else all machines in one, or each on its own.

    The machine that asks comes first in its island; in others the first machine runs the head.
    """
    names = dict.fromkeys(machine.island for machine in fleet.machines)
    named = [_island(fleet, [m for m in fleet.machines if m.island == name]) for name in names]
    return [named] if any(names) else [named, [_island(fleet, [machine]) for machine in fleet.machines]]


def _island(fleet: Fleet, machines: Sequence[MachineSpec]) -> Fleet:
    members = {machine.name for machine in machines}
    links = tuple(link for link in fleet.links if {link.a, link.b} <= members)
    here = fleet.here if fleet.here in machines else machines[0]
    return replace(fleet, here=here, machines=tuple(machines), links=links)


def _rounds(steps: Steps, config: ModelConfig, task: StepTask, terms: Terms) -> Estimate:
    """Estimate training by these islands, whose slowest is last."""
    slowest = steps[-1][1]
    stretch = straggling(len(steps), len(steps), terms.spread)
    exchange_s = _exchange_seconds(steps, config, task, terms)
    validating_s = _validating_seconds(steps[-1], config, terms)
    round_s = round_seconds(terms.every, slowest.seconds, exchange_s, stretch=stretch) + validating_s
    lost = lost_share(terms.failures_per_hour, terms.snapshot_s, terms.restore_s)
    tokens_per_s = len(steps) * terms.every * task.tokens / round_s * (1 - lost)
    seconds = terms.tokens / tokens_per_s
    parts = {name: terms.every * part_s for name, part_s in slowest.parts.items()}
    if len(steps) > 1:
        waited_s = round_s - exchange_s - validating_s - terms.every * slowest.seconds
        parts |= {"exchange": exchange_s, "stragglers": waited_s}
    if validating_s:
        parts["validating"] = validating_s
    used = [machine for fleet, step in steps for machine in fleet.machines if machine.name in step.machines]
    sent = terms.tokens * _sent_bytes(steps, config, task, terms)
    energy, cost = _energy_and_cost(used, len(used), seconds, sent, terms)
    computing = utilisation(round_s - exchange_s, exchange_s)
    return Estimate(tokens_per_s, None, seconds, energy, cost, parts, sent, slowest.idle, computing)


def _validating_seconds(pair: tuple[Fleet, StepTime], config: ModelConfig, terms: Terms) -> float:
    """Seconds in which an island computes the loss on the tokens that are held back: forward passes only."""
    if not terms.held_rows:
        return 0.0
    here, rows = pair[0].here, min(terms.held_rows, MANY_ROWS)
    pass_s = config.n_blocks * block_time_s(config, here, rows=rows, context=0, sessions=0)
    pass_s += head_time_s(config, here, rows=rows)
    return pair[1].crowd * terms.held_rows / rows * pass_s


def _sent_bytes(steps: Steps, config: ModelConfig, task: StepTask, terms: Terms) -> float:
    """Bytes that all machines send to others for a token: rows and gradients in islands, exchanges between them."""
    row, islands = config.hidden_size * task.wire_bytes, len(steps)
    # From the machine with the embedding through all stages to the head there, and gradients the same way back.
    links = sum(len(step.machines) for _, step in steps if len(step.machines) > 1) / islands
    exchange = 2 * (islands - 1) / islands * exchanged_bytes(config, task, terms.wire)
    return 2 * row * links + exchange / (terms.every * task.tokens)


def _exchange_seconds(steps: Steps, config: ModelConfig, task: StepTask, terms: Terms) -> float:
    """Seconds of one exchange among islands: that of the slowest."""
    return max(_island_exchange_s(pair, len(steps), config, task, terms) for pair in steps)


def _island_exchange_s(
    pair: tuple[Fleet, StepTime], islands: int, config: ModelConfig, task: StepTask, terms: Terms
) -> float:
    """Seconds of one exchange for an island, over the narrowest connection of its machines."""
    used = [machine for machine in pair[0].machines if machine.name in pair[1].machines]
    narrowest = min(machine.bytes_per_s for machine in used)
    away_s = max(machine.rtt_s / 2 for machine in used)
    return averaging_seconds(islands, exchanged_bytes(config, task, terms.wire), narrowest, away_s)


def _bandwidth(joint: _Joint, config: ModelConfig, task: StepTask, terms: Terms) -> Verdict:
    """Judge the slowest link beside the slowest stage, then the steps needed to compute nine tenths of the time.

    All islands count, also those left out because of the exchange: it would be hidden otherwise.
    """
    ratio = max((step.link_s / step.stage_s for _, step in joint.steps), default=None)
    if len(joint.steps) < 2 or (ratio is not None and ratio > 1):
        return at_most("bandwidth", ratio, 1.0)
    needed = steps_needed(joint.used[-1][1].seconds, _exchange_seconds(joint.steps, config, task, terms))
    return at_most("bandwidth", needed, terms.every)


def _paces(joint: _Joint) -> list[float]:
    """Return the times to compare for stragglers: of all islands, or of the machines that are used in the only one."""
    if len(joint.steps) > 1:
        return [step.seconds for _, step in joint.steps]
    return [1 / m.flops_per_s for island, step in joint.used for m in island.machines if m.name in step.machines]


def _flops(config: ModelConfig, task: StepTask, tokens: int) -> float:
    """Flop of training on so many tokens, on cards like those that are rented."""
    return PASSES[task.rank is None, bool(task.recomputed)] * 2 * config.n_blocks * block_weights(config) * tokens


# --- both ------------------------------------------------------------------------------------------------------------


def _energy_and_cost(
    known: Sequence[MachineSpec], used: int, seconds: float, sent_bytes: float, terms: Terms
) -> tuple[float | None, float | None]:
    """Energy of the machines used, and what it and the bytes that they send cost.

    None unless the watts of each machine are known; the cost also if no price was given.
    """
    egress = None if terms.egress_gb is None else sent_bytes / 1e9 * terms.egress_gb
    if len(known) < used or not all(machine.watts for machine in known):
        return None, egress if terms.price_kwh is None else None
    energy = energy_kwh(sum(machine.watts for machine in known), seconds)
    if terms.price_kwh is None:
        return energy, egress
    return energy, energy * terms.price_kwh + (egress or 0.0)


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


def energy_kwh(watts: float, seconds: float) -> float:
    """Energy of machines that take these watts in all."""
    return watts * seconds / JOULES_PER_KWH


def rented_cost(flops: float, hour_price: float) -> float:
    """Price of computing the same on rented cards."""
    return flops / (RENTED_FLOPS_PER_S * RENTED_SHARE) / 3600 * hour_price

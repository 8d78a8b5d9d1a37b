"""The time of one training step of an island: a pipeline of stages over machines that hold the model together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from app.planning.cover import Cover, Share, StageCandidate, fastest_pipeline, fill_seconds, slowest_seconds
from app.planning.devices import CROWDED_PASSES, optimiser_s, passes_of, slowest_host_s, trained_block_s, trained_head_s
from app.planning.machines import Fleet, MachineSpec
from app.planning.memory import TrainingMemory, held_for_training
from engine.budget import adapter_weights, block_weights, ends_bytes, unquantised
from engine.config import ModelConfig

AGREEING = 3  # round trips to the farthest machine until a step is done: what was counted, the change, the commit


@dataclass(frozen=True)
class StepTask:
    """One training step: `micro_batches` of `rows` tokens each; `rank` of the adapters, None trains all weights."""

    rank: int | None = 8
    rows: int = 2048
    micro_batches: int = 8
    recomputed: bool | None = None  # blocks are computed again for the backward pass; None: unless memory is enough
    wire_bytes: float = 2.0  # per number of an activation or gradient between two stages
    counted_rows: int | None = None  # of a micro-batch, whose loss counts; None: all

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.rows * self.micro_batches

    def memory(self, machines: int) -> TrainingMemory:
        """What decides the memory of this step; in a pipeline all micro-batches keep their inputs at once."""
        under_way = self.micro_batches if machines > 1 else 1
        return TrainingMemory(self.rank, self.rows, under_way, self.recomputed is not False)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step by part, the machines that share it, and the share of their time that they are idle."""

    machines: tuple[str, ...]
    parts: Mapping[str, float]
    idle: float
    stage_s: float  # of the slowest stage for a micro-batch, without links
    link_s: float  # of the slowest link for a micro-batch
    crowd: int = 1  # islands that share the cores of its hosts

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return sum(self.parts.values())

    def slowed(self, crowd: int) -> StepTime:
        """Return the step on cores that it shares with so many steps in all."""
        times = crowd * (CROWDED_PASSES if crowd > 1 else 1.0)
        parts = {name: part_s if name == "links" else times * part_s for name, part_s in self.parts.items()}
        return replace(self, parts=parts, stage_s=times * self.stage_s, crowd=crowd)


def step_time(fleet: Fleet, config: ModelConfig, task: StepTask) -> StepTime | None:
    """Return the shortest step of an island: alone where that is faster; None if it cannot hold the model."""
    ways = (False, True) if task.recomputed is None else (task.recomputed,)
    fleets = (fleet.alone(), fleet) if fleet.others else (fleet,)
    options = [_pipeline(own, config, replace(task, recomputed=way)) for own in fleets for way in ways]
    return min((option for option in options if option is not None), key=lambda step: step.seconds, default=None)


def _pipeline(fleet: Fleet, config: ModelConfig, task: StepTask) -> StepTime | None:
    head_s = _head_s(fleet, config, task)
    sends_s = _sends_seconds(fleet.here, config, task) if fleet.others else 0.0
    candidates = [_candidate(fleet, machine, config, task, head_s) for machine in fleet.machines]
    least_s = max(head_s, sends_s)
    # Machines are chosen as if each had cores of its own.
    cover = fastest_pipeline(candidates, config.n_blocks, task.micro_batches, least_s)
    return None if cover is None else _timed(cover, fleet, config, task)


def step_over(fleet: Fleet, blocks: Mapping[str, int], config: ModelConfig, task: StepTask) -> StepTime:
    """Return the step of machines that train just these blocks, by name; memory is not looked at."""
    head_s = _head_s(fleet, config, task)
    machines = [machine for machine in fleet.machines if machine.name in blocks]
    cover = tuple(Share(_candidate(fleet, m, config, task, head_s), blocks[m.name]) for m in machines)
    return _timed(cover, fleet, config, task)


def _timed(cover: Cover, fleet: Fleet, config: ModelConfig, task: StepTask) -> StepTime:
    """Return the step over a cover; its parts are the first micro-batch through everything, then the others."""
    machines = {machine.name: machine for machine in fleet.machines}
    used = tuple(dict.fromkeys((*(share.machine.name for share in cover), fleet.here.name)))
    head_s = _head_s(fleet, config, task)
    sends_s = _sends_seconds(fleet.here, config, task) if fleet.others else 0.0
    stages = [(machines[s.machine.name], s.blocks * s.machine.block_s) for s in cover]
    stage_s = slowest_host_s([*stages, (fleet.here, head_s)])
    link_s = max(sends_s, *(s.machine.link_s for s in cover))
    blocks_s = sum(share.blocks * share.machine.block_s for share in cover)
    parts = {
        "blocks": blocks_s,
        "links": fill_seconds(cover) - blocks_s + sends_s,
        "head": head_s,
        "other micro-batches": (task.micro_batches - 1) * max(stage_s, link_s, slowest_seconds(cover)),
    }
    busy_s = task.micro_batches * (blocks_s + head_s)
    hosts = {machines[name].host or name for name in used}
    idle = 1 - busy_s / (len(hosts) * sum(parts.values()))
    return StepTime(used, parts, max(0.0, idle), stage_s, link_s)


def _head_s(fleet: Fleet, config: ModelConfig, task: StepTask) -> float:
    """Seconds of the head for one micro-batch, on the machine that asks."""
    rows = task.rows if task.counted_rows is None else task.counted_rows
    return trained_head_s(config, fleet.here, rows=rows, all_weights=task.rank is None)


def ends_weights(config: ModelConfig) -> int:
    """Number of weights of embedding and head."""
    return ends_bytes(config, unquantised(1), embedding=True, head=True)


def _sends_seconds(machine: MachineSpec, config: ModelConfig, task: StepTask) -> float:
    """Seconds that a stage sends, or receives, for one micro-batch: activations one way, gradients the other."""
    return 2 * task.rows * config.hidden_size * task.wire_bytes / machine.bytes_per_s


def _candidate(
    fleet: Fleet, machine: MachineSpec, config: ModelConfig, task: StepTask, head_s: float
) -> StageCandidate:
    here = machine.name == fleet.here.name
    passes = passes_of(machine, all_weights=task.rank is None, recomputed=task.recomputed is not False)
    link_s = 0.0 if here else _sends_seconds(machine, config, task)
    away_s = fleet.link_s(machine.name, fleet.here.name)
    # The optimiser runs once a step, after all micro-batches.
    changing_s = optimiser_s(machine, _trained_weights(config, task)) / task.micro_batches
    return StageCandidate(
        machine.name,
        held_for_training(config, machine, task.memory(len(fleet.machines)), asks=here).blocks,
        trained_block_s(config, machine, rows=task.rows, passes=passes) + changing_s,
        link_s + 2 * away_s,
        return_s=2 * away_s * (1 + AGREEING),
        link_s=link_s,
        beside_s=head_s if here else 0.0,
    )


def _trained_weights(config: ModelConfig, task: StepTask) -> int:
    """Weights of a block that are trained; where all are, embedding and head are shared out among the blocks."""
    if task.rank is not None:
        return adapter_weights(config, task.rank)
    return block_weights(config) + ends_weights(config) // config.n_blocks

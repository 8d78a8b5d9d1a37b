"""The time of one training step of an island: a pipeline of stages over machines that hold the model together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from app.planning.cover import Cover, StageCandidate, fastest_pipeline, fill_seconds, slowest_seconds
from app.planning.devices import passes_of, trained_block_s, trained_head_s
from app.planning.machines import Fleet, MachineSpec
from app.planning.memory import TrainingMemory, held_for_training
from engine.config import ModelConfig


@dataclass(frozen=True)
class StepTask:
    """One training step: `micro_batches` of `rows` tokens each; `rank` of the adapters, None trains all weights."""

    rank: int | None = 8
    rows: int = 2048
    micro_batches: int = 8
    recomputed: bool = True
    wire_bytes: float = 2.0  # per number of an activation or gradient between two stages

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.rows * self.micro_batches

    @property
    def memory(self) -> TrainingMemory:
        """What decides the memory of this step; every micro-batch keeps its inputs until its backward pass."""
        return TrainingMemory(self.rank, self.rows, self.micro_batches)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step by part, the machines that share it, and the share of their time that they are idle."""

    machines: tuple[str, ...]
    parts: Mapping[str, float]
    idle: float
    stage_s: float  # of the slowest stage for a micro-batch, without links
    link_s: float  # of the slowest link for a micro-batch

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return sum(self.parts.values())


def step_time(fleet: Fleet, config: ModelConfig, task: StepTask) -> StepTime | None:
    """Return the shortest step of an island: alone where that is faster; None if it cannot hold the model."""
    options = [_pipeline(fleet.alone(), config, task)]
    if fleet.others:
        options.append(_pipeline(fleet, config, task))
    return min((option for option in options if option is not None), key=lambda step: step.seconds, default=None)


def _pipeline(fleet: Fleet, config: ModelConfig, task: StepTask) -> StepTime | None:
    head_s = trained_head_s(config, fleet.here, rows=task.rows)
    sends_s = _sends_seconds(fleet.here, config, task) if fleet.others else 0.0
    candidates = [_candidate(fleet, machine, config, task, head_s) for machine in fleet.machines]
    least_s = max(head_s, sends_s)
    cover = fastest_pipeline(candidates, config.n_blocks, task.micro_batches, least_s)
    return None if cover is None else _timed(cover, task, head_s, sends_s, fleet.here.name)


def _timed(cover: Cover, task: StepTask, head_s: float, sends_s: float, here: str) -> StepTime:
    """Return the step over a cover; its parts are the first micro-batch through everything, then the others."""
    machines = tuple(dict.fromkeys((*(share.machine.name for share in cover), here)))
    steady_s = max(head_s, sends_s, slowest_seconds(cover))
    blocks_s = sum(share.blocks * share.machine.block_s for share in cover)
    parts = {
        "blocks": blocks_s,
        "links": fill_seconds(cover) - blocks_s + sends_s,
        "head": head_s,
        "other micro-batches": (task.micro_batches - 1) * steady_s,
    }
    busy_s = task.micro_batches * (blocks_s + head_s)
    idle = 1 - busy_s / (len(machines) * sum(parts.values()))
    stage_s = max(head_s, *(s.blocks * s.machine.block_s + s.machine.beside_s for s in cover))
    link_s = max(sends_s, *(s.machine.link_s for s in cover))
    return StepTime(machines, parts, max(0.0, idle), stage_s, link_s)


def _sends_seconds(machine: MachineSpec, config: ModelConfig, task: StepTask) -> float:
    """Seconds that a stage sends, or receives, for one micro-batch: activations one way, gradients the other."""
    return 2 * task.rows * config.hidden_size * task.wire_bytes / machine.bytes_per_s


def _candidate(
    fleet: Fleet, machine: MachineSpec, config: ModelConfig, task: StepTask, head_s: float
) -> StageCandidate:
    here = machine.name == fleet.here.name
    passes = passes_of(machine, all_weights=task.rank is None, recomputed=task.recomputed)
    link_s = 0.0 if here else _sends_seconds(machine, config, task)
    return StageCandidate(
        machine.name,
        held_for_training(config, machine, task.memory).blocks,
        trained_block_s(config, machine, rows=task.rows, passes=passes),
        link_s + 2 * fleet.link_s(machine.name, fleet.here.name),
        link_s=link_s,
        beside_s=head_s if here else 0.0,
    )

"""What a machine can hold: blocks for replies or for training, and what is lacking for the whole model.

All bytes are computed by `engine.budget`, with the code that hosting uses.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.planning.machines import MachineSpec
from engine.budget import (
    ADAPTER_ROLES,
    TrainingTask,
    allowance_on,
    ends_bytes,
    fit,
    loss_bytes,
    plan_full,
    plan_training,
)
from engine.config import ModelConfig
from engine.device.kinds import kind_named

_PLENTY = 1 << 62


@dataclass(frozen=True)
class Holding:
    """Blocks of a model that a machine can hold, and the memory that it lacks for all of them."""

    blocks: int
    lacking_bytes: int
    block_bytes: int


def held_for_replies(config: ModelConfig, machine: MachineSpec) -> Holding:
    """Return what a machine holds for replies: weights, cache and workspace."""
    found = fit(config, machine, machine.precision, machine.cap_bytes)
    # `lacking_bytes` asks for a full cache; a GPU holds all blocks with a smaller one too.
    whole = found.budget.blocks == config.n_blocks
    lacking = 0 if whole else max(1, found.lacking_bytes)
    return Holding(found.budget.blocks, lacking, found.budget.weight_bytes_per_block)


@dataclass(frozen=True)
class TrainingMemory:
    """What decides the memory of training: rank of the adapters (None: all weights) and rows under way."""

    rank: int | None
    rows: int  # of a micro-batch
    micro_batches: int  # under way at once
    recomputed: bool = True  # blocks keep their inputs only, and are computed again for the backward pass


def held_for_training(config: ModelConfig, machine: MachineSpec, task: TrainingMemory, *, asks: bool) -> Holding:
    """Return what a machine holds for training: weights, what is trained with its state, kept inputs, workspace.

    The machine that asks also holds embedding and head, and computes the loss.
    """
    each, beside = trained_bytes(config, machine, task, asks=asks)
    allowance = allowance_on(machine, machine.cap_bytes)
    room = allowance.usable_bytes - beside - allowance.scratch_bytes
    blocks = min(config.n_blocks, max(0, room) // each)
    return Holding(blocks, max(0, config.n_blocks * each - room), each)


def tuning_peak_bytes(config: ModelConfig, machine: MachineSpec, task: TrainingMemory) -> int:
    """Bytes that a process takes at most while it fine-tunes a whole model by itself."""
    assert task.rank is not None, "where all weights are trained, what is set aside is what is taken"
    precision, graphs = machine.precision, 0 if task.recomputed else _PLENTY
    job = TrainingTask(config.n_blocks, task.rank, ADAPTER_ROLES, task.rows, task.micro_batches)
    ends = ends_bytes(config, precision, embedding=True, head=True)
    return ends + plan_training(config, precision, job, graphs).peak_bytes(loss_bytes(config, precision, task.rows))


def trained_bytes(config: ModelConfig, machine: MachineSpec, task: TrainingMemory, *, asks: bool) -> tuple[int, int]:
    """Return the bytes of one block in training, and those that a machine needs besides its blocks."""
    precision, graphs = machine.precision, 0 if task.recomputed else _PLENTY
    if task.rank is None:
        plan, shared = plan_full(config, precision, task.rows, graphs), kind_named(machine.kind).shared_memory
        passes = task.micro_batches * (plan.input_bytes + plan.graph_bytes)
        if not shared:  # what rounds need is in the machine's own memory
            return -(-(plan.state_bytes + passes) // config.n_blocks), plan.workspace_bytes
        more = max(0, plan.kept_bytes + passes + plan.workspace_bytes - plan.round_bytes)
        return -(-(plan.state_bytes + plan.round_bytes) // config.n_blocks), more
    job = TrainingTask(1, task.rank, ADAPTER_ROLES, task.rows, task.micro_batches)
    one = plan_training(config, precision, job, graphs)
    ends = ends_bytes(config, precision, embedding=True, head=True) + loss_bytes(config, precision, task.rows)
    return one.total_bytes - one.workspace_bytes, one.workspace_bytes + (ends if asks else 0)

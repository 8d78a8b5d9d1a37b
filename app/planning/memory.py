"""What a machine can hold: blocks for replies or for training, and what is lacking for the whole model.

All bytes are computed by `engine.budget`, with the code that hosting uses.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.planning.machines import MachineSpec
from engine.budget import allowance_on, fit, trained_block_bytes, workspace_bytes
from engine.config import ModelConfig


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


def held_for_training(config: ModelConfig, machine: MachineSpec, task: TrainingMemory) -> Holding:
    """Return what a machine holds for training: weights, what is trained with its state, kept inputs, workspace."""
    kept_rows = task.rows * task.micro_batches
    each = trained_block_bytes(config, machine.precision, rank=task.rank, kept_rows=kept_rows)
    # Recomputing goes block by block: the activations of one, and their gradients, are held at a time.
    workspace = 2 * workspace_bytes(config, machine.precision, task.rows, head=False)
    allowance = allowance_on(machine, machine.cap_bytes)
    room = allowance.usable_bytes - workspace - allowance.scratch_bytes
    blocks = min(config.n_blocks, max(0, room) // each)
    return Holding(blocks, max(0, config.n_blocks * each - room), each)


def training_state_bytes(config: ModelConfig, machine: MachineSpec, task: TrainingMemory) -> int:
    """Bytes of all blocks of a model in training, in a machine's precision, without workspace and kept inputs."""
    return config.n_blocks * trained_block_bytes(config, machine.precision, rank=task.rank, kept_rows=0)

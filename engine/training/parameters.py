"""All weights of a model as vectors that a job owns: how they are laid out, drawn from a seed, and read from a model.

Each part (the embedding, each block, the head) is one flat float32 vector: matrices first, in the order in which a
block fuses them, then biases and norms. So a fused matrix is a view of the vector, and gradients, moments, hashes and
bytes of a part are one vector each. The weights that a node serves are only read.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.sources.base import ModelSource
from engine.sources.layout import block_index, expected_shapes, part_names
from engine.sources.tensors import load_part

_ORDER = (
    "embedding", "output",
    "q", "k", "v", "o", "gate", "up", "down",
    "q_bias", "k_bias", "v_bias", "o_bias", "gate_bias", "up_bias", "down_bias",
    "attn_norm", "q_norm", "k_norm", "mlp_norm", "final_norm",
)  # fmt: skip
SPREAD = 0.02  # standard deviation of drawn matrices


class Slot(NamedTuple):
    """One tensor of a part and where it is in the part's vector."""

    role: str
    shape: tuple[int, ...]
    first: int

    @property
    def stop(self) -> int:
        """One past the tensor's last weight."""
        return self.first + math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """True for a matrix, False for a bias or a norm."""
        return len(self.shape) == 2


@functools.lru_cache(maxsize=8192)
def part_slots(config: ModelConfig, part: str) -> tuple[Slot, ...]:
    """Return the tensors of a part in the order of its vector."""
    shapes = expected_shapes(config, part)
    slots: list[Slot] = []
    for role in (role for role in _ORDER if role in shapes):
        slots.append(Slot(role, shapes[role], slots[-1].stop if slots else 0))
    return tuple(slots)


def part_weights(config: ModelConfig, part: str) -> int:
    """Number of weights of a part."""
    return part_slots(config, part)[-1].stop


def model_weights(config: ModelConfig) -> int:
    """Number of weights of all parts."""
    return sum(part_weights(config, part) for part in part_names(config))


def matrix_weights(config: ModelConfig, part: str) -> int:
    """Number of weights of a part's matrices, which come first in its vector."""
    return max((slot.stop for slot in part_slots(config, part) if slot.is_matrix), default=0)


def views(config: ModelConfig, part: str, vector: Tensor) -> dict[str, Tensor]:
    """Return each tensor of a part as a view of its vector."""
    return {slot.role: vector[slot.first : slot.stop].view(slot.shape) for slot in part_slots(config, part)}


def drawn_part(config: ModelConfig, part: str, seed: int) -> Tensor:
    """Return a part's vector before any step: norms are one, biases zero, matrices uniform around zero.

    Matrices have the standard deviation `SPREAD`; those that add to the residual (o and down) have it divided by the
    square root of twice the number of blocks, as in GPT-2. The numbers are 16-bit integers from a hash of the seed,
    the part and the role, times one factor, so they are the same bits on every machine.
    """
    vector = torch.zeros(part_weights(config, part))
    for role, tensor in views(config, part, vector).items():
        if role.endswith("norm"):
            tensor.fill_(1.0)
        elif tensor.dim() == 2:
            spread = SPREAD / math.sqrt(2 * config.n_blocks) if role in ("o", "down") else SPREAD
            stream = hashlib.shake_256(f"shoal weights 1/{seed}/{part}/{role}".encode()).digest(2 * tensor.numel())
            numbers = np.frombuffer(stream, dtype="<i2").astype(np.float32)
            numbers *= np.float32(spread * math.sqrt(3) / 32768)
            tensor.copy_(torch.from_numpy(numbers).view(tensor.shape))
    return vector


def drawn_model(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Return the vectors of all parts as drawn from a seed."""
    return {part: drawn_part(config, part, seed) for part in part_names(config)}


def read_model(source: ModelSource) -> dict[str, Tensor]:
    """Return the vectors of all parts of a model, copied from its files; raises `SourceError`."""
    vectors = {}
    for part in part_names(source.config):
        vectors[part] = torch.empty(part_weights(source.config, part))
        tensors = load_part(source, part, torch.float32)
        for role, tensor in views(source.config, part, vectors[part]).items():
            tensor.copy_(tensors[role])
    return vectors


def is_block(part: str) -> bool:
    """True if a part is a block rather than the embedding or the head."""
    return block_index(part) is not None


def joined(config: ModelConfig, vectors: Mapping[str, Tensor]) -> Tensor:
    """Return all parts one after another as one vector."""
    return torch.cat([vectors[part] for part in part_names(config)])


def divided(config: ModelConfig, vector: Tensor) -> dict[str, Tensor]:
    """Return the parts of a joined vector, as views of it."""
    names = part_names(config)
    return dict(zip(names, vector.split([part_weights(config, part) for part in names]), strict=True))

"""Low-rank adapters: their settings, how their weights are laid out in memory, and how they are drawn.

An adapter adds `(alpha / rank) B A x` to the product of a matrix with x, where A is (rank, in) and B is (out, rank).
The weights of one block are one flat float32 vector: so gradients, moments, hashes and bytes of a block are one vector
each. Matrices that a block fuses (q, k, v and gate, up) share one input, so their A's are stacked and are one product.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.budget import ADAPTER_ROLES, adapter_shapes
from engine.config import ModelConfig
from engine.errors import TrainingError
from engine.model.block import FUSED, Matrix

MAX_RANK = 256


@dataclass(frozen=True)
class AdapterSettings:
    """Shape and start of an adapter; raises `TrainingError` for values that make no adapter."""

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ADAPTER_ROLES
    dropout: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= MAX_RANK:
            raise TrainingError(f"the rank {self.rank} is outside 1 to {MAX_RANK}")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise TrainingError(f"alpha must be a positive number, not {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise TrainingError(f"dropout must be at least 0 and below 1, not {self.dropout}")
        object.__setattr__(self, "targets", ordered_targets(self.targets))

    @property
    def scale(self) -> float:
        """Factor on the product of B and A."""
        return self.alpha / self.rank


def ordered_targets(names: Iterable[str]) -> tuple[str, ...]:
    """Return the named roles in the order of a block; raises `TrainingError` for an unknown one or for none."""
    wanted = set(names)
    if unknown := sorted(wanted - set(ADAPTER_ROLES)):
        raise TrainingError(f"unknown target {unknown[0]!r}: choose from {', '.join(ADAPTER_ROLES)}, or all")
    if not wanted:
        raise TrainingError(f"an adapter needs a target: choose from {', '.join(ADAPTER_ROLES)}, or all")
    return tuple(role for role in ADAPTER_ROLES if role in wanted)


class Group(NamedTuple):
    """The adapted roles of one fused matrix, and where their weights are in a block's vector."""

    matrix: Matrix
    roles: tuple[str, ...]
    rank: int
    n_in: int
    columns: tuple[tuple[int, int], ...]  # [first, stop) of each role in the fused output
    first: int  # in the vector: all A's, then each B

    @property
    def stop(self) -> int:
        """One past the group's last weight in the vector."""
        return self.first + len(self.roles) * self.rank * self.n_in + sum(b - a for a, b in self.columns) * self.rank

    def down(self, vector: Tensor) -> Tensor:
        """The stacked A's, a view (roles * rank, in)."""
        rows = len(self.roles) * self.rank
        return vector[self.first : self.first + rows * self.n_in].view(rows, self.n_in)

    def ups(self, vector: Tensor) -> Iterator[Tensor]:
        """Each role's B, a view (out, rank)."""
        begin = self.first + len(self.roles) * self.rank * self.n_in
        for first, stop in self.columns:
            end = begin + (stop - first) * self.rank
            yield vector[begin:end].view(stop - first, self.rank)
            begin = end


@functools.lru_cache
def layout(config: ModelConfig, rank: int, targets: tuple[str, ...]) -> tuple[Group, ...]:
    """Return the groups of a block's vector, which are the same for all blocks of a model."""
    shapes = adapter_shapes(config)
    groups: list[Group] = []
    for matrix, fused in FUSED.items():
        columns, column = {}, 0
        for role in fused:
            columns[role] = (column, column + shapes[role][0])
            column += shapes[role][0]
        roles = tuple(role for role in fused if role in targets)
        if roles:
            first = groups[-1].stop if groups else 0
            n_in = shapes[roles[0]][1]
            groups.append(Group(matrix, roles, rank, n_in, tuple(columns[role] for role in roles), first))
    return tuple(groups)


def weight_count(groups: tuple[Group, ...]) -> int:
    """Number of adapter weights of one block."""
    return groups[-1].stop


def named(groups: tuple[Group, ...], vector: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A (rank, in) and B (out, rank) of each role as views of a block's vector."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for group in groups:
        downs = group.down(vector).split(group.rank)
        found.update(zip(group.roles, zip(downs, group.ups(vector), strict=True), strict=True))
    return found


def drawn(settings: AdapterSettings, config: ModelConfig, block: int) -> Tensor:
    """Return the vector of a block's adapter before any step: A uniform as PEFT draws it, B zero.

    It depends on the seed, the block and the role alone, so that every holder of a block draws the same numbers.
    """
    groups = layout(config, settings.rank, settings.targets)
    vector = torch.zeros(weight_count(groups))
    for role, (down, _) in named(groups, vector).items():
        bound = 1 / math.sqrt(down.shape[1])  # Kaiming's uniform distribution with a = sqrt(5)
        down.uniform_(-bound, bound, generator=generator(settings.seed, block, role))
    return vector


def generator(*parts: int | str) -> torch.Generator:
    """Return a generator on the CPU whose numbers depend on these values alone."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))

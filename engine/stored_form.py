"""How a model's files hold its weights: as plain numbers, or in grids of few bits, in which a CPU can keep them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.budget import FLOAT32, Precision, grid_weights
from engine.config import ModelConfig
from engine.model.block import FUSED
from engine.sources import starter
from engine.sources.base import EMBEDDING_PART, HEAD_PART, ModelSource, block_part
from engine.sources.grid import block_grid_bytes


class StoredTensor(Protocol):
    """A tensor as a file or a manifest describes it."""

    @property
    def role(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class StoredForm:
    """The types of a model's tensors whose blocks are in grids."""

    blocks: tuple[Mapping[str, str], ...]  # of each block, by role
    head: str  # of the output matrix, or of the embedding that takes its place
    weight_bytes: float  # of a weight, as `stored_bytes` counts them

    @property
    def precision(self) -> Precision:
        """Precision of a CPU that keeps the weights in their grids."""
        return grid_weights(self.weight_bytes, FLOAT32.compute_bytes, on_cpu=True)


def stored_form(config: ModelConfig, tensors_of: Callable[[str], Sequence[StoredTensor]]) -> StoredForm | None:
    """Return the form of a model, given the tensors of each of its parts; None for files of plain numbers."""
    blocks = [tensors_of(block_part(index)) for index in range(config.n_blocks)]
    weight_bytes = stored_bytes(blocks)
    if weight_bytes is None:
        return None
    ends = {tensor.role: tensor.kind for part in (EMBEDDING_PART, HEAD_PART) for tensor in tensors_of(part)}
    kinds = tuple({tensor.role: tensor.kind for tensor in tensors} for tensors in blocks)
    return StoredForm(kinds, ends.get("output", ends["embedding"]), weight_bytes)


def starter_form() -> StoredForm:
    """Return the form of the starter model, which need not be here for that."""
    form = stored_form(starter.SHAPE, starter.tensors_of)
    assert form is not None
    return form


def source_form(source: ModelSource) -> StoredForm | None:
    """Return the form of a model's files."""
    return stored_form(source.config, lambda part: source.parts[part])


def stored_bytes(blocks: Iterable[Sequence[StoredTensor]]) -> float | None:
    """Bytes of a weight in the grid of its file, in the block where they are most; None for files of plain numbers."""
    held = []
    for tensors in blocks:
        described = {tensor.role: (tensor.kind, tensor.shape) for tensor in tensors}
        held.append(block_grid_bytes([described[role] for role in roles] for roles in FUSED.values()))
    if not any(held):
        return None
    return max(4.0 if each is None else each for each in held)


def source_bytes(source: ModelSource) -> float | None:
    """Return `stored_bytes` of a model's files."""
    return stored_bytes(source.parts[block_part(index)] for index in range(source.config.n_blocks))

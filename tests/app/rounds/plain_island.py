"""An island whose model is plain numbers, for tests of who waits for whom, lists, histories and leaders.

A step of a real model takes many times as long, and such tests make thousands of them. What islands share and merge in
rounds is that of `IslandModel`; only its steps and losses are others: each sequence pulls all weights towards a point
of its own. Tests of the arithmetic take a lesson with a real model.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.config import ModelConfig, Rope
from engine.errors import NotFinite
from engine.island import IslandModel, IslandTerms, RoundModel
from engine.model.block import WeightOptions
from engine.pieces import Pieces
from engine.training.local_trainer import StepResult
from engine.training.optimiser import AdamW, Moments, Schedule, adamw_step, clip_factor
from engine.training.parameters import divided, joined
from engine.training.sketches import sketch_of

PLAIN = ModelConfig(
    family="llama", n_blocks=1, hidden_size=4, n_heads=1, n_kv_heads=1, head_dim=4, intermediate_size=4,
    vocab_size=128, context_length=64, norm_eps=1e-5, rope=Rope(), tied_embeddings=True,
)  # fmt: skip


class PlainIsland(IslandModel):
    """An island with plain numbers in place of its model."""

    def __init__(
        self, config: ModelConfig, vectors: Mapping[str, Tensor], options: WeightOptions, terms: IslandTerms
    ) -> None:
        RoundModel.__init__(self, config, vectors, terms)
        self._model: Any = PlainModel(config, vectors)

    def batches(self, sequences: Sequence[Sequence[int]]) -> Any:
        """The sequences as they are."""
        return sequences


class PlainModel:
    """Weights with the loss of half their mean squared distance from a sequence's point; takes `FullModel`'s place."""

    def __init__(self, config: ModelConfig, vectors: Mapping[str, Tensor]) -> None:
        self._config, self.version = config, 0
        self._state = Moments.fresh(joined(config, vectors))

    def loss(self, sequences: Sequence[Sequence[int]]) -> Pieces[float]:
        """Mean loss on some sequences."""
        yield
        return self._measured(sequences)[0]

    def step(
        self,
        sequences: Sequence[Sequence[int]],
        schedule: Schedule,
        number: int,
        clip: float | None,
        seed: bytes | None = None,
    ) -> Pieces[StepResult]:
        """Make a step by AdamW without decay; raises `NotFinite` if the loss is not finite."""
        yield
        loss, gradient = self._measured(sequences)
        if not math.isfinite(loss):
            raise NotFinite(f"the loss of step {number + 1} is not finite")
        norm, rate = float(gradient.norm()), schedule.at(number)
        sketch = () if seed is None else (yield from self._sketched(gradient, seed))
        self.version += 1
        self._state = adamw_step(self._state, gradient * clip_factor(norm, clip), self.version, rate, AdamW())
        return StepResult(number + 1, loss, sum(map(len, sequences)) - len(sequences), norm, rate, sketch)

    def sketch(self, sequences: Sequence[Sequence[int]], seed: bytes) -> Pieces[tuple[float, tuple[float, ...]]]:
        """Mean loss on some sequences, and a sketch of its gradient."""
        loss, gradient = self._measured(sequences)
        return loss, (yield from self._sketched(gradient, seed))

    def vectors(self) -> dict[str, Tensor]:
        """Copies of the weights of each part."""
        return divided(self._config, self._state.values.clone())

    def set_vectors(self, vectors: Mapping[str, Tensor]) -> None:
        """Replace the weights; moments stay."""
        self._state = self._state._replace(values=joined(self._config, vectors))

    def moments(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The first and second moments of each part."""
        first, second = divided(self._config, self._state.first), divided(self._config, self._state.second)
        return {part: (first[part], second[part]) for part in first}

    def set_moments(self, moments: Mapping[str, tuple[Tensor, Tensor]], steps: int) -> None:
        """Replace the moments by those after so many steps."""
        first, second = (joined(self._config, {part: pair[i] for part, pair in moments.items()}) for i in (0, 1))
        self._state, self.version = Moments(self._state.values, first, second), steps

    def _measured(self, sequences: Sequence[Sequence[int]]) -> tuple[float, Tensor]:
        """Mean loss on some sequences, and how far the weights are from the middle of their points."""
        values = self._state.values
        away = [values - torch.from_numpy(np.resize(point_of(tuple(one)), values.shape)) for one in sequences]
        return math.fsum(float(one.square().mean()) for one in away) / 2 / len(away), torch.stack(away).mean(dim=0)

    def _sketched(self, gradient: Tensor, seed: bytes) -> Pieces[tuple[float, ...]]:
        return sketch_of(divided(self._config, gradient), 1.0, seed)


@functools.lru_cache(maxsize=1024)
def point_of(sequence: tuple[int, ...]) -> np.ndarray:
    """The point of a sequence, to be repeated for as many weights as there are; those of all are around one."""
    return 1 + 0.3 * np.random.default_rng(sequence).standard_normal(64, dtype=np.float32)

"""Training in one process: the ends and one or more spans, step by step.

`shoal finetune --local` uses it, and it is what a swarm's steps are compared with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.errors import NotFinite, TrainingError
from engine.pieces import at_once
from engine.training.head import IGNORED, TrainingEnds
from engine.training.optimiser import Schedule, clip_factor, total_norm
from engine.training.span import TrainedSpan


class MicroBatch(NamedTuple):
    """Token ids (batch, length), and for each the token that follows it where it counts, else `IGNORED`."""

    token_ids: Tensor
    labels: Tensor

    @property
    def counted(self) -> int:
        """Number of tokens that the loss counts."""
        return int((self.labels != IGNORED).sum())

    @property
    def contents(self) -> list[bytes]:
        """The tokens of each sequence as bytes, without the filling at its end."""
        return [np.trim_zeros(ids, "b").tobytes() for ids in self.token_ids.numpy()]


def micro_batch(sequences: Sequence[tuple[Sequence[int], Sequence[bool]]]) -> MicroBatch:
    """Make a micro-batch of (token ids, which of them count), padded at the end to the longest.

    Padding needs no mask: nothing in front of it sees it, and it does not count.
    """
    longest = max(len(ids) for ids, _ in sequences)
    token_ids = torch.zeros(len(sequences), longest, dtype=torch.int64)
    labels = torch.full((len(sequences), longest), IGNORED)
    for row, (ids, counted) in enumerate(sequences):
        token_ids[row, : len(ids)] = torch.tensor(ids)
        following = torch.where(torch.tensor(counted), token_ids[row, : len(ids)], IGNORED)
        labels[row, : len(ids) - 1] = following[1:]
    return MicroBatch(token_ids, labels)


@dataclass(frozen=True)
class StepResult:
    """One committed step: its number from 1, the mean loss before it, counted tokens, gradient norm and rate.

    With a sketch of the gradient (`engine.training.sketches`) if one was asked for.
    """

    version: int
    loss: float
    tokens: int
    norm: float
    rate: float
    sketch: tuple[float, ...] = ()


class LocalTrainer:
    """Runs the steps of a job through spans in this process, which together are all blocks of the model."""

    def __init__(
        self, ends: TrainingEnds, spans: Sequence[TrainedSpan], schedule: Schedule, clip: float | None = 1.0
    ) -> None:
        self._ends, self.spans = ends, list(spans)
        self._schedule, self._clip = schedule, clip

    @property
    def version(self) -> int:
        """Number of committed steps."""
        return self.spans[0].version

    def run(self, number: int, batch: MicroBatch) -> float:
        """Run one micro-batch forwards and backwards; return its summed loss. Gradients go to the spans' sums."""
        sequences = batch.token_ids.shape[0]
        hidden = self._ends.embed(batch.token_ids)
        for span in self.spans:
            hidden = span.forward(number, hidden, sequences)
        loss = at_once(self._ends.loss(hidden, batch.labels))
        gradient = loss.gradient
        for span in reversed(self.spans):
            gradient = span.backward(number, gradient)
        return loss.total

    def step(self, batches: Sequence[MicroBatch]) -> StepResult:
        """Run the micro-batches of a step and commit it.

        Raises `NotFinite` if the loss or a gradient is not finite; the version then stays as it was.
        """
        tokens = sum(batch.counted for batch in batches)
        if not tokens:
            raise TrainingError("a step needs at least one token that counts")
        try:
            loss = math.fsum(self.run(number, batch) for number, batch in enumerate(batches)) / tokens
            scale = 1 / tokens
            norm = total_norm((norm for span in self.spans for norm in span.squared_norms().values()), scale)
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise NotFinite(f"the loss of step {self.version + 1} is not finite")
            rate = self._schedule.at(self.version)
            for span in self.spans:
                span.step(rate, scale, clip_factor(norm, self._clip))
        except BaseException:
            for span in self.spans:
                span.clear()
            raise
        for span in self.spans:
            span.commit()
        return StepResult(self.version, loss, tokens, norm, rate)

    def loss(self, batches: Iterable[MicroBatch]) -> float:
        """Mean loss over the counted tokens of data that is not trained on."""
        total, tokens = 0.0, 0
        for batch in batches:
            hidden = self._ends.embed(batch.token_ids)
            for span in self.spans:
                hidden = span.evaluate(hidden, batch.token_ids.shape[0])
            found = at_once(self._ends.loss(hidden, batch.labels, gradient=False))
            total, tokens = total + found.total, tokens + found.tokens
        return total / max(1, tokens)

    def states(self) -> dict[int, bytes]:
        """Adapter and moments of every block."""
        return {block: span.state(block) for span in self.spans for block in span.blocks}

    def load(self, states: dict[int, bytes]) -> None:
        """Go on from the states of every block; raises `TrainingError` if they do not fit."""
        for span in self.spans:
            span.load({block: states[block] for block in span.blocks if block in states})

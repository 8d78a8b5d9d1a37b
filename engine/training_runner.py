"""Runs the blocks of a training job for a server, and the two ends for its owner: bytes in and bytes out.

Each block is a span of its own, so that a reply can go between any two blocks of a pass. Not thread-safe: one thread at
a time. Knows no peers; `app.training` decides which micro-batches run and when a step counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from engine.budget import TrainingTask, plan_training, unquantised
from engine.config import ModelConfig
from engine.errors import NotFinite, TrainingError, TrainingFull
from engine.model.span import SpanRunner
from engine.pieces import Pieces
from engine.swarm_ends import SwarmEnds
from engine.training.adapters import AdapterSettings, drawn, layout, weight_count
from engine.training.head import TrainingEnds
from engine.training.local_trainer import MicroBatch
from engine.training.optimiser import MOST_RATIO, AdamW, Moments, adamw_step
from engine.training.peft_format import Adapter
from engine.training.span import TrainedSpan, unpack_state
from engine.wire import is_finite, to_bytes, to_tensor

SUM_BYTES = 4  # of a number in summed gradients, which are float32
_SAMPLED = 4096  # numbers of a block that are followed
_ROUNDING = 1e-3  # of their length, by which they may differ: a step is rounded by 1e-7 on any device
_LEAST = 1e-30  # numbers so small are zero on some devices


class TrainingRunner:
    """Blocks [start, stop) of a hosted span with the adapters of one job, within a memory limit."""

    def __init__(
        self,
        hosted: SpanRunner,
        blocks: tuple[int, int],
        settings: AdapterSettings,
        *,
        optimiser: AdamW,
        rows: int,
        under_way: int,
        usable_bytes: int,
    ) -> None:
        """Draw the adapters; raises `TrainingError` for blocks that are not hosted, `TrainingFull` without memory."""
        start, stop = blocks
        if not hosted.start <= start < stop <= hosted.start + len(hosted.blocks):
            raise TrainingError(f"blocks {start}:{stop} are not hosted here")
        precision = unquantised(hosted.options.dtype.itemsize)
        task = TrainingTask(stop - start, settings.rank, settings.targets, rows, under_way)
        plan = plan_training(hosted.config, precision, task, usable_bytes)
        # The model's own weights are here already, whether a job uses them or not.
        self.memory_bytes = plan.total_bytes - plan.weight_bytes - plan.graph_bytes
        if self.memory_bytes > usable_bytes:
            raise TrainingFull(
                f"the job takes {self.memory_bytes} bytes of memory here, of which {usable_bytes} are to spare",
                self.memory_bytes,
            )
        graphs = max(0, min(usable_bytes - self.memory_bytes, under_way * plan.graph_bytes))
        self.hidden_size = hosted.config.hidden_size
        self.start, self.stop = start, stop
        self._spans = [
            TrainedSpan(
                hosted.config,
                [block],
                settings,
                hosted.options,
                input_bytes=plan.input_bytes // (stop - start),
                graph_bytes=graphs // (stop - start),
                optimiser=optimiser,
            )
            for block in hosted.blocks[start - hosted.start : stop - hosted.start]
        ]

    @property
    def version(self) -> int:
        """Number of committed steps."""
        return self._spans[0].version

    def rows(self, data: memoryview, dtype: str) -> Tensor:
        """Return numbers from the wire as rows (N, hidden)."""
        return to_tensor([data], dtype, self.hidden_size)

    def data(self, rows: Tensor, dtype: str) -> bytes:
        """Return rows as numbers for the wire; raises `NotFinite` if they do not fit its format."""
        return data_of(rows, dtype)

    def forward(self, block: int, number: int, rows: Tensor, sequences: int, way: int = 0) -> Tensor:
        """Run a micro-batch through one block; see `TrainedSpan.forward`."""
        return self._spans[block - self.start].forward(number, rows, sequences, way=way)

    def backward(self, block: int, number: int, rows: Tensor, counts: bool, way: int = 0) -> Tensor:
        """Run a gradient back through one block, adding to its sums if it counts; see `TrainedSpan.backward`."""
        return self._spans[block - self.start].backward(number, rows, () if counts else (block,), way=way)

    def evaluate(self, block: int, rows: Tensor, sequences: int) -> Tensor:
        """Run rows through one block without keeping anything; see `TrainedSpan.evaluate`."""
        return self._spans[block - self.start].evaluate(rows, sequences)

    def discard(self, number: int, way: int = 0) -> None:
        """Drop what a micro-batch's forward pass has kept."""
        for span in self._spans:
            span.discard(number, way)

    def clear(self) -> None:
        """Drop all passes and sums of this version, and the next one if there is one."""
        for span in self._spans:
            span.clear()

    def squared_norms(self) -> list[float]:
        """Squared norm of the summed gradients of each block."""
        return [norm for span in self._spans for norm in span.squared_norms().values()]

    def gradient(self, block: int) -> Tensor:
        """A copy of the summed gradients of a block's adapter."""
        return self._spans[block - self.start].gradient(block)

    @property
    def sums_bytes(self) -> int:
        """Bytes of one block's summed gradients."""
        return self._spans[0].numbers * SUM_BYTES

    def take_sums(self, block: int) -> bytes:
        """Return the summed gradients of a block as float32 numbers, and begin new sums."""
        return self._spans[block - self.start].take_gradient(block).numpy().astype("<f4", copy=False).tobytes()

    def set_sums(self, block: int, data: memoryview) -> None:
        """Replace the summed gradients of a block by those of all its holders."""
        self._spans[block - self.start].set_gradient(block, torch.frombuffer(bytearray(data), dtype=torch.float32))

    def step(self, rate: float, scale: float, clip: float) -> None:
        """Make the next version of all blocks; raises `NotFinite` and makes none."""
        try:
            for span in self._spans:
                span.step(rate, scale, clip)
        except NotFinite:
            for span in self._spans:
                span.revert()
            raise

    def commit(self) -> None:
        """Make the next version the current one in all blocks."""
        for span in self._spans:
            span.commit()

    def state(self, block: int) -> bytes:
        """Adapter and moments of a block in the current version."""
        return self._spans[block - self.start].state(block)

    def load(self, states: Mapping[int, bytes]) -> None:
        """Go on from these states of all blocks; raises `TrainingError` if they do not fit."""
        for span in self._spans:
            span.load({span.start: states[span.start]})
        if len({span.version for span in self._spans}) != 1:
            raise TrainingError("the states of the blocks are of different versions")


def sums_bytes(settings: AdapterSettings, config: ModelConfig) -> int:
    """Bytes of the summed gradients of a block's adapter."""
    return weight_count(layout(config, settings.rank, settings.targets)) * SUM_BYTES


class BatchLoss(NamedTuple):
    """Summed loss of a micro-batch, and its gradient by the last hidden states as numbers for the wire."""

    total: float
    gradient: bytes


class OwnerEnds:
    """Embedding and loss of a job's micro-batches, for a wire format."""

    def __init__(self, ends: TrainingEnds, hidden_size: int) -> None:
        self._ends, self.hidden_size = ends, hidden_size

    def shape(self, batch: MicroBatch) -> tuple[int, int]:
        """Return sequences and tokens of each."""
        sequences, length = batch.token_ids.shape
        return sequences, length

    def counted(self, batches: Sequence[MicroBatch]) -> int:
        """Number of tokens that the loss of these micro-batches counts."""
        return sum(batch.counted for batch in batches)

    def contents(self, batch: MicroBatch) -> list[bytes]:
        """Return the tokens of each sequence as bytes, without the filling."""
        return batch.contents

    def embed(self, batch: MicroBatch, wire: str) -> bytes:
        """Return a micro-batch's embeddings as numbers for the wire."""
        return data_of(self._ends.embed(batch.token_ids), wire)

    def loss(
        self, batch: MicroBatch, hidden: memoryview, dtype: str, *, gradient: bool, number: int, wire: str
    ) -> Pieces[BatchLoss]:
        """Compute the loss of the last hidden states, with or without its gradient; raises `NotFinite`."""
        rows = to_tensor([hidden], dtype, self.hidden_size)
        found = yield from self._ends.loss(rows, batch.labels, gradient=gradient)
        return BatchLoss(found.total, data_of(found.gradient, wire) if gradient else b"")


def owner_ends(ends: SwarmEnds) -> OwnerEnds:
    """Return the ends of a job's owner, with the weights that its replies use too."""
    return OwnerEnds(TrainingEnds(ends.both), ends.hidden_size)


def adapter_of(settings: AdapterSettings, config: ModelConfig, states: Sequence[bytes], model: str) -> Adapter:
    """Return the adapter in the states of all blocks; raises `TrainingError` if they are no such states."""
    count = weight_count(layout(config, settings.rank, settings.targets))
    return Adapter(settings, {block: unpack_state(state, count)[1].values for block, state in enumerate(states)}, model)


def version_of(state: bytes, settings: AdapterSettings, config: ModelConfig) -> int:
    """Return the number of steps after which this state of a block was taken; raises `TrainingError`."""
    return unpack_state(state, weight_count(layout(config, settings.rank, settings.targets)))[0]


class StateSample:
    """Some numbers of a block's adapter and moments, which are stepped along with those of its holders.

    Who holds the block does not know which ones: a state that the sums of all holders do not lead to is found. A few
    wrong numbers among many are not, so none may be larger than the steps can have made it: those do little.
    """

    def __init__(
        self, block: int, state: bytes | None, settings: AdapterSettings, config: ModelConfig, optimiser: AdamW
    ) -> None:
        """Begin with a state, or with the adapter as it is drawn; raises `TrainingError` if it is no such state."""
        self._count, self._optimiser = weight_count(layout(config, settings.rank, settings.targets)), optimiser
        whole = Moments.fresh(drawn(settings, config, block)) if state is None else unpack_state(state, self._count)[1]
        self._places = torch.from_numpy(numpy.random.default_rng().integers(self._count, size=_SAMPLED))
        self._state = self._sampled(whole)
        self._largest = float(whole.values.abs().max())  # that a weight can be

    def step(self, sums: Any, number: int, rate: float, factor: float) -> None:
        """Make step `number` (from 1) with the summed gradients of the block times `factor`."""
        gradient = torch.from_numpy(sums[self._places.numpy()]) * factor
        self._state = adamw_step(self._state, gradient, number, rate, self._optimiser)
        self._largest += MOST_RATIO * rate

    def fits(self, state: bytes) -> bool:
        """True if a state has the same numbers, but for rounding; raises `TrainingError` if it is none."""
        whole = unpack_state(state, self._count)[1]
        found = self._sampled(whole)
        return float(whole.values.abs().max()) <= (1 + _ROUNDING) * self._largest and all(
            float((one - other).double().norm()) <= _ROUNDING * float(one.double().norm()) + _LEAST
            for one, other in zip(self._state, found, strict=True)
        )

    def _sampled(self, state: Moments) -> Moments:
        return Moments(*(vector[self._places] for vector in state))


def data_of(rows: Tensor, dtype: str) -> bytes:
    """Return rows as numbers for the wire; raises `NotFinite` if they do not fit its format."""
    data = to_bytes(rows, dtype)
    if not is_finite(to_tensor([data], dtype, rows.shape[1])):
        raise NotFinite(f"a number is not finite in {dtype}")
    return bytes(data)

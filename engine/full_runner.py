"""Runs blocks whose weights are all trained for a training server, and the two ends for the job's owner.

Bytes in and bytes out, as in `engine.training_runner`, whose blocks have adapters instead. The weights are the job's
own. A block's state is its weights and moments (`engine.training.full`). Not thread-safe: one thread at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.budget import full_blocks_bytes, unquantised
from engine.config import ModelConfig
from engine.errors import NotFinite, TrainingError, TrainingFull
from engine.model.block import WeightOptions
from engine.pieces import Pieces, unbroken
from engine.sources.base import EMBEDDING_PART, HEAD_PART, block_part
from engine.training.full import FullBlocks, FullEnds, Optimisers
from engine.training.local_trainer import MicroBatch
from engine.training.optimiser import AdamW, Muon
from engine.training.parameters import part_weights
from engine.training_runner import SUM_BYTES, BatchLoss, data_of
from engine.wire import to_tensor


class FullRunner:
    """Blocks [start, stop) of a job that trains all weights; `load` gives them their weights."""

    def __init__(
        self,
        config: ModelConfig,
        blocks: tuple[int, int],
        options: WeightOptions,
        *,
        optimiser: AdamW | Muon,
        rows: int,
        under_way: int,
        usable_bytes: int,
    ) -> None:
        """Make room for the blocks; raises `TrainingError` if there are none such, `TrainingFull` without memory."""
        self.start, self.stop = blocks
        if not 0 <= self.start < self.stop <= config.n_blocks:
            raise TrainingError(f"a model of {config.n_blocks} blocks has no blocks {self.start}:{self.stop}")
        precision = unquantised(options.dtype.itemsize)
        self.memory_bytes = full_blocks_bytes(config, precision, self.stop - self.start, rows, under_way)
        if self.memory_bytes > usable_bytes:
            raise TrainingFull(
                f"the job takes {self.memory_bytes} bytes of memory here, of which {usable_bytes} are to spare",
                self.memory_bytes,
            )
        self.hidden_size = config.hidden_size
        self._how, self._options = Optimisers.of(optimiser), options
        size = part_weights(config, block_part(self.start))
        self._blocks = FullBlocks(
            config, {index: torch.zeros(size) for index in range(self.start, self.stop)}, options, self._how
        )
        self._steps = 0  # since the moments were fresh
        self._inputs: dict[tuple[int, int, int], tuple[Tensor, int]] = {}  # by block, micro-batch and way
        self._next: tuple[float, float] | None = None  # rate and factor of the step that waits for `commit`

    # Passes

    def rows(self, data: memoryview, dtype: str) -> Tensor:
        """Return numbers from the wire as rows (N, hidden)."""
        return to_tensor([data], dtype, self.hidden_size)

    def data(self, rows: Tensor, dtype: str) -> bytes:
        """Return rows as numbers for the wire; raises `NotFinite` if they do not fit its format."""
        return data_of(rows, dtype)

    @torch.no_grad()
    def forward(self, block: int, number: int, rows: Tensor, sequences: int, way: int = 0) -> Tensor:
        """Run a micro-batch through one block, and keep its input for the pass backwards."""
        x = self._admitted(rows, sequences)
        self._inputs[block, number, way] = x, sequences
        return self._blocks.run(block, x, sequences, self._turns(x, sequences))

    def backward(self, block: int, number: int, rows: Tensor, counts: bool, way: int = 0) -> Tensor:
        """Run a gradient back through one block, adding to its sums if it counts; raises `TrainingError`.

        The block is computed again, so that its input alone is kept between the passes.
        """
        kept = self._inputs.get((block, number, way))
        if kept is None:
            raise TrainingError(f"micro-batch {number} has no forward pass here: send it forward first")
        x, sequences = kept
        dy = self._admitted(rows, sequences)
        if dy.shape != x.shape:
            raise TrainingError(f"micro-batch {number} has {x.shape[0]} rows, not {dy.shape[0]}")
        del self._inputs[block, number, way]
        leaf = x.detach().requires_grad_()
        return self._blocks.back(block, leaf, None, dy, sequences, self._turns(x, sequences), counts=counts)

    @torch.no_grad()
    def evaluate(self, block: int, rows: Tensor, sequences: int) -> Tensor:
        """Run rows through one block without keeping anything."""
        x = self._admitted(rows, sequences)
        return self._blocks.run(block, x, sequences, self._turns(x, sequences))

    def discard(self, number: int, way: int = 0) -> None:
        """Drop what a micro-batch's forward pass has kept."""
        for block in range(self.start, self.stop):
            self._inputs.pop((block, number, way), None)

    def clear(self) -> None:
        """Drop all passes and sums of this version, and the step that waits."""
        self._inputs.clear()
        self._next = None
        for part in self._blocks.parts.values():
            part.clear()

    # Sums

    def squared_norms(self) -> list[float]:
        """Squared norm of the summed gradients of each block."""
        return [part.squared_norm() for part in self._blocks.parts.values()]

    @property
    def sums_bytes(self) -> int:
        """Bytes of one block's summed gradients."""
        return self._blocks.parts[self.start].sums.numel() * SUM_BYTES

    def take_sums(self, block: int) -> bytes:
        """Return the summed gradients of a block as float32 numbers, and begin new sums."""
        sums = self._blocks.parts[block].sums
        taken = sums.cpu().numpy().astype("<f4").tobytes()
        sums.zero_()
        return taken

    def set_sums(self, block: int, data: memoryview) -> None:
        """Replace the summed gradients of a block by those of all its holders."""
        self._blocks.parts[block].sums.copy_(torch.frombuffer(bytearray(data), dtype=torch.float32))

    # Steps

    def step(self, rate: float, scale: float, clip: float) -> None:
        """Prepare the next version; raises `NotFinite` and prepares none.

        The weights change in `commit`: a second copy of weights and moments would take as much memory again.
        """
        if not all(map(math.isfinite, (*self.squared_norms(), rate, scale, clip))):
            raise NotFinite("the summed gradients are not finite")
        self._next = rate, scale * clip

    @torch.no_grad()
    def commit(self) -> None:
        """Make the next version the current one in all blocks."""
        if self._next is None:
            raise TrainingError("no step waits to be committed")
        rate, factor = self._next
        self._steps += 1
        for part in self._blocks.parts.values():
            part.step(self._steps, rate, factor, self._how)
        self.clear()

    # State

    def state(self, block: int) -> bytes:
        """Weights and moments of a block in the current version."""
        return self._blocks.parts[block].state(self._steps)

    def load(self, states: Mapping[int, bytes]) -> None:
        """Go on from these states of all blocks; raises `TrainingError` if they do not fit."""
        steps = {self._blocks.parts[block].load(states[block]) for block in range(self.start, self.stop)}
        if len(steps) != 1:
            raise TrainingError("the states of the blocks are of different versions")
        self._steps = steps.pop()
        self.clear()

    # Inside

    def _admitted(self, rows: Tensor, sequences: int) -> Tensor:
        if self._next is not None:
            raise TrainingError("a step waits to be committed: no passes until then")
        if rows.dim() != 2 or rows.shape[1] != self.hidden_size or sequences < 1 or rows.shape[0] % sequences:
            raise TrainingError(f"{tuple(rows.shape)} are not rows of {sequences} sequences of this model")
        if not bool(torch.isfinite(rows).all()):
            raise NotFinite("rows have numbers that are not finite")
        moved = rows.to(self._options.device, self._options.dtype)
        return moved.clone() if moved.is_inference() else moved.detach()

    def _turns(self, rows: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
        return self._blocks.turns(sequences, rows.shape[0] // sequences)


class FullOwnerEnds:
    """Embedding and head of a job that trains all weights, at its owner, who trains them too."""

    def __init__(
        self,
        config: ModelConfig,
        vectors: Mapping[str, Tensor],
        options: WeightOptions,
        optimiser: AdamW | Muon,
    ) -> None:
        self._ends = FullEnds(config, vectors, options)
        self._how, self._options = Optimisers.of(optimiser), options
        self.hidden_size = config.hidden_size
        self.steps = 0  # since the moments were fresh
        self._heads: set[int] = set()  # micro-batches in the sums of the head
        self._embedded: set[int] = set()  # and of the embedding
        self.keep()

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

    @torch.no_grad()
    def embed(self, batch: MicroBatch, wire: str) -> bytes:
        """Return a micro-batch's embeddings as numbers for the wire."""
        return data_of(self._ends.embed(batch.token_ids), wire)

    def loss(
        self, batch: MicroBatch, hidden: memoryview, dtype: str, *, gradient: bool, number: int, wire: str
    ) -> Pieces[BatchLoss]:
        """Compute the loss of the last hidden states of micro-batch `number`; raises `NotFinite`.

        With `gradient`, the head's gradients are added to its sums, unless they are there already.
        """
        rows = to_tensor([hidden], dtype, self.hidden_size).to(self._options.device, self._options.dtype)
        counts = gradient and number not in self._heads
        if counts:
            self._heads.add(number)
        total, found = yield from unbroken(self._ends.loss(rows, batch.labels, gradient=gradient, counts=counts))
        return BatchLoss(total, data_of(found, wire) if gradient else b"")

    def back(self, batch: MicroBatch, number: int, gradient: memoryview, dtype: str) -> None:
        """Add the gradient of a micro-batch's embeddings to the sums, unless it is there already."""
        if number in self._embedded:
            return
        with torch.enable_grad():
            embedded = self._ends.embed(batch.token_ids)
        self._ends.back(embedded, to_tensor([gradient], dtype, self.hidden_size).to(embedded))
        self._embedded.add(number)

    def clear(self) -> None:
        """Drop the sums of this step."""
        self._heads.clear()
        self._embedded.clear()
        for part in self._ends.parts.values():
            part.clear()

    def squared_norms(self) -> list[float]:
        """Squared norms of the summed gradients of embedding and head."""
        return [part.squared_norm() for part in self._ends.parts.values()]

    @torch.no_grad()
    def step(self, rate: float, scale: float, clip: float) -> None:
        """Change the weights by the summed gradients, and begin new sums."""
        self.steps += 1
        for part in self._ends.parts.values():
            part.step(self.steps, rate, scale * clip, self._how)
        self.clear()

    def keep(self) -> None:
        """Remember weights and moments as they are now."""
        self.kept = [part.state(self.steps) for part in self._ends.parts.values()]

    def restore(self) -> None:
        """Go back to what was remembered last."""
        for part, state in zip(self._ends.parts.values(), self.kept, strict=True):
            self.steps = part.load(state)
        self.clear()

    def vectors(self) -> dict[str, Tensor]:
        """Copies of the weights of both parts, on the CPU."""
        return {name: part.values.cpu().clone() for name, part in self._ends.parts.items()}

    @torch.no_grad()
    def set_vectors(self, vectors: Mapping[str, Tensor]) -> None:
        """Replace the weights of both parts; moments stay. What is remembered is that."""
        for name in (EMBEDDING_PART, HEAD_PART):
            self._ends.parts[name].values.copy_(vectors[name])
            self._ends.parts[name].refresh()
        self.clear()
        self.keep()

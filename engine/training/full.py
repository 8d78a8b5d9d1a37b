"""Training of all weights of a model: passes, summed gradients, and steps by AdamW or Muon.

`FullBlocks` and `FullEnds` are what one machine has of a model, `FullModel` is a whole one in this process. The weights
are the job's own (`engine.training.parameters`); what a node serves never changes. Not thread-safe.

Passes and steps are generators that compute a short piece between two yields, so that the caller can let the device do
other work there. No torch context is open at a yield. A generator that is closed before its end changes no weights,
unless it had begun to: then it changes them all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.budget import LOSS_ROWS, block_graph_bytes, unquantised
from engine.config import ModelConfig
from engine.errors import NotFinite, TrainingError
from engine.model.attention import attend_whole
from engine.model.block import Block, Matrix, WeightOptions, block_forward
from engine.model.linear import DenseLinear
from engine.model.rope import RotaryTable
from engine.pieces import Pieces, unbroken
from engine.sources.base import EMBEDDING_PART, HEAD_PART, block_part
from engine.sources.layout import part_names
from engine.training.head import IGNORED
from engine.training.local_trainer import MicroBatch, StepResult
from engine.training.optimiser import (
    AdamW,
    Moments,
    Muon,
    Schedule,
    adamw_step,
    are_moments,
    clip_factor,
    muon_step,
    total_norm,
)
from engine.training.parameters import is_block, matrix_weights, part_slots, part_weights, views
from engine.training.sketches import sketch_of

_FUSED: tuple[tuple[str, ...], ...] = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))
_MAGIC = b"shoal weights 1\n"
Turns = tuple[Tensor, Tensor]  # of a rotary embedding


class Optimisers(NamedTuple):
    """How weights are changed: matrices of blocks by Muon if `uses_muon`, all others by AdamW."""

    adamw: AdamW
    muon: Muon
    uses_muon: bool

    @classmethod
    def of(cls, optimiser: AdamW | Muon | None) -> Optimisers:
        """Return those of a job; Muon's weight decay is AdamW's too."""
        muon = optimiser if isinstance(optimiser, Muon) else Muon()
        adamw = optimiser if isinstance(optimiser, AdamW) else AdamW(weight_decay=muon.weight_decay)
        return cls(adamw, muon, isinstance(optimiser, Muon))


class TrainedPart:
    """One part: its weights, their summed gradients and moments, and the tensors that passes compute with."""

    def __init__(self, config: ModelConfig, part: str, values: Tensor, how: WeightOptions, *, muon: bool) -> None:
        if values.shape != (part_weights(config, part),):
            raise TrainingError(
                f"{part} has {values.numel()} weights, but this shape needs {part_weights(config, part)}"
            )
        self.part, self.values = part, values.detach().to(how.device, torch.float32).clone()
        self.sums = torch.zeros_like(self.values)
        self.slots = part_slots(config, part)
        self.matrices = matrix_weights(config, part)
        self.muon = muon and is_block(part)
        # Muon keeps one moment of each matrix's weight, AdamW two of every weight.
        self.first = torch.zeros_like(self.values)
        self.second = torch.zeros_like(self.values[self.matrices :] if self.muon else self.values)
        self._copies = how.dtype != torch.float32
        own, sums = views(config, part, self.values), views(config, part, self.sums)
        self.leaves: dict[str, Tensor] = {}  # by role; a fused group by its first
        self._pairs: list[tuple[Tensor, Tensor, Tensor]] = []  # (leaf, its weights, its sums)
        groups = [fused for fused in _FUSED if fused[0] in own]
        groups += [tuple(f"{role}_bias" for role in fused) for fused in _FUSED if f"{fused[0]}_bias" in own]
        groups += [(role,) for role in own if not any(role in group for group in groups)]
        for group in groups:
            weights, total = (_span(group, each) for each in (own, sums))
            leaf = weights.to(how.dtype, copy=True) if self._copies else weights.detach()
            leaf.requires_grad_()
            if not self._copies:
                leaf.grad = total  # autograd adds in place to a gradient that is there
            self.leaves[group[0]] = leaf
            self._pairs.append((leaf, weights, total))

    def collect(self) -> None:
        """Add the gradients of copies in a shorter format to the sums."""
        if self._copies:
            for leaf, _, total in self._pairs:
                if leaf.grad is not None:
                    total += leaf.grad
                    leaf.grad = None

    def clear(self) -> None:
        """Drop the summed gradients, and those of copies that were not added to them."""
        self.sums.zero_()
        if self._copies:
            for leaf in self.leaves.values():
                leaf.grad = None

    def squared_norm(self) -> float:
        """Squared norm of the summed gradients, in float64."""
        return float(self.sums.double().square().sum())

    def refresh(self) -> None:
        """Let the copies be those of the current weights."""
        if self._copies:
            with torch.no_grad():
                for leaf, weights, _ in self._pairs:
                    leaf.copy_(weights)

    def state(self, steps: int) -> bytes:
        """Weights and moments as bytes, after so many steps."""
        return pack_part(steps, self.values, _bytes(self.first) + _bytes(self.second))

    @torch.no_grad()
    def load(self, data: bytes) -> int:
        """Go on from the bytes of a state; return its steps. Raises `TrainingError` if they are none."""
        steps, values, rest = unpack_part(data, self.values.numel())
        if len(rest) != 4 * (self.first.numel() + self.second.numel()):
            raise TrainingError(f"the state of {self.part} has {len(rest)} bytes of moments, of another optimiser")
        moments = _numbers(rest)
        first, second = moments[: self.first.numel()], moments[self.first.numel() :]
        if not are_moments(first, second):
            raise TrainingError(f"the moments of {self.part} are none that training makes")
        for own, vector in ((self.values, values), (self.first, first), (self.second, second)):
            own.copy_(vector)
        self.clear()
        self.refresh()
        return steps

    @torch.no_grad()
    def step(self, number: int, rate: float, factor: float, how: Optimisers) -> None:
        """Change the weights by their summed gradients times `factor`."""
        adamw, muon = how.adamw, how.muon
        gradient = self.sums * factor
        middle, start = self.matrices, 0
        if self.muon:
            start = middle
            for slot in (slot for slot in self.slots if slot.is_matrix):
                at = slice(slot.first, slot.stop)
                own, momentum = self.values[at].view(slot.shape), self.first[at].view(slot.shape)
                made = muon_step(own, momentum, gradient[at].view(slot.shape), rate, muon)
                own.copy_(made[0])
                momentum.copy_(made[1])
        plain = AdamW(adamw.beta1, adamw.beta2, adamw.eps)  # biases and norms do not decay
        for first, stop, each in ((start, middle, adamw), (middle, self.values.numel(), plain)):
            if first < stop:
                second = self.second[first - start : stop - start]
                state = Moments(self.values[first:stop], self.first[first:stop], second)
                for old, new in zip(state, adamw_step(state, gradient[first:stop], number, rate, each), strict=True):
                    old.copy_(new)
        self.refresh()


def stepped(parts: Iterable[TrainedPart], number: int, rate: float, factor: float, how: Optimisers) -> Pieces[None]:
    """Change the weights of some parts by their summed gradients times `factor`."""
    for part in parts:
        part.step(number, rate, factor, how)
        yield


class FullBlocks:
    """Some blocks of a model whose weights are all trained."""

    def __init__(
        self, config: ModelConfig, vectors: Mapping[int, Tensor], options: WeightOptions, how: Optimisers
    ) -> None:
        """Copy the vectors of these blocks; raises `TrainingError` if they do not fit the shape."""
        self.config, self.options = config, options
        self._rope = RotaryTable(config.rope, config.head_dim, options.device, options.dtype)
        self.parts = {
            index: TrainedPart(config, block_part(index), vector, options, muon=how.uses_muon)
            for index, vector in vectors.items()
        }
        self._blocks = {index: _block(index, part.leaves) for index, part in self.parts.items()}

    def turns(self, count: int, length: int) -> Turns:
        """Rotary embeddings of `count` sequences of one length."""
        if length > self.config.context_length:
            raise TrainingError(
                f"a sequence of {length} tokens is longer than the context {self.config.context_length}"
            )
        return self._rope.at(torch.arange(length, device=self.options.device).repeat(count))

    def run(self, index: int, x: Tensor, count: int, rope: Turns) -> Tensor:
        """Run `count` sequences through one block: (N, hidden) -> (N, hidden)."""
        block, window = self._blocks[index], self.config.window_of(index)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend_whole(q, k, v, count, window)

        def multiply(matrix: Matrix, rows: Tensor, residual: Tensor | None) -> Tensor:
            linear: DenseLinear = getattr(block, matrix)
            return linear(rows, residual, training=True)

        return block_forward(block, self.config, x, rope, attend, multiply)

    def again(self, index: int, leaf: Tensor, count: int, rope: Turns) -> Tensor:
        """Run sequences through one block once more, for the graph that `back` needs."""
        with torch.enable_grad():
            return self.run(index, leaf.requires_grad_(), count, rope)

    def back(
        self, index: int, leaf: Tensor, y: Tensor | None, dy: Tensor, count: int, rope: Turns, *, counts: bool = True
    ) -> Tensor:
        """Return the gradient by a block's input from that by its output; the weights' go to the sums if it counts.

        The output is computed again if it is not given with its graph.
        """
        if y is None:
            y = self.again(index, leaf, count, rope)
        if not counts:
            (dx,) = torch.autograd.grad(y, leaf, dy)
            return dx
        y.backward(dy)
        self.parts[index].collect()
        assert leaf.grad is not None
        return leaf.grad


class FullEnds:
    """Embedding and head of a model whose weights are all trained."""

    def __init__(self, config: ModelConfig, vectors: Mapping[str, Tensor], options: WeightOptions) -> None:
        """Copy the vectors of both; raises `TrainingError` if they do not fit the shape."""
        self.config = config
        self.parts = {
            part: TrainedPart(config, part, vectors[part], options, muon=False) for part in (EMBEDDING_PART, HEAD_PART)
        }

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embed token ids (batch, length): (batch * length, hidden)."""
        embedding = self.parts[EMBEDDING_PART].leaves["embedding"]
        return F.embedding(token_ids.reshape(-1).to(embedding.device), embedding)

    def back(self, embedded: Tensor, gradient: Tensor) -> None:
        """Add the gradient of embedded tokens to the sums; `embedded` was computed with gradients."""
        embedded.backward(gradient)
        self.parts[EMBEDDING_PART].collect()

    def loss(
        self, hidden: Tensor, labels: Tensor, *, gradient: bool, counts: bool = True
    ) -> Pieces[tuple[float, Tensor]]:
        """Return the summed loss of the rows that count and, if asked for, the gradient of all rows (N, hidden).

        The gradients of the head's weights go to the sums if it counts.
        """
        norm = self.parts[HEAD_PART].leaves["final_norm"]
        output = self.parts[HEAD_PART].leaves.get("output", self.parts[EMBEDDING_PART].leaves["embedding"])
        labels = labels.reshape(-1).to(norm.device)
        counted = (labels != IGNORED).nonzero().view(-1)
        whole = torch.zeros_like(hidden) if gradient else hidden.new_empty(0)
        total = torch.zeros((), dtype=torch.float64, device=norm.device)
        for rows in counted.split(LOSS_ROWS):
            with torch.set_grad_enabled(gradient):
                leaf = hidden[rows].detach().requires_grad_(gradient)
                normed = F.rms_norm(leaf, (leaf.shape[1],), norm, self.config.norm_eps)
                logits = F.linear(normed, output)  # (slice, vocab)
                scores = logits.detach().requires_grad_(gradient)
                loss = F.cross_entropy(scores.float(), labels[rows], reduction="sum")
            total += loss.detach().double()
            if gradient:  # a product with all rows of the output matrix is a piece of its own
                (d_logits,) = torch.autograd.grad(loss, scores)
                del loss, scores
                yield
                (d_normed,) = torch.autograd.grad(logits, normed, d_logits, retain_graph=counts)
                yield
                if counts:
                    torch.autograd.backward(logits, d_logits, inputs=[output])
                    normed.backward(d_normed)
                    assert leaf.grad is not None
                    whole[rows] = leaf.grad
                else:
                    (whole[rows],) = torch.autograd.grad(normed, leaf, d_normed)
                del d_logits
            del logits
            yield
        for part in self.parts.values():
            part.collect()
        return float(total), whole


class FullModel:
    """A model whose weights are all trained, and which is whole in this process."""

    def __init__(
        self,
        config: ModelConfig,
        vectors: Mapping[str, Tensor],
        options: WeightOptions,
        *,
        optimiser: AdamW | Muon | None = None,
        graph_bytes: int | None = None,
    ) -> None:
        """Copy the vectors of all parts; raises `TrainingError` if they do not fit the shape.

        `graph_bytes` bounds what passes keep beyond each block's input, to save computing a block again; None sets no
        bound.
        """
        self.config, self.options = config, options
        self.version = 0  # steps since the moments were fresh
        self._how, self._graph_bytes = Optimisers.of(optimiser), graph_bytes
        own = {index: vectors[block_part(index)] for index in range(config.n_blocks)}
        self._blocks = FullBlocks(config, own, options, self._how)
        self._ends = FullEnds(config, vectors, options)
        found = {**self._ends.parts, **{part.part: part for part in self._blocks.parts.values()}}
        self._parts = {part: found[part] for part in part_names(config)}

    # Passes

    def run(self, batch: MicroBatch) -> Pieces[float]:
        """Run one micro-batch forwards and backwards; return its summed loss. Gradients go to the sums."""
        count, length = batch.token_ids.shape
        rope = self._blocks.turns(count, length)
        with torch.enable_grad():
            embedded = self._ends.embed(batch.token_ids)
        kept: list[tuple[Tensor, Tensor | None]] = []
        x = embedded.detach()
        keep = self._kept_blocks(count * length)
        for index in range(self.config.n_blocks):
            with torch.set_grad_enabled(index < keep):
                leaf = x.detach().requires_grad_(index < keep)
                y = self._blocks.run(index, leaf, count, rope)
            kept.append((leaf, y if index < keep else None))
            x = y.detach()
            yield
        total, gradient = yield from self._ends.loss(x, batch.labels, gradient=True)
        for index in reversed(range(self.config.n_blocks)):
            gradient = yield from self._back(index, *kept.pop(), gradient, count, rope)
            yield
        self._ends.back(embedded, gradient)
        return total

    def loss(self, batches: Iterable[MicroBatch]) -> Pieces[float]:
        """Mean loss over the counted tokens of data that is not trained on."""
        total, tokens = 0.0, 0
        for batch in batches:
            count, length = batch.token_ids.shape
            x, rope = self._ends.embed(batch.token_ids).detach(), self._blocks.turns(count, length)
            for index in range(self.config.n_blocks):
                with torch.no_grad():
                    x = self._blocks.run(index, x, count, rope)
                yield
            total += (yield from self._ends.loss(x, batch.labels, gradient=False))[0]
            tokens += batch.counted
        return total / max(1, tokens)

    # Steps

    def step(
        self,
        batches: Sequence[MicroBatch],
        schedule: Schedule,
        number: int,
        clip: float | None,
        seed: bytes | None = None,
    ) -> Pieces[StepResult]:
        """Run the micro-batches of step `number` of a job (from 0) and change the weights.

        With a seed, the result has a sketch of the gradient before clipping. Raises `NotFinite` if the loss or the
        gradient is not finite; the weights then stay as they were.
        """
        tokens = _counted(batches)
        scale = 1 / tokens
        try:
            loss = (yield from self._summed(batches)) / tokens
            norm = total_norm((yield from self.squared_norms()), scale)
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise NotFinite(f"the loss of step {number + 1} is not finite")
            sketch = () if seed is None else (yield from sketch_of(self.gradients(), scale, seed))
            yield from self.apply(schedule.at(number), scale * clip_factor(norm, clip))
        finally:
            self.clear()
        return StepResult(number + 1, loss, tokens, norm, schedule.at(number), sketch)

    def sketch(self, batches: Sequence[MicroBatch], seed: bytes) -> Pieces[tuple[float, tuple[float, ...]]]:
        """Return the mean loss on micro-batches and a sketch of its gradient, finite or not; no weight changes."""
        tokens = _counted(batches)
        try:
            loss = (yield from self._summed(batches)) / tokens
            return loss, (yield from sketch_of(self.gradients(), 1 / tokens, seed))
        finally:
            self.clear()

    def squared_norms(self) -> Pieces[list[float]]:
        """Squared norm of each part's summed gradients, in float64."""
        norms = []
        for own in self._parts.values():
            norms.append(own.squared_norm())
            yield
        return norms

    def apply(self, rate: float, factor: float) -> Pieces[None]:
        """Change the weights by the summed gradients times `factor`."""
        self.version += 1
        yield from unbroken(stepped(self._parts.values(), self.version, rate, factor, self._how))

    def clear(self) -> None:
        """Drop the summed gradients."""
        for own in self._parts.values():
            own.clear()

    # State

    def gradients(self) -> dict[str, Tensor]:
        """The summed gradients of each part, as they are kept."""
        return {part: own.sums for part, own in self._parts.items()}

    def vectors(self) -> dict[str, Tensor]:
        """Copies of the weights of each part, on the CPU."""
        return {part: own.values.cpu().clone() for part, own in self._parts.items()}

    @torch.no_grad()
    def set_vectors(self, vectors: Mapping[str, Tensor]) -> None:
        """Replace the weights of all parts; moments stay."""
        for part, own in self._parts.items():
            own.values.copy_(vectors[part])
            own.refresh()

    def moments(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The first and second moments of each part, as they are kept."""
        return {part: (own.first, own.second) for part, own in self._parts.items()}

    @torch.no_grad()
    def set_moments(self, moments: Mapping[str, tuple[Tensor, Tensor]], steps: int) -> None:
        """Replace the moments of all parts by those after so many steps."""
        for part, own in self._parts.items():
            own.first.copy_(moments[part][0])
            own.second.copy_(moments[part][1])
        self.version = steps

    # Inside

    def _back(
        self, index: int, leaf: Tensor, y: Tensor | None, gradient: Tensor, count: int, rope: Turns
    ) -> Pieces[Tensor]:
        """Return the gradient by a block's input; the block is computed again if its output was not kept."""
        if y is None:
            y = self._blocks.again(index, leaf, count, rope)
            yield
        return self._blocks.back(index, leaf, y, gradient, count, rope)

    def _summed(self, batches: Sequence[MicroBatch]) -> Pieces[float]:
        """Run micro-batches; return the sum of their losses."""
        losses = []
        for batch in batches:
            losses.append((yield from self.run(batch)))
        return math.fsum(losses)

    def _kept_blocks(self, rows: int) -> int:
        """How many blocks, from the first on, keep what their backward pass needs."""
        if self._graph_bytes is None:
            return self.config.n_blocks
        graph = block_graph_bytes(self.config, unquantised(self.options.dtype.itemsize), rows)
        return min(self.config.n_blocks, self._graph_bytes // graph)


def _counted(batches: Sequence[MicroBatch]) -> int:
    """Return how many tokens of a step count; raises `TrainingError` if none does."""
    tokens = sum(batch.counted for batch in batches)
    if not tokens:
        raise TrainingError("a step needs at least one token that counts")
    return tokens


def _span(group: Sequence[str], tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the tensors of a fused group, which follow each other in their vector, as one view."""
    first = tensors[group[0]]
    rows = sum(tensors[role].shape[0] for role in group)
    shape = (rows, *first.shape[1:])
    return first.as_strided(shape, first.stride(), first.storage_offset())


def _block(index: int, leaves: Mapping[str, Tensor]) -> Block:
    """Return a block whose tensors are the job's own."""
    qkv, o, gate_up, down = (
        DenseLinear(leaves[name], leaves.get(bias))
        for name, bias in ((fused[0], f"{fused[0]}_bias") for fused in _FUSED)
    )
    return Block(
        index,
        leaves["attn_norm"],
        qkv,
        o,
        leaves.get("q_norm"),
        leaves.get("k_norm"),
        leaves["mlp_norm"],
        gate_up,
        down,
    )


def pack_part(steps: int, values: Tensor, moments: bytes) -> bytes:
    """Return the state of a part: a magic, the steps since its moments were fresh, its weights, and its moments."""
    return b"".join((_MAGIC, steps.to_bytes(8, "little"), _bytes(values), moments))


def unpack_part(data: bytes, count: int) -> tuple[int, Tensor, bytes]:
    """Return steps, weights and moments in the state of a part with `count` weights; raises `TrainingError`."""
    start = len(_MAGIC) + 8
    if not start + 4 * count <= len(data) <= start + 12 * count or data[: len(_MAGIC)] != _MAGIC:
        raise TrainingError(f"{len(data)} bytes are not the state of a part with {count} weights")
    values = _numbers(data[start : start + 4 * count])
    if not bool(torch.isfinite(values).all()):
        raise TrainingError("a state has weights that are not finite")
    return int.from_bytes(data[len(_MAGIC) : start], "little"), values, data[start + 4 * count :]


def _numbers(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype="<f4").astype(np.float32))


def _bytes(vector: Tensor) -> bytes:
    return vector.cpu().numpy().astype("<f4", copy=False).tobytes()

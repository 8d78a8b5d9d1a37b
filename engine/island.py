"""One island of a training job: its own model between two rounds, and the state that all islands share.

Bytes in and bytes out. A change travels as leaves of `LEAF` numbers, each encoded by itself, so that members can merge
different leaves. Not thread-safe. Knows no peers; `app.rounds` decides whose changes are merged when.

A leaf that has hardly changed may wait for the next round, and is empty in this one. In every round that is allowed for
half of the leaves, the same for all islands: so none waits twice, and the other half shows who sends nothing at all.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.errors import TrainingError
from engine.full_runner import FullOwnerEnds
from engine.model.block import WeightOptions
from engine.pieces import Pieces
from engine.sources.base import block_part
from engine.sources.layout import part_names
from engine.training.codecs import GROUP, Codec, bounded, check, decode, encode, encoded_bytes
from engine.training.full import FullModel, pack_part, unpack_part
from engine.training.local_trainer import MicroBatch, StepResult
from engine.training.optimiser import AdamW, Muon, Schedule, are_moments
from engine.training.outer import Nesterov, agreement, likeness, merged, nesterov_step
from engine.training.parameters import divided, joined, matrix_weights, model_weights, part_weights

LEAF = 4 * GROUP  # numbers
TRACED_WEIGHT_BYTES = 2  # of a weight in a trace: bfloat16
MOMENTS_ROUNDING = 0.01  # of a norm that may be lost in bfloat16
MOST_MERGED = 10.0  # times as long as this island's own change, were that of as many steps as any


@dataclass(frozen=True)
class IslandTerms:
    """How an island trains, and how changes are merged."""

    schedule: Schedule
    clip: float
    optimiser: AdamW | Muon
    outer: Nesterov
    codec: Codec  # of the first round
    robust: bool  # merge by centred clipping
    rows: int  # most rows of a micro-batch
    significance: float = 0.0  # a leaf waits whose change has a smaller norm than this share of its weights'; 0: none


class Merged(NamedTuple):
    """The leaves of a share after merging, and figures of each change in it, of leaves that all have sent."""

    leaves: list[bytes]
    report: list[tuple[float, float]]  # norm and agreement; empty if there is no such leaf
    past: list[float]  # cosine with what was merged in the last round; empty if that is not known


class InnerMoments(NamedTuple):
    """The optimiser's moments of an island after so many steps, for one that joins: bfloat16, first and then second."""

    steps: int
    parts: Sequence[bytes]
    norms: tuple[float, float]  # of all first and of all second moments


class _Encoded(NamedTuple):
    """Leaves and their number format."""

    leaves: Sequence[bytes]
    codec: Codec


@dataclass
class _Shared:
    """Weights and outer momentum that all islands have after a round, as joined vectors."""

    values: Tensor
    momentum: Tensor


class RoundModel(ABC):
    """What an island has between two rounds and shares in them; where its own weights are is left to others."""

    def __init__(self, config: ModelConfig, vectors: Mapping[str, Tensor], terms: IslandTerms) -> None:
        self.config, self.terms = config, terms
        self.codec: Codec = terms.codec  # of the current round; all its changes are in it
        self.round = 0  # number of the current round
        self._momentum_kept = 1.0  # the share of the momentum that the current round begins with
        values = joined(config, vectors)
        self._shared = _Shared(values, torch.zeros_like(values))
        self._residual = torch.zeros_like(values)  # what rounding kept back from the changes sent so far
        self._sent: Tensor | None = None  # the change of this round, with the residual, before rounding
        self._sent_leaves: list[bytes] = []  # the same after rounding; the bytes are the caller's own
        self._next: _Shared | None = None
        self._next_change: _Encoded | None = None  # that leads to the next state
        self._past: _Encoded | None = None  # the merged change of the last round; the bytes are the caller's own

    @abstractmethod
    def _own(self) -> Tensor:
        """The island's own weights, joined."""

    @abstractmethod
    def _go_on_from(self, values: Tensor) -> None:
        """Replace the island's own weights by those that all islands have; moments stay."""

    @property
    def leaves(self) -> int:
        """Number of leaves of a change."""
        return -(-self._shared.values.numel() // LEAF)

    @property
    def leaf_bytes(self) -> int:
        """Most bytes of a leaf in the current round."""
        return encoded_bytes(LEAF, self.codec)

    @property
    def most_leaf_bytes(self) -> int:
        """Most bytes of a leaf in any round."""
        return encoded_bytes(LEAF, "f32")

    @property
    def traced_leaf_bytes(self) -> int:
        """Most bytes of a leaf of a trace."""
        return TRACED_WEIGHT_BYTES * LEAF

    # Rounds

    def begin_round(self, number: int, codec: Codec, steps: range, last_steps: range) -> None:
        """Let the next steps be those of a round: its number, the format of its changes, its steps and the last one's.

        Momentum is as large as the changes before it. A round of fewer steps, or of smaller ones, makes smaller
        changes, and keeps as much less of the momentum: otherwise it would carry the weights past their aim.
        """
        self.round, self.codec = number, codec
        now, last = (math.fsum(map(self.terms.schedule.at, some)) for some in (steps, last_steps))
        self._momentum_kept = round(min(1.0, now / last), 6) if last > 0 else 1.0  # the same on every machine

    def change(self) -> list[bytes]:
        """Return the leaves of what this island has changed since the last round; raises `NotFinite`."""
        sent = self._own()  # a copy, which becomes the change: a vector of all weights is large
        self._sent = torch.sub(self._shared.values, sent, out=sent).add_(self._residual)
        pairs = enumerate(zip(self._sent.split(LEAF), self._shared.values.split(LEAF), strict=True))
        self._sent_leaves = [
            b"" if self._may_wait(number) and self._is_small(leaf, weights) else encode(leaf, self.codec)
            for number, (leaf, weights) in pairs
        ]
        return self._sent_leaves

    def merge(self, rows: Sequence[Sequence[bytes]], first: int, weights: Sequence[float]) -> Merged:
        """Merge the leaves from number `first` on, one row of leaves for each member; raises `TrainingError`."""
        count, codec = len(rows[0]), self.codec
        if not count:
            return Merged([], [(0.0, 0.0)] * len(rows), [])
        changes = torch.empty(len(rows), sum(map(self._leaf_size, range(first, first + count))))
        for row, change in zip(rows, changes, strict=True):
            self._join(_Encoded(row, codec), change)
        # whoever sends the largest numbers that `decode` allows must not make this island fail
        whole = bounded(merged(changes, weights, clip=self.terms.robust))
        leaves = [
            encode(leaf, codec) if any(row[index] for row in rows) else b""
            for index, leaf in enumerate(whole.split(LEAF))
        ]
        del whole
        past = None
        if self._past is not None:
            past = self._joined(self._past._replace(leaves=self._past.leaves[first : first + count]), first, count)
        if self.terms.significance:  # compare what all have sent
            sizes = [self._leaf_size(first + index) for index in range(count)]
            sent = torch.cat([torch.full((size,), not self._may_wait(first + at)) for at, size in enumerate(sizes)])
            changes, past = changes[:, sent], None if past is None else past[sent]
        if not changes.shape[1]:
            return Merged(leaves, [], [])
        return Merged(leaves, agreement(changes), [] if past is None else likeness(changes, past))

    def check(self, leaves: Sequence[bytes], first: int) -> None:
        """Raise `TrainingError` unless these are leaves of a change, from number `first` on."""
        for index, leaf in enumerate(leaves):
            size = self._leaf_size(first + index)
            if leaf or not self._may_wait(first + index):
                check(leaf, size, self.codec)

    def check_merged(self, leaves: Sequence[bytes], first: int, times: float) -> None:
        """Raise `TrainingError` if these merged leaves are far larger than this island's own whole change.

        Some changes are of so many `times` the steps of this one. Clipping keeps what is merged among the changes, so
        only whoever merged them can have made them so large.
        """
        if not self.terms.robust or self._sent is None:
            return
        merged_norm = float(self._joined(_Encoded(leaves, self.codec), first, len(leaves)).double().norm())
        own_norm = float(self._sent.double().norm())
        if own_norm and merged_norm > MOST_MERGED * times * own_norm:
            raise TrainingError(f"merged numbers of the norm {merged_norm:.3g}, where a change has {own_norm:.3g}")

    def advance(self, leaves: Sequence[bytes]) -> list[bytes]:
        """Compute the next shared state from all merged leaves; return the state of each part, in their order.

        Raises `TrainingError` if these are no such leaves. `commit` makes it the current state.
        """
        if len(leaves) != self.leaves:
            raise TrainingError(f"{len(leaves)} leaves are not the {self.leaves} of a change")
        self._next = self._next_change = None  # of another attempt
        values, momentum = torch.empty_like(self._shared.values), torch.empty_like(self._shared.momentum)
        for number, leaf in enumerate(leaves):  # one at a time: beside both, there would be no room for a whole change
            at = slice(number * LEAF, number * LEAF + self._leaf_size(number))
            change, kept = self._decoded(leaf, at.stop - at.start, self.codec), self._shared.momentum[at]
            made = nesterov_step(self._shared.values[at], kept * self._momentum_kept, change, self.terms.outer)
            values[at], momentum[at] = made
        self._next, self._next_change = _Shared(values, momentum), _Encoded(leaves, self.codec)
        return self._packed(self._next)

    def commit(self, *, counted: bool) -> None:
        """Go on from the next shared state; `counted` if this island's own change is in it."""
        assert self._next is not None, "no round has been computed"
        if counted and self._sent is not None:
            for part, leaf in zip(self._sent.split(LEAF), self._sent_leaves, strict=True):
                part -= self._decoded(leaf, part.numel(), self.codec)
            self._residual = self._sent
        self._shared, self._next, self._sent, self._sent_leaves = self._next, None, None, []
        self._past, self._next_change = self._next_change, None
        self._go_on_from(self._shared.values)

    def states(self) -> list[bytes]:
        """The shared state of each part, in their order."""
        return self._packed(self._shared)

    def load(self, states: Sequence[bytes]) -> None:
        """Go on from these states of all parts; moments stay. Raises `TrainingError` if the states do not fit."""
        values, momentum = unpacked(self.config, states)
        self._shared, self._next, self._sent, self._sent_leaves = _Shared(values, momentum), None, None, []
        self._past = self._next_change = None
        self._residual = torch.zeros_like(values)
        self._go_on_from(values)

    def batches(self, sequences: Sequence[Sequence[int]]) -> list[MicroBatch]:
        """Micro-batches of sequences of one length, in which every token but the first is to be foretold."""
        ids = torch.tensor(np.asarray(sequences, dtype=np.int64))
        labels = torch.full_like(ids, -100)
        labels[:, :-1] = ids[:, 1:]
        most = max(1, self.terms.rows // ids.shape[1])
        return [MicroBatch(*pair) for pair in zip(ids.split(most), labels.split(most), strict=True)]

    # Inside

    def _packed(self, shared: _Shared) -> list[bytes]:
        pairs = (divided(self.config, vector) for vector in (shared.values, shared.momentum))
        values, momentum = pairs
        return [_bytes(values[part]) + _bytes(momentum[part]) for part in part_names(self.config)]

    def _joined(self, part: _Encoded, first: int, count: int) -> Tensor:
        """The numbers in leaves of a change, from number `first` on; raises `TrainingError` if these are none."""
        whole = torch.empty(sum(map(self._leaf_size, range(first, first + count))))
        self._join(part, whole)
        return whole

    def _join(self, part: _Encoded, whole: Tensor) -> None:
        """Write the numbers in leaves of a change into a vector; raises `TrainingError` if these are none."""
        for own, leaf in zip(whole.split(LEAF), part.leaves, strict=True):
            own.copy_(self._decoded(leaf, own.numel(), part.codec))

    def _decoded(self, leaf: bytes, size: int, codec: Codec) -> Tensor:
        return torch.zeros(size) if not leaf and self.terms.significance else decode(leaf, size, codec)

    def _may_wait(self, number: int) -> bool:
        """True for a leaf that may be empty in this round: every second one, and the others in the next round."""
        return self.terms.significance > 0 and (number + self.round) % 2 == 1

    def _is_small(self, leaf: Tensor, weights: Tensor) -> bool:
        return float(leaf.norm()) < self.terms.significance * float(weights.norm())

    def _leaf_size(self, index: int) -> int:
        size = min(LEAF, self._shared.values.numel() - index * LEAF)
        if size <= 0:
            raise TrainingError(f"a change has no leaf {index}")
        return size


class IslandModel(RoundModel):
    """A whole model that is trained here."""

    def __init__(
        self,
        config: ModelConfig,
        vectors: Mapping[str, Tensor],
        options: WeightOptions,
        terms: IslandTerms,
        *,
        graph_bytes: int | None = None,
    ) -> None:
        super().__init__(config, vectors, terms)
        self._model = FullModel(config, vectors, options, optimiser=terms.optimiser, graph_bytes=graph_bytes)

    # Steps

    def step(self, sequences: Sequence[Sequence[int]], number: int, seed: bytes | None = None) -> Pieces[StepResult]:
        """Make step `number` of the job, from 0; raises `NotFinite` and changes nothing if the loss is not finite.

        With a seed, the result has a sketch of the gradient.
        """
        return self._model.step(self.batches(sequences), self.terms.schedule, number, self.terms.clip, seed)

    def loss(self, sequences: Sequence[Sequence[int]]) -> Pieces[float]:
        """Mean loss of the island's own weights on sequences that are not trained on."""
        return self._model.loss(self.batches(sequences))

    def trial(
        self,
        states: Sequence[bytes],
        changes: Sequence[Sequence[bytes]],
        codec: Codec,
        texts: Sequence[Sequence[Sequence[int]]],
    ) -> Pieces[list[list[list[float]]]]:
        """Return the losses of each text's sequences: of the shared weights in some states, and with each change.

        The island's own weights stay as they are. Raises `TrainingError` if these are no leaves of a change.
        """
        values, losses = (yield from self._values_in(states)), []
        with self._other_weights():
            for leaves in (None, *changes):
                weights = values if leaves is None else values - (yield from self._whole(leaves, codec))
                self._model.set_vectors(divided(self.config, weights))
                del weights
                found = []
                for text in texts:
                    found.append((yield from self._losses(text)))
                losses.append(found)
        return [list(of_text) for of_text in zip(*losses, strict=True)]

    # Traces

    @property
    def trace_bytes(self) -> int:
        """Most bytes of all leaves of a trace."""
        return TRACED_WEIGHT_BYTES * self._shared.values.numel()

    def trace(self) -> list[bytes]:
        """Return how far this island is from the shared weights now, as leaves of bfloat16, empty for zeros."""
        away = self._shared.values - self._own()
        return [_shorter(leaf) if bool(leaf.any()) else b"" for leaf in away.split(LEAF)]

    def retrace(
        self, states: Sequence[bytes], leaves: Sequence[bytes], sequences: Sequence[Sequence[int]], seed: bytes
    ) -> Pieces[tuple[float, float, tuple[float, ...]]]:
        """Compute the gradient of a step again, at the weights to which a trace leads from those in some states.

        Returns the mean loss on its sequences of the shared weights, that of the traced ones, and the sketch of the
        gradient. The island's own weights stay as they are. Raises `TrainingError` if these are no leaves of a trace.
        """
        sizes = [2 * self._leaf_size(index) for index in range(self.leaves)]
        whole = bytearray(b"".join(leaf or bytes(size) for leaf, size in zip(leaves, sizes, strict=False)))
        if len(leaves) != len(sizes) or len(whole) != self.trace_bytes:
            raise TrainingError(f"{len(leaves)} leaves are not the {self.leaves} of a trace")
        values = yield from self._values_in(states)
        away = torch.frombuffer(whole, dtype=torch.bfloat16).float()
        with self._other_weights():
            self._model.set_vectors(divided(self.config, values))
            before = yield from self.loss(sequences)
            self._model.set_vectors(divided(self.config, values - away))
            return before, *(yield from self._model.sketch(self.batches(sequences), seed))

    # Moments

    @property
    def has_moments(self) -> bool:
        """True once this island has made a step, or taken over another's moments."""
        return self._model.version > 0

    def moments(self) -> InnerMoments:
        """The moments of this island as they are now."""
        pairs = list(self._model.moments().values())
        norms = [math.sqrt(math.fsum(float(pair[side].double().square().sum()) for pair in pairs)) for side in (0, 1)]
        return InnerMoments(self._model.version, [_shorter(torch.cat(pair)) for pair in pairs], (norms[0], norms[1]))

    def take_moments(self, moments: InnerMoments) -> None:
        """Go on with the moments of another island; raises `TrainingError` if they are none, or not what they claim."""
        own, found = self._model.moments(), dict[str, tuple[Tensor, Tensor]]()
        if [len(data) for data in moments.parts] != self.moments_bytes or moments.steps < 1:
            raise TrainingError("these are not the moments of a model of this shape")
        for (part, (first, _)), data in zip(own.items(), moments.parts, strict=True):
            numbers = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).float()
            found[part] = numbers[: first.numel()], numbers[first.numel() :]
            if not are_moments(*found[part], self.terms.clip):
                raise TrainingError(f"the moments of {part} are none that training makes")
        for side, claimed in enumerate(moments.norms):
            norm = math.sqrt(math.fsum(float(pair[side].double().square().sum()) for pair in found.values()))
            if abs(norm - claimed) > MOMENTS_ROUNDING * claimed:
                raise TrainingError(f"the moments have the norm {norm:.3g}, not {claimed:.3g}")
        self._model.set_moments(found, moments.steps)

    @property
    def moments_bytes(self) -> list[int]:
        """Bytes of each part's moments."""
        return [2 * (first.numel() + second.numel()) for first, second in self._model.moments().values()]

    # Inside

    def _whole(self, leaves: Sequence[bytes], codec: Codec) -> Pieces[Tensor]:
        """The numbers in all leaves of a change; raises `TrainingError` if these are none."""
        if len(leaves) != self.leaves:
            raise TrainingError(f"{len(leaves)} leaves are not the {self.leaves} of a change")
        decoded = []
        for index, leaf in enumerate(leaves):
            decoded.append(self._decoded(leaf, self._leaf_size(index), codec))
            yield
        return torch.cat(decoded)

    def _losses(self, text: Sequence[Sequence[int]]) -> Pieces[list[float]]:
        """The loss on each sequence of a text."""
        found = []
        for sequence in text:
            found.append((yield from self.loss([sequence])))
        return found

    def _values_in(self, states: Sequence[bytes]) -> Pieces[Tensor]:
        """The shared weights in the states of all parts."""
        found = []
        for part, state in zip(part_names(self.config), states, strict=True):
            found.append(_weights(self.config, part, state))
            yield
        return torch.cat(found)

    @contextmanager
    def _other_weights(self) -> Iterator[None]:
        """Let the model compute with other weights meanwhile."""
        kept = self._model.vectors()
        try:
            yield
        finally:
            self._model.set_vectors(kept)

    def _own(self) -> Tensor:
        return joined(self.config, self._model.vectors())

    def _go_on_from(self, values: Tensor) -> None:
        self._model.set_vectors(divided(self.config, values))


class PipelineModel(RoundModel):
    """The owner's part of an island of several machines: the ends, and what the island shares in rounds.

    The blocks' own weights and moments are where the blocks are; `gather` takes their weights in, block by block, and
    `renewed` gives a block its state for the next round.
    """

    def __init__(
        self, config: ModelConfig, vectors: Mapping[str, Tensor], options: WeightOptions, terms: IslandTerms
    ) -> None:
        super().__init__(config, vectors, terms)
        self.ends = FullOwnerEnds(config, vectors, options, terms.optimiser)
        self._gathered = self._shared.values.clone()

    def first_state(self, block: int) -> bytes:
        """The state of a block that begins with the shared weights and fresh moments."""
        return pack_part(0, self._block(self._shared.values, block), bytes(4 * sum(self._moments_of(block))))

    def gather(self, block: int, state: bytes, steps: int) -> None:
        """Take in a block's own weights from its state, so many steps after its moments were fresh.

        Raises `TrainingError` if it is none, or one that the next machine could not go on with: that would be blamed.
        """
        count, second = self._moments_of(block)
        said, values, rest = unpack_part(state, count)
        if said != steps or len(rest) != 4 * (count + second):
            raise TrainingError(f"the state of block {block} is of step {said}, or of another optimiser")
        moments = torch.frombuffer(bytearray(rest), dtype=torch.float32)
        if not are_moments(moments[:count], moments[count:], self.terms.clip):
            raise TrainingError(f"the moments of block {block} are none that training makes")
        if not torch.equal(bounded(values), values):  # `change` could not send them
            raise TrainingError(f"block {block} has weights that are far too large")
        self._block(self._gathered, block).copy_(values)

    def renewed(self, block: int, state: bytes) -> bytes:
        """Return a block's state with the shared weights and the moments that it has; raises `TrainingError`."""
        steps, _, moments = unpack_part(state, part_weights(self.config, block_part(block)))
        return pack_part(steps, self._block(self._shared.values, block), moments)

    # Inside

    def _own(self) -> Tensor:
        parts = divided(self.config, self._gathered)
        return joined(self.config, {**parts, **self.ends.vectors()})

    def _go_on_from(self, values: Tensor) -> None:
        self._gathered.copy_(values)
        self.ends.set_vectors(divided(self.config, values))

    def _moments_of(self, block: int) -> tuple[int, int]:
        """Number of first and of second moments of a block: of its matrices, Muon has no second ones."""
        count = part_weights(self.config, block_part(block))
        matrices = matrix_weights(self.config, block_part(block))
        return count, count - matrices if isinstance(self.terms.optimiser, Muon) else count

    def _block(self, values: Tensor, block: int) -> Tensor:
        return divided(self.config, values)[block_part(block)]


def first_states(config: ModelConfig, vectors: Mapping[str, Tensor]) -> list[bytes]:
    """Return the state of each part before the first round, when there is no momentum yet."""
    return [_bytes(vectors[part]) + bytes(4 * vectors[part].numel()) for part in part_names(config)]


def unpacked(config: ModelConfig, states: Sequence[bytes]) -> tuple[Tensor, Tensor]:
    """Return weights and outer momentum in the states of all parts; raises `TrainingError` if they are none."""
    names = part_names(config)
    sizes = [8 * part_weights(config, part) for part in names]
    if [len(state) for state in states] != sizes:
        raise TrainingError(f"the states are not those of a model with {model_weights(config)} weights")
    whole = torch.empty(2, model_weights(config))
    for each, state in zip(whole.split([size // 8 for size in sizes], dim=1), states, strict=True):
        each.numpy()[:] = np.frombuffer(state, dtype="<f4").reshape(2, -1)
    values, momentum = whole
    if not bool(torch.isfinite(values).all() and torch.isfinite(momentum).all()):
        raise TrainingError("a state has numbers that are not finite")
    return values, momentum


def _weights(config: ModelConfig, part: str, state: bytes) -> Tensor:
    """Return the weights in the state of one part, without the momentum; raises `TrainingError` if it is none."""
    count = part_weights(config, part)
    if len(state) != 8 * count:
        raise TrainingError(f"{len(state)} bytes are not the state of {part}")
    return torch.from_numpy(np.frombuffer(state, dtype="<f4", count=count).astype(np.float32))


def _shorter(vector: Tensor) -> bytes:
    return vector.cpu().to(torch.bfloat16).view(torch.int16).numpy().astype("<i2", copy=False).tobytes()


def _bytes(vector: Tensor) -> bytes:
    return vector.cpu().numpy().astype("<f4", copy=False).tobytes()

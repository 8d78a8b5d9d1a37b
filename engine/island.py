"""One island of a training job: its own model between two rounds, and the state that all islands share.

Bytes in and bytes out. A change travels as leaves of `LEAF` numbers, each encoded by itself, so that members can merge
different leaves. Not thread-safe. Knows no peers; `app.rounds` decides whose changes are merged when.

A leaf that has hardly changed may wait for the next round, and is empty in this one. In every round that is allowed for
half of the leaves, the same for all islands: so none waits twice, and the other half shows who sends nothing at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.errors import TrainingError
from engine.model.block import WeightOptions
from engine.sources.layout import part_names
from engine.training.codecs import GROUP, Codec, bounded, check, decode, encode, encoded_bytes
from engine.training.full import FullModel
from engine.training.local_trainer import MicroBatch, StepResult
from engine.training.optimiser import AdamW, Muon, Schedule
from engine.training.outer import Nesterov, agreement, likeness, merged, nesterov_step
from engine.training.parameters import divided, joined, model_weights, part_weights

LEAF = 4 * GROUP  # numbers


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


class _Encoded(NamedTuple):
    """Leaves and their number format."""

    leaves: Sequence[bytes]
    codec: Codec


@dataclass
class _Shared:
    """Weights and outer momentum that all islands have after a round, as joined vectors."""

    values: Tensor
    momentum: Tensor


class IslandModel:
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
        self.config, self.terms = config, terms
        self.codec: Codec = terms.codec  # of the current round; all its changes are in it
        self.round = 0  # number of the current round
        self._model = FullModel(config, vectors, options, optimiser=terms.optimiser, graph_bytes=graph_bytes)
        values = joined(config, vectors)
        self._shared = _Shared(values, torch.zeros_like(values))
        self._residual = torch.zeros_like(values)  # what rounding kept back from the changes sent so far
        self._sent: Tensor | None = None  # the change of this round, with the residual, before rounding
        self._sent_leaves: list[bytes] = []  # the same after rounding; the bytes are the caller's own
        self._next: _Shared | None = None
        self._next_change: _Encoded | None = None  # that leads to the next state
        self._past: _Encoded | None = None  # the merged change of the last round; the bytes are the caller's own

    @property
    def leaves(self) -> int:
        """Number of leaves of a change."""
        return -(-self._shared.values.numel() // LEAF)

    @property
    def leaf_bytes(self) -> int:
        """Most bytes of a leaf in the current round."""
        return encoded_bytes(LEAF, self.codec)

    # Steps

    def step(self, sequences: Sequence[Sequence[int]], number: int) -> StepResult:
        """Make step `number` of the job, from 0; raises `NotFinite` and changes nothing if the loss is not finite."""
        return self._model.step(self._batches(sequences), self.terms.schedule, number, self.terms.clip)

    def loss(self, sequences: Sequence[Sequence[int]]) -> float:
        """Mean loss of the island's own weights on sequences that are not trained on."""
        return self._model.loss(self._batches(sequences))

    # Rounds

    def change(self) -> list[bytes]:
        """Return the leaves of what this island has changed since the last round; raises `NotFinite`."""
        own = joined(self.config, self._model.vectors())
        self._sent = self._shared.values - own + self._residual
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
        changes = torch.stack([self._joined(_Encoded(row, codec), first, count) for row in rows])
        # whoever sends the largest numbers that `decode` allows must not make this island fail
        whole = bounded(merged(changes, weights, clip=self.terms.robust))
        leaves = [
            encode(leaf, codec) if any(row[index] for row in rows) else b""
            for index, leaf in enumerate(whole.split(LEAF))
        ]
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

    def advance(self, leaves: Sequence[bytes]) -> list[bytes]:
        """Compute the next shared state from all merged leaves; return the state of each part, in their order.

        Raises `TrainingError` if these are no such leaves. `commit` makes it the current state.
        """
        if len(leaves) != self.leaves:
            raise TrainingError(f"{len(leaves)} leaves are not the {self.leaves} of a change")
        found = _Encoded(leaves, self.codec)
        change = self._joined(found, 0, self.leaves)
        values, momentum = nesterov_step(self._shared.values, self._shared.momentum, change, self.terms.outer)
        self._next, self._next_change = _Shared(values, momentum), found
        return self._packed(self._next)

    def commit(self, *, counted: bool) -> None:
        """Go on from the next shared state; `counted` if this island's own change is in it."""
        assert self._next is not None, "no round has been computed"
        if counted and self._sent is not None:
            self._residual = self._sent - self._joined(_Encoded(self._sent_leaves, self.codec), 0, self.leaves)
        self._shared, self._next, self._sent, self._sent_leaves = self._next, None, None, []
        self._past, self._next_change = self._next_change, None
        self._model.set_vectors(divided(self.config, self._shared.values))

    def states(self) -> list[bytes]:
        """The shared state of each part, in their order."""
        return self._packed(self._shared)

    def load(self, states: Sequence[bytes]) -> None:
        """Go on from these states of all parts, with fresh moments; raises `TrainingError` if they do not fit."""
        values, momentum = unpacked(self.config, states)
        self._shared, self._next, self._sent, self._sent_leaves = _Shared(values, momentum), None, None, []
        self._past = self._next_change = None
        self._residual = torch.zeros_like(values)
        self._model.set_vectors(divided(self.config, values), fresh=True)

    # Inside

    def _packed(self, shared: _Shared) -> list[bytes]:
        pairs = (divided(self.config, vector) for vector in (shared.values, shared.momentum))
        values, momentum = pairs
        return [_bytes(values[part]) + _bytes(momentum[part]) for part in part_names(self.config)]

    def _joined(self, part: _Encoded, first: int, count: int) -> Tensor:
        """The numbers in leaves of a change, from number `first` on; raises `TrainingError` if these are none."""
        sizes = map(self._leaf_size, range(first, first + count))
        return torch.cat([self._decoded(leaf, size, part.codec) for leaf, size in zip(part.leaves, sizes, strict=True)])

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

    def _batches(self, sequences: Sequence[Sequence[int]]) -> list[MicroBatch]:
        """Micro-batches of sequences of one length, in which every token but the first is to be foretold."""
        ids = torch.tensor(np.asarray(sequences, dtype=np.int64))
        labels = torch.full_like(ids, -100)
        labels[:, :-1] = ids[:, 1:]
        most = max(1, self.terms.rows // ids.shape[1])
        return [MicroBatch(*pair) for pair in zip(ids.split(most), labels.split(most), strict=True)]


def first_states(config: ModelConfig, vectors: Mapping[str, Tensor]) -> list[bytes]:
    """Return the state of each part before the first round, when there is no momentum yet."""
    return [_bytes(vectors[part]) + bytes(4 * vectors[part].numel()) for part in part_names(config)]


def unpacked(config: ModelConfig, states: Sequence[bytes]) -> tuple[Tensor, Tensor]:
    """Return weights and outer momentum in the states of all parts; raises `TrainingError` if they are none."""
    names = part_names(config)
    sizes = [8 * part_weights(config, part) for part in names]
    if [len(state) for state in states] != sizes:
        raise TrainingError(f"the states are not those of a model with {model_weights(config)} weights")
    halves = [np.frombuffer(state, dtype="<f4").astype(np.float32) for state in states]
    values, momentum = (
        torch.from_numpy(np.concatenate([np.split(half, 2)[side] for half in halves])) for side in (0, 1)
    )
    if not bool(torch.isfinite(values).all() and torch.isfinite(momentum).all()):
        raise TrainingError("a state has numbers that are not finite")
    return values, momentum


def _bytes(vector: Tensor) -> bytes:
    return vector.cpu().numpy().astype("<f4", copy=False).tobytes()

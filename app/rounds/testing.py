"""Tests the change of another island: applies it to the state before the round, and measures what that does to losses.

Then, where members keep traces of their steps (`app.rounds.traces`), it computes the gradient of one of them again.

Who tests whom is drawn by lot (`app.rounds.testers`), and a test runs while this island makes the steps of the next
round: it takes the whole change, checked against the hash that its author committed to, and a few forward passes; for a
step, the weights before it (2 bytes each) and one pass forwards and backwards. What comes of it is in this island's
next result. A test that is not done by then says nothing. Nor does one whose author shows nothing: that may as well be
a slow link, or a job that was paused.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import trio

from app.core.compute import Device
from app.core.errors import RecordError
from app.core.pieces import Pieces
from app.rounds.exchange import Exchange, ExchangeFailed
from app.rounds.log import RoundEntry, Standing
from app.rounds.reading import positions_of, sequence_at
from app.rounds.record import TrainingRecord
from app.rounds.testers import MOST_RATIO, DrawnTest, drawn_steps, drawn_trace, loss_ratio, step_error
from app.rounds.traces import trace_seed, traced_steps, unpack_trace
from app.training.states import StateStore
from app.training.wire import StatePart
from engine.errors import TrainingError
from p2p.errors import P2PError

log = logging.getLogger("shoal.rounds")

TEST_S = 600.0  # for what a test fetches; the next round ends it earlier


class TryingModel(Protocol):
    """What a test needs of an island's model; `engine.island.IslandModel` has it."""

    @property
    def trace_bytes(self) -> int: ...
    def trial(
        self,
        states: Sequence[bytes],
        changes: Sequence[Sequence[bytes]],
        codec: Any,
        texts: Sequence[Sequence[Sequence[int]]],
    ) -> Pieces[list[list[list[float]]]]: ...
    def retrace(
        self, states: Sequence[bytes], leaves: Sequence[bytes], sequences: Sequence[Sequence[int]], seed: bytes
    ) -> Pieces[tuple[float, float, Sequence[float]]]: ...


class Sequences(Protocol):
    """The text of a job, and what it is validated with."""

    @property
    def count(self) -> int: ...
    def sequence(self, number: int) -> Sequence[int]: ...
    @property
    def held(self) -> Sequence[Sequence[int]]: ...


@dataclass(frozen=True)
class PastRound:
    """A round whose changes are tested: where the job stood before it, the parts of that state, and its entry.

    `own` has the leaves of the tester's change.
    """

    standing: Standing
    parts: Sequence[StatePart]
    entry: RoundEntry
    own: Sequence[bytes]


class ChangeTester:
    """Makes the tests of one island, one set after each round; `told` and `recomputed` are what they found so far."""

    def __init__(
        self,
        record: TrainingRecord,
        model: TryingModel | None,
        text: Sequences,
        device: Device,
        states: StateStore,
        exchange: Exchange,
        me: str,
    ) -> None:
        """Without a model that is whole here, nothing is tested."""
        self._record, self._model, self._text, self._device = record, model, text, device
        self._states, self._exchange, self._me = states, exchange, me
        self._scope = trio.CancelScope()
        self.told: tuple[int, ...] = ()
        self.recomputed: tuple[int, ...] = ()

    def begin_round(self) -> None:
        """End all tests, and forget what they found: it was about another round."""
        self.stop()
        self._scope, self.told, self.recomputed = trio.CancelScope(), (), ()

    def stop(self) -> None:
        """End the tests that are under way; what they found stays."""
        self._scope.cancel()

    async def run(self, past: PastRound, tests: Sequence[DrawnTest]) -> None:
        """Make the tests of a round for which this island was drawn, until `stop` is called."""
        found, errors, model = [0] * (2 * len(tests)), [0] * len(tests), self._model
        if model is None:
            return
        with self._scope as scope:
            for at, test in enumerate(tests):
                if self._me not in test.testers:
                    continue
                found[2 * at : 2 * at + 2] = ratios = await self._tested(model, past, test)
                if scope is self._scope:
                    self.told = tuple(found)
                if self._record.recompute and any(ratios):
                    errors[at] = await self._recomputed(model, past, test.peer)
                    if scope is self._scope:
                        self.recomputed = tuple(errors)

    async def _tested(self, model: TryingModel, past: PastRound, test: DrawnTest) -> list[int]:
        """Return the ratios of losses with a change and without it: of what its author read, and of unseen text.

        Both are 0 if that could not be measured, and the worst if the author shows another change than it committed to,
        or what is none: in the round, its own share was seen by nobody else.
        """
        entry, deadline = past.entry, trio.current_time() + TEST_S
        arrival = next(one for one in entry.list.arrivals if one.peer == test.peer)
        try:
            leaves = await self._exchange.change_of(entry.list, arrival, deadline)
        except RecordError as error:
            log.info("%s shows another change than that of round %s: %s", test.peer, entry.round, error)
            return [MOST_RATIO, MOST_RATIO]
        except (ExchangeFailed, P2PError) as error:
            log.info("the change of %s in round %s could not be had: %s", test.peer, entry.round, error)
            return [0, 0]
        texts = [self._read(past.standing, entry, test.peer, arrival.steps), self._text.held]
        used = [text for text in texts if text]
        try:
            states = await self._states.fetch(self._record.id[:16], past.parts, ())
            changes, codec = (leaves, past.own), past.standing.codec
            losses = iter(await self._device.run_later(model.trial, states, changes, codec, used))
        except TrainingError as error:
            log.info("the change of %s in round %s is none: %s", test.peer, entry.round, error)
            return [MOST_RATIO, MOST_RATIO]
        except Exception as error:  # of torch, for one, if the card is full; it must not end this island's job
            log.warning("the change of %s in round %s could not be tested: %r", test.peer, entry.round, error)
            return [0, 0]
        return [loss_ratio(*next(losses)) if text else 0 for text in texts]

    def _read(self, standing: Standing, entry: RoundEntry, peer: str, steps: int) -> list[Sequence[int]]:
        """Some of the sequences that a member was to read in a round; none if its text is its own."""
        record = self._record
        if record.own_data:
            return []
        found = []
        for step, row in drawn_steps(entry.root, self._me, steps, record.batch):
            found.append(self._read_in(standing, peer, step)[row])
        return found

    def _read_in(self, standing: Standing, peer: str, step: int) -> list[Sequence[int]]:
        """The sequences that a member was to read in a step of a round."""
        places = positions_of(standing.start, standing.members, peer, step, self._record.batch)
        return [self._text.sequence(sequence_at(place, self._text.count, self._record.seed)) for place in places]

    async def _recomputed(self, model: TryingModel, past: PastRound, peer: str) -> int:
        """Return by how much the gradient of the drawn step of a member that has shown its change is off.

        It is 0 if that could not be computed, or the member shows no steps because it is of several machines; and the
        worst if it shows others than it committed to.
        """
        standing, entry, deadline = past.standing, past.entry, trio.current_time() + TEST_S
        arrival = next(one for one in entry.list.arrivals if one.peer == peer)
        if not arrival.traces:
            return 0
        steps = [step for step in traced_steps(standing.every, model.trace_bytes) if step < arrival.steps]
        drawn = drawn_trace(entry.root, peer, len(steps))
        try:
            packed = await self._exchange.traces_of(entry.list, arrival, deadline)
            if len(packed) != len(steps):
                raise RecordError(f"{len(packed)} traces of {len(steps)} steps")
            trace = unpack_trace(packed[drawn])
            weights = await self._exchange.traced_weights(entry.list, peer, trace.root, deadline)
        except RecordError as error:
            log.info("%s shows another step than %s of round %s: %s", peer, steps[drawn], entry.round, error)
            return MOST_RATIO
        except (ExchangeFailed, P2PError) as error:
            log.info("step %s of %s in round %s could not be had: %s", steps[drawn], peer, entry.round, error)
            return 0
        sequences, seed = self._read_in(standing, peer, steps[drawn]), trace_seed(self._record.id, standing.prev, peer)
        try:
            states = await self._states.fetch(self._record.id[:16], past.parts, ())
            before, after, sketch = await self._device.run_later(model.retrace, states, weights, sequences, seed)
        except TrainingError as error:
            log.info("step %s of %s in round %s is none: %s", steps[drawn], peer, entry.round, error)
            return MOST_RATIO
        except Exception as error:  # likewise
            log.warning("step %s of %s in round %s could not be computed: %r", steps[drawn], peer, entry.round, error)
            return 0
        return step_error(before, after, trace.sketch, sketch)

"""Makes the steps of an island between two rounds: on this machine, or through a pipeline of several.

In a pipeline the owner drives hops as in fine-tuning (`app.training.trainer`), but their blocks are the job's own and
all their weights are trained. Every step is synchronous. A round begins with the states of all blocks (the weights that
all islands have, and the moments of the round before), which hops fetch from the owner by hash, and ends with a
snapshot, from which the owner takes the island's weights: 12 bytes a weight each way. If a hop dies the steps of the
round are made again from its beginning over another route, so that the island's change is what it would have been. From
then on there are snapshots within the round too, so that one in which hops are lost now and then comes to an end; but
as the whole round may have to begin again, the owner keeps the states of its beginning until it is over. If there is no
route, the island waits for one without end, and the others make their rounds without it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import trio

from app.core.compute import Device
from app.core.errors import AppError
from app.core.network import Network
from app.core.pieces import Pieces
from app.rounds.moments import MomentsModel
from app.rounds.testing import TryingModel
from app.rounds.traces import StepTraces
from app.routing.route import Route
from app.training.states import StateStore
from app.training.trainer import (
    HopsAway,
    JobHooks,
    JobTerms,
    OwnServer,
    Patience,
    RouteFinder,
    Snapshot,
    StepDone,
    SwarmTrainer,
    TrainingStopped,
)
from app.training.wire import JobOrder, StatePart
from engine.errors import EngineError

log = logging.getLogger("shoal.rounds")

_FIRST_VERSION = 1  # states travel with every version but 0
MOST_IN_VAIN = 1000  # attempts in a row to make a round, through machines that are there and make no step
AGAIN_S = 5.0  # before a round begins again that a machine may have stopped
_NEVER = 2**31  # steps between snapshots: only rounds end with one, until a hop is lost


class StepFigures(Protocol):
    """What is known of a step that was made."""

    @property
    def loss(self) -> float: ...
    @property
    def tokens(self) -> int: ...


@dataclass(frozen=True)
class RoundTask:
    """The steps of one round."""

    count: int
    number: int  # of the first one in the job
    sequences: Callable[[int], Sequence[Sequence[int]]]  # what a step of the round reads, from 0
    stop: Callable[[int], bool]  # asked before each step, with the number of those made
    made: Callable[[StepFigures], None]  # told of each step
    traces: StepTraces | None = None  # that are to be kept; steps through several machines leave none


class WholeModel(TryingModel, MomentsModel, Protocol):
    """A model that is whole in this process; `engine.island.IslandModel`."""

    def step(self, sequences: Sequence[Sequence[int]], number: int, seed: bytes | None = None) -> Pieces[Any]: ...
    def trace(self) -> list[bytes]: ...
    def loss(self, sequences: Sequence[Sequence[int]]) -> Pieces[float]: ...


class StepMaker(Protocol):
    """Makes the steps of rounds."""

    @property
    def whole(self) -> WholeModel | None:
        """The model, if it is whole in this process."""

    async def make(self, task: RoundTask) -> bool:
        """Make steps until all are made or `stop` says so; False if none of them count."""

    async def loss(self, held: Sequence[Sequence[int]]) -> float | None:
        """Mean loss on text that is not trained on; None if it is measured with the next steps."""

    @property
    def route(self) -> Route:
        """The machines of the latest steps, with their blocks; empty if it is this one alone."""

    @property
    def waiting(self) -> str:
        """What keeps steps from being made now, in words; empty if nothing does."""

    async def close(self) -> None:
        """Remove what is kept for the steps."""


class LocalSteps:
    """Makes steps on this machine."""

    route: Route = ()
    waiting = ""

    def __init__(self, model: WholeModel, device: Device) -> None:
        self.whole, self._device = model, device

    async def make(self, task: RoundTask) -> bool:
        """Make steps until all are made or `stop` says so; raises `EngineError`."""
        for step in range(task.count):
            if task.stop(step):
                break
            task.made(await self._step(task, step))
        return True

    async def _step(self, task: RoundTask, step: int) -> Any:
        """Make a step of a round, and keep its trace if one is wanted."""
        traces, make, sequences = task.traces, self.whole.step, task.sequences(step)
        if traces is None or step not in traces.steps:
            return await self._device.run_later(make, sequences, task.number + step)
        weights = await self._device.run_beside(self.whole.trace)
        made = await self._device.run_later(make, sequences, task.number + step, traces.seed)
        traces.add(weights, made.sketch)
        return made

    async def loss(self, held: Sequence[Sequence[int]]) -> float | None:
        """Mean loss on text that is not trained on."""
        return await self._device.run_later(self.whole.loss, held)

    async def close(self) -> None:
        """Nothing is kept."""


class OwnersModel(Protocol):
    """The owner's part of a pipeline; `engine.island.PipelineModel` has it."""

    @property
    def ends(self) -> Any: ...
    def batches(self, sequences: Sequence[Sequence[int]]) -> Sequence[Any]: ...
    def first_state(self, block: int) -> bytes: ...
    def gather(self, block: int, state: bytes, steps: int) -> None: ...
    def renewed(self, block: int, state: bytes) -> bytes: ...


@dataclass(frozen=True)
class PipelineTerms:
    """What a pipeline trains and how."""

    order: JobOrder  # for all blocks
    rate_of: Callable[[int], float]  # of a step of the job, from 0
    clip: float
    sums_bytes: int  # of a block's summed gradients


@dataclass(frozen=True)
class PipelinePlace:
    """Where a pipeline finds its machines."""

    routes: RouteFinder
    own_server: OwnServer | None = None  # for blocks at the owner itself
    patience: Patience = field(default_factory=lambda: Patience(route_s=math.inf))


class _Stopped(Exception):
    """The steps of a round are not wanted any more, while no route is found."""


class PipelineSteps:
    """Makes steps through several machines; the owner's side of an island."""

    whole: WholeModel | None = None

    def __init__(
        self,
        network: Network,
        model: OwnersModel,
        device: Device,
        states: StateStore,
        terms: PipelineTerms,
        place: PipelinePlace,
        validated: Callable[[float], None] = lambda loss: None,
    ) -> None:
        """`validated` is told the loss on the text that `loss` was last called with, when a round begins."""
        self._model, self._device, self._states, self._terms = model, device, states, terms
        self._held: Sequence[Sequence[int]] = ()
        self._stop: Callable[[int], bool] = lambda made: False
        self._routes, self.validated = place.routes, validated
        self._begun = _FIRST_VERSION, 0  # version and step of the job with which the round began
        self._parts: tuple[StatePart, ...] = ()  # of all blocks when the round began, or after the last one
        self._age = 0  # steps since the moments in these were fresh
        self._peer = network.peer_id
        self._in_vain = 0  # attempts since a step was made
        self._no_route = self._trouble = ""  # what to wait for, and why a round begins again
        job = JobTerms(
            terms.order, self._rate_of, terms.clip, snapshot_every=_NEVER, sums_bytes=terms.sums_bytes, replicas=1,
            copies=False,
        )  # fmt: skip
        self.trainer = SwarmTrainer(
            network, model.ends, device, states, self._found, job, own_server=place.own_server,
            patience=place.patience, trained=model.ends,
        )  # fmt: skip
        self._run = b"round" + self.trainer.run_id  # keeps `_parts`: those of the trainer go with its next snapshot
        self.trainer.begin_at(Snapshot(_FIRST_VERSION))

    @property
    def route(self) -> Route:
        """The machines of the latest steps, with their blocks."""
        return self.trainer.route

    @property
    def waiting(self) -> str:
        """What keeps steps from being made now, in words; empty if nothing does."""
        return self._no_route or self._trouble

    async def make(self, task: RoundTask) -> bool:
        """Make steps until all are made or `stop` says so; raises `TrainingStopped` or `WeightsError`.

        They do not count if a hop gave weights that cannot be used, which is not used again, if `stop` says so while
        there are no machines, or if no step can be made: any machine can bring that about, so one of them after the
        other is not used for a while. Only after very many such attempts, or if this node alone is to blame,
        `TrainingStopped` is raised; and never because machines are away.
        """
        first = self.trainer.version
        self._begun, self._stop = (first, task.number), task.stop
        await self._renew()
        ends = self._model.ends.kept
        told, stopped, held = first, False, self._held

        def stop() -> bool:
            nonlocal stopped
            stopped = stopped or task.stop(self.trainer.version - first)
            return stopped

        def made(done: StepDone) -> None:
            nonlocal told
            self._in_vain, self._trouble = 0, ""
            if done.version > told:  # steps are made again after a hop was lost
                told = done.version
                task.made(done)

        def batches(version: int) -> Sequence[Any]:
            return self._model.batches(task.sequences(version - first))

        def validation(version: int) -> Sequence[Any]:
            return self._model.batches(held) if held and version == first else ()

        def validated(version: int, loss: float) -> None:
            self._held = ()
            self.validated(loss)

        try:
            await self.trainer.run(first + task.count, batches, made, JobHooks(stop, validation, validated))
        except _Stopped:
            self._no_route = self._trouble = ""  # another round is to be made
            await self._go_back(first, ends)
            return False
        except TrainingStopped as error:
            others = [hop.peer for hop in self.route if hop.peer != self._peer]
            self._in_vain += 1
            if isinstance(error, HopsAway):
                self._in_vain, self._trouble = 0, f"waits for machines: {error}"
            elif not others or self._in_vain > MOST_IN_VAIN:
                raise
            else:
                self._trouble = f"makes this round again: {error}"
            log.warning("the steps of a round begin again: %s", error)
            if others:
                self.trainer.suspect(others, str(error))
            await self._go_back(first, ends)
            await trio.sleep(AGAIN_S)
            return False
        if await self._gather(self._age + self.trainer.version - first):
            return True
        self._parts = ()  # their moments may be why: begin with fresh ones
        await self._go_back(self.trainer.version, ends)
        return False

    async def _go_back(self, version: int, ends: Any) -> None:
        """Let blocks and ends have what they had when the round began; `version` is the number of that now."""
        self._model.ends.kept = ends
        await self._device.run_later(self._model.ends.restore)  # as the round may be over, and another one begin
        self.trainer.begin_at(Snapshot(version, self._parts))

    async def _found(self, avoid: frozenset[str]) -> Route:
        """Find a route, unless the steps that it is for are not wanted any more."""
        if self._stop(0):
            raise _Stopped
        try:
            route = await self._routes(avoid)
        except AppError as error:
            self._no_route = f"waits for machines: {error}"
            raise
        self._no_route = ""
        return route

    async def loss(self, held: Sequence[Sequence[int]]) -> float | None:
        """Have the next round begin with this text; None."""
        self._held = held
        return None

    async def close(self) -> None:
        """Remove what this node keeps for the pipeline."""
        await self.trainer.close()
        await self._states.forget(self._run)

    def _rate_of(self, version: int) -> float:
        first, number = self._begun
        return self._terms.rate_of(number + version - first)

    async def _renew(self) -> None:
        """Let the round begin with the weights that all islands have, and with the moments that blocks had last."""
        states, made = self._states, list[StatePart]()
        for block in self._terms.order.span.blocks():
            if self._parts:
                old = await states.read(self._parts[block])
                state = await self._device.run_later(self._model.renewed, block, old)
            else:
                self._age = 0
                state = await self._device.run_later(self._model.first_state, block)
            await states.require_room(len(state))
            made.append(await states.keep(self._run, state))
        self._parts = tuple(made)
        self.trainer.begin_at(Snapshot(self.trainer.version, self._parts))
        await states.forget(self._run, keep=made)
        await states.forget(self.trainer.states_run)

    async def _gather(self, age: int) -> bool:
        """Take in the weights of all blocks from the last snapshot, so many steps after their moments were fresh.

        False if some cannot be used.
        """
        found = self.trainer.snapshot.states
        for block in self._terms.order.span.blocks():
            try:
                (state,) = await self._states.fetch(self.trainer.states_run, [found[block]], ())
                await self._device.run_later(self._model.gather, block, state, age)
            except (EngineError, AppError) as error:
                peer = next(hop.peer for hop in self.route if block in hop.span)
                log.warning("%s gave weights of block %s that cannot be used: %s", peer, block, error)
                self.trainer.leave_out([(peer, f"its weights of block {block} cannot be used: {error}")])
                return False
        await self._states.obtain(self._run, found, ())
        self._parts, self._age = found, age
        return True

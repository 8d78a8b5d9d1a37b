"""The owner's side of a job: runs its steps through the hops, and goes on after a hop has died.

A step, all of it in this file: micro-batches follow each other through the hops (`_run_passes`); the hops say what they
have counted, and what is missing runs again (`_tally`); the gradient's norm over all hops decides how it is clipped,
and every hop makes the next version (`step`); once all have, it is committed. After some steps the states of all blocks
are kept here and at one more hop (`take_snapshot`). A hop that fails ends the epoch: the next one begins with another
route at the last snapshot, so that every later step is what it would have been.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import trio

from app.asker.route_session import loop_streams
from app.core.compute import Device
from app.core.errors import AppError, RecordError
from app.core.network import FrameStream, Network, Priority
from app.core.signal import Signal
from app.core.smoothing import Ewma
from app.routing.route import Hop, Route
from app.session.frame import DTYPE_NAMES, Frame, HopError, decode_hop_error, new_session_id, plain, root_mean_square
from app.session.outbound import OutboundFrame, PeerOutbox
from app.training.ledger import UsualSize
from app.training.progress import StepProgress, is_overcounted
from app.training.states import StateStore
from app.training.wire import (
    MAX_MICRO_BATCHES,
    PASSES,
    PROTOCOL,
    JobOrder,
    Kind,
    Pass,
    StatePart,
    StepOrder,
    Tally,
    decode,
    decode_parts,
    decode_root,
    decode_tally,
    encode_open,
    encode_parts,
    encode_step,
    frame_bytes,
    pass_header,
    pass_of,
    sequences_of,
)
from engine.errors import NotFinite
from p2p.errors import P2PError

log = logging.getLogger("shoal.training")

MAX_REJECTED = 3  # frames of one hop that must not be computed with, in one epoch
MAX_FAILURES = 12  # epochs in a row without a step


class BatchLoss(Protocol):
    """Summed loss of a micro-batch, and its gradient by the last hidden states as numbers for the wire."""

    @property
    def total(self) -> float: ...
    @property
    def gradient(self) -> bytes: ...


class LossRun(Protocol):
    """The loss of one micro-batch on its way through the head."""

    def advance(self) -> bool:
        """Compute a part of it; False if that was the last."""

    def result(self, wire: str) -> BatchLoss: ...


class JobEnds(Protocol):
    """Embedding and loss, which run at the owner; `engine.training_runner` implements it."""

    @property
    def hidden_size(self) -> int: ...
    def shape(self, batch: Any) -> tuple[int, int]: ...
    def counted(self, batches: Sequence[Any]) -> int: ...
    def embed(self, batch: Any, wire: str) -> bytes: ...
    def begin_loss(self, batch: Any, hidden: memoryview, dtype: str, *, gradient: bool) -> LossRun: ...


@dataclass(frozen=True)
class JobTerms:
    """What a job trains and how; `rate_of` gives the learning rate of a step, from 0."""

    order: JobOrder  # span, neighbours, states and holders are filled in for each hop
    rate_of: Callable[[int], float]
    clip: float | None = 1.0
    snapshot_every: int = 10  # steps, at least
    snapshot_share: float = 1.0  # of the time that snapshots may take


async def _ignore(snapshot: Snapshot) -> None:
    pass


@dataclass(frozen=True)
class JobHooks:
    """What else a run does; validation data is asked for before the first step and after each."""

    asked_to_leave: Callable[[], bool] = lambda: False  # before each step: True ends the run at a snapshot
    validation: Callable[[int], Sequence[Any]] = lambda version: ()  # micro-batches to validate with now
    on_validation: Callable[[int, float], None] = lambda version, loss: None  # (version, mean loss)
    on_snapshot: Callable[[Snapshot], Awaitable[None]] = _ignore


@dataclass(frozen=True)
class Patience:
    """Seconds that the owner waits."""

    open_s: float = 10.0  # for a stream
    ready_s: float = 330.0  # for a hop to fetch states and begin
    quiet_s: float = 1.0  # without any frame before hops are asked how they are, at least
    probe_s: float = 3.0  # for the answer
    route_s: float = 600.0  # for a route


@dataclass(frozen=True)
class StepDone:
    """One committed step: its number from 1, the mean loss before it, counted tokens, gradient norm and rate."""

    version: int
    loss: float
    tokens: int
    norm: float
    rate: float


@dataclass(frozen=True)
class Snapshot:
    """States of all blocks at one version, and who has them besides the owner."""

    version: int = 0
    states: tuple[StatePart, ...] = ()  # block by block; empty: as drawn
    holders: tuple[str, ...] = ()


@dataclass
class JobFigures:
    """Counters of a job, for its owner."""

    epochs: int = 0
    micro_batches_again: int = 0
    rejected: Counter[str] = field(default_factory=Counter)  # hop -> frames that were not computed with
    rejected_why: dict[str, str] = field(default_factory=dict)  # hop -> the latest reason
    lost: deque[str] = field(default_factory=lambda: deque(maxlen=64))  # why the latest epochs ended
    bytes_out: int = 0
    bytes_in: int = 0
    link_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)  # (sender, receiver) -> bytes of passes


class TrainingStopped(AppError):
    """A job cannot go on; it stays at its last snapshot."""

    code = "training_stopped"


class HopLost(Exception):
    """A hop failed or does not answer: the epoch is over; `refused` if it should not be asked again."""

    def __init__(self, peer: str, why: str, *, refused: bool = False) -> None:
        super().__init__(f"{peer}: {why}")
        self.peer, self.refused = peer, refused


RouteFinder = Callable[[frozenset[str]], Route]  # peers not to use -> a route; raises `NoRoute`
OwnServer = Callable[[FrameStream], Awaitable[None]]


class _Link(NamedTuple):
    """The stream to one hop."""

    hop: Hop
    outbox: PeerOutbox


class SwarmTrainer:
    """Runs one job; `run` trains up to a number of steps and may be called again."""

    def __init__(
        self,
        network: Network,
        ends: JobEnds,
        device: Device,
        states: StateStore,
        routes: RouteFinder,
        terms: JobTerms,
        *,
        own_server: OwnServer | None = None,
        patience: Patience | None = None,
    ) -> None:
        self._network, self._ends, self._device, self._states = network, ends, device, states
        self._routes, self._terms, self._own_server = routes, terms, own_server
        self._patience = patience or Patience()
        self.run_id = new_session_id(network.peer_id)
        self.snapshot = Snapshot()
        self.version = self.snapshot.version
        self.figures = JobFigures()
        self.route: Route = ()
        self._refused: set[str] = set()
        self._refusals: dict[str, str] = {}  # why
        self._failed: dict[str, float] = {}  # peer -> when; not used again for a while
        self._hooks = JobHooks()
        self._snapshot_at = 0.0
        self._snapshot_s = 0.0  # that the last one took

    async def run(
        self,
        steps: int,
        batches: Callable[[int], Sequence[Any]],
        on_step: Callable[[StepDone], None],
        hooks: JobHooks | None = None,
    ) -> None:
        """Train until `steps` steps are committed, or `hooks` end the run; `batches` gives a step's micro-batches.

        `on_step` is called for each committed step, again for steps that are repeated after a hop was lost. At the end
        the states of all blocks are in `snapshot`. Raises `TrainingStopped` or `NoRoute`.
        """
        self._hooks = hooks = hooks or JobHooks()
        failures = 0
        while self.version < steps or self.snapshot.version < steps:
            if self.version == self.snapshot.version and hooks.asked_to_leave():
                return
            begun = self.version
            try:
                await self._run_epoch(steps, batches, on_step)
            except HopLost as lost:
                failures = 0 if self.version > begun else failures + 1
                await self._note_loss(lost, failures)

    async def resume(self, version: int, states: Sequence[bytes]) -> None:
        """Go on from the states of all blocks at this version, which an earlier run has saved."""
        parts = [await self._states.keep(self.run_id, state) for state in states]
        self.snapshot = Snapshot(version, tuple(parts))
        self.version = version

    async def close(self) -> None:
        """Remove what this node keeps for the job."""
        await self._states.forget(self.run_id)

    async def final_states(self) -> list[bytes]:
        """Return the states of all blocks in the last snapshot."""
        return await self._states.fetch(self.run_id, self.snapshot.states, self.snapshot.holders)

    async def _note_loss(self, lost: HopLost, failures: int) -> None:
        log.warning("training goes back to step %d: %s", self.snapshot.version, lost)
        self.figures.lost.append(str(lost))
        if lost.refused:
            self._refused.add(lost.peer)
            self._refusals[lost.peer] = str(lost)
        else:
            self._failed[lost.peer] = trio.current_time()
        if failures > MAX_FAILURES:
            raise TrainingStopped(f"no step could be made in {failures} attempts; the last failed with {lost}")
        await trio.sleep(min(0.05 * 2**failures, 5.0) if failures > 1 else 0)

    async def _run_epoch(
        self, steps: int, batches: Callable[[int], Sequence[Any]], on_step: Callable[[StepDone], None]
    ) -> None:
        """Open a route at the last snapshot and train over it; raises `HopLost`."""
        self.route = await self._find_route()
        self.figures.epochs += 1
        self.version = self.snapshot.version
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:
            epoch = _Epoch(self, self.figures.epochs, nursery)
            try:
                await epoch.open(self.route)
                self._snapshot_at = trio.current_time()
                await self._validate(epoch)
                while self.version < steps and not self._hooks.asked_to_leave():
                    on_step(await epoch.step(batches(self.version)))
                    self.version += 1
                    await self._validate(epoch)
                    if self._snapshot_is_due or self.version == steps:
                        await self._take_snapshot(epoch)
                if self.snapshot.version < self.version:
                    await self._take_snapshot(epoch)
                await epoch.close()
            except Exception as error:
                failure = error  # raised below, outside of the nursery, which would wrap it
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _validate(self, epoch: _Epoch) -> None:
        batches = self._hooks.validation(self.version)
        if batches:
            self._hooks.on_validation(self.version, await epoch.evaluate(batches))

    @property
    def _snapshot_is_due(self) -> bool:
        passed = self.version - self.snapshot.version >= self._terms.snapshot_every
        return passed and self._snapshot_s <= self._terms.snapshot_share * (trio.current_time() - self._snapshot_at)

    async def _take_snapshot(self, epoch: _Epoch) -> None:
        begun = trio.current_time()
        self.snapshot = await epoch.take_snapshot()
        await self._hooks.on_snapshot(self.snapshot)
        self._snapshot_at = trio.current_time()
        self._snapshot_s = self._snapshot_at - begun

    async def _find_route(self) -> Route:
        """Return a route without hops that refused or failed; after a while those that failed are tried again."""
        now = trio.current_time()
        recent = {peer for peer, at in self._failed.items() if now - at < self._patience.probe_s * 10}
        deadline = now + self._patience.route_s
        while True:
            with suppress(AppError):
                return self._routes(frozenset(self._refused | recent))
            try:
                return self._routes(frozenset(self._refused))
            except AppError as error:
                # Waiting helps against a death, but not if all that host the block refuse.
                refused = bool(error.peers) and set(error.peers) <= self._refused
                if refused or trio.current_time() >= deadline:
                    why = "".join(f"; {refusal}" for refusal in self._refusals.values())
                    raise TrainingStopped(f"{error}{why}") from error
            await trio.sleep(1.0)


class _Epoch:
    """One epoch: fixed hops, all of them at one version."""

    def __init__(self, owner: SwarmTrainer, epoch: int, nursery: trio.Nursery) -> None:
        self._owner, self._epoch, self._nursery = owner, epoch, nursery
        self._ends, self._terms, self._patience = owner._ends, owner._terms, owner._patience
        self._links: list[_Link] = []
        self._send, self._arrived = trio.open_memory_channel[tuple[int, Frame | HopLost]](math.inf)
        self._heard_at: dict[int, float] = {}
        self._heard = Signal()
        self._busy: dict[int, int] = {}  # hop -> micro-batches that wait or are computed there, as it said last
        self._pause_s = Ewma(0.2)  # between two frames
        self._sizes = {kind: UsualSize() for kind in PASSES}
        self._rejected: Counter[str] = Counter()
        self._sent: dict[int, tuple[int, int]] = {}  # hop -> bytes that it has sent in this epoch, as it said last

    # --- links --------------------------------------------------------------------------------------------------------

    async def open(self, route: Route) -> None:
        """Begin the epoch at every hop; raises `HopLost`."""
        owner, snapshot = self._owner, self._owner.snapshot
        for index, hop in enumerate(route):
            try:
                stream = await self._open_stream(hop.peer)
            except P2PError as error:
                raise HopLost(hop.peer, f"it cannot be reached: {error}") from error
            self._links.append(_Link(hop, PeerOutbox(stream, self._nursery)))
            self._nursery.start_soon(self._read, index, stream)
        for index, (_, outbox) in enumerate(self._links):
            order = self._order_for(index, snapshot)
            await outbox.push(_control(encode_open(owner.run_id, self._epoch, snapshot.version, order)))
        await self._gather(Kind.READY, self._patience.ready_s)

    def _order_for(self, index: int, snapshot: Snapshot) -> JobOrder:
        peers = ["", *(link.hop.peer for link in self._links), ""]
        span, order = self._links[index].hop.span, self._terms.order
        holders = (self._owner._network.peer_id, *snapshot.holders)
        values = {
            "span": span,
            "predecessor": peers[index],
            "successor": peers[index + 2],
            "under_way": len(self._links) + 1,
            "states": snapshot.states[span.start : span.stop],
            "holders": tuple(dict.fromkeys(holders))[:8] if snapshot.states else (),
        }
        return JobOrder(**{**order.__dict__, **values})

    async def _open_stream(self, peer: str) -> FrameStream:
        owner = self._owner
        if peer == owner._network.peer_id and owner._own_server is not None:
            here, there = loop_streams(peer)
            self._nursery.start_soon(owner._own_server, there)
            return here
        return await owner._network.open(peer, PROTOCOL, timeout_s=self._patience.open_s)

    async def close(self) -> None:
        """Tell the hops that the job is over."""
        for _, outbox in self._links:
            await outbox.push(_control(plain(Kind.CLOSE, self._owner.run_id, self._epoch)))
            with suppress(P2PError):
                await outbox.stream.aclose()

    async def _read(self, index: int, stream: FrameStream) -> None:
        """Pass a hop's frames on, until its stream breaks."""
        peer = self._links[index].hop.peer
        try:
            while True:
                frame = decode(await stream.receive())
                self._heard_at[index] = trio.current_time()
                self._owner.figures.bytes_in += frame_bytes(frame)
                if frame.session != self._owner.run_id:
                    continue
                if frame.kind == Kind.STATE:
                    self._busy[index] = frame.rows
                    self._heard.notify()
                    if not frame.epoch:
                        self._send.send_nowait((index, HopLost(peer, "it has forgotten the job")))
                elif frame.epoch == self._epoch:
                    self._send.send_nowait((index, frame))
        except RecordError as error:
            self._send.send_nowait((index, HopLost(peer, f"it sent what is not understood: {error}", refused=True)))
        except P2PError as error:
            self._send.send_nowait((index, HopLost(peer, f"its stream broke: {error}")))

    @property
    def _indexes(self) -> range:
        return range(len(self._links))

    async def _next(self) -> tuple[int, Frame] | None:
        """Return the next frame of a hop; None if all hops are well and idle, so something got lost."""
        quiet_s = max(self._patience.quiet_s, 8 * self._pause_s.value)
        begun = trio.current_time()
        while True:
            with trio.move_on_after(quiet_s):
                index, found = await self._arrived.receive()
                if isinstance(found, HopLost):
                    raise found
                self._pause_s.add(trio.current_time() - begun)
                if found.kind != Kind.TROUBLE:
                    return index, found
                if self._on_trouble(index, decode_hop_error(found)):
                    return None
                continue
            await self._probe()
            if not any(self._busy.values()) and not self._arrived.statistics().current_buffer_used:
                return None

    async def _probe(self) -> None:
        """Ask every hop how it is; raises `HopLost` for one that does not answer."""
        asked_at = trio.current_time()
        for link in self._links:
            await link.outbox.push(_control(plain(Kind.PROBE, self._owner.run_id, self._epoch)))
        with trio.move_on_after(self._patience.probe_s):
            await self._heard.wait_for(lambda: all(self._heard_at.get(i, 0.0) > asked_at for i in self._indexes))
        for index, link in enumerate(self._links):
            if self._heard_at.get(index, 0.0) <= asked_at:
                raise HopLost(link.hop.peer, f"it has not answered for {self._patience.probe_s:g} s")

    def _on_trouble(self, index: int, trouble: HopError) -> bool:
        """Act on a hop's error: True if what is under way should run again; raises `HopLost`."""
        peer = self._links[index].hop.peer
        if trouble.code == "input":
            sender = index - 1 if trouble.why == "forward" else index + 1
            if not 0 <= sender < len(self._links):
                raise TrainingStopped(f"{peer} refuses what this node sends: {trouble.text}")
            self._reject(sender, trouble.text)
            return True
        if trouble.code == "link":
            return True
        raise HopLost(peer, trouble.text or trouble.code, refused=trouble.code == "refused")

    def _reject(self, index: int, why: str) -> None:
        """Count numbers of a hop that must not be computed with; too many of them end the epoch."""
        peer = self._links[index].hop.peer
        self._owner.figures.rejected[peer] += 1
        self._owner.figures.rejected_why[peer] = why
        self._rejected[peer] += 1
        log.warning("%s sent numbers that are not used: %s", peer, why)
        if self._rejected[peer] >= MAX_REJECTED:
            raise HopLost(peer, f"it sent {MAX_REJECTED} times what cannot be used: {why}", refused=True)

    async def _gather(self, kind: Kind, wait_s: float | None = None, order: bytes | None = None) -> list[Frame]:
        """Send an order to every hop and return their answers in the hops' order.

        An order that got lost is sent again; raises `HopLost`.
        """
        found: dict[int, Frame] = {}
        deadline = trio.current_time() + (wait_s or math.inf)
        if order is not None:
            await self._to_all(order)
        while len(found) < len(self._links):
            came = await self._next()
            if came is not None and came[1].kind == kind:
                found[came[0]] = came[1]
            elif came is None and order is not None:
                await self._to_all(order, except_for=found)
            if trio.current_time() > deadline:
                late = next(link.hop.peer for index, link in enumerate(self._links) if index not in found)
                raise HopLost(late, f"it was not ready within {wait_s:g} s")
        return [found[index] for index in range(len(self._links))]

    async def _to_all(self, message: bytes, except_for: Any = ()) -> None:
        for index, link in enumerate(self._links):
            if index not in except_for:
                await link.outbox.push(_control(message))

    # --- a step -------------------------------------------------------------------------------------------------------

    async def step(self, batches: Sequence[Any]) -> StepDone:
        """Make and commit one step; raises `HopLost`, or `TrainingStopped` if the loss is not finite."""
        version = self._owner.version
        tokens = self._ends.counted(batches)
        if not tokens or len(batches) > MAX_MICRO_BATCHES:
            raise TrainingStopped(f"step {version + 1} has {tokens} tokens that count in {len(batches)} micro-batches")
        progress = StepProgress(len(batches), len(self._links) + 1)
        while True:
            await self._run_passes(progress, batches, (Kind.FORWARD, Kind.BACK))
            tallies = await self._tally(version, len(batches))
            missing = progress.missing(tallies)
            if not missing:
                break
            self._run_again(progress, missing)
        loss = math.fsum(progress.losses.values()) / tokens
        scale = 1 / tokens
        norm = scale * math.sqrt(math.fsum(one for tally in tallies for one in tally.squared_norms))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise TrainingStopped(f"the loss of step {version + 1} is not finite: start again with a smaller rate")
        rate = self._terms.rate_of(version)
        clip = 1.0 if self._terms.clip is None else min(1.0, self._terms.clip / (norm + 1e-6))
        run = self._owner.run_id
        order = encode_step(run, self._epoch, version, StepOrder(rate, scale, clip))
        for index, frame in enumerate(await self._gather(Kind.STEP, order=order)):
            self._checked(index, decode_root, frame)
        await self._gather(Kind.COMMIT, order=plain(Kind.COMMIT, run, self._epoch, version + 1))
        return StepDone(version + 1, loss, tokens, norm, rate)

    async def evaluate(self, batches: Sequence[Any]) -> float:
        """Return the mean loss of micro-batches that are not trained on; raises `HopLost` or `TrainingStopped`."""
        progress = StepProgress(len(batches), len(self._links) + 1)
        await self._run_passes(progress, batches, (Kind.EVALUATE,))
        return math.fsum(progress.losses.values()) / max(1, self._ends.counted(batches))

    async def _run_passes(self, progress: StepProgress, batches: Sequence[Any], kinds: tuple[Kind, ...]) -> None:
        """Send micro-batches in frames of the first kind until each has come back in one of the last.

        At most one more than there are hops are under way.
        """
        version, wire = self._owner.version, self._terms.order.wire
        while not progress.is_back:
            for number, attempt in progress.start():
                data = await self._owner._device.run_later(self._ends.embed, batches[number], wire)
                await self._send_pass(kinds[0], 0, Pass(version, number, attempt), batches[number], data)
            came = await self._next()
            if came is None:
                self._run_again(progress)
                continue
            index, frame = came
            if frame.kind not in kinds or frame.position != version:
                continue
            one = pass_of(frame)
            if not await self._is_passed_on(index, frame) and one.number < len(batches):
                if self._is_sound(index, frame, batches[one.number]):
                    await self._on_pass(progress, frame, one, batches[one.number])

    async def _on_pass(self, progress: StepProgress, frame: Frame, one: Pass, batch: Any) -> None:
        if frame.kind == Kind.BACK:
            progress.came_back(one.number, one.attempt)
        elif progress.reached_end(one.number, one.attempt):
            trains = frame.kind == Kind.FORWARD
            try:
                found = await self._loss(batch, frame, gradient=trains)
            except NotFinite as error:
                raise TrainingStopped(f"the loss of step {one.version + 1} is not finite: {error}") from error
            progress.losses[one.number] = found.total
            if trains:
                await self._send_pass(Kind.BACK, len(self._links) - 1, one, batch, found.gradient)
            else:
                progress.came_back(one.number, one.attempt)

    async def _loss(self, batch: Any, frame: Frame, *, gradient: bool) -> BatchLoss:
        """Compute the loss of a micro-batch, in parts between which replies can go; raises `NotFinite`."""
        device = self._owner._device
        begin = partial(self._ends.begin_loss, gradient=gradient)
        loss = await device.run_later(begin, batch, frame.body, DTYPE_NAMES[frame.dtype])
        while await device.run_later(loss.advance):
            pass
        return await device.run_later(loss.result, self._terms.order.wire)

    async def _send_pass(self, kind: Kind, index: int, one: Pass, batch: Any, data: bytes) -> None:
        _, length = self._ends.shape(batch)
        head = pass_header(
            kind, self._owner.run_id, self._epoch, one, dtype=self._terms.order.wire, rows=length,
            width=self._ends.hidden_size, length=len(data),
        )  # fmt: skip
        self._owner.figures.bytes_out += len(head) + len(data)
        self._owner.figures.link_bytes[self._peers[0], self._links[index].hop.peer] += len(head) + len(data)
        await self._links[index].outbox.push(OutboundFrame((head, data), Priority.BULK))

    async def _is_passed_on(self, index: int, frame: Frame) -> bool:
        """Send a frame to the neighbour that its hop cannot reach; False if it is meant for the owner."""
        target = index + (-1 if frame.kind == Kind.BACK else 1)
        if not 0 <= target < len(self._links):
            return False
        await self._pass_on(target, frame)
        return True

    async def _pass_on(self, index: int, frame: Frame) -> None:
        """Send a hop's frame to a neighbour that the hop cannot reach."""
        head = pass_header(
            Kind(frame.kind), frame.session, frame.epoch, pass_of(frame), dtype=DTYPE_NAMES[frame.dtype],
            rows=frame.rows, width=frame.width, length=len(frame.body),
        )  # fmt: skip
        await self._links[index].outbox.push(OutboundFrame((head, bytes(frame.body)), Priority.BULK))

    def _is_sound(self, index: int, frame: Frame, batch: Any) -> bool:
        """True if a hop's numbers have the micro-batch's shape, are finite and of a usual size; else it is counted."""
        if (frame.width, sequences_of(frame), frame.rows) != (self._ends.hidden_size, *self._ends.shape(batch)):
            self._reject(index, "a wrong shape")
        elif not self._sizes[Kind(frame.kind)].accepts(root_mean_square(frame)):
            self._reject(index, "numbers that are not finite, or far beyond the usual")
        else:
            return True
        return False

    def _run_again(self, progress: StepProgress, numbers: Sequence[int] | None = None) -> None:
        self._owner.figures.micro_batches_again += progress.under_way if numbers is None else len(numbers)
        if not progress.run_again(numbers):
            raise HopLost(self._links[0].hop.peer, "a micro-batch did not come back after many attempts")

    async def _tally(self, version: int, count: int) -> list[Tally]:
        order = plain(Kind.TALLY, self._owner.run_id, self._epoch, version)
        frames = await self._gather(Kind.TALLY, order=order)
        tallies: list[Tally] = [
            self._checked(index, partial(decode_tally, span=link.hop.span), frame)
            for index, (link, frame) in enumerate(zip(self._links, frames, strict=True))
        ]
        self._count_bytes(tallies)
        wrong = is_overcounted(tallies, count)
        if wrong is not None:
            peer = next(link.hop.peer for link in self._links if wrong.start in link.hop.span)
            raise HopLost(peer, "it counted micro-batches that were never sent", refused=True)
        return tallies

    def _count_bytes(self, tallies: Sequence[Tally]) -> None:
        """Add what the hops say they have sent since the last tally to the bytes of their links."""
        peers, links = self._peers, self._owner.figures.link_bytes
        for index, tally in enumerate(tallies):
            before = self._sent.get(index, (0, 0))
            for receiver, size, known in zip((peers[index + 2], peers[index]), tally.sent_bytes, before, strict=True):
                links[peers[index + 1], receiver] += max(0, size - known)
            self._sent[index] = tally.sent_bytes

    @property
    def _peers(self) -> list[str]:
        """The owner, the hops, and the owner again."""
        own = self._owner._network.peer_id
        return [own, *(link.hop.peer for link in self._links), own]

    def _checked(self, index: int, read: Callable[[Frame], Any], frame: Frame) -> Any:
        try:
            return read(frame)
        except RecordError as error:
            raise HopLost(self._links[index].hop.peer, f"its answer is not valid: {error}", refused=True) from error

    # --- snapshots ----------------------------------------------------------------------------------------------------

    async def take_snapshot(self) -> Snapshot:
        """Have the states of all blocks kept by their hops, here, and by one more hop."""
        owner = self._owner
        order = plain(Kind.SNAPSHOT, owner.run_id, self._epoch, owner.version)
        frames = await self._gather(Kind.SNAPSHOT, order=order)
        states: list[StatePart] = []
        for index, (link, frame) in enumerate(zip(self._links, frames, strict=True)):
            parts, _ = self._checked(index, decode_parts, frame)
            if len(parts) != len(link.hop.span):
                raise HopLost(link.hop.peer, "it kept states of other blocks than its own", refused=True)
            try:
                await owner._states.fetch(owner.run_id, parts, [link.hop.peer])
            except trio.TooSlowError:
                raise HopLost(link.hop.peer, "it did not send its states in time") from None
            states += parts
        others = [link for link in self._links if link.hop.peer != owner._network.peer_id]
        if others:
            keep = encode_parts(Kind.KEEP, owner.run_id, self._epoch, owner.version, states, [owner._network.peer_id])
            await self._order_one(others[owner.version % len(others)], Kind.KEEP, keep)
        await owner._states.forget(owner.run_id, keep=states)
        kept_by = tuple(link.hop.peer for link in others)
        return Snapshot(owner.version, tuple(states), kept_by)

    async def _order_one(self, link: _Link, kind: Kind, message: bytes) -> None:
        """Send one hop an order and wait for its answer."""
        await link.outbox.push(_control(message))
        while True:
            came = await self._next()
            if came is None:
                await link.outbox.push(_control(message))
            elif came[1].kind == kind and self._links[came[0]] is link:
                return


def _control(message: bytes) -> OutboundFrame:
    return OutboundFrame((message,), Priority.CONTROL)

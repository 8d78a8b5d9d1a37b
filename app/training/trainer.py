"""The owner's side of a job: runs its steps through the hops, and goes on after a hop has died.

A step, all of it in this file: micro-batches follow each other through the hops (`_run_passes`); the hops say what they
have counted, and what is missing runs again (`_tally`); where several hold a block, their sums are made one, and who
lied about them is left out (`_reduce`); the gradient's norm over all hops decides how it is clipped, and every hop
makes the next version (`step`); once all have, it is committed. After some steps the states of all blocks are kept here
(`take_snapshot`) and at a trusted hop (`copy_snapshot`). If a hop fails whose blocks others hold too, they go on
without it, and the step begins again (`go_on_without`). Otherwise the epoch ends: the next one begins with another
route at the last snapshot, so that every later step is what it would have been.
"""

from __future__ import annotations

import logging
import math
import random
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

import trio

from app.core.compute import Device
from app.core.errors import AppError, RecordError
from app.core.network import FrameStream, Network, Priority
from app.core.pieces import Pieces
from app.core.signal import Signal
from app.core.smoothing import Ewma
from app.core.span import Span
from app.routing.route import Hop, Route
from app.routing.trust import Verdict
from app.serving.homes import Homes
from app.session.frame import (
    CHANGES,
    DTYPE_NAMES,
    Frame,
    HopError,
    decode_hop_error,
    new_session_id,
    plain,
    root_mean_square,
)
from app.session.loop_stream import loop_streams
from app.session.outbound import FRAME_COST_BYTES, OutboundFrame, PeerOutbox
from app.training.activations import ActivationDisk, Activations, Boundary, NoBase
from app.training.audits import Answer, AuditLots, AuditVerdict, Caution, Suspect, judge, other_causes
from app.training.blame import Blame
from app.training.ledger import UsualSize
from app.training.progress import StepProgress
from app.training.reduction import HolderSums, Numbers, from_bytes, is_finite, reduced, squared_norm
from app.training.states import SLOWEST_BYTES_PER_S, StateStore
from app.training.ways import Drawn, VirtualTimes, WayPlan, assigned, parts_of, plan_ways, taking_part
from app.training.wire import (
    FORMAT_NAMES,
    FORMATS,
    FRAMES_AT_ONCE,
    FRAMES_PER_S,
    MAX_MICRO_BATCHES,
    PROTOCOL,
    JobOrder,
    Kind,
    Pass,
    ReduceOrder,
    StatePart,
    StepOrder,
    SumsBuffer,
    Tally,
    decode,
    decode_parts,
    decode_tally,
    digest_of,
    encode_open,
    encode_parts,
    encode_reduce,
    encode_step,
    frame_bytes,
    length_of,
    most_state_bytes,
    pass_header,
    pass_of,
    reading_cost,
    sequences_of,
    split_kept,
    sums_frames,
    with_kept,
)
from app.weights.extents import WeightsError
from engine.errors import EngineError, NotFinite
from p2p.errors import P2PError
from p2p.rate_limit import PeerRateLimit

log = logging.getLogger("shoal.training")
T = TypeVar("T")

MAX_REJECTED = 3  # frames of one hop that must not be computed with, in one epoch
MAX_QUEUED_BYTES = 2**26  # of one hop's frames that wait here; then its stream is not read
MAX_FAILURES = 12  # epochs in a row without a step; those that ended because a hop was away are counted apart
PROBE_EVERY_S = 60.0  # at least, however long pauses usually are: hops forget an owner that is silent for minutes
CLOSE_S = 1.0  # for telling hops that an epoch is over
OVERDUE = 4.0  # times as long as all that is under way at a hop takes on the fastest way: then it is late
MOST_PATIENCE = 16  # times the usual quiet time, before what did not come is taken for lost
_NO_ROOM = "it trains as many jobs as it may: raise `train_jobs` there for more"


class BatchLoss(Protocol):
    """Summed loss of a micro-batch, and its gradient by the last hidden states as numbers for the wire."""

    @property
    def total(self) -> float: ...
    @property
    def gradient(self) -> bytes: ...


class JobEnds(Protocol):
    """Embedding and loss, which run at the owner; `engine.training_runner` implements it."""

    @property
    def hidden_size(self) -> int: ...
    def shape(self, batch: Any) -> tuple[int, int]: ...
    def counted(self, batches: Sequence[Any]) -> int: ...
    def contents(self, batch: Any) -> list[bytes]: ...
    def embed(self, batch: Any, wire: str) -> bytes: ...
    def loss(
        self, batch: Any, hidden: memoryview, dtype: str, *, gradient: bool, number: int, wire: str
    ) -> Pieces[BatchLoss]: ...


class TrainedEnds(Protocol):
    """Ends whose weights are trained too, at the owner; `engine.full_runner` implements it."""

    def back(self, batch: Any, number: int, gradient: memoryview, dtype: str) -> None: ...
    def clear(self) -> None: ...
    def squared_norms(self) -> list[float]: ...
    def step(self, rate: float, scale: float, clip: float) -> None: ...
    def keep(self) -> None: ...
    def restore(self) -> None: ...


class StateSample(Protocol):
    """Some numbers of a block's state, stepped along with its holders; `engine.training_runner` implements it."""

    def step(self, sums: Numbers, number: int, rate: float, factor: float) -> None: ...
    def fits(self, state: bytes) -> bool: ...


@dataclass(frozen=True)
class JobTerms:
    """What a job trains and how; `rate_of` gives the learning rate of a step, from 0."""

    order: JobOrder  # span, neighbours, ways, states and holders are filled in for each hop
    rate_of: Callable[[int], float]
    clip: float | None = 1.0
    snapshot_every: int = 10  # steps, at least
    snapshot_after_s: float = math.inf  # after which fewer steps are enough
    snapshot_share: float = 1.0  # of the time that snapshots may take
    sums_bytes: int = 0  # of a block's summed gradients
    version_of: Callable[[bytes], int] | None = None  # of a block's state; raises `EngineError` for what is none
    sample_of: Callable[[int, bytes | None], StateSample] | None = None  # (block, its state; None: as drawn)
    replicas: int = 4  # most holders of a block that train at the same time
    copies: bool = True  # snapshots are kept by a trusted hop, besides the owner
    caution: Caution = field(default_factory=Caution)


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
    quiet_s: float = 1.0  # without any frame before hops are asked how they are, at least
    probe_s: float = 3.0  # for the answer
    stuck_s: float = 600.0  # for a hop that answers, and brings the job no further, besides the time to fetch states
    copy_s: float = 300.0  # for a copy of a snapshot; if that is too short, no more are made
    route_s: float = 10.0  # for a route, and for hops that train other jobs


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
    snapshots_s: float = 0.0  # that all snapshots took
    micro_batches_again: int = 0
    rejected: Counter[str] = field(default_factory=Counter)  # hop -> frames that were not computed with
    rejected_why: dict[str, str] = field(default_factory=dict)  # hop -> the latest reason
    lost: deque[str] = field(default_factory=lambda: deque(maxlen=64))  # why the latest epochs ended
    computed: Counter[str] = field(default_factory=Counter)  # hop -> micro-batches that went through it
    audits: int = 0
    left_out: dict[str, str] = field(default_factory=dict)  # hop that lied, or may have -> how it was found
    bytes_out: int = 0
    bytes_in: int = 0
    link_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)  # (sender, receiver) -> bytes of passes


class TrainingStopped(AppError):
    """A job cannot go on; it stays at its last snapshot."""

    code = "training_stopped"


class HopsAway(TrainingStopped):
    """A job cannot go on while nobody trains some block for it; it stays at its last snapshot, and may be run again."""


class HopLost(Exception):
    """A hop failed, and some `beside` it in the same way.

    `refused` if it should not be asked again, `welcome` if soon, `away` if it is just not there.
    """

    def __init__(
        self, peer: str, why: str, *, beside: Sequence[str] = (),
        refused: bool = False, welcome: bool = False, away: bool = False,
    ) -> None:  # fmt: skip
        self.peer, self.peers = peer, (peer, *beside)
        super().__init__(f"{', '.join(self.peers)}: {why}")
        self.refused, self.welcome, self.away = refused, welcome, away


class HopBusy(HopLost):
    """A hop has no room for the job now."""

    def __init__(self, peer: str, why: str) -> None:
        super().__init__(peer, why, away=True)


class HopFull(HopLost):
    """A hop will never have memory for as many micro-batches under way as it was told."""

    def __init__(self, peer: str, why: str) -> None:
        super().__init__(peer, why, refused=True)


@dataclass
class _Failures:
    """Epochs in a row without a step."""

    count: int = 0
    away: int = 0  # of these, that ended because a hop was not there, or busy
    busy_since: float = math.inf  # when a hop was busy first

    def add(self, lost: HopLost, now: float) -> None:
        """Count one more."""
        self.count, self.away = self.count + 1, self.away + lost.away
        if isinstance(lost, HopBusy):
            self.busy_since = min(self.busy_since, now)


RouteFinder = Callable[[frozenset[str]], Awaitable[Route]]  # peers not to use -> a route; raises `NoRoute`
HolderFinder = Callable[[Route, frozenset[str]], Sequence[Hop]]  # who else may train, all of its blocks; best first


def _alone(route: Route, avoid: frozenset[str]) -> Sequence[Hop]:
    return ()


class TrustNotes(Protocol):
    """Where it is noted that a peer lied or agreed; `app.routing.trust` implements it."""

    def note(self, peer: str, verdict: Verdict, note: str, weight: float = 1.0) -> None: ...


@dataclass(frozen=True)
class Replicas:
    """Who may train beside a route's hops, who is never accused of lying, and where it is noted who did."""

    holders: HolderFinder = _alone
    not_accused: Callable[[], frozenset[str]] = frozenset
    trust: TrustNotes | None = None


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
        replicas: Replicas | None = None,
        trained: TrainedEnds | None = None,
        activations: ActivationDisk | None = None,
    ) -> None:
        """`trained` are the ends once more, if they are trained themselves; `activations` is for a job of changes."""
        assert activations is not None or not terms.order.sends_changes, "changes are made from what is kept"
        self._activations = activations
        self._samples: dict[bytes, int] = {}  # digest of a sequence -> the number by which hops know it
        self._trained = trained
        self._network, self._ends, self._device, self._states = network, ends, device, states
        self._routes, self._terms, self._own_server = routes, terms, own_server
        self._patience = patience or Patience()
        self._replicas = replicas or Replicas()
        self._most_holders = terms.replicas
        self._times, self._lots, self._homes = VirtualTimes(), AuditLots(terms.caution), Homes(network)
        self.run_id = new_session_id(network.peer_id)
        # Apart from the states of its own node as a hop, which forgets them with the job.
        self.states_run = b"owner" + self.run_id
        self.snapshot = Snapshot()
        self.version = self.snapshot.version
        self.figures = JobFigures()
        self.route: Route = ()
        self._refused: set[str] = set()
        self._refusals: dict[str, str] = {}  # why
        self._rooms: dict[str, int] = {}  # hop with less memory than others -> micro-batches under way at it, at most
        self._blame = Blame(self._patience.probe_s * 10)
        self._frames = PeerRateLimit(FRAMES_AT_ONCE, FRAMES_PER_S)
        self._hooks = JobHooks()
        self._failures = _Failures()
        self._most_unkept = math.inf  # steps after which a snapshot is due whatever it costs, once steps were lost
        self._makes_copies = terms.copies
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
        the states of all blocks are in `snapshot`. Raises `TrainingStopped`, after a `HopsAway` it can be called again,
        and `WeightsError` if the disk is full.
        """
        self._hooks = hooks = hooks or JobHooks()
        while self.version < steps or self.snapshot.version < steps:
            if self.version == self.snapshot.version and hooks.asked_to_leave():
                return
            begun = self.version
            try:
                await self._run_epoch(steps, batches, on_step)
            except HopLost as lost:
                if steps_lost := self.version - self.snapshot.version:
                    # If hops stop the job again and again after some steps, it must come to a snapshot before.
                    self._most_unkept = max(1, min(self._most_unkept, steps_lost // 2))
                await self._note_lost_hop(lost, made_step=self.version > begun)

    async def resume(self, version: int, states: Sequence[bytes]) -> None:
        """Go on from the states of all blocks at this version, which an earlier run has saved."""
        parts = [await self._states.keep(self.states_run, state) for state in states]
        self.begin_at(Snapshot(version, tuple(parts)))

    def begin_at(self, snapshot: Snapshot) -> None:
        """Go on from a snapshot whose states are kept here."""
        self.snapshot, self.version, self._failures = snapshot, snapshot.version, _Failures()

    def leave_out(self, hops: Iterable[tuple[str, str]]) -> None:
        """Do without hops that an earlier run left out, for these reasons."""
        for peer, why in hops:
            self.figures.left_out[peer] = why
            self._refused.add(peer)
            self._refusals[peer] = f"{peer}: {why}"

    def suspect(self, peers: Sequence[str], why: str) -> None:
        """Do without one of several hops for a while, one of which may have stopped a run."""
        self._remember(HopLost(self._blame.choose(peers, trio.current_time()), why))

    async def close(self) -> None:
        """Remove what this node keeps for the job."""
        await self._states.forget(self.states_run)

    async def final_states(self) -> list[bytes]:
        """Return the states of all blocks in the last snapshot."""
        return await self._states.fetch(self.states_run, self.snapshot.states, self.snapshot.holders)

    async def _note_lost_hop(self, lost: HopLost, *, made_step: bool) -> None:
        """Wait until the next epoch may begin; raises `TrainingStopped` if there should be none, or none for now."""
        log.warning("training goes back to step %d: %s", self.snapshot.version, lost)
        self._remember(lost)
        if made_step:
            self._failures = _Failures()
        else:
            self._failures.add(lost, trio.current_time())
        failures = self._failures
        text = f"no step could be made in {failures.count} attempts; the last failed with {lost}"
        if failures.count - failures.away > MAX_FAILURES:
            hint = "; if the loss grew before, start again with a smaller rate" if self.figures.rejected else ""
            raise TrainingStopped(f"{text}{hint}")
        if isinstance(lost, HopBusy) and trio.current_time() >= failures.busy_since + self._patience.route_s:
            raise HopsAway(str(lost))
        if lost.away and failures.count > MAX_FAILURES:
            raise HopsAway(text)
        # Two jobs that keep each other from their hops must not try again at the same time.
        pause_s = random.uniform(0.5, 1.0) * 0.05 * 2 ** min(failures.count, 7)
        await trio.sleep(pause_s if failures.count > 1 else 0)

    def _remember(self, lost: HopLost) -> None:
        self.figures.lost.append(str(lost))
        for peer in lost.peers:
            if lost.refused:
                self._refused.add(peer)
                self._refusals[peer] = str(lost)
            elif not lost.welcome:
                self._blame.rest(peer, trio.current_time())

    async def _run_epoch(
        self, steps: int, batches: Callable[[int], Sequence[Any]], on_step: Callable[[StepDone], None]
    ) -> None:
        """Open a route at the last snapshot and train over it; raises `HopLost`."""
        self.route = self._with_replicas(await self._find_route())
        self.figures.epochs += 1
        self.version = self.snapshot.version
        if self._trained is not None:
            await self._device.run_later(self._trained.restore)
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:
            epoch = _HopGroup(self, self.figures.epochs, nursery)
            try:
                await epoch.open(self.route)
                self.route = epoch.hops
                self._snapshot_at = trio.current_time()
                await self._validate(epoch)
                while self.version < steps and not self._hooks.asked_to_leave():
                    on_step(await self._survived(epoch, partial(epoch.step, batches(self.version))))
                    self.version += 1
                    self._blame.step_made()
                    await self._validate(epoch)
                    if self._snapshot_is_due or self.version == steps:
                        await self._take_snapshot(epoch)
                        if epoch.differs or self._has_new_holders():
                            break  # the next epoch begins with the same state everywhere, and with all holders
                if self.snapshot.version < self.version:
                    await self._take_snapshot(epoch)
            except Exception as error:
                failure = error  # raised below, outside of the nursery, which would wrap it
            finally:
                # Hops that hear nothing keep memory and a place for the job, and have no room for the next epoch.
                with trio.CancelScope(shield=True):
                    with trio.move_on_after(CLOSE_S):
                        await epoch.close(comes_back=isinstance(failure, HopLost))
                    await epoch.forget_activations()
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _survived(self, epoch: _HopGroup, work: Callable[[], Awaitable[T]]) -> T:
        """Do some work of an epoch, again if a hop fails that the others can do without; raises `HopLost`."""
        while True:
            try:
                return await work()
            except HopLost as lost:
                await epoch.go_on_without(lost)

    def _with_replicas(self, route: Route) -> Route:
        """Return a route's hops with all others that train their blocks too."""
        avoid = frozenset(self._refused.union(self._resting))
        return taking_part(route, self._replicas.holders(route, avoid), self._most_holders)

    def _has_new_holders(self) -> bool:
        """True if more could train than do."""
        found = plan_ways(self._with_replicas(self.route)).hops
        return {hop.peer for hop in found} > {hop.peer for hop in self.route}

    async def _validate(self, epoch: _HopGroup) -> None:
        batches = self._hooks.validation(self.version)
        if batches:
            loss = await self._survived(epoch, partial(epoch.evaluate, batches))
            self._hooks.on_validation(self.version, loss)

    @property
    def _snapshot_is_due(self) -> bool:
        terms, steps = self._terms, self.version - self.snapshot.version
        since_s = trio.current_time() - self._snapshot_at
        is_time = steps >= terms.snapshot_every or since_s >= terms.snapshot_after_s
        return steps >= self._most_unkept or (is_time and self._snapshot_s <= terms.snapshot_share * since_s)

    async def _take_snapshot(self, epoch: _HopGroup) -> None:
        begun = trio.current_time()
        self.snapshot = await self._survived(epoch, epoch.take_snapshot)
        if self._trained is not None:
            await self._device.run_later(self._trained.keep)
        await self._hooks.on_snapshot(self.snapshot)
        await self._survived(epoch, epoch.copy_snapshot)
        self._most_unkept *= 2
        self._snapshot_at = trio.current_time()
        self._snapshot_s = self._snapshot_at - begun
        self.figures.snapshots_s += self._snapshot_s

    async def _find_route(self) -> Route:
        """Return a route without hops that refused or rest; without another one, with those that rest shortest."""
        deadline = trio.current_time() + self._patience.route_s
        while True:
            resting = self._resting
            for count in range(len(resting)):
                with suppress(AppError):
                    return await self._routes(frozenset(self._refused.union(resting[count:])))
            try:
                return await self._routes(frozenset(self._refused))
            except AppError as error:
                # Waiting helps against a death, but not if all that host the block refuse.
                refused = bool(error.peers) and set(error.peers) <= self._refused
                if refused or trio.current_time() >= deadline:
                    why = "".join(f"; {refusal}" for refusal in self._refusals.values())
                    raise (TrainingStopped if refused else HopsAway)(f"{error}{why}") from error
            await trio.sleep(1.0)

    @property
    def _resting(self) -> list[str]:
        return self._blame.resting(trio.current_time())


class _HopGroup:
    """The hops that train now, all of them at one version.

    When one is lost, the others go on without it in a new epoch: a number by which frames from before are known.
    """

    def __init__(self, owner: SwarmTrainer, epoch: int, nursery: trio.Nursery) -> None:
        self._owner, self._epoch, self._nursery = owner, epoch, nursery
        self._ends, self._terms, self._patience = owner._ends, owner._terms, owner._patience
        self._trained, self._device = owner._trained, owner._device
        self._links: dict[int, _Link] = {}  # by a number that stays
        self._plan: WayPlan
        self._under_way = 1  # most micro-batches at any hop, whatever the later plans
        self._round = 0  # of sums in this version
        self._agreed: Mapping[Span, Numbers] = {}  # sums of all holders in this step, by run of blocks
        self._followed: dict[int, StateSample] = {}  # block that several hold -> some numbers of its state
        self._drawn: dict[int, tuple[Drawn, float]] = {}  # micro-batch -> what was expected of it, and when it was sent
        self.version = owner.snapshot.version
        self.differs = False  # holders of a block had different states at the last snapshot
        self._send, self._arrived = trio.open_memory_channel[tuple[int, Frame | HopLost]](math.inf)
        self._queued: Counter[int] = Counter()  # hop -> bytes of its frames in that channel
        self._taken = Signal()
        self._heard_at: dict[int, float] = {}
        self._heard = Signal()
        self._served_self = trio.Event()  # once this node's own server reads no stream of the epoch any more
        self._served_self.set()
        self._forward_at = trio.current_time()  # when something last brought the job forward
        # While hops begin: what each had fetched from this node before, and what it is to fetch, in bytes.
        self._to_fetch: dict[int, tuple[int, int]] = {}
        self._waited_at = trio.current_time()  # until when it is counted for whom the job waited
        self._busy: dict[int, int] = {}  # hop -> micro-batches that wait or are computed there, as it said last
        self._sending: dict[int, int] = {}  # hop -> peers for which something waits there, as it said last
        self._pause_s = Ewma(0.2)  # between two frames
        self._waited_s = 0.0  # since the last frame, before all seemed lost
        self._in_vain = 0  # times that all seemed lost since the job last came forward
        self._troubled: Collection[int] | None = None  # ways on which something got lost; None: on any
        self._sizes: defaultdict[tuple[int, int], UsualSize] = defaultdict(UsualSize)  # by kind and way
        self._rejected: Counter[str] = Counter()
        self._complaints: Counter[tuple[str, str]] = Counter()  # (who complains, about whose numbers)
        self._sent: dict[str, dict[str, int]] = {}  # hop -> bytes to each receiver in this epoch, as it said last
        self._activations: Activations | None = None
        if self._terms.order.sends_changes and owner._activations is not None:
            self._activations = owner._activations.open()

    async def forget_activations(self) -> None:
        """Remove the activations that are kept here."""
        if self._activations is not None:
            await trio.to_thread.run_sync(self._activations.close)

    # --- links --------------------------------------------------------------------------------------------------------

    async def open(self, route: Route) -> None:
        """Begin the epoch at every hop; those that fail are left if others hold all their blocks. Raises `HopLost`."""
        self._plan = plan_ways(route)
        self._under_way = self._plan.depth + 1
        unreachable: dict[str, P2PError] = {}
        async with trio.open_nursery() as nursery:  # at once: each that cannot be reached takes its time
            for index, hop in enumerate(self.hops):
                nursery.start_soon(self._link_to, index, hop, unreachable)
        self._links = dict(sorted(self._links.items()))
        if unreachable:
            first, *others = unreachable
            lost = HopLost(first, f"it cannot be reached: {unreachable[first]}", beside=others, away=True)
            if not self.can_lose(*lost.peers):
                raise lost
            self._drop(lost)
        self._nursery.start_soon(self._stay_known)
        await self._close_unused()
        try:
            await self._begin(keeps=False)
        except HopLost as lost:
            await self.go_on_without(lost, keeps=False)

    async def _begin(self, *, keeps: bool) -> None:
        self._round = 0
        self._rejected.clear()
        self._complaints.clear()
        self._drawn.clear()
        self._sizes.clear()  # ways have new numbers
        if not keeps:
            await self._follow()
        self._to_fetch.clear()
        for index, link in self._links.items():
            order, given = self._order_for(link.hop, keeps=keeps), self._owner._states.given_bytes(link.hop.peer)
            self._to_fetch[index] = given, sum(state.size_bytes for state in order.states)
            await link.outbox.push(_control(encode_open(self._owner.run_id, self._epoch, self.version, order)))
        await self._gather(Kind.READY)
        self._to_fetch.clear()

    def _order_for(self, hop: Hop, *, keeps: bool) -> JobOrder:
        parts, snapshot, span = parts_of(self._plan, hop.peer), self._owner.snapshot, hop.span
        alone = parts[0] if len(self._plan.ways) == 1 else None
        holders = (self._owner._network.peer_id, *snapshot.holders)
        with_states = bool(snapshot.states) and not keeps
        values = {
            "span": span,
            "predecessor": alone.predecessor if alone else "",
            "successor": alone.successor if alone else "",
            "under_way": self._room(hop.peer),
            "states": snapshot.states[span.start : span.stop] if with_states else (),
            "holders": tuple(dict.fromkeys(holders))[:8] if with_states else (),
            "ways": () if alone else parts,
            "shared": self._plan.shared(hop.peer),
            "keeps": keeps,
        }
        return JobOrder(**{**self._terms.order.__dict__, **values})

    @property
    def hops(self) -> Route:
        """Who takes part, with which blocks."""
        return self._plan.hops

    def can_lose(self, *peers: str) -> bool:
        """True if others hold all blocks of peers that take part."""
        return {hop.peer for hop in self.hops}.issuperset(peers) and self._plan.can_lose(*peers)

    async def go_on_without(self, lost: HopLost, *, keeps: bool = True) -> None:
        """Begin another epoch with the others, who keep the version that they have unless they just begin.

        One that has too little memory stays, with fewer micro-batches under way: how many others have goes by the
        longest way, and so by who else takes part. Raises `HopLost` if the others do not hold all blocks.
        """
        while True:
            if isinstance(lost, HopFull) and self._room(lost.peer) > 1:
                self._owner._rooms[lost.peer] = self._room(lost.peer) // 2
            elif not self.can_lose(*lost.peers):
                raise lost
            else:
                self._drop(lost)
            await self._close_unused()
            try:
                await self._begin_anew(keeps=keeps)
                return
            except HopLost as another:
                lost = another

    def _room(self, peer: str) -> int:
        """Return how many micro-batches may be under way at a hop."""
        return min(self._under_way, self._owner._rooms.get(peer, self._under_way))

    async def _begin_anew(self, *, keeps: bool) -> None:
        """Begin another epoch with the hops of the plan; raises `HopLost`."""
        self._owner.figures.epochs += 1
        self._epoch = self._owner.figures.epochs
        await self._begin(keeps=keeps)

    async def _close_unused(self) -> None:
        """Close the streams to hops that are not in the plan any more: one that was lost, and those it alone led to."""
        planned = {hop.peer for hop in self.hops}
        for index, link in list(self._links.items()):
            if link.hop.peer not in planned:
                del self._links[index]
                self._busy.pop(index, None)
                self._sending.pop(index, None)
                await link.outbox.push(_control(plain(Kind.CLOSE, self._owner.run_id, self._epoch)))
                with suppress(P2PError), trio.move_on_after(self._patience.quiet_s):
                    await link.outbox.stream.aclose()

    def _drop(self, lost: HopLost) -> None:
        """Plan without the hops that are lost."""
        log.warning("training goes on without a hop: %s", lost)
        self._owner._remember(lost)
        self._plan = self._plan.without(*lost.peers)
        self._owner.route = self.hops

    async def _link_to(self, index: int, hop: Hop, unreachable: dict[str, P2PError]) -> None:
        """Open the stream to a hop and read it, or note why there is none."""
        try:
            stream = await self._open_stream(hop.peer)
        except P2PError as error:
            unreachable[hop.peer] = error
        else:
            self._links[index] = _Link(hop, PeerOutbox(stream, self._nursery))
            self._nursery.start_soon(self._read, index, stream)

    async def _open_stream(self, peer: str) -> FrameStream:
        owner = self._owner
        if peer == owner._network.peer_id and owner._own_server is not None:
            here, there = loop_streams(peer)
            self._nursery.start_soon(self._serve_self, owner._own_server, there)
            return here
        return await owner._network.open(peer, PROTOCOL, timeout_s=self._patience.open_s)

    async def _serve_self(self, own_server: OwnServer, stream: FrameStream) -> None:
        """Let this node's own server read a stream, which ends with that: a hop like others, that may fail."""
        self._served_self = trio.Event()
        try:
            await own_server(stream)
        except Exception:
            log.exception("this node's own training server failed")
        finally:
            await stream.reset()
            self._served_self.set()

    async def close(self, *, comes_back: bool) -> None:
        """Tell the hops that the job is over; if it `comes_back`, only free their memory: they keep their states."""
        if not comes_back:
            await self._to_all(plain(Kind.CLOSE, self._owner.run_id, self._epoch))
        for _, outbox in self._links.values():
            if comes_back or outbox.waiting_bytes:  # a hop that does not read
                await outbox.close()
            else:
                with suppress(P2PError):
                    await outbox.stream.aclose()
        await self._served_self.wait()

    async def _read(self, index: int, stream: FrameStream) -> None:
        """Pass a hop's frames on, until its stream breaks."""
        peer = stream.peer  # the link itself may be gone before this task begins
        try:
            while True:
                await self._taken.wait_for(lambda: self._queued[index] < MAX_QUEUED_BYTES)
                frame = decode(await stream.receive())
                if delay_s := self._owner._frames.delay_s(peer, trio.current_time(), reading_cost(frame)):
                    await trio.sleep(delay_s)
                self._heard_at[index] = trio.current_time()
                self._owner.figures.bytes_in += frame_bytes(frame)
                if frame.session != self._owner.run_id:
                    continue
                if frame.kind == Kind.STATE:
                    if index in self._links:  # else what is lost later would not be missed
                        self._busy[index], self._sending[index] = frame.rows, frame.width
                    self._heard.notify()
                    if not frame.epoch:
                        self._send.send_nowait((index, HopLost(peer, "it has forgotten the job", away=True)))
                        return
                elif frame.epoch == self._epoch:
                    self._queued[index] += _cost(frame)
                    self._send.send_nowait((index, frame))
        except RecordError as error:
            self._send.send_nowait((index, HopLost(peer, f"it sent what is not understood: {error}", refused=True)))
        except P2PError as error:
            self._send.send_nowait((index, HopLost(peer, f"its stream broke: {error}", away=True)))

    async def _next(
        self, awaited: Collection[int] = (), late: Callable[[], Collection[str]] = frozenset
    ) -> tuple[int, Frame] | None:
        """Return the next frame of a hop; None if all hops are well and idle, so something got lost.

        It may also be on its way over a slow link, where nobody sees it: so each time it takes twice as long until
        something is taken for lost, up to `MOST_PATIENCE` times, as long as nothing brings the job forward.

        Raises `HopLost` if nothing brought the job forward for `stuck_s`: for one of the hops that are `awaited`, or
        else for one that says it computes, or does not read what is sent to it, or for one on a way with a hop that
        cannot send. And for one of those that are `late` if the job waits for them most of the time.
        """
        self._count_waiting()  # for nobody, since the last call
        quiet_s = max(self._patience.quiet_s, 8 * self._pause_s.value) * min(2**self._in_vain, MOST_PATIENCE)
        begun = trio.current_time()
        while True:
            self._check_progress(awaited)
            with trio.move_on_after(min(quiet_s, PROBE_EVERY_S)):
                index, found = await self._arrived.receive()
                self._count_waiting(late(), awaited)
                if isinstance(found, Frame):
                    self._queued[index] -= _cost(found)
                    self._taken.notify()
                if index not in self._links or (isinstance(found, Frame) and found.epoch != self._epoch):
                    continue  # of a hop that was left, or of the epoch before
                if isinstance(found, HopLost):
                    raise found
                self._pause_s.add(self._waited_s + trio.current_time() - begun)
                self._waited_s = 0.0
                if found.kind != Kind.TROUBLE:
                    return index, found
                self._troubled = self._on_trouble(index, self._checked(self._links[index], decode_hop_error, found))
                return None
            await self._probe()
            self._count_waiting(late(), awaited)
            waited_s = trio.current_time() - begun
            if (quiet_s <= PROBE_EVERY_S or waited_s >= quiet_s) and self._is_idle():
                self._waited_s += waited_s
                self._in_vain += 1
                self._troubled = None
                return None

    def _is_idle(self) -> bool:
        """True if nothing is computed or waits to be sent, here or, as they say, at the hops."""
        is_working = any(self._busy.values()) or any(self._sending.values()) or self._not_reading()
        return not is_working and not self._arrived.statistics().current_buffer_used

    def _not_reading(self) -> list[int]:
        """The hops to which this node could not send everything yet."""
        return [index for index, link in self._links.items() if link.outbox.waiting_bytes]

    def _came_forward(self) -> None:
        self._forward_at = trio.current_time()
        self._in_vain = 0

    def _fetching_s(self, index: int) -> float:
        """Seconds that a hop may take for the states that it has fetched from this node since the epoch began."""
        if index not in self._to_fetch:
            return 0.0
        before, size = self._to_fetch[index]
        given = self._owner._states.given_bytes(self._links[index].hop.peer) - before
        return max(0, min(given, size)) / SLOWEST_BYTES_PER_S

    def _check_progress(self, awaited: Collection[int]) -> None:
        stuck_s = trio.current_time() - self._forward_at
        if stuck_s <= self._patience.stuck_s:
            return
        if self._to_fetch:
            awaited = [index for index in awaited if stuck_s > self._patience.stuck_s + self._fetching_s(index)]
            if not awaited:
                return
        busy = [*(index for index, count in self._busy.items() if count), *self._not_reading()]
        peers = self._peers(awaited or busy)
        sending = {link.hop.peer for index, link in self._links.items() if self._sending.get(index)}
        beside = {hop.peer for way in self._plan.ways for hop in way if any(one.peer in sending for one in way)}
        everybody = [link.hop.peer for link in self._links.values()]
        suspects = peers or [peer for peer in everybody if peer in beside] or everybody
        raise self._held_up(suspects, awaited, f"nothing came of its work for {stuck_s:.0f} s")

    def _count_waiting(self, late: Collection[str] = (), awaited: Collection[int] = ()) -> None:
        """Count the time since the last call as one in which the job waited for some hops, if it can do without them.

        Raises `HopLost` for those for whom it waited for too long.
        """
        blame, now = self._owner._blame, trio.current_time()
        blame.time_passed(now - self._waited_at, late if self._plan.can_lose(*late) else ())
        self._waited_at = now
        if slow := [peer for peer in blame.too_slow if self.can_lose(peer)]:
            raise self._held_up(slow, awaited, "the job waited for it most of the time")

    async def _probe(self) -> None:
        """Ask every hop how it is; raises `HopLost` for one that does not answer."""
        asked_at = trio.current_time()
        await self._to_all(plain(Kind.PROBE, self._owner.run_id, self._epoch))
        with trio.move_on_after(self._patience.probe_s):
            await self._heard.wait_for(lambda: all(self._heard_at.get(i, 0.0) > asked_at for i in self._links))
        for index, link in self._links.items():
            if self._heard_at.get(index, 0.0) <= asked_at:
                raise HopLost(link.hop.peer, f"it has not answered for {self._patience.probe_s:g} s", away=True)

    async def _stay_known(self) -> None:
        """Ask the hops how they are now and then: they would forget a job that fetches its states for minutes."""
        while True:
            await trio.sleep(PROBE_EVERY_S)
            await self._to_all(plain(Kind.PROBE, self._owner.run_id, self._epoch))

    def _on_trouble(self, index: int, trouble: HopError) -> list[int]:
        """Act on a hop's error: return the ways on which what is under way should run again; raises `HopLost`.

        What goes through the hop on other ways is not touched: one neighbour of it could have all others suspected.
        """
        peer = self._links[index].hop.peer
        if trouble.code in ("input", "base"):
            direction, _, number = trouble.why.partition(" ")
            way = int(number) if number.isdecimal() else 0
            before = self._before(peer, way, is_back=direction != "forward")
            if trouble.code == "input":
                if not before:  # this node's own numbers are checked before they are sent
                    raise HopLost(peer, f"it refuses what this node sends: {trouble.text}")
                self._complain(peer, before, trouble.text)
            return [way]
        if trouble.code == "link":
            return self._ways_over(peer, trouble.why)
        if trouble.code == "busy":
            raise HopBusy(peer, _NO_ROOM if trouble.why == "train_jobs" else trouble.text or trouble.code)
        code = trouble.code
        if code == "refused" and trouble.why == "train_memory":
            raise HopFull(peer, trouble.text)
        raise HopLost(peer, trouble.text or code, refused=code == "refused", away=code == "draining")

    def _ways_over(self, peer: str, neighbour: str) -> list[int]:
        """Return the ways that lead from one hop to another, in either direction; those through it if none does."""
        over = [
            number
            for number, way in enumerate(self._plan.ways)
            if any({one.peer, two.peer} == {peer, neighbour} for one, two in pairwise(way))
        ]
        return over or self._ways_through(peer)

    def _ways_through(self, peer: str) -> list[int]:
        return [number for number, way in enumerate(self._plan.ways) if any(hop.peer == peer for hop in way)]

    def _before(self, peer: str, way: int, *, is_back: bool) -> list[str]:
        """Return the hops through which passes come to a hop on a way, the nearest one first; raises `HopLost`."""
        peers = [hop.peer for hop in self._plan.ways[way]] if way < len(self._plan.ways) else []
        if peer not in peers:
            raise HopLost(peer, f"it speaks of way {way}, on which it is not", refused=True)
        at = peers.index(peer)
        return peers[at + 1 :] if is_back else peers[:at][::-1]

    def _beside(self, peer: str) -> list[str]:
        """Return who shares a way with a hop, and so has a part in what it computes."""
        met = self._met(self._ways_through(peer)) - {peer}
        return [hop.peer for hop in self.hops if hop.peer in met]

    def _suspected(self, peers: Sequence[str], why: str) -> HopLost:
        """Return the loss of one of several hops, any of which may be the cause; never of one that is not accused."""
        suspects = [peer for peer in peers if peer not in self._not_accused] or peers
        return HopLost(self._owner._blame.choose(suspects, trio.current_time(), self.can_lose), why)

    def _held_up(self, peers: Sequence[str], awaited: Collection[int], why: str) -> HopLost:
        """Return the loss of all at once of which an answer is `awaited`, or else of one that may be the cause.

        One after the other would each hold the job up for as long.
        """
        silent = {*peers}.intersection(self._peers(awaited)) - self._not_accused
        if silent and self.can_lose(*silent):
            first, *others = sorted(silent)
            return HopLost(first, why, beside=others)
        return self._suspected(peers, why)

    def _at_fault(self, peer: str, others: Collection[str], why: str) -> HopLost:
        """Return the loss of a hop for good, or of one for a while if others may have caused what it did."""
        others = [other for other in others if other not in self._not_accused]
        if not others:
            return HopLost(peer, why, refused=True)
        lost = self._suspected([peer, *others], why)
        return lost if lost.peer == peer else HopLost(lost.peer, f"it may be the cause of this, of {peer}: {why}")

    @property
    def _not_accused(self) -> frozenset[str]:
        """Who is never accused of anything that others may have done: this node, and those that the user trusts."""
        return self._owner._replicas.not_accused() | {self._owner._network.peer_id}

    def _complain(self, complainer: str, before: Sequence[str], why: str) -> None:
        """Count numbers that a hop says the nearest one `before` it sent; too many cost one of them all its place.

        Only these two have seen the numbers, and either may lie; but what the nearest one made of odd numbers from
        those before it is odd too.
        """
        sender = before[0]
        self._note_rejected(sender, why)
        self._complaints[complainer, sender] += 1
        if self._complaints[complainer, sender] >= MAX_REJECTED:
            text = f"{complainer} cannot use what {sender} sent it {MAX_REJECTED} times: {why}"
            raise self._suspected((sender, complainer, *before[1:]), text)

    def _note_rejected(self, peer: str, why: str) -> None:
        self._owner.figures.rejected[peer] += 1
        self._owner.figures.rejected_why[peer] = why
        log.warning("%s sent numbers that are not used: %s", peer, why)

    def _reject(self, peer: str, way: int, why: str) -> None:
        """Count numbers of a hop that must not be computed with; too many of them end the epoch.

        All others on the way may have sent it what was wrong already, or have let it get used to what is unusual here.
        """
        self._note_rejected(peer, why)
        self._rejected[peer] += 1
        if self._rejected[peer] >= MAX_REJECTED:
            others = [hop.peer for hop in self._plan.ways[way] if hop.peer != peer]
            raise self._at_fault(peer, others, f"it sent {MAX_REJECTED} times what cannot be used: {why}")

    def _check_format(self, index: int, frame: Frame, formats: Collection[int]) -> None:
        """Check that a hop's numbers are in a format that was agreed; raises `HopLost`."""
        if frame.dtype not in formats:
            raise HopLost(self._links[index].hop.peer, "it sent another number format than was agreed", refused=True)

    async def _gather(self, kind: Kind, order: bytes | None = None) -> list[Frame]:
        """Send an order to every hop and return their answers in the hops' order.

        An order that got lost is sent again; raises `HopLost`.
        """
        found: dict[int, Frame] = {}
        # States may take long to fetch and to write, but are so seldom.
        begun = trio.current_time() if kind in (Kind.READY, Kind.SNAPSHOT) else -math.inf
        self._came_forward()
        if order is not None:
            await self._to_all(order)
        while len(found) < len(self._links):
            awaited = self._links.keys() - found.keys()
            came = await self._next(awaited, partial(self._overdue, awaited, begun))
            if came is not None and came[1].kind == kind:
                if came[0] not in found:
                    self._came_forward()
                found[came[0]] = came[1]
            elif came is None and order is not None:
                await self._to_all(order, except_for=found)
        return [found[index] for index in self._links]

    def _overdue(self, indices: Iterable[int], begun: float) -> list[str]:
        """Return the hops of some that have had time for the states of all their blocks since then."""
        block_s = most_state_bytes(self._terms.sums_bytes) / SLOWEST_BYTES_PER_S
        passed_s = trio.current_time() - begun
        spans = {hop.peer: hop.span for hop in self.hops}
        return [peer for peer in self._peers(indices) if passed_s > block_s * len(spans[peer])]

    def _peers(self, indices: Iterable[int]) -> list[str]:
        return [self._links[index].hop.peer for index in indices if index in self._links]

    async def _to_all(self, message: bytes, except_for: Any = ()) -> None:
        for index, link in list(self._links.items()):  # hops may be lost meanwhile
            if index not in except_for:
                await link.outbox.push(_control(message))

    # --- a step -------------------------------------------------------------------------------------------------------

    async def step(self, batches: Sequence[Any]) -> StepDone:
        """Make and commit one step; raises `HopLost`, or `TrainingStopped` if the loss is not finite."""
        version = self.version
        tokens = self._ends.counted(batches)
        if not tokens or len(batches) > MAX_MICRO_BATCHES:
            raise TrainingStopped(f"step {version + 1} has {tokens} tokens that count in {len(batches)} micro-batches")
        progress = StepProgress(len(batches), len(self._links) + 1)
        if self._trained is not None:
            await self._device.run_later(self._trained.clear)
        tallies = await self._count_all(progress, batches)
        loss = math.fsum(progress.losses.values()) / tokens
        scale = 1 / tokens
        squares = [one for link, tally in zip(self._links.values(), tallies, strict=True)
                   for one in self._own_norms(link.hop, tally)]  # fmt: skip
        squares += await self._reduce(progress, batches)
        if self._trained is not None:
            squares += await self._device.run_later(self._trained.squared_norms)
        norm = scale * math.sqrt(math.fsum(squares))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise TrainingStopped(f"the loss of step {version + 1} is not finite: start again with a smaller rate")
        rate = self._terms.rate_of(version)
        clip = 1.0 if self._terms.clip is None else min(1.0, self._terms.clip / (norm + 1e-6))
        run = self._owner.run_id
        order = encode_step(run, self._epoch, version, StepOrder(rate, scale, clip))
        await self._gather(Kind.STEP, order=order)
        self.version, self._round = version + 1, 0
        try:
            await self._gather(Kind.COMMIT, order=plain(Kind.COMMIT, run, self._epoch, version + 1))
        except HopLost as lost:
            await self.go_on_without(lost)  # all others have the order, so the step is made
        if self._trained is not None:
            await self._device.run_later(self._trained.step, rate, scale, clip)
        await self._device.run_later(self._step_followed, version + 1, rate, scale * clip)
        return StepDone(version + 1, loss, tokens, norm, rate)

    def _own_norms(self, hop: Hop, tally: Tally) -> list[float]:
        """Return the squared norms of the blocks that nobody else holds."""
        shared = self._plan.shared(hop.peer)
        found = zip(hop.span.blocks(), tally.squared_norms, strict=True)
        return [norm for block, norm in found if not any(block in run for run in shared)]

    async def _count_all(self, progress: StepProgress, batches: Sequence[Any]) -> list[Tally]:
        """Run micro-batches until every block has counted all of them; return what the hops have counted."""
        self._owner._times.begin_step()
        while True:
            await self._run_passes(progress, batches, (Kind.FORWARD, Kind.BACK))
            tallies = await self._tally(progress)
            missing = progress.missing(tallies)
            if not missing:
                return tallies
            self._run_again(progress, missing)

    async def evaluate(self, batches: Sequence[Any]) -> float:
        """Return the mean loss of micro-batches that are not trained on; raises `HopLost` or `TrainingStopped`."""
        progress = StepProgress(len(batches), len(self._links) + 1)
        self._owner._times.begin_step()
        await self._run_passes(progress, batches, (Kind.EVALUATE,))
        return math.fsum(progress.losses.values()) / max(1, self._ends.counted(batches))

    async def _run_passes(self, progress: StepProgress, batches: Sequence[Any], kinds: tuple[Kind, ...]) -> None:
        """Send micro-batches in frames of the first kind until each has come back in one of the last.

        At most one more than there are hops are under way, and at each hop no more than it was told.
        """
        version, row_format = self.version, self._terms.order.row_format
        self._came_forward()
        while not progress.is_back:
            while (number := progress.next_number) is not None:
                way = self._draw(progress, number, batches[number])
                if way is None:
                    break
                one = Pass(version, number, progress.start(number, way), way)
                data = await self._owner._device.run_later(self._ends.embed, batches[number], row_format)
                await self._send_pass(kinds[0], self._plan.ways[way][0].peer, one, batches[number], data)
            came = await self._next((), partial(self._late, progress, batches))
            if came is None:
                self._run_lost_again(progress)
                continue
            index, frame = came
            if frame.kind not in kinds or frame.position != version:
                continue
            one = pass_of(frame)
            if progress.ways.get(one.number) != one.way:
                continue
            if await self._is_passed_on(progress, index, frame, batches[one.number]):
                continue
            if frame.kind != Kind.EVALUATE and self._activations is not None:
                await self._on_changes(self._activations, progress, index, frame, batches[one.number])
            elif self._is_sound(index, frame, batches[one.number]):
                await self._on_pass(progress, frame, one, batches[one.number])

    async def _on_changes(
        self, activations: Activations, progress: StepProgress, index: int, frame: Frame, batch: Any
    ) -> None:
        """Take a FORWARD or BACK of a job of changes; what builds on something that is not here runs again."""
        one, way = pass_of(frame), self._plan.ways[pass_of(frame).way]
        self._check_format(index, frame, [FORMATS[CHANGES]])
        if not self._has_shape(frame, batch):
            self._reject(self._links[index].hop.peer, one.way, "a wrong shape")
        elif frame.kind == Kind.BACK:
            frame, kept = split_kept(frame)
            if self._is_sound(index, frame, batch):
                activations.agreed(Boundary(way[0].peer, way[0].span.start), one, kept)
                await self._on_pass(progress, frame, one, batch)
        elif progress.awaits_end(one.number, one.attempt):
            boundary = Boundary(way[-1].peer, way[-1].span.stop)
            try:
                arrival = await trio.to_thread.run_sync(activations.unpack, boundary, frame)
            except NoBase as missing:
                log.info("a micro-batch runs again: %s", missing)
                self._run_again(progress)
                return
            if self._is_sound(index, arrival.frame, batch):
                kept = await trio.to_thread.run_sync(activations.keep, arrival)
                await self._on_pass(progress, arrival.frame, one, batch, kept)

    def _draw(self, progress: StepProgress, number: int, batch: Any) -> int | None:
        """Return the way of a micro-batch: that which it took before, as it may be counted there; else a new one.

        None if a hop on it has as many micro-batches under way as it was told.
        """
        plan, now = self._plan, trio.current_time()
        busy = Counter(hop.peer for way in progress.ways_under_way for hop in plan.ways[way])
        full = {peer for peer, count in busy.items() if count >= self._room(peer)}
        earlier = progress.ways.get(number)
        ways = range(len(plan.ways)) if earlier is None else (earlier,)
        free = [way for way in ways if not any(hop.peer in full for hop in plan.ways[way])]
        if not free:
            return None
        sequences, length = self._ends.shape(batch)
        drawn = self._owner._times.draw([plan.ways[way] for way in free], sequences * length, now)
        way = free[drawn.way]
        self._drawn[number] = drawn, now
        self._owner.figures.computed.update(hop.peer for hop in plan.ways[way])
        return way

    def _late(self, progress: StepProgress, batches: Sequence[Any]) -> set[str]:
        """Return the hops that can be lost on the ways of what is under way, if all of it should be back long since."""
        now, late = trio.current_time(), set[str]()
        for number in progress.under_way:
            sequences, length = self._ends.shape(batches[number])
            usual_s = self._under_way * self._owner._times.least_s(self._plan.ways, sequences * length)
            if now - self._drawn[number][1] <= OVERDUE * usual_s:
                return set()
            late.update(hop.peer for hop in self._plan.ways[progress.ways[number]] if self.can_lose(hop.peer))
        return late

    def _came_back(self, progress: StepProgress, one: Pass) -> None:
        if progress.came_back(one.number, one.attempt):
            self._came_forward()
            drawn, sent_at = self._drawn[one.number]
            self._owner._times.came_back(self._plan.ways[one.way], drawn, trio.current_time() - sent_at)

    async def _on_pass(
        self, progress: StepProgress, frame: Frame, one: Pass, batch: Any, kept: Sequence[bool] = ()
    ) -> None:
        """Take rows that came to an end of the hops; `kept` are the sequences whose hidden states are kept here."""
        if frame.kind == Kind.BACK:
            if self._trained is not None:
                dtype = DTYPE_NAMES[frame.dtype]
                await self._device.run_later(self._trained.back, batch, one.number, frame.body, dtype)
            self._came_back(progress, one)
        elif progress.reached_end(one.number, one.attempt):
            self._came_forward()
            trains = frame.kind == Kind.FORWARD
            last = self._plan.ways[one.way][-1].peer
            try:
                found = await self._loss(batch, frame, one.number, gradient=trains)
            except NotFinite as error:
                self._reject(last, one.way, f"hidden states whose loss is not finite: {error}")
                self._run_again(progress, [one.number])
                return
            progress.losses[one.number] = found.total
            if trains:
                gradient = found.gradient if self._activations is None else with_kept(found.gradient, kept)
                await self._send_pass(Kind.BACK, last, one, batch, gradient)
            else:
                self._came_back(progress, one)

    async def _loss(self, batch: Any, frame: Frame, number: int, *, gradient: bool) -> BatchLoss:
        """Compute the loss of a micro-batch, in pieces between which replies can go; raises `NotFinite`."""
        loss = partial(self._ends.loss, gradient=gradient, number=number, wire=self._terms.order.row_format)
        found: BatchLoss = await self._device.run_later(loss, batch, frame.body, DTYPE_NAMES[frame.dtype])
        if not math.isfinite(found.total):
            raise NotFinite(f"it is {found.total}")
        return found

    async def _send_pass(self, kind: Kind, peer: str, one: Pass, batch: Any, data: bytes) -> None:
        _, length = self._ends.shape(batch)
        if kind == Kind.FORWARD and self._activations is not None:
            boundary, samples = Boundary(peer, self._plan.ways[one.way][0].span.start), self._samples(batch)
            pack, width = self._activations.pack, self._ends.hidden_size
            data = await trio.to_thread.run_sync(pack, boundary, one, samples, data, width)
        head = pass_header(
            kind, self._owner.run_id, self._epoch, one, dtype=self._terms.order.format_of(kind), rows=length,
            width=self._ends.hidden_size, length=len(data),
        )  # fmt: skip
        self._owner.figures.bytes_out += len(head) + len(data)
        own = self._owner._network.peer_id
        self._owner.figures.link_bytes[own, peer] += len(head) + len(data)
        await self._link(peer).outbox.push(OutboundFrame((head, data), Priority.BULK))

    def _samples(self, batch: Any) -> list[int]:
        """Return the number of each sequence: the same whenever it comes, and it tells hops nothing of the text."""
        known = self._owner._samples
        return [known.setdefault(digest_of(content), len(known)) for content in self._ends.contents(batch)]

    def _link(self, peer: str) -> _Link:
        return next(link for link in self._links.values() if link.hop.peer == peer)

    async def _is_passed_on(self, progress: StepProgress, index: int, frame: Frame, batch: Any) -> bool:
        """Send a frame to the neighbour that its hop cannot reach; False if it is meant for the owner.

        The neighbour would answer for what it makes of a wrong shape, and lose its stream if it were sent more than it
        can read: so the shape is checked, and each attempt is passed on once.
        """
        one, peer = pass_of(frame), self._links[index].hop.peer
        after = self._before(peer, one.way, is_back=frame.kind != Kind.BACK)
        if not after:
            return False
        if not self._has_shape(frame, batch):
            self._reject(peer, one.way, "a wrong shape")
            return True
        if not progress.passes_on(peer, frame.kind, one):
            return True
        head = pass_header(
            Kind(frame.kind), frame.session, frame.epoch, one, dtype=FORMAT_NAMES[frame.dtype],
            rows=length_of(frame), width=frame.width, length=len(frame.body),
        )  # fmt: skip
        await self._link(after[0]).outbox.push(OutboundFrame((head, bytes(frame.body)), Priority.BULK))
        return True

    def _is_sound(self, index: int, frame: Frame, batch: Any) -> bool:
        """True if a hop's numbers have the micro-batch's shape, are finite and of a usual size; else it is counted."""
        peer, way = self._links[index].hop.peer, pass_of(frame).way
        self._check_format(index, frame, DTYPE_NAMES)
        if not self._has_shape(frame, batch):
            self._reject(peer, way, "a wrong shape")
        elif not math.isfinite(size := root_mean_square(frame)):
            self._reject(peer, way, "numbers that are not finite")
        elif not self._sizes[frame.kind, way].accepts(size):
            self._reject(peer, way, f"numbers of size {size:.3g}, far beyond the usual")
        else:
            return True
        return False

    def _has_shape(self, frame: Frame, batch: Any) -> bool:
        shape = (self._ends.hidden_size, *self._ends.shape(batch))
        return (frame.width, sequences_of(frame), length_of(frame)) == shape

    def _run_lost_again(self, progress: StepProgress) -> None:
        """Run again what is under way: on the ways that are in trouble, or on all if all is quiet."""
        ways = range(len(self._plan.ways)) if self._troubled is None else self._troubled
        if lost := progress.under_way_on(ways):
            self._run_again(progress, lost)

    def _run_again(self, progress: StepProgress, numbers: Sequence[int] | None = None) -> None:
        self._owner.figures.micro_batches_again += len(progress.under_way if numbers is None else numbers)
        if not progress.run_again(numbers):
            ways = {progress.ways[number] for number in progress.most_tried}
            on_them = dict.fromkeys(hop.peer for way in sorted(ways) for hop in self._plan.ways[way])
            raise self._suspected(list(on_them), "a micro-batch did not come back after many attempts")

    async def _tally(self, progress: StepProgress) -> list[Tally]:
        order = plain(Kind.TALLY, self._owner.run_id, self._epoch, self.version)
        frames = await self._gather(Kind.TALLY, order=order)
        tallies: list[Tally] = []
        for link, frame in zip(self._links.values(), frames, strict=True):
            peer = link.hop.peer
            runs = [run.span for run in self._plan.runs if peer in run.peers]
            tally = self._checked(link, partial(decode_tally, runs=runs), frame)
            if progress.is_overcounted(self._plan, peer, tally):
                why = "it counted micro-batches that were never sent to it"
                raise self._at_fault(peer, self._beside(peer), why)
            tallies.append(tally)
        self._count_bytes(tallies)
        return tallies

    def _count_bytes(self, tallies: Sequence[Tally]) -> None:
        """Add what the hops say they have sent since the last tally to the bytes of their links."""
        own, links = self._owner._network.peer_id, self._owner.figures.link_bytes
        known = {"", *(link.hop.peer for link in self._links.values())}
        for link, tally in zip(self._links.values(), tallies, strict=True):
            before = self._sent.get(link.hop.peer, {})
            for receiver, size in tally.sent_bytes:
                if receiver in known:
                    links[link.hop.peer, receiver or own] += max(0, size - before.get(receiver, 0))
            self._sent[link.hop.peer] = dict(tally.sent_bytes)

    def _checked(self, link: _Link, read: Callable[[Frame], Any], frame: Frame) -> Any:
        try:
            return read(frame)
        except RecordError as error:
            raise HopLost(link.hop.peer, f"its answer is not valid: {error}", refused=True) from error

    # --- several holders of a block -----------------------------------------------------------------------------------

    async def _reduce(self, progress: StepProgress, batches: Sequence[Any]) -> list[float]:
        """Make one sum of what the holders of a block have; return the squared norms, for each run of blocks.

        Raises `HopLost` for a holder that lied: the step begins again without it.
        """
        self._agreed = {}
        if not self._plan.shared_runs:
            return []
        answers = await self._collect(
            {link.hop.peer: self._plan.shared(link.hop.peer) for link in self._links.values()}
        )
        runs: dict[Span, list[HolderSums]] = {}
        for run in self._plan.shared_runs:
            for peer in run.peers:
                numbers = assigned(self._plan, progress.ways, peer, run.span)
                tokens = self._ends.counted([batches[number] for number in numbers])
                if tokens:
                    runs.setdefault(run.span, []).append(HolderSums(peer, tokens, answers[peer, run.span]))
        device, caution = self._owner._device, self._terms.caution
        comparable = {span: shares for span, shares in runs.items() if len(self._plan.trainers(span)) > 1}
        suspects = await device.run_later(self._owner._lots.choose, comparable, self.version)
        for suspect in suspects:
            await self._audit(suspect, progress, batches, answers[suspect.peer, suspect.span])
        if suspects:
            await self._count_own_again(progress, batches)
        agreed: dict[Span, Numbers] = {}
        for span, shares in runs.items():
            agreed[span] = await device.run_later(partial(reduced, clipped=caution.clips), shares)
        self._agreed = agreed
        await self._hand_out(agreed)
        return [await device.run_later(squared_norm, sums) for sums in agreed.values()]

    async def _count_own_again(self, progress: StepProgress, batches: Sequence[Any]) -> None:
        """Run again what blocks with one holder have not counted any more: a hop that fails in an audit loses its sums.

        What others count meanwhile is replaced by the sums of all holders.
        """
        shared = {run.span for run in self._plan.shared_runs}
        while True:
            tallies = await self._tally(progress)
            own = [tally._replace(counted=tuple(one for one in tally.counted if one[0] not in shared))
                   for tally in tallies]  # fmt: skip
            missing = progress.missing(own)
            if not missing:
                return
            self._run_again(progress, missing)
            await self._run_passes(progress, batches, (Kind.FORWARD, Kind.BACK))

    async def _hand_out(self, agreed: Mapping[Span, Numbers]) -> None:
        """Send the sums of all holders to each, and wait until they have them: an order would overtake them."""
        owner, waiting = self._owner, {index for index, link in self._links.items() if self._plan.shared(link.hop.peer)}
        epoch, sending = self._epoch, set[int]()

        def slices_for(peer: str) -> Iterator[OutboundFrame]:
            data = b"".join(agreed[span].tobytes() for span in self._plan.shared(peer))
            for parts in sums_frames(owner.run_id, epoch, self.version, self._round, data):
                if self._epoch != epoch:
                    return
                owner.figures.bytes_out += sum(map(len, parts))
                yield OutboundFrame(parts, Priority.BULK)

        async def send(index: int, link: _Link) -> None:
            await link.outbox.push_all(slices_for(link.hop.peer))
            sending.discard(index)

        def begin_to_send(to: Collection[int]) -> None:
            for index in to:
                sending.add(index)
                self._nursery.start_soon(send, index, self._links[index])

        self._came_forward()
        begin_to_send(waiting)
        while waiting:
            came = await self._next(waiting, partial(self._peers, waiting))
            if came is None:
                begin_to_send(waiting - sending - set(self._not_reading()))
            elif came[1].kind == Kind.REDUCE and came[1].position == self.version and came[0] in waiting:
                self._came_forward()
                waiting.discard(came[0])

    async def _collect(self, wanted: Mapping[str, Sequence[Span]]) -> dict[tuple[str, Span], Numbers]:
        """Have all holders hand over their sums, and return those that are wanted, by peer and run of blocks."""
        owner, version = self._owner, self.version
        buffers: dict[int, SumsBuffer] = {}
        furthest: Counter[int] = Counter()  # slice of each
        found: dict[int, Numbers] = {}

        async def order_rest() -> None:
            for index, link in self._links.items():
                runs = tuple(wanted.get(link.hop.peer, ()))
                if index not in found and self._plan.shared(link.hop.peer):
                    if runs and index not in buffers:  # slices may be on their way already
                        buffers[index] = SumsBuffer(self._terms.sums_bytes * sum(map(len, runs)))
                    order = encode_reduce(owner.run_id, self._epoch, version, ReduceOrder(self._round, runs))
                    await link.outbox.push(_control(order))

        self._came_forward()
        await order_rest()
        while len(found) < len(buffers):
            awaited = buffers.keys() - found.keys()
            came = await self._next(awaited, partial(self._peers, awaited))
            if came is None:
                await order_rest()
            elif came[1].kind == Kind.SUMS and self._is_of_round(came[1]) and came[0] in buffers.keys() - found.keys():
                link = self._links[came[0]]
                data = self._checked(link, buffers[came[0]].add, came[1])
                if came[1].revision > furthest[came[0]]:  # slices may begin again and again
                    furthest[came[0]] = came[1].revision
                    self._came_forward()
                if data is not None:
                    self._came_forward()
                    found[came[0]] = from_bytes(data)
                    if not await owner._device.run_later(is_finite, found[came[0]]):
                        why = "its summed gradients are not finite"
                        raise self._at_fault(link.hop.peer, self._beside(link.hop.peer), why)
        self._round += 1
        sums: dict[tuple[str, Span], Numbers] = {}
        for index, numbers in found.items():
            peer, at = self._links[index].hop.peer, 0
            for span in wanted[peer]:
                size = self._terms.sums_bytes // 4 * len(span)
                sums[peer, span] = numbers[at : at + size]
                at += size
        return sums

    def _is_of_round(self, frame: Frame) -> bool:
        return (frame.position, frame.width) == (self.version, self._round)

    async def _audit(self, suspect: Suspect, progress: StepProgress, batches: Sequence[Any], claimed: Numbers) -> None:
        """Have a holder's micro-batches computed again by others; raises `HopLost` for who lied, or may have."""
        owner, (peer, span) = self._owner, suspect
        ways = dict(progress.ways)
        numbers = assigned(self._plan, ways, peer, span)
        not_accused, homes = self._not_accused, self._homes_of(span)
        others = self._plan.trainers(span) - {peer}
        answers, verdict = [Answer(peer, claimed)], AuditVerdict(None, agree=False)
        owner.figures.audits += 1
        met = {peer: self._met(ways[number] for number in numbers)}  # who summed up -> the hops on its ways
        for witness in owner._lots.witnesses(peer, others, homes, not_accused):
            order = owner._lots.order(len(self._plan.ways))
            around = {number: self._plan.way_around(ways[number], span, witness, order) for number in numbers}
            met[witness] = self._met(around.values())
            answers.append(Answer(witness, await self._recompute(around, span, witness, progress, batches)))
            verdict = await owner._device.run_later(judge, answers, homes, not_accused)
            if verdict.agree or verdict.liar is not None:
                break
        progress.ways.update(ways)
        if verdict.agree:
            owner._lots.cleared(suspect, self.version)
            self._note(peer, "agreed", "agreed with others")
        elif verdict.liar is not None:
            causes = other_causes(verdict, met, owner._homes.of) - not_accused
            self._leave_out(Suspect(verdict.liar, span), causes)
        else:
            peers = [answer.peer for answer in answers]
            self._leave_out_either(peers, span, set().union(*met.values()) - set(peers) - not_accused)

    def _homes_of(self, span: Span) -> dict[str, str]:
        """Return the home of each holder of some blocks in this job.

        Who has trained for it counts while it rests: else some that tell the same lie could have one honest holder
        after the other rest, until they are more than those that are left.
        """
        owner = self._owner
        known = owner._replicas.holders(self.hops, frozenset(owner._refused))
        before = {hop.peer for hop in known if hop.peer in owner.figures.computed and hop.span.covers(span)}
        return {peer: owner._homes.of(peer) for peer in self._plan.trainers(span) | before}

    def _met(self, ways: Iterable[int]) -> set[str]:
        """Return the hops on some ways."""
        return {hop.peer for way in ways for hop in self._plan.ways[way]}

    def _leave_out(self, suspect: Suspect, others: Collection[str]) -> NoReturn:
        """Leave out a hop that lied; `others` may have sent it, or its accusers, what was wrong. Raises `HopLost`."""
        liar = suspect.peer
        why = f"its summed gradients of step {self.version + 1} are not what others compute from the same data"
        share = 1 / (1 + len(others))
        self._note(liar, "doubted" if others else "lied", f"trained wrongly: {why}", share)
        for other in others:
            self._note(other, "doubted", "took part in training that others contradict", share)
        self._owner._lots.contradicted(suspect)
        lost = self._at_fault(liar, sorted(others), why)
        if lost.refused:
            self._owner.figures.left_out[liar] = why
        raise lost

    def _leave_out_either(self, peers: Sequence[str], span: Span, others: set[str]) -> NoReturn:
        """Do without one of several holders that all differ: nobody can tell who is right. Raises `HopLost`.

        Of equals it is the one that the route would rather do without, and a trusted one if all are. If somebody else
        holds these blocks, it comes back together with that one, and then it shows who lied. If nobody does, `others`
        on the way are suspected too, who may have sent them different numbers.
        """
        owner = self._owner
        order = [hop.peer for hop in self.hops]
        own, not_accused = owner._network.peer_id, self._not_accused
        accused = [peer for peer in peers if peer not in not_accused] or [peer for peer in peers if peer != own]
        accused.sort(key=order.index, reverse=True)
        for peer in set(peers) - not_accused:
            self._note(peer, "doubted", "trained with another result than other holders", 1 / len(peers))
        names = " and ".join(sorted(peers))
        why = f"{names} sum up different gradients of the same data, and nobody can tell who is right"
        known = owner._replicas.holders(self.hops, frozenset(owner._refused.union(owner._resting)))
        if not any(hop.peer not in order and hop.span.covers(span) for hop in known):
            raise self._suspected([*accused, *sorted(others)], why)
        owner._most_holders = max(owner._most_holders, len(peers) + 1)
        lost = self._suspected(accused, why)
        lost.welcome = True
        raise lost

    async def _recompute(
        self, ways: Mapping[int, int], span: Span, witness: str, progress: StepProgress, batches: Sequence[Any]
    ) -> Numbers:
        """Run micro-batches again on ways that lead through a witness for some blocks; return its sums.

        What others count on these ways is not used: they have handed over the sums of the step before.
        """
        progress.ways.update(ways)
        missing = set(ways)
        while missing:
            if not progress.run_again(missing):
                why = "micro-batches could not be computed again in many attempts"
                raise self._suspected([witness, *self._beside(witness)], why)
            await self._run_passes(progress, batches, (Kind.FORWARD, Kind.BACK))
            tallies = zip(self._links.values(), await self._tally(progress), strict=True)
            tally = next(tally for link, tally in tallies if link.hop.peer == witness)
            missing -= dict(tally.counted)[span]
        return (await self._collect({witness: (span,)}))[witness, span]

    def _note(self, peer: str, verdict: Verdict, text: str, weight: float = 1.0) -> None:
        trust = self._owner._replicas.trust
        if trust is not None and peer not in self._not_accused:
            trust.note(peer, verdict, text, weight)

    # --- snapshots ----------------------------------------------------------------------------------------------------

    async def take_snapshot(self) -> Snapshot:
        """Have the states of all blocks kept by their hops, and here.

        Of holders with different states, the one that most agree with counts; of as many the one that had to rest least
        often, or else the route's first one.
        """
        owner = self._owner
        order = plain(Kind.SNAPSHOT, owner.run_id, self._epoch, self.version)
        frames = await self._gather(Kind.SNAPSHOT, order=order)
        kept: dict[str, Sequence[StatePart]] = {}
        for link, frame in zip(self._links.values(), frames, strict=True):
            parts, _ = self._checked(link, decode_parts, frame)
            if len(parts) != len(link.hop.span):
                raise HopLost(link.hop.peer, "it kept states of other blocks than its own", refused=True)
            if any(part.size_bytes > most_state_bytes(self._terms.sums_bytes) for part in parts):
                raise HopLost(link.hop.peer, "it names states larger than those of the job's adapter", refused=True)
            kept[link.hop.peer] = parts
        starts = {hop.peer: hop.span.start for hop in self.hops}
        not_accused = self._not_accused
        rests, now = owner._blame.rests, trio.current_time()
        order_of = {peer: (peer not in not_accused, rests(peer, now), at) for at, peer in enumerate(starts)}
        states: list[StatePart] = []
        self.differs = False
        for run in self._plan.runs:
            held = {
                peer: tuple(kept[peer][run.span.start - starts[peer] : run.span.stop - starts[peer]])
                for peer in sorted(run.peers, key=order_of.__getitem__)
            }
            chosen, votes = Counter(held.values()).most_common(1)[0]
            self.differs |= votes < len(held)
            suppliers = [peer for peer in held if held[peer] == chosen]
            await self._obtain(chosen, suppliers)
            await self._check_states(run.span, chosen, suppliers)
            states += chosen
        await owner._states.forget(owner.states_run, keep=states)
        return Snapshot(self.version, tuple(states), tuple(link.hop.peer for link in self._others))

    @property
    def _others(self) -> list[_Link]:
        """The hops that are not this node."""
        return [link for link in self._links.values() if link.hop.peer != self._owner._network.peer_id]

    async def copy_snapshot(self) -> None:
        """Have a hop that the user trusts keep all states of the last snapshot; raises `HopLost`.

        They are the whole adapter, in which the training data can leave traces; others see that of their own blocks.
        Over a slow link from here that takes too long: the hops go on without it, and no other copy is tried.
        """
        owner = self._owner
        trusted = [link for link in self._others if link.hop.peer in self._not_accused]
        if not trusted or not owner._makes_copies:
            return
        states, here = owner.snapshot.states, owner._network.peer_id
        keep = encode_parts(Kind.KEEP, owner.run_id, self._epoch, self.version, states, [here])
        with trio.move_on_after(self._patience.copy_s) as waiting:
            await self._order_one(trusted[self.version % len(trusted)], Kind.KEEP, keep)
        if waiting.cancelled_caught:
            log.warning("no more snapshots are copied: one took more than %g s", self._patience.copy_s)
            owner._makes_copies = False
            await self._begin_anew(keeps=True)  # the hop would fetch it to the end before it does anything else

    async def _obtain(self, parts: Sequence[StatePart], suppliers: Sequence[str]) -> None:
        """Fetch the states that some hops name, and read them once: a snapshot of anything else would be the job's end.

        Raises `HopLost`, or `WeightsError` if this node's disk is full.
        """
        owner, version_of = self._owner, self._terms.version_of
        try:
            await owner._states.obtain(owner.states_run, parts, suppliers)
        except trio.TooSlowError:
            raise self._suspected(suppliers, "it did not send its states in time") from None
        except WeightsError as error:
            if error.code == "disk_full":
                raise  # this node's own
            raise self._suspected(suppliers, f"its states cannot be kept: {error}") from error
        if version_of is None:
            return
        for part in parts:  # whoever names states answers for them
            try:
                version = await owner._device.run_later(version_of, await owner._states.read(part))
            except EngineError as error:
                raise HopLost(suppliers[0], f"its states are none: {error}", refused=True) from error
            if version != self.version:
                raise HopLost(suppliers[0], f"its states are of version {version}", refused=True)

    async def _follow(self) -> None:
        """Take some numbers of the states with which all holders begin, of the blocks that several hold."""
        sample_of, states, self._followed = self._terms.sample_of, self._owner.snapshot.states, {}
        if sample_of is None:
            return
        for block in (block for run in self._plan.shared_runs for block in run.span.blocks()):
            with suppress(WeightsError):  # this node's disk; hops may have the state from each other
                state = await self._owner._states.read(states[block]) if states else None
                self._followed[block] = await self._device.run_later(sample_of, block, state)

    def _step_followed(self, number: int, rate: float, factor: float) -> None:
        """Make a step of the blocks of which this node has the sums; the others have one holder by now."""
        size, followed, agreed = self._terms.sums_bytes // 4, self._followed, self._agreed
        self._followed, self._agreed = {}, {}
        for span, sums in agreed.items():
            for at, block in enumerate(span.blocks()):
                if block in followed:
                    followed[block].step(sums[at * size : (at + 1) * size], number, rate, factor)
                    self._followed[block] = followed[block]

    async def _check_states(self, span: Span, parts: Sequence[StatePart], suppliers: Sequence[str]) -> None:
        """Raise `HopLost` for a holder whose states do not come from the sums of all: nobody else has a part in them.

        Only one state of several is taken, and nobody could tell later that it was wrong.
        """
        if self._not_accused.intersection(suppliers):
            return
        peer = suppliers[0]
        for block, part in zip(span.blocks(), parts, strict=True):
            sample = self._followed.get(block)
            if sample and not await self._device.run_later(sample.fits, await self._owner._states.read(part)):
                why = f"its state of block {block} at step {self.version} does not come from the sums of all holders"
                self._note(peer, "lied", f"trained wrongly: {why}")
                self._owner.figures.left_out[peer] = why
                raise HopLost(peer, why, refused=True)

    async def _order_one(self, link: _Link, kind: Kind, message: bytes) -> None:
        """Send one hop an order and wait for its answer."""
        self._came_forward()
        await link.outbox.push(_control(message))
        while True:
            came = await self._next([index for index, one in self._links.items() if one is link])
            if came is None:
                await link.outbox.push(_control(message))
            elif came[1].kind == kind and self._links.get(came[0]) is link:
                return


def _cost(frame: Frame) -> int:
    """Bytes of memory that a frame takes while it waits."""
    return frame_bytes(frame) + FRAME_COST_BYTES


def _control(message: bytes) -> OutboundFrame:
    return OutboundFrame((message,), Priority.CONTROL)

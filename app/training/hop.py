"""The training server: runs the jobs of owners through the blocks that this node hosts, or that are a job's own.

A micro-batch's way through this hop, all of it in this file: a stream's reader leaves a frame to its job (`_on_frame`),
the job's task judges it (`app.training.ledger`), runs it block by block on the device whenever no reply waits there
(`_forward`, `_back`), and sends what comes out to the next hop or the one before (`_send`). The owner's orders take the
same way, so nothing of one job ever overlaps.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import trio

from app.core.canonical_json import canonical
from app.core.compute import Device
from app.core.errors import AppError, RecordError
from app.core.network import FrameStream, Network, Priority
from app.core.signal import Signal
from app.core.span import MAX_BLOCKS, Span
from app.session.frame import (
    CHANGES,
    DTYPE_NAMES,
    MAX_ROWS,
    Frame,
    HopError,
    belongs_to,
    plain,
    root_mean_square,
)
from app.session.outbound import OutboundFrame, PeerOutbox, PeerOutboxes, WaitingBytes
from app.training.activations import ActivationDisk, Activations, Boundary, NoBase
from app.training.ledger import JobLedger, PassVerdict, UsualSize
from app.training.states import StateStore
from app.training.wire import (
    FORMATS,
    FRAMES_AT_ONCE,
    FRAMES_PER_S,
    PASSES,
    PROTOCOL,
    ROOM,
    SLICE_BYTES,
    STATE_WEIGHT_BYTES,
    HopWay,
    JobOrder,
    Kind,
    Pass,
    StatePart,
    SumsBuffer,
    Tally,
    decode,
    decode_open,
    decode_parts,
    decode_reduce,
    decode_step,
    encode_parts,
    encode_tally,
    encode_trouble,
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
from engine.budget import FULL_WEIGHT_BYTES
from engine.errors import EngineError, NotFinite, TrainingError, TrainingFull
from p2p.errors import P2PError
from p2p.rate_limit import PeerRateLimit
from p2p.shares import Holder

if TYPE_CHECKING:
    from trio_typing import TaskStatus

log = logging.getLogger("shoal.training")

IDLE_S = 180.0  # a job whose owner is silent for so long is ended
LAST_WORDS_S = 1.0  # for telling an owner that its job ends with this server
IDLE_STREAM_S = 60.0  # a stream to a neighbour over which nothing went for so long is closed: it keeps its link open
MAX_PARKED = 4
MAX_KEPT_BYTES = 8 * 2**30  # of states on disk, of all jobs that train adapters
KEPT_VERSIONS = 2  # of its own blocks, on disk, for a job that trains all weights
MAX_KEPT_STATES = 2 * MAX_BLOCKS  # of one version of a job: those of all blocks, and of this hop's where they differ
MAX_WAITING_BYTES = 2**28  # of frames that wait, of one job
SENDER_SHARE, NEIGHBOURS_SHARE = 0.5, 0.75  # of it: of one sender, and of all but the owner
MAX_REJECTIONS = 64  # passes in an epoch about which the owner is told that they were rejected
_REMEMBERED_ENDED = 1024
_COMPUTING = (Kind.FORWARD, Kind.BACK, Kind.STEP)


class JobBlocks(Protocol):
    """The blocks of one job on this node's device; `engine.training_runner` implements it."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...
    def rows(self, data: memoryview, dtype: str) -> Any: ...
    def data(self, rows: Any, dtype: str) -> bytes: ...
    def forward(self, block: int, number: int, rows: Any, sequences: int, way: int) -> Any: ...
    def backward(self, block: int, number: int, rows: Any, counts: bool, way: int) -> Any: ...
    def evaluate(self, block: int, rows: Any, sequences: int) -> Any: ...
    def discard(self, number: int, way: int) -> None: ...
    def clear(self) -> None: ...
    def squared_norms(self) -> list[float]: ...
    @property
    def sums_bytes(self) -> int: ...
    def take_sums(self, block: int) -> bytes: ...
    def set_sums(self, block: int, data: memoryview) -> None: ...
    def step(self, rate: float, scale: float, clip: float) -> None: ...
    def commit(self) -> None: ...
    def state(self, block: int) -> bytes: ...
    def load(self, states: Mapping[int, bytes]) -> None: ...


MakeBlocks = Callable[[JobOrder, int], JobBlocks]  # (order, bytes to spare); raises `EngineError`; runs on the device


class FullMaker(Protocol):
    """Makes blocks whose weights are all trained, for jobs of any model; `app.training.wiring` implements it."""

    def room(self, spare_bytes: int) -> int:
        """Return the bytes that a job may have here, of these; runs on the device."""

    def make(self, order: JobOrder, spare_bytes: int) -> JobBlocks:
        """Make the blocks of an order; raises `EngineError`; runs on the device."""

    def release(self) -> None:
        """Return the memory of blocks that are gone to the system, where `room` sees it; runs on the device."""


@dataclass(frozen=True)
class TrainingTerms:
    """What this node gives to the jobs of others."""

    jobs: int = 1
    memory_bytes: int = 2**62
    refuses: Callable[[str], str | None] = lambda owner: None  # why an owner's jobs are refused


class HopFrame(NamedTuple):
    """A FORWARD or BACK frame for a neighbour, with what is needed to send it through the owner instead."""

    run: bytes
    parts: tuple[bytes, ...]
    priority: Priority
    epoch: int
    owner: Holder  # of the job
    left: None = None


@dataclass
class StepBusy:
    """How long this hop computed for a job, of the time that the job's steps took; the rest is its bubble.

    A step lasts from the commit before it to its own. The first one has none before it, and is not counted.
    """

    steps_s: float = 0.0
    computed_s: float = 0.0
    _since: float | None = None  # the latest commit
    _computed_s: float = 0.0  # since then

    def computed(self, seconds: float) -> None:
        """Count a pass or the optimiser."""
        self._computed_s += seconds

    def committed(self, now: float) -> None:
        """End a step."""
        if self._since is not None:
            self.steps_s += now - self._since
            self.computed_s += self._computed_s
        self._since, self._computed_s = now, 0.0

    def interrupted(self) -> None:
        """Begin an epoch: the step under way began with another route, or with waiting for it."""
        self._since, self._computed_s = None, 0.0


@dataclass
class HopJob:
    """One job at this hop."""

    run: bytes
    ledger: JobLedger
    answers: PeerOutbox
    heard_at: float
    ordered: int  # the latest epoch that its owner has ordered; the ledger's once it is carried out
    blocks: JobBlocks | None = None
    waiting: dict[str, deque[Frame]] = field(default_factory=dict)  # sender -> its frames; whose turn is next is first
    waiting_bytes: Counter[str] = field(default_factory=Counter)  # sender -> bytes of its frames that wait
    is_busy: bool = False
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    fetching: trio.CancelScope = field(default_factory=trio.CancelScope)
    news: Signal = field(default_factory=Signal)
    sizes: defaultdict[tuple[int, int], UsualSize] = field(default_factory=lambda: defaultdict(UsualSize))  # kind, way
    kept: dict[int, list[StatePart]] = field(default_factory=dict)  # version -> states on disk; the last two versions
    most_kept_bytes: int = 0  # of them, if all weights are trained
    dropped: Counter[str] = field(default_factory=Counter)  # verdict -> frames
    sums: SumsBuffer | None = None  # those of all holders, on their way here
    sums_slices: int = 0  # in which these come
    rejections: Counter[int] = field(default_factory=Counter)  # epoch -> passes that were rejected
    sent: Counter[str] = field(default_factory=Counter)  # neighbour ("": the owner) -> bytes in this epoch
    busy: StepBusy = field(default_factory=StepBusy)
    activations: Activations | None = None  # if hidden states are sent as changes
    # By `Pass.place`: which sequences of a micro-batch are kept, and how many of which length it had forwards.
    to_agree: dict[tuple[int, int], tuple[Pass, list[bool]]] = field(default_factory=dict)
    shapes: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    def put(self, sender: str, frame: Frame) -> None:
        """Leave a frame to the job's task."""
        self.waiting.setdefault(sender, deque()).append(frame)
        self.waiting_bytes[sender] += len(frame.body)
        self.news.notify()

    @property
    def waiting_count(self) -> int:
        """Number of frames that wait."""
        return sum(map(len, self.waiting.values()))

    def has_room(self, sender: str, frame: Frame) -> bool:
        """True if a frame may wait; one sender's frames never keep out those of another, least of all the owner's."""
        if len(self.waiting.get(sender, ())) > 2 * self.ledger.order.under_way + 8 + self.sums_slices:
            return False
        size, owner = len(frame.body), self.ledger.owner
        if sender == owner:
            return self.waiting_bytes.total() + size <= MAX_WAITING_BYTES
        others = self.waiting_bytes.total() - self.waiting_bytes[owner]
        return (
            self.waiting_bytes[sender] + size <= SENDER_SHARE * MAX_WAITING_BYTES
            and others + size <= NEIGHBOURS_SHARE * MAX_WAITING_BYTES
        )

    def take(self) -> tuple[str, Frame]:
        """Return a sender and its frame that waited longest; the senders take turns."""
        sender = next(iter(self.waiting))
        frames = self.waiting.pop(sender)
        frame = frames.popleft()
        if frames:
            self.waiting[sender] = frames
        self.waiting_bytes[sender] -= len(frame.body)
        return sender, frame

    def drop_waiting(self) -> None:
        """Forget the frames that wait."""
        self.waiting.clear()
        self.waiting_bytes.clear()

    def begin_epoch(self, epoch: int, order: JobOrder, version: int) -> None:
        """Take the owner's order for a new epoch, in which ways have new numbers."""
        self.ledger.begin_epoch(epoch, order, version)
        self.sizes.clear()

    @property
    def kept_bytes(self) -> int:
        """Bytes of its states on disk."""
        return sum(state.size_bytes for state in {state for states in self.kept.values() for state in states})

    @property
    def is_parked(self) -> bool:
        """True if its owner's stream has ended, and its memory is free."""
        return self.answers.broken

    @property
    def span(self) -> Span:
        """The job's blocks at this hop."""
        return self.ledger.order.span


@dataclass(frozen=True)
class HopJobStats:
    """Figures of one job at this hop."""

    run: str
    owner: str
    start: int
    stop: int
    version: int
    waiting: int
    dropped: Mapping[str, int]
    steps_s: float  # of the steps since the job runs, without the first one of each epoch
    computed_s: float  # of these, in which this hop computed


class TrainingServer:
    """Serves the jobs of many owners; `host` gives and takes the blocks."""

    def __init__(
        self,
        network: Network,
        device: Device,
        states: StateStore,
        terms: Callable[[], TrainingTerms],
        full: FullMaker | None = None,
        activations: ActivationDisk | None = None,
    ) -> None:
        """Without `full`, jobs that train all weights are refused, and without `activations` those of changes."""
        self._network, self._device, self._states, self._terms = network, device, states, terms
        self._make: MakeBlocks | None = None
        self._full, self._activations = full, activations
        self._is_open = False
        self._attending: set[trio.CancelScope] = set()  # of the streams that are read
        self._jobs: dict[bytes, HopJob] = {}
        self._ended: dict[bytes, int] = {}  # run -> epoch: an old OPEN must not bring a job back
        self._nursery: trio.Nursery
        self._outboxes: PeerOutboxes[HopFrame]
        self._frames = PeerRateLimit(FRAMES_AT_ONCE, FRAMES_PER_S)
        self._waiting = WaitingBytes()  # frames for owners and neighbours, and answers to strangers
        self._working = 0  # tasks of jobs
        self._to_release = False  # blocks are gone, and the allocator may still keep their memory
        self._ended_one = Signal()
        self.dropped = 0  # frames of no job, or not understood

    @property
    def jobs(self) -> list[HopJobStats]:
        """Figures of the jobs that run here now."""
        return [
            HopJobStats(
                job.run.hex(),
                job.ledger.owner,
                job.span.start,
                job.span.stop,
                job.ledger.version,
                job.waiting_count,
                dict(job.dropped),
                job.busy.steps_s,
                job.busy.computed_s,
            )
            for job in self._jobs.values()
        ]

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; then jobs end, their owners are told, and all streams are closed.

        The network goes on asking one that has ended, until there is another: it offers no room, and reads nothing.
        """
        try:
            async with trio.open_nursery() as self._nursery:
                await self._serve(task_status)
        finally:
            for scope in self._attending:
                scope.cancel()

    async def _serve(self, task_status: TaskStatus[None]) -> None:
        self._outboxes = PeerOutboxes(
            self._network,
            PROTOCOL,
            self._nursery,
            lost=self._link_lost,
            undeliverable=self._undeliverable,
            waiting=self._waiting,
        )
        self._network.accept(PROTOCOL, self.attend)
        self._network.serve(ROOM, self._on_room)
        self._states.serve()
        self._is_open = True
        task_status.started()
        try:
            while True:
                await trio.sleep(IDLE_STREAM_S / 2)
                await self._outboxes.close_idle((), trio.current_time() - IDLE_STREAM_S)
        finally:
            self._is_open = False  # no job begins any more: the tasks of the others are ending

    async def host(self, make: MakeBlocks | None) -> None:
        """Train with these blocks from now on; jobs of the old ones end, and their owners are told."""
        self._make = make
        for job in [job for job in self._jobs.values() if not job.ledger.order.is_full]:
            await self._trouble(job, HopError("draining", "this node does not host these blocks any more"))
            self._end(job)

    async def no_jobs(self) -> None:
        """Wait until no job runs here and nothing of any is left."""
        await self._ended_one.wait_for(lambda: not self._working)

    # --- frames -------------------------------------------------------------------------------------------------------

    async def attend(self, stream: FrameStream) -> None:
        """Read one peer's stream while this server runs; a frame that is not understood costs the peer its stream."""
        if self._is_open:
            with trio.CancelScope() as scope:
                self._attending.add(scope)
                try:
                    await self._read(stream)
                finally:
                    self._attending.remove(scope)

    async def _read(self, stream: FrameStream) -> None:
        answers = PeerOutbox(stream, self._nursery, waiting=self._waiting)
        try:
            while True:
                with trio.fail_after(2 * IDLE_S):
                    frame = decode(await stream.receive())
                if delay_s := self._frames.delay_s(stream.peer, trio.current_time(), reading_cost(frame)):
                    await trio.sleep(delay_s)
                if self._is_open:  # else jobs are about to tell their owners on this stream that they end
                    await self._on_frame(frame, stream.peer, answers)
        except RecordError as error:
            log.info("%s sent a frame that is not understood: %s", stream.peer, error)
            self.dropped += 1
            await stream.reset()
        except trio.TooSlowError:
            await stream.reset()  # an open stream would keep its link from being closed when others need it
        except P2PError:
            pass  # the stream ended
        finally:
            answers.broken = True
            for job in [job for job in self._jobs.values() if job.answers is answers]:
                self._park(job)

    async def _on_frame(self, frame: Frame, peer: str, answers: PeerOutbox) -> None:
        if frame.kind == Kind.OPEN:
            await self._on_open(frame, peer, answers)
            return
        job = self._jobs.get(frame.session)
        if frame.kind == Kind.PROBE:
            if job is not None and job.ledger.owner == peer:
                await answers.push(_control(self._state_of(job)))
                job.heard_at = trio.current_time()
            else:
                await answers.push(_control(plain(Kind.STATE, frame.session, 0)))
            return
        if job is None or (frame.kind not in PASSES and peer != job.ledger.owner):
            self.dropped += 1
        elif frame.kind == Kind.CLOSE:
            if frame.epoch >= job.ordered:
                self._end(job)
        elif peer != job.ledger.owner and peer not in job.ledger.order.neighbours:
            job.dropped["foreign"] += 1
        elif not job.has_room(peer, frame):
            job.dropped["queue"] += 1
        else:
            job.heard_at = trio.current_time()
            job.put(peer, frame)

    def _state_of(self, job: HopJob) -> bytes:
        neighbours = job.ledger.order.neighbours
        sending = bool(job.answers.waiting_bytes) + sum(self._outboxes.has_waiting(peer) for peer in neighbours)
        computing = job.waiting_count + job.is_busy
        return plain(Kind.STATE, job.run, job.ledger.epoch, job.ledger.version, rows=computing, width=sending)

    async def _on_open(self, frame: Frame, peer: str, answers: PeerOutbox) -> None:
        """Take an order; it is read only if its sender may give one: to read a long one takes a while."""
        if not belongs_to(frame.session, peer):
            raise RecordError("the job's id is not one that this peer may use")
        job = self._jobs.get(frame.session)
        known_epoch = self._ended.get(frame.session, -1) if job is None else job.ordered
        if frame.epoch <= known_epoch:
            self.dropped += 1
            return
        refusal = self._refusal(peer, job)
        if refusal is None:
            order = decode_open(frame)
            refusal = self._refusal_of(order, peer)
        if refusal is not None:
            await answers.push(_control(encode_trouble(frame.session, frame.epoch, frame.position, refusal)))
            return
        now = trio.current_time()
        if job is None:
            job = HopJob(frame.session, JobLedger(peer, frame.epoch, order, frame.position), answers, now, 0)
            self._nursery.start_soon(self._work, job)  # first: a job without a task would never end
            self._jobs[frame.session] = job
            self._working += 1
        job.answers, job.heard_at, job.ordered = answers, now, frame.epoch
        job.drop_waiting()
        job.fetching.cancel()
        job.put(peer, frame)

    def _refusal(self, owner: str, job: HopJob | None) -> HopError | None:
        """Return why no order of this owner is taken now."""
        terms = self._terms()
        if why := terms.refuses(owner):
            return HopError("refused", why)
        if self._is_full_up(job):
            return HopError("busy", f"this node trains at most {terms.jobs} jobs at a time", "train_jobs")
        return None

    def _refusal_of(self, order: JobOrder, owner: str) -> HopError | None:
        """Return why this order of an owner is not taken."""
        if order.is_full and self._full is None:
            return HopError("refused", "this node trains adapters only")
        if order.sends_changes and self._activations is None:
            return HopError("refused", "this node keeps no activations, which changes are made from")
        if not order.is_full and self._make is None:
            return HopError("busy", "this node hosts no blocks now")
        if owner != self._network.peer_id and order.rows > MAX_ROWS:
            return HopError("refused", f"micro-batches have at most {MAX_ROWS} rows, not {order.rows}")
        return None

    def _is_full_up(self, job: HopJob | None) -> bool:
        """True if as many other jobs train here as may."""
        others = sum(other is not job and not other.is_parked for other in self._jobs.values())
        return others >= self._terms().jobs

    @property
    def _spare_bytes(self) -> int:
        used = sum(job.blocks.memory_bytes for job in self._jobs.values() if job.blocks is not None)
        return self._terms().memory_bytes - used

    async def room_for(self, peer: str) -> int:
        """Return how many bytes a job of a peer may have here that trains all weights, and keeps its states on disk."""
        if self._full is None or not self._is_open or self._terms().refuses(peer):
            return 0
        own = [job for job in self._full_jobs if job.is_parked and job.ledger.owner == peer]  # it may go on with these
        disk = await self._states.room() + sum(map(self._on_disk, own)) - self._promised_bytes
        await self._release()
        # Only now: streams that the peer has just closed have ended meanwhile, and the jobs on them are parked.
        if self._is_full_up(None):
            return 0
        memory = await self._device.run_later(self._full.room, self._spare_bytes)
        return max(0, min(memory, disk * FULL_WEIGHT_BYTES // (KEPT_VERSIONS * STATE_WEIGHT_BYTES)))

    @property
    def _full_jobs(self) -> list[HopJob]:
        """The jobs that train all weights."""
        return [job for job in self._jobs.values() if job.ledger.order.is_full]

    def _on_disk(self, job: HopJob) -> int:
        """Bytes of a job's states that are here."""
        return job.kept_bytes - self._states.absent_bytes(state for states in job.kept.values() for state in states)

    @property
    def _promised_bytes(self) -> int:
        """Bytes of the disk that these jobs do not take yet, but may."""
        return sum(max(0, job.most_kept_bytes - self._on_disk(job)) for job in self._full_jobs if not job.is_parked)

    def _drop_blocks(self, job: HopJob) -> None:
        """Free a job's memory."""
        self._to_release |= job.blocks is not None
        job.blocks = None

    async def _release(self) -> None:
        """Return the memory of blocks that are gone to the system: what a card's allocator keeps counts as taken."""
        if self._to_release and self._full is not None:
            self._to_release = False
            try:
                await self._device.run_later(self._full.release)
            except Exception:  # torch raises errors of every kind; they must cost no job
                log.exception("the memory of a training job could not be returned")

    async def _on_room(self, peer: str, body: bytes) -> bytes:
        refuses = {"refuses": why} if (why := self._terms().refuses(peer)) else {}
        return canonical({"bytes": await self.room_for(peer), **refuses})

    # --- a job --------------------------------------------------------------------------------------------------------

    async def _work(self, job: HopJob) -> None:
        """Carry out one frame of a job after the other, until it ends or its owner is silent for too long."""
        try:
            with job.scope:
                while True:
                    with trio.move_on_after(IDLE_S):
                        await job.news.wait_for(lambda: bool(job.waiting))
                    if not job.waiting:
                        if trio.current_time() - job.heard_at < IDLE_S:
                            continue  # it was asked how it is
                        break
                    job.is_busy = True
                    await self._carry_out(job, *job.take())
                    job.is_busy = False
                    self._to_release |= job.blocks is None  # a frame has let go of them only now
        except trio.Cancelled:  # not by its owner or for idleness: this server ends
            with trio.CancelScope(shield=True), trio.move_on_after(LAST_WORDS_S):
                await self._trouble(job, HopError("draining", "this node trains nothing any more"))
            raise
        finally:
            self._end(job)
            self._drop_blocks(job)
            with trio.CancelScope(shield=True):
                await self._states.forget(job.run)
                await self._close_activations(job)
                await self._release()
            self._working -= 1
            self._ended_one.notify()

    async def _carry_out(self, job: HopJob, sender: str, frame: Frame) -> None:
        """Carry out one frame; whatever fails costs this job alone."""
        work = {
            Kind.OPEN: self._open,
            Kind.FORWARD: self._forward,
            Kind.BACK: self._back,
            Kind.EVALUATE: self._evaluate,
            Kind.TALLY: self._tally,
            Kind.REDUCE: self._reduce,
            Kind.SUMS: self._sums,
            Kind.STEP: self._step,
            Kind.COMMIT: self._commit,
            Kind.SNAPSHOT: self._snapshot,
            Kind.KEEP: self._keep,
        }.get(Kind(frame.kind))
        if work is None or (job.blocks is None and frame.kind != Kind.OPEN):
            job.dropped["order"] += 1
            return
        begun = trio.current_time()
        try:
            await work(job, sender, frame)
            if frame.kind in _COMPUTING:
                job.busy.computed(trio.current_time() - begun)
        except (RecordError, AppError, EngineError, trio.TooSlowError) as error:
            if isinstance(error, NotFinite | TrainingError) and self._is_from_neighbour(job, frame):
                why = "size" if isinstance(error, NotFinite) else "shape"
                await self._reject(job, frame, _Rejected(str(error), why))  # it is for the owner to find out whose
                return
            code, why = "failed", ""
            if isinstance(error, TrainingFull):  # what else takes memory may end
                never = error.needed_bytes > self._terms().memory_bytes
                code, why = "refused" if never else "busy", "train_memory"
            await self._trouble(job, HopError(code, str(error) or "states did not arrive in time", why))
            if job.blocks is None and not job.is_parked and frame.epoch == job.ordered:
                self._end(job)
        except Exception as error:  # torch raises errors of every kind; they must cost no other job
            log.exception("a training job failed")
            await self._trouble(job, HopError("failed", f"{type(error).__name__} while computing"))

    def _is_from_neighbour(self, job: HopJob, frame: Frame) -> bool:
        """True for a pass that another hop computed, whichever way it came."""
        way = job.ledger.order.way(pass_of(frame).way) if frame.kind in PASSES else None
        return way is not None and bool(way.successor if frame.kind == Kind.BACK else way.predecessor)

    async def _open(self, job: HopJob, sender: str, frame: Frame) -> None:
        order = decode_open(frame)
        job.busy.interrupted()
        if order.keeps:
            await self._go_on(job, order, frame)
            return
        job.begin_epoch(frame.epoch, order, frame.position)
        job.sent.clear()
        self._drop_blocks(job)  # before the same memory is taken again
        await self._close_activations(job)  # neighbours may be others, or have lost theirs
        if order.sends_changes and self._activations is not None:
            job.activations = self._activations.open()
        make = self._make if not order.is_full else None if self._full is None else self._full.make
        if frame.epoch != job.ordered or job.is_parked or make is None:
            return  # a later order is waiting, or may come
        with trio.CancelScope() as job.fetching:
            try:
                await self._begin(job, order, frame, make)
            except BaseException:
                self._drop_blocks(job)
                raise

    async def _begin(self, job: HopJob, order: JobOrder, frame: Frame, make: MakeBlocks) -> None:
        """Make the blocks of an order, so that their memory is nobody else's, and then fetch their states."""
        await self._release()
        blocks = job.blocks = await self._device.run_later(make, order, self._spare_bytes)
        await trio.lowlevel.checkpoint()  # the owner may have gone, or ordered something else
        # The owner names sizes and hashes: only what these blocks can have is fetched, and read into memory.
        most = most_state_bytes(blocks.sums_bytes)
        if any(state.size_bytes > most for state in order.states):
            raise RecordError("states larger than those of the job's blocks")
        if order.is_full:
            job.kept.clear()
            job.most_kept_bytes = KEPT_VERSIONS * len(order.span) * most
        await self._note_kept(job, frame.position, order.states, others=False)
        if order.is_full:
            await self._states.require_room(self._promised_bytes)
        await self._states.obtain(job.run, order.states, order.holders)
        if order.states:
            data = [await self._states.read(state) for state in order.states]
            await self._device.run_later(blocks.load, dict(zip(order.span.blocks(), data, strict=True)))
        await self._answer(job, plain(Kind.READY, job.run, frame.epoch, frame.position))

    async def _go_on(self, job: HopJob, order: JobOrder, frame: Frame) -> None:
        """Begin an epoch with the version that is here; raises `AppError` if it is another one."""
        ledger, blocks = job.ledger, job.blocks
        if ledger.stepped and frame.position == ledger.version + 1 and blocks is not None:
            await self._device.run_later(blocks.commit)  # the order to commit was dropped with the old epoch
            ledger.commit(ledger.epoch, frame.position)
        is_here = (ledger.version, ledger.order.span) == (frame.position, order.span)
        job.begin_epoch(frame.epoch, order, frame.position)
        for neighbour in job.sent.keys() - order.neighbours - {""}:
            del job.sent[neighbour]
        if blocks is None or not is_here:
            self._drop_blocks(job)
            raise AppError(f"version {frame.position} of blocks {order.span} is not here")
        await self._device.run_later(blocks.clear)
        await self._answer(job, plain(Kind.READY, job.run, frame.epoch, frame.position))

    async def _close_activations(self, job: HopJob) -> None:
        activations, job.activations = job.activations, None
        job.to_agree.clear()
        if activations is not None:
            await trio.to_thread.run_sync(activations.close)

    async def _forward(self, job: HopJob, sender: str, frame: Frame) -> None:
        one, blocks = pass_of(frame), self._blocks(job)
        if not self._is_accepted(job, job.ledger.forward(sender, frame.epoch, one)):
            return
        way = self._way(job, one)
        for given_up in job.ledger.take_displaced():
            blocks.discard(given_up.number, given_up.way)
        job.shapes[one.place] = sequences_of(frame), length_of(frame)
        try:
            rows, samples = await self._arrived(job, frame, one, way)
            for block in way.span.blocks():
                args = block, one.number, rows, sequences_of(frame), one.way
                rows = await self._device.run_later(blocks.forward, *args)
            data = await self._device.run_later(blocks.data, rows, job.ledger.order.row_format)
            if job.activations is not None:
                boundary, pack = Boundary(way.successor, way.span.stop), job.activations.pack
                data = await trio.to_thread.run_sync(pack, boundary, one, samples, data, frame.width)
        except BaseException as error:
            job.ledger.failed(one)
            blocks.discard(one.number, one.way)  # an earlier attempt too, which will not come back
            if not isinstance(error, _Rejected):
                raise
            await self._reject(job, frame, error)
            return
        await self._send(job, way.successor, frame, one, data)

    async def _arrived(self, job: HopJob, frame: Frame, one: Pass, way: HopWay) -> tuple[Any, list[int]]:
        """Return the rows of a FORWARD, and of changes the numbers of the sequences; raises `_Rejected`."""
        if (frame.dtype == FORMATS[CHANGES]) != (job.activations is not None):
            raise _Rejected("another number format than was agreed", "shape")
        if job.activations is None:
            return await self._admitted(job, frame), []
        if frame.width != self._blocks(job).hidden_size:
            raise _Rejected(f"rows of {frame.width} numbers are not this model's", "shape")
        boundary = Boundary(way.predecessor, way.span.start)
        try:
            arrival = await trio.to_thread.run_sync(job.activations.unpack, boundary, frame)
        except NoBase as missing:
            raise _Rejected(str(missing), "base", code="base") from missing
        rows = await self._admitted(job, arrival.frame)
        job.to_agree[one.place] = one, await trio.to_thread.run_sync(job.activations.keep, arrival)
        return rows, arrival.samples

    async def _came_back(self, job: HopJob, frame: Frame, one: Pass) -> Any:
        """Return the rows of a BACK, and note what the hop after this one keeps; raises `_Rejected`."""
        if (sequences_of(frame), length_of(frame)) != job.shapes[one.place]:
            raise _Rejected("another shape than the micro-batch had forwards", "shape")
        if job.activations is not None and frame.dtype == FORMATS[CHANGES]:
            way = self._way(job, one)
            frame, kept = split_kept(frame)
            job.activations.agreed(Boundary(way.successor, way.span.stop), one, kept)
        return await self._admitted(job, frame)

    async def _back(self, job: HopJob, sender: str, frame: Frame) -> None:
        one, blocks = pass_of(frame), self._blocks(job)
        if not self._is_accepted(job, job.ledger.back(sender, frame.epoch, one)):
            return
        try:
            rows = await self._came_back(job, frame, one)
        except _Rejected as rejected:
            blocks.discard(one.number, one.way)
            await self._reject(job, frame, rejected)
            return
        way = self._way(job, one)
        try:
            counting = {block for run in job.ledger.count(one) for block in run.blocks()}
            for block in reversed(way.span.blocks()):
                args = block, one.number, rows, block in counting, one.way
                rows = await self._device.run_later(blocks.backward, *args)
            data = await self._device.run_later(blocks.data, rows, job.ledger.order.row_format)
        except BaseException:
            blocks.clear()  # some blocks may have counted it and others not
            job.ledger.forget_passes()
            raise
        if job.activations is not None:
            accepted, kept = job.to_agree.pop(one.place, (None, []))
            data = with_kept(data, kept if accepted == one else [False] * sequences_of(frame))
        await self._send(job, way.predecessor, frame, one, data)

    async def _evaluate(self, job: HopJob, sender: str, frame: Frame) -> None:
        one, blocks = pass_of(frame), self._blocks(job)
        if not self._is_accepted(job, job.ledger.evaluate(sender, frame.epoch, one)):
            return
        try:
            rows = await self._admitted(job, frame)
        except _Rejected as rejected:
            await self._reject(job, frame, rejected)
            return
        way = self._way(job, one)
        for block in way.span.blocks():
            rows = await self._device.run_later(blocks.evaluate, block, rows, sequences_of(frame))
        data = await self._device.run_later(blocks.data, rows, job.ledger.order.row_format)
        await self._send(job, way.successor, frame, one, data)

    def _way(self, job: HopJob, one: Pass) -> HopWay:
        way = job.ledger.order.way(one.way)
        assert way is not None, "a pass on another way is not accepted"
        return way

    def _is_accepted(self, job: HopJob, verdict: PassVerdict) -> bool:
        """True if a pass runs; else it is counted as dropped."""
        if verdict is not PassVerdict.RUN:
            job.dropped[verdict.value] += 1
        return verdict is PassVerdict.RUN

    async def _admitted(self, job: HopJob, frame: Frame) -> Any:
        """Return the rows that a peer sent, once they are checked; raises `_Rejected`."""
        blocks = self._blocks(job)
        if frame.dtype not in DTYPE_NAMES:
            raise _Rejected("another number format than was agreed", "shape")
        if frame.width != blocks.hidden_size:
            raise _Rejected(f"rows of {frame.width} numbers are not this model's", "shape")
        if length_of(frame) * sequences_of(frame) > job.ledger.order.rows:
            raise _Rejected("more rows than were agreed", "shape")
        size = root_mean_square(frame)
        if not job.sizes[frame.kind, pass_of(frame).way].accepts(size):
            raise _Rejected(f"numbers of size {size:.3g} are not finite, or far beyond the usual", "size")
        return await self._device.run_later(blocks.rows, frame.body, DTYPE_NAMES[frame.dtype])

    async def _reject(self, job: HopJob, frame: Frame, rejected: _Rejected) -> None:
        """Tell the owner of a pass that its sender was to send and that must not be computed with."""
        job.dropped[rejected.why] += 1
        epoch = job.ledger.epoch
        job.rejections = Counter({epoch: job.rejections[epoch] + 1})
        if job.rejections[epoch] > MAX_REJECTIONS:
            return  # what the owner does not read would fill its stream
        direction, way = "back" if frame.kind == Kind.BACK else "forward", pass_of(frame).way
        await self._trouble(job, HopError(rejected.code, str(rejected), f"{direction} {way}" if way else direction))

    async def _tally(self, job: HopJob, sender: str, frame: Frame) -> None:
        if await self._is_current(job, frame):
            norms = await self._device.run_later(self._blocks(job).squared_norms)
            tally = Tally(job.ledger.counted, tuple(norms), tuple(sorted(job.sent.items())))
            await self._answer(job, encode_tally(job.run, frame.epoch, frame.position, tally))

    async def _reduce(self, job: HopJob, sender: str, frame: Frame) -> None:
        """Hand over the sums of blocks that others hold too, and begin new ones.

        If it is ordered again, they are on their way: another copy would hold up all that comes after it.
        """
        order, blocks, shared = decode_reduce(frame, job.ledger.order), self._blocks(job), job.ledger.order.shared
        if not await self._is_current(job, frame):
            return
        verdict = job.ledger.hand_over(order.round)
        if verdict is None:
            await self._stale(job, frame)
            return
        if not verdict:
            return
        taken = {
            block: await self._device.run_later(blocks.take_sums, block) for run in shared for block in run.blocks()
        }
        size_bytes = sum(map(len, taken.values()))
        job.sums, job.sums_slices = SumsBuffer(size_bytes), size_bytes // SLICE_BYTES
        wanted = b"".join(taken[block] for run in order.wanted for block in run.blocks())
        slices = sums_frames(job.run, frame.epoch, frame.position, order.round, wanted)
        in_time = takewhile(lambda _: job.ordered == frame.epoch, slices)
        await job.answers.push_all(OutboundFrame(parts, Priority.BULK) for parts in in_time)

    async def _sums(self, job: HopJob, sender: str, frame: Frame) -> None:
        """Take the sums of all holders in place of its own, and say so."""
        ledger = job.ledger
        if not ledger.is_current(frame.epoch, frame.position) or frame.width != ledger.round or job.sums is None:
            job.dropped["stale"] += 1
            return
        data = job.sums.add(frame)
        if data is None:
            return
        blocks, at = self._blocks(job), 0
        for block in (block for run in ledger.order.shared for block in run.blocks()):
            part = memoryview(data)[at : at + blocks.sums_bytes]
            await self._device.run_later(blocks.set_sums, block, part)
            at += len(part)
        ledger.agreed()
        await self._answer(job, plain(Kind.REDUCE, job.run, frame.epoch, frame.position))

    async def _step(self, job: HopJob, sender: str, frame: Frame) -> None:
        order = decode_step(frame)
        if job.ledger.awaits_sums:
            await self._trouble(job, HopError("failed", "a step was ordered before the sums of all holders came"))
        elif await self._is_current(job, frame):
            await self._device.run_later(self._blocks(job).step, order.rate, order.scale, order.clip)
            job.ledger.made_step()
            await self._answer(job, plain(Kind.STEP, job.run, frame.epoch, frame.position))

    async def _commit(self, job: HopJob, sender: str, frame: Frame) -> None:
        verdict = job.ledger.commit(frame.epoch, frame.position)
        if verdict is None:
            await self._stale(job, frame)
            return
        if verdict:
            await self._device.run_later(self._blocks(job).commit)
            job.busy.committed(trio.current_time())
        await self._answer(job, plain(Kind.COMMIT, job.run, frame.epoch, frame.position))

    async def _snapshot(self, job: HopJob, sender: str, frame: Frame) -> None:
        if not await self._is_current(job, frame):
            return
        parts = []
        for block in job.span.blocks():
            state = await self._device.run_later(self._blocks(job).state, block)
            parts.append(await self._states.keep(job.run, state))
        await self._note_kept(job, frame.position, parts)
        await self._answer(job, encode_parts(Kind.SNAPSHOT, job.run, frame.epoch, frame.position, parts))

    async def _keep(self, job: HopJob, sender: str, frame: Frame) -> None:
        parts, holders = decode_parts(frame)
        await self._note_kept(job, frame.position, parts)
        with trio.CancelScope() as job.fetching:  # an order for a new epoch does not wait for it
            await self._states.obtain(job.run, parts, holders)
            await self._answer(job, plain(Kind.KEEP, job.run, frame.epoch, frame.position))

    async def _note_kept(self, job: HopJob, version: int, parts: Sequence[StatePart], *, others: bool = True) -> None:
        """Keep these states of a version, and of the others only the latest, which may be the last that all have.

        Raises `RecordError` if more would be kept than this node gives to jobs: to those that train adapters a part of
        the disk; to one that trains all weights what it needs, which follows from the memory that it has here.
        """
        versions = {version, *sorted(job.kept.keys() - {version})[-1:]} if others else {version}
        job.kept = {kept: states for kept, states in job.kept.items() if kept in versions}
        job.kept[version] = list(dict.fromkeys((*job.kept.get(version, ()), *parts)))
        wanted = [state for states in job.kept.values() for state in states]
        most = job.most_kept_bytes
        if not job.ledger.order.is_full:
            alike = [one for one in self._jobs.values() if one is not job and not one.ledger.order.is_full]
            most = MAX_KEPT_BYTES - sum(one.kept_bytes for one in alike)
        if job.kept_bytes > most or len(job.kept[version]) > MAX_KEPT_STATES:
            job.kept.clear()
            text = f"{most} bytes of states here, and {MAX_KEPT_STATES} states of a version"
            raise RecordError(f"this job may keep at most {text}")
        await self._states.forget(job.run, keep=wanted)

    def _blocks(self, job: HopJob) -> JobBlocks:
        if job.blocks is None:  # orders wait until they are there
            raise AppError("the job's owner has left")
        return job.blocks

    async def _is_current(self, job: HopJob, frame: Frame) -> bool:
        if job.ledger.is_current(frame.epoch, frame.position):
            return True
        await self._stale(job, frame)
        return False

    async def _stale(self, job: HopJob, frame: Frame) -> None:
        job.dropped["stale"] += 1
        if frame.epoch == job.ledger.epoch:
            text = f"version {frame.position} was ordered, but version {job.ledger.version} is here"
            await self._trouble(job, HopError("stale", text))

    def _park(self, job: HopJob) -> None:
        """Free a job's memory but keep its states: the owner may come back with another route, for `IDLE_S`."""
        job.fetching.cancel()
        self._drop_blocks(job)
        job.drop_waiting()
        parked = [other for other in self._jobs.values() if other.is_parked]
        for other in sorted(parked, key=lambda other: other.heard_at)[:-MAX_PARKED]:
            self._end(other)

    def _end(self, job: HopJob) -> None:
        """Free everything that a job holds here."""
        if self._jobs.get(job.run) is not job:
            return
        del self._jobs[job.run]
        self._ended[job.run] = job.ordered
        if len(self._ended) > _REMEMBERED_ENDED:
            del self._ended[next(iter(self._ended))]
        job.scope.cancel()

    # --- sending ------------------------------------------------------------------------------------------------------

    async def _send(self, job: HopJob, neighbour: str, frame: Frame, one: Pass, data: bytes) -> None:
        """Send the result of a pass to a neighbour, or through the owner where it cannot be reached."""
        kind = Kind(frame.kind)
        dtype = job.ledger.order.format_of(kind)
        head = pass_header(
            kind, job.run, frame.epoch, one, dtype=dtype, rows=length_of(frame), width=frame.width, length=len(data)
        )
        job.sent[neighbour] += len(head) + len(data)
        owner = Holder(job.ledger.owner, job.ledger.owner)  # the node decides whose jobs it takes
        sent = HopFrame(job.run, (head, data), Priority.BULK, frame.epoch, owner)
        if not neighbour or not await self._outboxes.push(neighbour, sent, owner):
            await job.answers.push(sent)

    def _undeliverable(self, peer: str, frames: list[HopFrame]) -> None:
        self._nursery.start_soon(self._send_through_owner, frames)

    async def _send_through_owner(self, frames: list[HopFrame]) -> None:
        for frame in frames:
            job = self._jobs.get(frame.run)
            if job is not None and frame.epoch == job.ledger.epoch:
                await job.answers.push(frame)

    def _link_lost(self, peer: str) -> None:
        self._nursery.start_soon(self._report_lost_link, peer)

    async def _report_lost_link(self, peer: str) -> None:
        for job in list(self._jobs.values()):
            if peer in job.ledger.order.neighbours:
                await self._trouble(job, HopError("link", f"the link to {peer} broke", peer))

    async def _answer(self, job: HopJob, message: bytes) -> None:
        await job.answers.push(_control(message))

    async def _trouble(self, job: HopJob, trouble: HopError) -> None:
        await self._answer(job, encode_trouble(job.run, job.ledger.epoch, job.ledger.version, trouble))


class _Rejected(Exception):
    """Numbers from a peer that must not be computed with; `why` is the name under which they are counted."""

    def __init__(self, text: str, why: str, code: str = "input") -> None:
        super().__init__(text)
        self.why, self.code = why, code


def _control(message: bytes) -> OutboundFrame:
    return OutboundFrame((message,), Priority.CONTROL)

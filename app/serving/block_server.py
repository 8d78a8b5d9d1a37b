"""The block server: runs the sessions of many askers through the hosted blocks.

A token's way through this hop, all of it in this file: a stream's reader judges a DATA frame and queues its rows
(`_on_data`), the step loop takes a batch from the queue, runs it on the device and sends each session's outputs on
(`_step_forever`, `_step`, `_deliver`, `HopSender.send`). TURN and CLOSE frames change the cache, so they are carried
out between two steps: those of an asker in the order in which they arrived, those of several homes in turns, and after
some milliseconds comes a step (`app.serving.orders`). Their askers pay for the time that they take (`_charged`).
Outputs for a successor that cannot be reached go through the asker.

A session that its asker has finished with may rest (`_on_close`): its cache stays for a new session of the same asker
that begins with the same tokens (`_lease`). Resting sessions make way at once for whoever needs their room, and neither
leaving nor unloading waits for them.

A session may use an adapter of its asker (`app.serving.adapters`). An order that names one waits until it is loaded,
while steps go on (`_on_adapted_turn`).

A new session whose order names another hop as the source of its cache takes it from there before it says READY
(`_begin`); the hop that leaves gives it, both in `app.serving.handover`.

A reply of this node itself may have its next step begun before its frame has come (`go_ahead`,
`app.serving.step_ahead`).

The rules of one session are in `app.serving.hop_session`, the choice of a batch in `app.serving.batching`, the frames
in `app.session.wire`.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import outcome
import trio

from app.core.awake import may_stay_awake, result_of
from app.core.compute import MAX_AHEAD, BlockRunner, Device, NextStep, StepOutput, StepWork
from app.core.errors import RecordError
from app.core.network import FrameStream, Network, Priority
from app.core.signal import Signal
from app.core.smoothing import Ewma
from app.core.span import Span
from app.core.turns import Who
from app.serving.adapters import MADE_WAY, AdapterKey, AdapterLimits, AdapterSource, HopAdapters, LoadedAdapter
from app.serving.admission import (
    AdmissionLimits,
    CacheTurns,
    FrameBudget,
    HopRoom,
    frame_cost,
    sessions_in_the_way,
    why_not,
)
from app.serving.batching import URGENT_ROWS, BatchLimits, BatchQueue, QueuedTokens
from app.serving.handover import UNMEASURED_TOKENS_PER_S, CacheForm, CacheGiver, CacheTaker
from app.serving.homes import Homes
from app.serving.hop_session import (
    SMOOTHING,
    FrameAction,
    HopSession,
    SessionCounters,
    first_to_evict,
    resting_to_end,
    session_key,
)
from app.serving.orders import ORDERS_S, Order, OrderQueue, timed
from app.serving.stats import ServerStats, SessionStats
from app.serving.step_ahead import StepAhead, may_go_ahead
from app.session.adapter_index import AdapterRef
from app.session.cache_wire import PROTOCOL as CACHE_PROTOCOL
from app.session.cache_wire import CacheChunk
from app.session.frame import (
    DTYPE_NAMES,
    DTYPES,
    HEADER_BYTES,
    Frame,
    HopError,
    belongs_to,
    header,
    plain,
)
from app.session.loop_stream import each_message
from app.session.outbound import OutboundFrame, PeerOutbox, PeerOutboxes, WaitingBytes
from app.session.wire import (
    GIVES_CACHE,
    KNOWS_ADAPTERS,
    KNOWS_REVISIONS,
    PROTOCOL,
    CacheGrant,
    EpochOrder,
    HopPace,
    Kind,
    RowsError,
    decode,
    decode_give,
    decode_turn,
    encode_hop_error,
    encode_pace,
)
from engine.errors import CacheFull, DeviceFull, EngineError, NotFinite, SessionError
from p2p.errors import P2PError
from p2p.rate_limit import PeerRateLimit
from p2p.shares import Holder
from p2p.supervise import guarded

if TYPE_CHECKING:
    from trio_typing import TaskStatus


AHEAD_BYTES = 16 * 2**20  # of one asker's outputs that wait for a link, beyond which its prompts are read no further
URGENT_AHEAD_BYTES = 256 * 2**10  # of outputs that replies wait for, beyond which its tokens wait too
PART_BYTES = 2 * 2**20  # of kept outputs that are sent again at once


class HopFrame(NamedTuple):
    """A DATA or RELAY frame, with what is needed to send its body another way."""

    session: bytes  # `HopSession.key`
    parts: tuple[bytes | memoryview, ...]  # header, then the body
    priority: Priority
    epoch: int
    revision: int
    position: int
    owner: Who  # home, asker and session
    left: trio.Event | None = None


@dataclass(eq=False)
class _Way:
    """Where a session's outputs go in its present epoch."""

    session: HopSession
    answers: PeerOutbox  # the stream on which its asker gave the last order
    successor: str  # to which they are sent; empty: to the asker
    owner: tuple[str, str, bytes]  # of what is sent, the same throughout the epoch so that it stays in order
    again: range = range(0)  # positions of kept outputs that are still to be sent again
    must: bool = False  # the asker is told if they are no longer kept
    sends_again: bool = False  # a task does
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)  # of that task

    @property
    def holder(self) -> Holder:
        """The session's asker."""
        return Holder(*self.owner[:2])


class HopSender:
    """Sends outputs to successors, or through the asker where one cannot be reached, and errors to askers.

    What is sent again, because an asker orders it, costs it next to nothing. So it is bulk, unless it is the one row
    that a reply waits for, and of each asker one part at a time waits for a link.
    """

    def __init__(
        self,
        network: Network,
        nursery: trio.Nursery,
        chunk_rows: int,
        waiting: WaitingBytes,
        sent_again: Callable[[str, int], None],
    ) -> None:
        """`sent_again` is called with an asker and a number of bytes whenever kept outputs are sent again for it."""
        self._nursery, self._chunk_rows, self._sent_again = nursery, chunk_rows, sent_again
        self._outboxes: PeerOutboxes[HopFrame] = PeerOutboxes(
            network, PROTOCOL, nursery, lost=self._link_lost, undeliverable=self._undeliverable, waiting=waiting
        )
        self._ways: dict[bytes, _Way] = {}  # by `HopSession.key`
        self._repeating: WeakValueDictionary[tuple[str, str], trio.Lock] = WeakValueDictionary()  # by peer and asker
        self.width = 0

    def begin(self, session: HopSession, answers: PeerOutbox) -> None:
        """A session, or a new epoch of one, was ordered on this stream; what waits of an earlier one is dropped."""
        self.end(session)
        turn, owner = session.turn, (session.home, session.asker, session.key)
        way = _Way(session, answers, "" if turn.relay else turn.successor, owner)
        self._ways[session.key] = way
        if way.successor:
            self._outboxes.prepare(way.successor, way.holder)

    def end(self, session: HopSession) -> None:
        """Send nothing more for a session."""
        way = self._ways.pop(session.key, None)
        if way is not None:
            way.again = range(0)  # its task may go on until it waits again
            way.scope.cancel()
            way.answers.drop(way.owner)
            self._outboxes.drop(way.successor, way.owner)

    def ordered_on(self, answers: PeerOutbox) -> list[HopSession]:
        """The sessions whose asker uses this stream."""
        return [way.session for way in self._ways.values() if way.answers is answers]

    def send_again(self, session: HopSession, start: int, stop: int, *, must: bool = True) -> None:
        """Begin to send kept outputs of [start, stop), as far as the successor needs them.

        With `must`, outputs that are no longer kept are reported to the asker.
        """
        way = self._ways.get(session.key)
        if way is None or session.send_from is None:
            return
        start = max(start, session.send_from)
        if start < stop:
            also, way.must = way.again or range(start, stop), must or (way.must and bool(way.again))
            way.again = range(min(start, also.start), max(stop, also.stop))
            if not way.sends_again:
                way.sends_again = True
                self._nursery.start_soon(guarded, "sending outputs again", self._send_again, way)

    async def _send_again(self, way: _Way) -> None:
        """Send kept outputs part by part: each when the last one of the asker has left for the link."""
        asker = way.session.asker
        lock = self._repeating.setdefault((way.successor or asker, asker), trio.Lock())
        is_token = len(way.again) == 1
        try:
            with way.scope:
                while way.again:
                    async with lock:
                        await self._send_part(way, is_token=is_token)
                    is_token = False
        finally:
            way.again, way.sends_again = range(0), False

    async def _send_part(self, way: _Way, *, is_token: bool) -> None:
        """Send the next of the outputs that are to be sent again, and wait until they have left."""
        session, first = way.session, way.again.start
        rows = 1 if is_token else max(min(self._chunk_rows, PART_BYTES // max(session.kept.row_bytes, 1)), 1)
        stop = min(first + rows, way.again.stop, session.length)
        if first >= stop:  # it was cut
            way.again = range(0)
            return
        body = session.kept.parts(first, stop)
        if body is None and way.must:
            way.again = range(0)
            await self.report_error(session, "missing", f"outputs at {first} are no longer kept")
            return
        if body is None:  # the successor may have them, but not those that were computed meanwhile
            way.again = range(session.kept.start, way.again.stop)
            return
        way.again = range(stop, way.again.stop)
        left = trio.Event()
        self._sent_again(session.asker, sum(map(len, body)))
        await self._send(way, first, body, Priority.DECODE if is_token else Priority.PREFILL, left)
        await left.wait()

    async def send(self, session: HopSession, position: int, data: bytes | memoryview) -> None:
        """Send new outputs to the successor; to the asker at the end of the route, or if it is unreachable."""
        way = self._ways.get(session.key)
        if way is None:
            return  # it ended while earlier frames were sent
        turn, rows = session.turn, len(data) // session.kept.row_bytes
        if way.again.start < position <= way.again.stop:  # they come after those
            way.again = range(way.again.start, position + rows)
            return
        is_token = rows <= URGENT_ROWS and position >= turn.urgent_from
        priority = Priority.DECODE if is_token or not turn.successor else Priority.PREFILL
        await self._send(way, position, (data,), priority)

    async def _send(
        self,
        way: _Way,
        position: int,
        body: tuple[bytes | memoryview, ...],
        priority: Priority,
        left: trio.Event | None = None,
    ) -> None:
        kind = Kind.RELAY if way.session.turn.successor and not way.successor else Kind.DATA
        frame = self._frame(way, kind, position, body, priority, left)
        if not way.successor:
            await way.answers.push(frame)
        elif not await self._outboxes.push(way.successor, frame, way.holder):
            await self._relay(way, frame)

    def is_behind(self, session: HopSession, *, urgent: bool) -> bool:
        """True if so many outputs of a session's asker wait for a link that more should not be computed.

        Its tokens wait as soon as a few of them do. Its prompts wait while what comes before them is sent again, and
        once those of its home have as much of what may wait for the successor as is left for others.
        """
        way = self._ways.get(session.key)
        if way is None:
            return False
        asker, home, outboxes = way.owner[:2], way.owner[:1], self._outboxes
        most, priority = (URGENT_AHEAD_BYTES, Priority.DECODE) if urgent else (AHEAD_BYTES, None)
        if max(way.answers.waiting_for(asker, priority), outboxes.waiting_for(way.successor, asker, priority)) > most:
            return True
        if urgent:
            return False
        return bool(way.again) or outboxes.waiting_for(way.successor, home) > outboxes.room_for(way.successor)

    async def close_idle(self) -> None:
        """Close streams to successors that no session has, and over which nothing went for `IDLE_STREAM_S`."""
        needed = {way.session.turn.successor for way in self._ways.values()}
        await self._outboxes.close_idle(needed, trio.current_time() - IDLE_STREAM_S)

    async def report_error(self, session: HopSession, code: str, text: str, why: str = "") -> None:
        """Report an error to a session's asker."""
        way = self._ways.get(session.key)
        if way is not None:
            error = encode_hop_error(session.id, session.epoch, session.kept.start, HopError(code, text, why))
            await way.answers.push(control_frame(error))

    def _frame(
        self,
        way: _Way,
        kind: Kind,
        position: int,
        body: tuple[bytes | memoryview, ...],
        priority: Priority,
        left: trio.Event | None,
    ) -> HopFrame:
        session, length = way.session, sum(map(len, body))
        head = header(
            kind,
            session.id,
            session.epoch,
            position,
            dtype=DTYPES[session.kept.dtype],
            rows=length // session.kept.row_bytes,
            width=self.width,
            length=length,
            revision=session.revision,
        )
        session.counters.bytes_out += len(head) + length
        place = session.epoch, session.revision, position
        return HopFrame(session.key, (head, *body), priority, *place, way.owner, left)

    async def _relay(self, way: _Way, frame: HopFrame) -> None:
        """Send a successor's frame through the asker, unless the session is in another epoch or revision by now."""
        if (frame.epoch, frame.revision) == (way.session.epoch, way.session.revision):
            body = frame.parts[1:]
            await way.answers.push(self._frame(way, Kind.RELAY, frame.position, body, frame.priority, frame.left))
        elif frame.left is not None:
            frame.left.set()

    def _undeliverable(self, peer: str, frames: list[HopFrame]) -> None:
        self._nursery.start_soon(guarded, "relaying outputs", self._relay_all, frames)

    async def _relay_all(self, frames: list[HopFrame]) -> None:
        for frame in frames:
            way = self._ways.get(frame.session)
            if way is not None:
                await self._relay(way, frame)

    def _link_lost(self, peer: str) -> None:
        self._nursery.start_soon(guarded, "reporting a lost link", self._report_lost_link, peer)

    async def _report_lost_link(self, peer: str) -> None:
        for way in list(self._ways.values()):
            if way.successor == peer:  # else nothing of it went over the link
                await self.report_error(way.session, "link", f"the link to the next hop {peer} broke")


def control_frame(message: bytes) -> OutboundFrame:
    """A message that overtakes all data."""
    return OutboundFrame((message,), Priority.CONTROL)


log = logging.getLogger("shoal.sessions")

DRAIN_S = 30.0
SHRINK_S = 2.0  # other programs wait for the memory
PREPARE_AFTER_S = 0.5  # without work for so long, the device prepares steps that are likely to come
AWAKE_S = 0.02  # after a launched step: over fast links the next token comes sooner, over others it can wait
IDLE_STREAM_S = 60.0  # a stream that no session needs is closed after so long without frames: its link can be pruned
_REMEMBERED_CLOSED = 4096
_REMEMBERED_ASKERS = 4096
_CHECK_KEPT_EVERY = 32  # steps
NO_DATA = memoryview(b"")
_PROMPT_ROWS = 64  # shorter steps do not tell how fast a prompt is read
_LEAVES = "this node is about to leave; move to another one"
_GIVES_BACK = "this node gives some of these blocks back; move to another one"

Turn = Callable[..., Awaitable[None]]  # carries an order out, with `adapter`
T = TypeVar("T")


@dataclass(frozen=True)
class ServerSettings:
    """Limits and times of a block server."""

    batch: BatchLimits = field(default_factory=BatchLimits)
    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    adapters: AdapterLimits = field(default_factory=AdapterLimits)
    queued_bytes: int = 1 << 30  # host memory for rows that wait for the device
    kept_bytes: int = 1 << 30  # host memory for outputs that may have to be sent again
    idle_s: float = 120.0  # a session whose asker is silent for so long is closed
    unused_s: float = 600.0  # and one for which nothing was computed so long after it was opened
    rest_s: float = 900.0  # the longest that a session may rest
    stays_awake: bool = field(
        default_factory=may_stay_awake
    )  # use a core while a card writes tokens, instead of sleeping between its steps


@dataclass(slots=True)
class ServerCounters:
    """Totals of a server since its start; those of ended sessions included."""

    steps: int = 0
    rows: int = 0
    urgent_steps: int = 0
    urgent_rows: int = 0
    busy_s: float = 0.0
    dropped_frames: int = 0
    opened: int = 0
    reused_tokens: int = 0  # that new sessions began with
    step_s: Ewma = field(default_factory=lambda: Ewma(SMOOTHING))  # of an urgent step
    prompt_tokens_per_s: Ewma = field(default_factory=lambda: Ewma(SMOOTHING))  # of long steps of prompts
    _bytes_in: int = 0  # of sessions that ended
    _bytes_out: int = 0
    _askers: set[str] = field(default_factory=set)
    _served: dict[str, int] = field(default_factory=dict)

    def opened_by(self, asker: str) -> None:
        """Count a session that this asker opened."""
        self.opened += 1
        if len(self._askers) < _REMEMBERED_ASKERS:
            self._askers.add(asker)

    def served(self, asker: str, rows: int) -> None:
        """Count tokens of this asker that went through the blocks."""
        if asker in self._served or len(self._served) < _REMEMBERED_ASKERS:
            self._served[asker] = self._served.get(asker, 0) + rows

    def ended(self, session: SessionCounters) -> None:
        """Add up the counters of a session that ended."""
        self._bytes_in += session.bytes_in
        self._bytes_out += session.bytes_out

    def stepped(self, rows: int, seconds: float, *, urgent: bool) -> None:
        """Count a device step."""
        self.steps += 1
        self.rows += rows
        self.busy_s += seconds
        if urgent:
            self.urgent_steps += 1
            self.urgent_rows += rows
            self.step_s.add(seconds)
        elif rows >= _PROMPT_ROWS and seconds > 0:
            self.prompt_tokens_per_s.add(rows / seconds)

    def read(
        self, sessions: Iterable[SessionStats], *, queued: tuple[int, int], kv: tuple[int, int, int]
    ) -> ServerStats:
        """The totals and the present load: `queued` rows and sessions, `kv` free, resting and total tokens."""
        sessions = tuple(sessions)
        return ServerStats(
            steps=self.steps,
            rows=self.rows,
            urgent_steps=self.urgent_steps,
            urgent_rows=self.urgent_rows,
            busy_s=self.busy_s,
            dropped_frames=self.dropped_frames,
            bytes_in=self._bytes_in + sum(session.bytes_in for session in sessions),
            bytes_out=self._bytes_out + sum(session.bytes_out for session in sessions),
            opened=self.opened,
            askers=len(self._askers),
            usual_step_s=self.step_s.value,
            queued_rows=queued[0],
            queued_sessions=queued[1],
            kv_free_tokens=kv[0],
            kv_resting_tokens=kv[1],
            kv_total_tokens=kv[2],
            reused_tokens=self.reused_tokens,
            sessions=tuple(session for session in sessions if not session.rests),
            resting_sessions=sum(session.rests for session in sessions),
            served=dict(self._served),
        )


@dataclass(eq=False)
class _InboundStream:
    """A stream that a peer opened."""

    stream: FrameStream
    answers: PeerOutbox
    heard_at: float
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


class BlockServer:
    """Serves the blocks of one runner to the swarm; `run` must be running.

    Sessions are known by their asker and id together: every hop of a route learns the id, and none of them may use it
    against the asker elsewhere.
    """

    def __init__(
        self,
        network: Network,
        runner: BlockRunner | None,
        device: Device,
        settings: ServerSettings | None = None,
        adapters: AdapterSource | None = None,
    ) -> None:
        self._network = network
        self._settings = settings or ServerSettings()
        self._runner = runner
        self._device = device
        self._homes = Homes(network)
        self._adapters = HopAdapters(device, adapters, self._settings.adapters, self._homes, self)
        self._adapters.host(runner)
        self._awaited: Counter[bytes] = Counter()  # key of a session -> its orders that wait for an adapter
        self._queue = BatchQueue(self._settings.batch)
        self._counters = ServerCounters()
        self._sessions: dict[bytes, HopSession] = {}  # by `HopSession.key`
        self._by_id: dict[bytes, HopSession] = {}  # the id that DATA frames carry; it belongs to one asker alone
        self._cache_turns = CacheTurns()
        self._closed: OrderedDict[bytes, int] = OrderedDict()  # key of an ended session -> its last epoch
        self._orders = OrderQueue()  # wait for the end of the step under way; this node's own are those of ""
        self._transfers: deque[Order] = deque()  # parts of caches that move: one of them between two steps
        self._to_truncate: set[bytes] = set()  # sessions whose `_truncate` is an order; no step takes their rows
        self._last_step_s = 0.0
        self._unprepared = False  # a step ran since the runner last had nothing left to prepare
        self._preparing = False  # `_prepare_when_quiet` runs
        self._stepped_at = 0.0
        self._awake_until = 0.0
        self._awake = False  # `_stay_awake` runs
        self._work = Signal()  # the queue, `_orders`, `_transfers` or `_aheads` has something new
        self._occupied = False  # the step loop runs a step or carries out an action
        self._aheads: list[StepAhead] = []  # in order; under way, or with outputs that were not asked for yet
        self._latest_ahead: StepAhead | None = None  # the device still has its output
        self._left = Signal()  # a session has ended or rests
        self.device_full = Signal()  # a step failed because the device's memory is full
        self._nursery: trio.Nursery | None = None
        self._attending: set[_InboundStream] = set()
        self._waiting = WaitingBytes()  # outputs for askers and successors that these have not read yet
        limits = self._settings.admission
        self._frame_limit = FrameBudget(limits, self._homes.of)
        self._dropped_limit = PeerRateLimit(limits.frames_burst, limits.frames_per_s)
        self.draining = False
        self._giver, self._taker = CacheGiver(self), CacheTaker(network, self)
        self._fetches: dict[bytes, trio.CancelScope] = {}  # by `HopSession.key`: sessions whose cache is fetched
        self._prompt_tokens_per_s = 0.0  # measured by whoever loaded the blocks; 0: not measured
        network.accept(PROTOCOL, self.attend)
        network.accept(CACHE_PROTOCOL, self._giver.attend)

    # --- what others see ----------------------------------------------------------------------------------------------

    @property
    def sessions(self) -> int:
        """Number of sessions in use; resting ones do not count."""
        return sum(session.rests_until is None for session in self._sessions.values())

    @property
    def queued_rows(self) -> int:
        """Number of tokens that wait for the device."""
        return self._queue.rows

    @property
    def kv_free_tokens(self) -> int:
        """Tokens that new sessions may still lease in the cache; what rests makes way for them."""
        return self._runner.kv_free_tokens + self._kv_resting_tokens if self._runner is not None else 0

    @property
    def kv_total_tokens(self) -> int:
        """Tokens of the largest session that the cache can hold."""
        return self._runner.kv_total_tokens if self._runner is not None else 0

    @property
    def _kv_resting_tokens(self) -> int:
        """Tokens of cache that nothing but resting sessions holds."""
        resting = [session.key for session in self._sessions.values() if session.rests_until is not None]
        return self._runner.tokens_freed_by(resting) if self._runner is not None and resting else 0

    @property
    def stats(self) -> ServerStats:
        """Totals since the start, and the present load."""
        runner, now = self._runner, trio.current_time()
        return self._counters.read(
            (session.stats(now) for session in self._sessions.values()),
            queued=(self._queue.rows, self._queue.sessions),
            kv=(runner.kv_free_tokens, self._kv_resting_tokens, runner.kv_total_tokens) if runner else (0, 0, 0),
        )

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; streams of askers end then, so that they open new ones to the next server."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                chunk_rows = self._settings.batch.chunk_rows
                self._sender = HopSender(self._network, nursery, chunk_rows, self._waiting, self._sent_again)
                self._sender.width = self._runner.hidden_size if self._runner is not None else 0
                nursery.start_soon(self._step_forever)
                nursery.start_soon(self._close_idle)
                task_status.started()
        finally:
            self._nursery = None
            for attended in self._attending:
                attended.scope.cancel()

    async def drain(self, within_s: float = DRAIN_S) -> bool:
        """Admit no new session and ask the askers to move theirs; True if all have left within `within_s`."""
        self.draining = True
        self._order(self._end_resting)
        for session in list(self._sessions.values()):
            await self._sender.report_error(session, "draining", _LEAVES)
        with trio.move_on_after(within_s):
            await self._left.wait_for(lambda: not self.sessions)
        return not self.sessions

    async def host(self, runner: BlockRunner | None, prompt_tokens_per_s: float = 0.0) -> None:
        """Serve other blocks from now on; sessions over the old ones end, and no reference to the old blocks stays."""
        self._prompt_tokens_per_s = prompt_tokens_per_s
        if self._nursery is None:
            await self._change_runner(runner)
        else:
            await self._result_of(self._order, partial(self._change_runner, runner))

    async def shrink(self, span: Span, shrink: Callable[[], Awaitable[T]]) -> T:
        """Have the sessions that use blocks outside of `span` move, and await `shrink` between two steps.

        Those that have not moved within `SHRINK_S` end: the memory is needed.
        """
        for session in self._outside(span):
            if session.rests_until is None:
                await self._sender.report_error(session, "draining", _GIVES_BACK)
        with trio.move_on_after(SHRINK_S):
            await self._left.wait_for(lambda: all(s.rests_until is not None for s in self._outside(span)))

        async def change() -> T:
            await self._end_outside(span)
            return await shrink()

        return await self._result_of(self._order, change)

    def _outside(self, span: Span | None) -> list[HopSession]:
        """The sessions that use other blocks than these."""
        return [s for s in self._sessions.values() if span is None or not span.covers(s.turn.span)]

    async def _end_outside(self, span: Span | None) -> None:
        self._aheads = []
        self._overwrite_rows()
        for session in self._outside(span):
            await self._sender.report_error(session, "closed", "this node now hosts other blocks")
            self._end(session, session.epoch)

    async def _change_runner(self, runner: BlockRunner | None) -> None:
        await self._end_outside(None)
        self._runner, self.draining = runner, False
        self._adapters.host(runner)
        if self._nursery is not None:
            self._sender.width = runner.hidden_size if runner is not None else 0

    # --- frames in ----------------------------------------------------------------------------------------------------

    async def attend(self, stream: FrameStream) -> None:
        """Read one peer's stream to its end; the sessions that were opened on it end with it."""
        if self._nursery is None:
            return
        self._homes.of(stream.peer)  # it has a link now
        answers = PeerOutbox(stream, self._nursery, waiting=self._waiting)
        attended = _InboundStream(stream, answers, trio.current_time())
        self._attending.add(attended)
        try:
            with attended.scope:
                await self._read(attended)
        finally:
            self._attending.discard(attended)

    async def _read(self, attended: _InboundStream) -> None:
        stream, answers = attended.stream, attended.answers
        try:
            await each_message(stream, partial(self._take, attended))
        except RecordError as error:
            log.warning("%s sent a malformed frame, its stream is closed: %s", stream.peer, error)
            await stream.reset()
        except P2PError:
            pass  # the stream ended
        finally:
            answers.broken = True
            self._order(partial(self._end_sessions_of, answers), stream.peer)

    async def _take(self, attended: _InboundStream, message: bytes) -> None:
        peer = attended.stream.peer
        attended.heard_at = now = trio.current_time()
        action, at_cost_of = None, peer
        try:
            frame = decode(message)
        except RowsError as error:
            frame = error.frame
            action, at_cost_of = await self._on_wrong_rows(error, peer)
        else:
            if frame.kind == Kind.DATA:
                action, at_cost_of = await self._on_data(frame, peer)
            else:
                await self._on_control(frame, peer, attended.answers)
                await self._orders.wait_for_room(peer)
        cost = frame_cost(frame.kind, action)
        if not cost:
            return
        # Dropped rows come on a stream that other askers share: it does not wait for what this peer orders itself.
        limit = self._dropped_limit if action is FrameAction.DROP else self._frame_limit
        delay_s = limit.delay_s(at_cost_of, now, cost)
        if delay_s and at_cost_of == peer:  # nothing is lost: what it sends meanwhile waits in the stream's window
            await trio.sleep(delay_s)

    def _sent_again(self, asker: str, size: int) -> None:
        """Count kept outputs that are sent again for an asker as frames: a short order may be for many of them.

        It is read more slowly then, as in `_take`; this node itself never is. If a hop dies, honest askers have a lot
        sent again, and its parts wait for the link anyway: others of the same home do not make that dearer.
        """
        if asker != self._network.peer_id:
            cost = size / self._settings.admission.again_bytes
            self._frame_limit.delay_s(asker, trio.current_time(), cost, alone=True)

    def _spent(self, asker: str, seconds: float) -> None:
        """Count the time that work on the cache took for an asker's order as frames, as `_sent_again` does."""
        if asker != self._network.peer_id:
            self._frame_limit.delay_s(asker, trio.current_time(), seconds / self._settings.admission.order_s)

    def _charged(self, asker: str, function: Callable[..., T], *args: object) -> T:
        """Call a function at the cost of an asker."""
        seconds, result = timed(function, *args)
        self._spent(asker, seconds)
        return result.unwrap()

    async def _on_data(self, frame: Frame, peer: str) -> tuple[FrameAction, str]:
        """Queue hidden states, answer them from kept outputs, or refuse them; frames that fit no session are dropped.

        Only the predecessor and the asker of a session may send for it. Returns also who pays for it: what a hop sends
        follows from the asker's orders, and other askers share that hop's stream.
        """
        session = self._by_id.get(frame.session)
        if session is not None and self._runner is not None and frame.width == self._runner.hidden_size:
            action = session.judge(peer, frame.epoch, frame.position, frame.rows, frame.revision)
            if action is not FrameAction.DROP:
                await self._act_on(action, session, frame)
                return action, session.asker
        self._counters.dropped_frames += 1
        return FrameAction.DROP, peer

    async def _on_wrong_rows(self, error: RowsError, peer: str) -> tuple[FrameAction, str]:
        """End the session that such rows are for; the stream goes on, as those of other askers come over it too."""
        session = self._by_id.get(error.frame.session)
        if session is None or not session.hears(peer, error.frame.epoch):
            self._counters.dropped_frames += 1
            return FrameAction.DROP, peer
        log.warning("%s sent wrong rows, their session ends: %s", peer, error)
        await self._give_up(session, "input", str(error))  # the asker finds out whose doing it is
        return FrameAction.GAP, session.asker

    async def _act_on(self, action: FrameAction, session: HopSession, frame: Frame) -> None:
        session.heard_at = now = trio.current_time()
        session.counters.bytes_in += HEADER_BYTES + len(frame.body)
        if action is FrameAction.CUT:
            self._cut(session, frame)
        if action in (FrameAction.COMPUTE, FrameAction.CUT):
            session.accepted(frame.rows)
            if not session.turn.successor:
                session.forget_before(frame.position)  # the asker sends the next token, so it has all earlier outputs
            queued = QueuedTokens(
                session=session.key,
                peer=session.asker,
                home=session.home,
                epoch=session.epoch,
                revision=session.revision,
                position=frame.position,
                rows=frame.rows,
                data=frame.body,
                dtype=DTYPE_NAMES[frame.dtype],
                urgent=frame.rows <= URGENT_ROWS and frame.position >= session.turn.urgent_from,
                arrived_at=now,
                first=not session.turn.predecessor,
                group=(session.turn.span, session.turn.adapter),
                shares_device=self._settings.stays_awake and self._is_at_home(session),
            )
            self._queue.put(queued)
            self._work.notify()
            while self._queue.bytes > self._settings.queued_bytes:
                text = "more of its rows wait here than this node has memory for"
                await self._give_up(self._sessions[self._queue.largest], "busy", text)
        elif action is FrameAction.REPEAT:
            self._sender.send_again(session, frame.position, frame.position + frame.rows, must=False)
        else:
            await self._sender.report_error(
                session, "gap", f"tokens at {frame.position} do not follow {session.received}"
            )

    async def _give_up(self, session: HopSession, code: str, text: str) -> None:
        """End a session because of the rows that were sent for it: too many of them, or wrong ones."""
        self._queue.drop_rows(session.key)
        session.is_over = True
        self._order(partial(self._end_over, session), session.asker)
        await self._sender.report_error(session, code, text)

    async def _end_over(self, session: HopSession) -> None:
        if self._sessions.get(session.key) is session:
            self._end(session, session.epoch)

    def _is_at_home(self, session: HopSession) -> bool:
        """True if a session is of this node's own asker, and no other hop takes part in it."""
        turn = session.turn
        return session.asker == self._network.peer_id and not turn.predecessor and not turn.successor

    def _cut(self, session: HopSession, frame: Frame) -> None:
        """Drop a session's tokens from the frame's position on; the cache follows before the next step."""
        self._queue.drop_rows(session.key)
        session.begin_revision(frame.revision, frame.position)
        if session.key not in self._to_truncate:  # once, however often it is cut during a step
            self._to_truncate.add(session.key)
            self._order(partial(self._truncate, session), session.asker)

    async def _truncate(self, session: HopSession) -> None:
        """Cut a session's cache to its length; a step that was under way may have added rows to it.

        The rows that replace the dropped ones cost more than that, unless there are shared pages to copy.
        """
        runner = self._runner
        if self._sessions.get(session.key) is not session or runner is None:
            return
        self._to_truncate.discard(session.key)
        try:
            self._cut_cache(session, runner, is_ordered=False)
        except EngineError as error:
            await self._sender.report_error(session, "closed", str(error))
            self._end(session, session.epoch)

    def _cut_cache(self, session: HopSession, runner: BlockRunner, *, is_ordered: bool) -> None:
        """Cut a session's cache to its length; resting sessions make room where that takes a page.

        Its asker pays for an order, and wherever pages were copied. Raises `EngineError`, `CacheFull` without room.
        """
        while True:
            free = runner.kv_free_tokens
            seconds, cut = timed(runner.truncate, session.key, session.length)
            if is_ordered or runner.kv_free_tokens < free:
                self._spent(session.asker, seconds)
            try:
                cut.unwrap()
                return
            except CacheFull:
                if not self._end_one_resting():
                    raise

    async def _on_control(self, frame: Frame, peer: str, answers: PeerOutbox) -> None:
        """Carry out what an asker orders for its own session."""
        if frame.kind == Kind.TURN:
            turn = decode_turn(frame)
            if not belongs_to(frame.session, peer):
                raise RecordError("the session's id is not one that this peer may use")
            if turn.adapter is None or self._nursery is None:
                self._order(partial(self._on_turn, frame, turn, peer, answers), peer)
            else:
                self._on_adapted_turn(frame, turn, peer, answers)
            return
        if frame.kind == Kind.CLOSE:  # even of an unknown session: its TURN may still wait for a step's end
            self._order(partial(self._on_close, frame, peer), peer)
            return
        session = self._sessions.get(session_key(peer, frame.session))
        if session is None or session.rests_until is not None:
            self._counters.dropped_frames += 1
            if frame.kind == Kind.PROBE:
                await answers.push(control_frame(plain(Kind.STATE, frame.session, 0)))
            return
        if frame.kind == Kind.PROBE:
            session.heard_at = trio.current_time()
            queued = min(self._queue.rows, 2**31)
            state = plain(
                Kind.STATE, session.id, session.epoch, session.length, session.received, queued, session.revision
            )
            await answers.push(control_frame(state))
        elif frame.kind == Kind.PACE:
            await answers.push(control_frame(encode_pace(session.id, session.epoch, session.counters.pace)))
        elif frame.kind == Kind.GIVE:
            grant = decode_give(frame)
            session.give_to(grant)
            self._giver.allowed(session, grant.peer)
        elif frame.kind == Kind.GO and frame.epoch == session.epoch and session.send_from is None:  # once an epoch
            session.send_from = frame.position
            self._sender.send_again(session, frame.position, session.length)

    # --- orders with an adapter ---------------------------------------------------------------------------------------

    def _on_adapted_turn(self, frame: Frame, turn: EpochOrder, peer: str, answers: PeerOutbox) -> None:
        """Carry out an order between two steps, once its adapter is loaded."""
        assert self._nursery is not None, "streams are read while the server runs"
        assert turn.adapter is not None, "another order needs no adapter"
        on_turn = partial(self._on_turn, frame, turn, peer, answers)
        key = AdapterKey(peer, turn.adapter.root, turn.span)
        if (loaded := self._adapters.held(key)) is not None:
            self._order(partial(self._with_adapter, loaded, on_turn), peer)
        elif self.draining or not self._adapters.may_load(turn.span):
            self._order(on_turn, peer)  # a new session is refused
        else:
            self._awaited[session_key(peer, frame.session)] += 1
            load = partial(self._load_adapter, key, turn.adapter, frame, on_turn, answers)
            self._nursery.start_soon(guarded, "loading an adapter", load)

    async def _load_adapter(
        self, key: AdapterKey, ref: AdapterRef, frame: Frame, on_turn: Turn, answers: PeerOutbox
    ) -> None:
        """Load an adapter, then have the order carried out that waits for it."""
        loaded = await self._adapters.load(key, ref)
        self._awaited -= Counter([session_key(key.asker, frame.session)])
        if isinstance(loaded, HopError):
            log.info("%s asks for an adapter: %s", key.asker, loaded.text)
            await answers.push(control_frame(encode_hop_error(frame.session, frame.epoch, 0, loaded)))
        else:
            self._order(partial(self._with_adapter, loaded, on_turn), key.asker)

    async def _with_adapter(self, loaded: LoadedAdapter, on_turn: Turn) -> None:
        try:
            await on_turn(adapter=loaded)
        finally:
            self._adapters.release(loaded)  # a session that the order opened holds it too

    def idle_since(self, adapter: LoadedAdapter) -> float:
        """Return when an adapter in use was last used; see `app.serving.adapters.AdapterUsers`."""
        sessions = [session for session in self._sessions.values() if session.adapter is adapter]
        if len(sessions) < adapter.users:
            return trio.current_time()  # an order is about to be carried out
        in_use = [session for session in sessions if session.rests_until is None]
        if any(session.asker == self._network.peer_id for session in in_use):
            return math.inf
        return max((session.counters.worked_at for session in in_use), default=-math.inf)

    async def end_users(self, adapters: Collection[LoadedAdapter]) -> None:
        """End the sessions that use these adapters, between two steps; the askers of those that rest are not told."""

        async def end() -> None:
            for session in list(self._sessions.values()):
                if session.adapter in adapters:
                    if session.rests_until is None:
                        await self._sender.report_error(session, MADE_WAY.code, MADE_WAY.text, MADE_WAY.why)
                    self._end(session, session.epoch)

        await self._result_of(self._order, end)

    # --- sessions; called between two steps ---------------------------------------------------------------------------

    async def _on_turn(
        self,
        frame: Frame,
        turn: EpochOrder,
        peer: str,
        answers: PeerOutbox,
        adapter: LoadedAdapter | None = None,
    ) -> None:
        key = session_key(peer, frame.session)
        session = self._sessions.get(key)
        known_epoch = session.epoch if session is not None else self._closed.get(key, -1)
        if frame.epoch <= known_epoch or answers.broken:
            self._counters.dropped_frames += 1
            return
        if session is not None and (session.rests_until is not None or not session.goes_on_with(turn)):
            self._end(session, known_epoch)
            session = None
        if session is None:
            opened = await self._open(frame, turn, peer, adapter)
        else:
            opened = self._go_on(session, frame, turn)
        if isinstance(opened, HopError):
            await answers.push(control_frame(encode_hop_error(frame.session, frame.epoch, 0, opened)))
            return
        is_new, session = session is None, opened
        self._sender.begin(session, answers)
        if is_new and session.kept:
            await self._evict_kept_outputs()  # another session has them too, and orders come faster than steps
        source = self._taker.reserve(session) if is_new else None
        if source is not None:
            self._start_fetch(session, source, answers)
        else:
            await self._begin(session, answers)

    async def _begin(self, session: HopSession, answers: PeerOutbox) -> None:
        """Say that an epoch has begun, and send what the successor is known to need."""
        session.heard_at = trio.current_time()
        knows = KNOWS_REVISIONS | GIVES_CACHE | (KNOWS_ADAPTERS if self._adapters.is_served else 0)
        ready = plain(Kind.READY, session.id, session.epoch, session.length, session.kept.start, knows)
        await answers.push(control_frame(ready))
        if self.draining:  # an asker that began this epoch at that moment has missed it
            await self._sender.report_error(session, "draining", _LEAVES)
        if session.send_from is not None:
            self._sender.send_again(session, session.send_from, session.length)

    def _go_on(self, session: HopSession, frame: Frame, turn: EpochOrder) -> HopSession | HopError:
        """Begin an epoch of an open session; an error ends it."""
        assert self._runner is not None, "no session outlives its runner"
        self._queue.drop(session.key)
        self._stop_fetch(session)
        before = session.length
        session.begin_epoch(frame.epoch, frame.position, turn)
        if session.length < before:
            try:
                self._cut_cache(session, self._runner, is_ordered=True)
            except CacheFull as error:
                self._end(session, session.epoch)
                return HopError("busy", str(error), "cache_full")
        return session

    async def _open(
        self, frame: Frame, turn: EpochOrder, peer: str, adapter: LoadedAdapter | None
    ) -> HopSession | HopError:
        """Admit a new session, or say why not."""
        if self.draining:
            return HopError("draining", "this node is about to leave")
        source = None if turn.prefix is None else self._sessions.get(session_key(peer, turn.prefix.session))
        length = 0 if source is None else source.shares_with(turn)
        in_use = source is not None and source.rests_until is None  # else its cache counts as free room already
        lacks_adapter = turn.adapter is not None and (adapter is None or adapter.is_dropped)
        home = self._homes.of(peer)
        for session in self._sessions.values():
            if session.asker == peer:
                session.home = home  # it may have another address by now
        refusal = await self._find_room(peer, home, turn, length if in_use else 0, others_end=not lacks_adapter)
        if refusal is not None:
            return refusal
        if lacks_adapter:
            return HopError("refused", "this node does not serve sessions with an adapter now", "adapter_refused")
        session = HopSession(frame.session, peer, frame.epoch, turn, trio.current_time(), home)
        session.adapter = adapter
        most = self._settings.admission.sessions
        while len(self._sessions) >= most and self._end_one_resting(but=source if length else None):
            pass
        try:
            await self._lease(session, source if length else None, length)
        except EngineError as error:
            return HopError("busy", str(error), "cache_full")
        if adapter is not None:
            adapter.users += 1
        self._closed.pop(session.key, None)
        self._sessions[session.key] = session
        self._by_id[session.id] = session
        self._counters.opened_by(peer)
        self._counters.reused_tokens += length
        return session

    async def _lease(self, session: HopSession, source: HopSession | None, length: int) -> None:
        """Lease cache for a new session, with the first `length` tokens of `source`; resting sessions make room.

        Raises `EngineError` without room. A resting source that could stay beside the new session only if there were
        more room is taken over, whatever its asker wished.
        """
        runner, tokens = self._runner, session.turn.tokens
        assert runner is not None, "a server without a runner refuses every session"
        ends = session.turn.prefix is not None and session.turn.prefix.ends
        if source is not None and len(self._sessions) >= self._settings.admission.sessions:
            ends = True  # there is no other place
        while True:
            try:
                if source is None:
                    weights = None if session.adapter is None else session.adapter.weights
                    self._charged(session.asker, runner.open, session.key, tokens, weights)
                else:
                    lease = runner.take_over if ends else runner.fork
                    seconds, leased = await self._device.run(timed, lease, session.key, tokens, source.key, length)
                    self._spent(session.asker, seconds)
                    leased.unwrap()
                break
            except CacheFull:
                if self._end_one_resting(but=source):
                    continue
                if source is not None and ends:
                    self._end(source, source.epoch)  # it may have been cut
                if source is None or ends or source.rests_until is None:
                    raise
                ends = True
        if source is not None:
            session.begin_with(source, length)
            if ends:
                self._end(source, source.epoch)

    async def _on_close(self, frame: Frame, peer: str) -> None:
        key = session_key(peer, frame.session)
        session = self._sessions.get(key)
        if self._awaited[key]:
            self._remember_closed(key, frame.epoch)  # an order that still waits for its adapter comes too late
        if session is None or frame.epoch < session.epoch:
            return
        if not frame.rows or not session.length or self.draining or self._runner is None:
            self._end(session, frame.epoch)
        elif session.rests_until is None:
            self._queue.drop(session.key)
            self._sender.end(session)
            self._stop_fetch(session)
            session.heard_at = now = trio.current_time()
            session.rest(now + min(frame.rows, self._settings.rest_s))
            self._runner.resize(session.key, session.length)
            self._left.notify()

    async def _find_room(
        self, asker: str, home: str, turn: EpochOrder, shared: int, *, others_end: bool
    ) -> HopError | None:
        """Say why a new session is not admitted; with `others_end`, sessions of those above their share may end."""
        room = self._room()
        refusal = self._charged(asker, why_not, turn, asker, home, room, shared)
        if refusal is None or room is None or not others_end:
            return refusal
        tokens, now = room.needed(turn.tokens, shared), trio.current_time()
        to_end = self._charged(asker, sessions_in_the_way, refusal, asker, home, tokens, room, self._cache_turns, now)
        for session in to_end:
            await self._sender.report_error(session, "busy", "its room is needed for others, who have less of it")
            self._end(session, session.epoch)
        return None if to_end else refusal

    def _room(self) -> HopRoom | None:
        if self._runner is None:
            return None
        limits, own = self._settings.admission, self._network.peer_id
        held_back = self._cache_turns.held_back(trio.current_time())
        return HopRoom(self._runner, self._sessions.values(), limits, own, held_back)

    async def _end_resting(self) -> None:
        while self._end_one_resting():
            pass

    def _end_one_resting(self, but: HopSession | None = None) -> bool:
        """End the resting session that is to make room first; False if none is left besides `but`."""
        victim = resting_to_end(session for session in self._sessions.values() if session is not but)
        if victim is not None:
            self._end(victim, victim.epoch)
        return victim is not None

    async def _end_sessions_of(self, answers: PeerOutbox) -> None:
        for session in self._sender.ordered_on(answers):
            self._end(session, session.epoch)

    def _end(self, session: HopSession, epoch: int) -> None:
        """Free everything that a session holds here."""
        if self._sessions.pop(session.key, None) is None:
            return
        del self._by_id[session.id]
        self._counters.ended(session.counters)
        self._sender.end(session)
        self._queue.drop(session.key)
        self._to_truncate.discard(session.key)
        self._stop_fetch(session)
        if self._runner is not None:
            self._runner.close(session.key)
        self._adapters.release(session.adapter)
        self._remember_closed(session.key, epoch)
        self._left.notify()

    def _remember_closed(self, key: bytes, epoch: int) -> None:
        self._closed[key] = epoch
        if len(self._closed) > _REMEMBERED_CLOSED:
            self._closed.popitem(last=False)

    async def _close_idle(self) -> None:
        """End sessions that are idle, and close unused streams."""
        while True:
            await trio.sleep(self._settings.idle_s / 8)
            await self._close_idle_streams()
            for session in list(self._sessions.values()):
                if self._is_idle(session):
                    if session.rests_until is None:
                        await self._sender.report_error(session, "closed", "the session was idle for too long")
                    self._order(partial(self._end_if_idle, session), session.asker)

    def _is_idle(self, session: HopSession) -> bool:
        """True if a session has rested for long enough, its asker is silent, or it was never used for anything."""
        now, settings = trio.current_time(), self._settings
        if session.rests_until is not None:
            return session.rests_until <= now
        is_unused = not session.counters.tokens and session.counters.opened_at < now - settings.unused_s
        return is_unused or session.heard_at < now - settings.idle_s

    async def _close_idle_streams(self) -> None:
        await self._sender.close_idle()
        idle_since = trio.current_time() - IDLE_STREAM_S
        needed = {session.turn.predecessor for session in self._sessions.values() if session.rests_until is None}
        for attended in list(self._attending):
            is_needed = attended.stream.peer in needed or self._sender.ordered_on(attended.answers)
            if attended.heard_at < idle_since and not is_needed:
                await attended.stream.reset()

    async def _end_if_idle(self, session: HopSession) -> None:
        if self._sessions.get(session.key) is session and self._is_idle(session):
            self._end(session, session.epoch)

    # --- hand-overs of caches -----------------------------------------------------------------------------------------

    def session(self, id: bytes) -> HopSession | None:
        """Return an open session that does not rest."""
        session = self._by_id.get(id)
        return None if session is None or session.rests_until is not None else session

    def cache_form(self) -> CacheForm | None:
        """The form of the cache; None while nothing is hosted."""
        runner = self._runner
        return None if runner is None else CacheForm(runner.cache_format, runner.cache_row_bytes)

    async def export(self, session: HopSession, span: Span, start: int, stop: int) -> memoryview:
        """Return the cache of a session's tokens; raises `EngineError` if it does not have them any more."""

        async def read() -> memoryview:
            runner = self._of_open(session)
            blocks = (span.start, span.stop)
            return memoryview(await self._move_cache(runner.export_cache, session.key, blocks, start, stop))

        return await self._result_of(self._transfer, read)

    async def load(self, session: HopSession, epoch: int, chunk: CacheChunk) -> None:
        """Append tokens to the cache of a session; raises `EngineError` if they do not fit or the epoch is over."""

        async def write() -> None:
            runner, span = self._of_open(session), session.turn.span
            if session.epoch != epoch or not session.fetching:
                raise SessionError("the session has begun another epoch")
            blocks = (span.start, span.stop)
            await self._move_cache(runner.import_cache, session.key, blocks, chunk.position, chunk.body)
            session.took(chunk.rows)

        await self._result_of(self._transfer, write)

    async def _move_cache(self, function: Callable[..., T], *args: object) -> T:
        try:
            return await self._device.run(function, *args)
        except EngineError:
            raise
        except Exception as error:  # torch raises errors of every kind; the tokens are read again
            log.exception("the device could not move a session's cache")
            raise SessionError("the device could not move the cache") from error

    def _of_open(self, session: HopSession) -> BlockRunner:
        """The runner, if it still has this session; raises `SessionError` if not."""
        if self._sessions.get(session.key) is not session or self._runner is None:
            raise SessionError("the session is over")
        return self._runner

    def _start_fetch(self, session: HopSession, source: CacheGrant, answers: PeerOutbox) -> None:
        assert self._nursery is not None, "orders are carried out while the server runs"
        session.fetching = True
        scope = self._fetches[session.key] = trio.CancelScope()
        fetch = partial(self._fetch, session, source, answers, scope)
        self._nursery.start_soon(guarded, "taking a session's cache over", fetch)

    def _stop_fetch(self, session: HopSession) -> None:
        scope = self._fetches.pop(session.key, None)
        if scope is not None:
            scope.cancel()

    async def _fetch(
        self, session: HopSession, source: CacheGrant, answers: PeerOutbox, scope: trio.CancelScope
    ) -> None:
        """Take a new session's cache from another hop, then begin its epoch with what is here."""
        read_tokens_per_s = self._counters.prompt_tokens_per_s.value or self._prompt_tokens_per_s
        with scope:
            is_sound = await self._taker.take(session, source, read_tokens_per_s or UNMEASURED_TOKENS_PER_S)
            fetched = partial(self._fetched, session, answers, is_sound)
            await self._result_of(partial(self._order, asker=session.asker), fetched)

    async def _fetched(self, session: HopSession, answers: PeerOutbox, is_sound: bool) -> None:
        if self._sessions.get(session.key) is not session or not session.fetching:
            return
        del self._fetches[session.key]
        session.fetching = False
        if not is_sound:
            session.took_nothing()
            await self._truncate(session)
        if self._sessions.get(session.key) is session:  # its cache could be cut
            await self._begin(session, answers)

    # --- steps --------------------------------------------------------------------------------------------------------

    def _order(self, order: Order, asker: str = "") -> None:
        """Leave what touches the cache to the step loop: no two orders, and no step, ever overlap."""
        self._orders.put(asker, self._homes.of(asker or self._network.peer_id), order)
        self._work.notify()

    def _transfer(self, order: Order) -> None:
        """Leave a part of a cache that moves to the step loop."""
        self._transfers.append(order)
        self._work.notify()

    async def _result_of(self, leave: Callable[[Order], None], action: Callable[[], Awaitable[T]]) -> T:
        """Leave an action to the step loop with `_order` or `_transfer`, and return its result or raise its error."""
        results: list[outcome.Outcome[T]] = []
        done = trio.Event()

        async def act() -> None:
            try:
                results.append(outcome.Value(await action()))
            except Exception as error:  # not a cancellation: that is the step loop's own
                results.append(outcome.Error(error))
            finally:
                done.set()

        leave(act)
        await done.wait()
        if not results:
            raise SessionError("the block server has stopped")
        return results[0].unwrap()

    async def _step_forever(self) -> None:
        """The step loop: orders for some time, then the next batch, and so on.

        Caches move part by part, each asked for when the last one is done: steps would wait for the end of them all.
        """
        while True:
            if self._aheads and await self._attend_aheads():
                continue
            if self._transfers:
                await self._carry_out(self._transfers.popleft())
            until = trio.current_time() + min(self._last_step_s, ORDERS_S)
            while self._orders:
                await self._carry_out(self._orders.take())
                if trio.current_time() >= until:
                    break
            batch = self._queue.take(trio.current_time(), self._is_behind, self._to_truncate)
            if isinstance(batch, list):
                await self._step(batch)
            elif self._orders:
                await trio.lowlevel.checkpoint()
            elif not self._transfers:
                with trio.move_on_at(math.inf if batch is None else batch):
                    await self._work.wait()

    def _is_behind(self, work: QueuedTokens) -> bool:
        return self._sender.is_behind(self._sessions[work.session], urgent=work.urgent)

    async def _carry_out(self, order: Order) -> None:
        """Carry out one order; a failure costs nobody but the peer that caused it."""
        self._occupied = True
        self._overwrite_rows()
        try:
            await order()
        except Exception:
            log.exception("an order of a peer could not be carried out")
        finally:
            self._occupied = False

    async def _prepare_when_quiet(self) -> None:
        """Once no step has run for `PREPARE_AFTER_S`, have the step loop prepare later ones, until nothing is left.

        One task for many steps, rather than a timer for each of them.
        """
        while self._unprepared:
            quiet_at = self._stepped_at + PREPARE_AFTER_S
            if trio.current_time() < quiet_at:
                await trio.sleep_until(quiet_at)
                continue
            prepared = trio.Event()
            self._order(partial(self._prepare, prepared))
            await prepared.wait()
        self._preparing = False

    async def _prepare(self, prepared: trio.Event) -> None:
        """Let the runner build one thing that later steps need, unless a session has work by now."""
        runner = self._runner
        try:
            if self._queue.rows:
                self._stepped_at = trio.current_time()  # a step is about to run
            else:
                self._unprepared = runner is not None and await self._device.run(runner.prepare)
        except Exception:  # torch raises errors of every kind; steps work without it
            log.exception("the device could not prepare a step")
            self._unprepared = False
        finally:
            prepared.set()

    async def _step(self, batch: list[QueuedTokens]) -> None:
        """Run one batch through the blocks and send every session's outputs on."""
        assert self._runner is not None, "no session outlives its runner"
        self._stepped_at = started_at = trio.current_time()
        self._unprepared = True
        if not self._preparing and self._nursery is not None:
            self._preparing = True
            self._nursery.start_soon(self._prepare_when_quiet)
        work = [self._step_work(item) for item in batch]
        self._occupied = True
        self._overwrite_rows()
        try:
            outputs = await self._run_step(self._runner, work)
        except Exception as error:  # torch raises errors of every kind; they must cost no other session
            if not isinstance(error, EngineError):
                log.exception("a device step failed")
            await self._step_failed(batch, error)
            return
        finally:
            self._occupied = False
        await self._deliver_all(batch, outputs, started_at, trio.current_time())

    async def _deliver_all(
        self, batch: list[QueuedTokens], outputs: Sequence[StepOutput], started_at: float, ended_at: float
    ) -> None:
        """Send the outputs of a step on, and count it."""
        sent_at: list[float] = []
        for item, output in zip(batch, outputs, strict=True):
            await self._deliver(item, output)
            sent_at.append(trio.current_time())
        self._queue.done(batch, ended_at - started_at, ended_at)
        self._count(batch, started_at, ended_at, sent_at)
        if not batch[0].urgent or self._counters.steps % _CHECK_KEPT_EVERY == 0:
            await self._evict_kept_outputs()

    async def _run_step(self, runner: BlockRunner, work: list[StepWork]) -> Sequence[StepOutput]:
        """Run a step in the device's thread or, where the device can, start it here and look until it is done."""
        started = runner.launch(work) if self._settings.stays_awake else None
        if started is None:
            self._awake_until = 0.0  # an event loop that stays awake takes the interpreter from the device's thread
            return await self._device.run(runner.step, work)
        outputs = await result_of(started)
        self._keep_awake()
        return outputs

    def _keep_awake(self) -> None:
        self._awake_until = trio.current_time() + AWAKE_S
        if not self._awake and self._nursery is not None:
            self._awake = True
            self._nursery.start_soon(self._stay_awake)

    async def _stay_awake(self) -> None:
        """Keep the event loop from sleeping until `AWAKE_S` after the last step: the next token is on its way."""
        while trio.current_time() < self._awake_until:
            await trio.lowlevel.checkpoint()
        self._awake = False

    def go_ahead(self, steps: Sequence[NextStep], rows: Any) -> StepAhead | None:
        """Begin a step of this node's own replies with the embeddings `rows` that the device is about to know.

        Only while nothing else waits, and if all sessions take part: others would have to wait for a step that they
        could have shared. None: nothing was begun.
        """
        runner, sessions = self._runner, [self._by_id.get(step.session) for step in steps]
        self._aheads = [ahead for ahead in self._aheads if self._is_awaited(ahead)]
        waits = self._orders or self._transfers
        if runner is None or self._occupied or waits or len(self._aheads) >= MAX_AHEAD:
            return None
        ready = [
            session
            for session, step in zip(sessions, steps, strict=True)
            if session is not None and may_go_ahead(session, step, self._aheads)
        ]
        if len(ready) < len(steps) or len(steps) != self.sessions:
            return None
        work = [
            StepWork(one.key, one.turn.span.start, one.turn.span.stop, step.position, 1, NO_DATA, "", one.turn.wire)
            for one, step in zip(ready, steps, strict=True)
        ]
        self._overwrite_rows()
        try:
            started = runner.launch_ahead(work, rows)
        except EngineError as error:
            log.info("a step could not begin ahead: %s", error)
            return None
        if started is None:
            return None
        self._stepped_at = trio.current_time()
        self._latest_ahead = ahead = StepAhead(started, ready, steps, self._stepped_at)
        self._aheads.append(ahead)
        self._work.notify()
        return ahead

    def _overwrite_rows(self) -> None:
        """Note that another step is about to begin: nobody may go on with the device's output of an earlier one."""
        if self._latest_ahead is not None:
            self._latest_ahead.rows = None
            self._latest_ahead = None

    def _is_awaited(self, ahead: StepAhead) -> bool:
        """True if a step ahead is under way, or a session may still ask for what it computed."""
        return ahead.is_under_way or any(ahead.is_for(session) for session in self._sessions.values())

    async def _attend_aheads(self) -> bool:
        """Look whether steps ahead are done, and send the outputs that tokens in the queue ask for.

        False if there is nothing to wait for or to send: the step loop may do something else.
        """
        for ahead in self._aheads:
            try:
                ahead.look(trio.current_time())
            except Exception as error:  # torch raises errors of every kind; the tokens are computed when they come
                log.warning("a step ahead failed: %s", error)
        for ahead in self._aheads:
            if not ahead.is_under_way and await self._deliver_ahead(ahead):
                self._keep_awake()
                return True
        if not any(ahead.is_under_way for ahead in self._aheads):
            return False
        await trio.lowlevel.cancel_shielded_checkpoint()
        return True

    async def _deliver_ahead(self, ahead: StepAhead) -> bool:
        """Send the outputs of a step ahead that tokens in the queue ask for; False if there are none."""
        assert self._runner is not None, "no session outlives its runner"
        batch: list[QueuedTokens] = []
        outputs: list[StepOutput] = []
        for item in self._queue.heads:
            output = ahead.take(item, self._sessions[item.session])
            if output is not None:
                self._queue.remove(item)
                self._runner.accept(item.session, item.position + 1)
                batch.append(item)
                outputs.append(output)
        if batch:
            await self._deliver_all(batch, outputs, ahead.begun_at, ahead.ended_at)
        return bool(batch)

    def _step_work(self, item: QueuedTokens) -> StepWork:
        turn = self._sessions[item.session].turn
        return StepWork(
            session=item.session,
            start=turn.span.start,
            stop=turn.span.stop,
            position=item.position,
            rows=item.rows,
            data=item.data,
            dtype=item.dtype,
            wire=turn.wire,
        )

    async def _deliver(self, item: QueuedTokens, output: StepOutput) -> None:
        """Keep a session's outputs, and send those that its successor needs."""
        session = self._sessions[item.session]
        if item.revision != session.revision:
            return  # it was cut during the step, and so will be its cache
        session.computed(item.rows, output.data, output.dtype)
        first, stop = session.send_from, item.position + item.rows
        if first is None or first >= stop:
            if first is not None and not session.turn.successor:
                session.forget_before(stop)
        elif first <= item.position:
            await self._sender.send(session, item.position, output.data)
        else:
            needed = memoryview(output.data)[(first - item.position) * session.kept.row_bytes :]
            await self._sender.send(session, first, needed)

    async def _step_failed(self, batch: list[QueuedTokens], error: Exception) -> None:
        """End the session at fault, which the error names or halving the batch finds; the others go on.

        A full device is nobody's fault: all sessions of the step move to other nodes, so that this one can shrink.
        """
        if isinstance(error, DeviceFull):
            log.warning("a step of %d sessions failed: %s", len(batch), error)
            for item in batch:
                session = self._sessions[item.session]
                await self._sender.report_error(session, "busy", str(error))
                self._end(session, session.epoch)
            self.device_full.notify()
            return
        if len(batch) > 1:
            named = [item for item in batch if isinstance(error, NotFinite) and item.session == error.session]
            parts = [named, [item for item in batch if item not in named]] if named else _halves(batch)
            for part in parts:
                await self._step(part)
            return
        session = self._sessions[batch[0].session]
        log.warning("a step of session %s failed: %s", session.id.hex()[:8], error)
        # Input that is not finite is the predecessor's doing: the asker finds out whose.
        await self._sender.report_error(session, "input" if isinstance(error, NotFinite) else "failed", str(error))
        self._end(session, session.epoch)

    def _count(self, batch: list[QueuedTokens], started_at: float, ended_at: float, sent_at: list[float]) -> None:
        self._last_step_s = seconds = ended_at - started_at
        self._counters.stepped(sum(item.rows for item in batch), seconds, urgent=batch[0].urgent)
        for item, sent in zip(batch, sent_at, strict=True):
            session = self._sessions[item.session]
            arrived_at = max(item.arrived_at, started_at)  # later than that only after a step ahead
            step_s = max(ended_at - arrived_at, 0.0)
            pace = HopPace(step_s, arrived_at - item.arrived_at, sent - arrived_at - step_s)
            session.counters.stepped(item.rows, pace, ended_at, urgent=item.urgent)
            self._counters.served(session.asker, item.rows)

    async def _evict_kept_outputs(self) -> None:
        """Keep the kept outputs within their budget: sessions lose all of theirs, and their askers are told."""
        kept_bytes = sum(len(session.kept) for session in self._sessions.values())
        while kept_bytes > self._settings.kept_bytes:
            session = first_to_evict(list(self._sessions.values()))
            kept_bytes -= session.evict()
            await self._sender.report_error(session, "evicted", "outputs are no longer kept for replay")


def _halves(batch: list[QueuedTokens]) -> list[list[QueuedTokens]]:
    middle = len(batch) // 2
    return [batch[:middle], batch[middle:]]

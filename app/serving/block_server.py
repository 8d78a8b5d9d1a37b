"""The block server: sessions of many askers over the hosted blocks.

Each stream has a reader that only judges frames and queues work; `app.serving.stepper` drives the device, and what
comes out is sent on from there. The rules of a session are in `app.serving.hop_session`, the order of work in
`app.serving.batching`, the frames in `app.session.wire`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import trio

from app.core.compute import BlockRunner, Device, StepOutput
from app.core.errors import RecordError
from app.core.network import FrameStream, Network
from app.serving.admission import AdmissionLimits, why_not
from app.serving.batching import URGENT_ROWS, BatchLimits, QueuedTokens
from app.serving.hop_sender import HopSender, control_frame
from app.serving.hop_session import FrameAction, HopSession, first_to_evict
from app.serving.stats import ServerStats
from app.serving.stepper import Stepper
from app.session.outbound import PeerOutbox
from app.session.wire import (
    DTYPE_NAMES,
    HEADER_BYTES,
    PROTOCOL,
    EpochOrder,
    Frame,
    HopError,
    Kind,
    decode,
    decode_turn,
    encode_pace,
    encode_trouble,
    plain,
)
from engine.errors import EngineError
from p2p.errors import P2PError

if TYPE_CHECKING:
    from trio_typing import TaskStatus

log = logging.getLogger("shoal.sessions")

DRAIN_S = 30.0
_REMEMBERED_CLOSED = 4096
_CHECK_KEPT_EVERY = 32  # steps


@dataclass(frozen=True)
class ServerSettings:
    """How a block server behaves."""

    batch: BatchLimits = field(default_factory=BatchLimits)
    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    kept_bytes: int = 1 << 30  # host memory for outputs that may have to be replayed
    idle_s: float = 120.0


class BlockServer:
    """Serves the blocks of a runner to the swarm; `run` must be running."""

    def __init__(
        self, network: Network, runner: BlockRunner | None, device: Device, settings: ServerSettings | None = None
    ) -> None:
        self._network = network
        self._settings = settings or ServerSettings()
        self._stepper = Stepper(self, runner, device, self._settings.batch)
        self._sessions: dict[bytes, HopSession] = {}
        self._closed: OrderedDict[bytes, int] = OrderedDict()  # epochs of sessions that are over
        self._emptied = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._attending: set[trio.CancelScope] = set()
        self.draining = False
        network.accept(PROTOCOL, self.attend)

    # --- what others see ----------------------------------------------------------------------------------------------

    @property
    def sessions(self) -> int:
        """How many sessions are open."""
        return len(self._sessions)

    @property
    def queued_rows(self) -> int:
        """Tokens that wait for the device."""
        return self._stepper.queue.rows

    @property
    def kv_free_tokens(self) -> int:
        """Room for new sessions."""
        return self._stepper.runner.kv_free_tokens if self._stepper.runner is not None else 0

    @property
    def stats(self) -> ServerStats:
        """What it has done, and how it stands now."""
        runner, now = self._stepper.runner, trio.current_time()
        return self._stepper.counters.read(
            (session.stats(now) for session in self._sessions.values()),
            queued=(self._stepper.queue.rows, self._stepper.queue.sessions),
            kv=(runner.kv_free_tokens, runner.kv_total_tokens) if runner is not None else (0, 0),
        )

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; streams that others opened end then, so that they open new ones to whoever follows."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self._sender = HopSender(self._network, nursery, self._settings.batch.chunk_rows)
                self._sender.width = self._stepper.runner.hidden_size if self._stepper.runner is not None else 0
                nursery.start_soon(self._stepper.run)
                nursery.start_soon(self._sweep)
                task_status.started()
        finally:
            self._nursery = None
            for scope in self._attending:
                scope.cancel()

    async def drain(self, within_s: float = DRAIN_S) -> bool:
        """Take no new sessions and ask the askers to move theirs; whether all have left in time."""
        self.draining = True
        for session in list(self._sessions.values()):
            await self._sender.complain(session, "draining", "this node is about to leave; move on to another")
        with trio.move_on_after(within_s):
            while self._sessions:
                self._emptied = trio.Event()
                await self._emptied.wait()
        return not self._sessions

    async def host(self, runner: BlockRunner | None) -> None:
        """Serve other blocks from now on; sessions over the old ones end, and nothing holds the old blocks."""
        changed = trio.Event()

        async def change() -> None:
            for session in list(self._sessions.values()):
                await self._sender.complain(session, "closed", "this node now hosts other blocks")
                self._end(session.id, session.epoch)
            self._stepper.runner, self.draining = runner, False
            if self._nursery is not None:
                self._sender.width = runner.hidden_size if runner is not None else 0
            changed.set()

        await self._stepper.between_steps(change)
        await changed.wait()

    # --- streams ------------------------------------------------------------------------------------------------------

    async def attend(self, stream: FrameStream) -> None:
        """Read one peer's stream to its end; the sessions that it opened there end with it."""
        if self._nursery is None:
            return
        with trio.CancelScope() as scope:
            self._attending.add(scope)
            try:
                await self._read(stream, PeerOutbox(stream, self._nursery))
            finally:
                self._attending.discard(scope)

    async def _read(self, stream: FrameStream, answers: PeerOutbox) -> None:
        try:
            while True:
                frame = decode(await stream.receive())
                if frame.kind == Kind.DATA:
                    await self._take(frame, stream.peer)
                else:
                    await self._obey(frame, stream.peer, answers)
        except RecordError as error:
            log.warning("%s sent a bad frame, its stream is closed: %s", stream.peer, error)
            await stream.reset()
        except P2PError:
            pass
        finally:
            answers.broken = True
            self._stepper.later(partial(self._forget_stream, answers))

    async def _take(self, frame: Frame, peer: str) -> None:
        """Queue hidden states, or answer them from what is kept."""
        session = self._sessions.get(frame.session)
        verdict = FrameAction.DROP
        runner = self._stepper.runner
        if session is not None and runner is not None and frame.width == runner.hidden_size:
            verdict = session.judge(peer, frame.epoch, frame.position, frame.rows)
        if session is None or verdict is FrameAction.DROP:
            self._stepper.counters.dropped_frames += 1
            return
        session.heard_at = now = trio.current_time()
        session.counters.bytes_in += HEADER_BYTES + len(frame.body)
        if verdict is FrameAction.COMPUTE:
            session.accepted(frame.rows)
            if not session.turn.successor:
                session.forget_before(frame.position)  # the asker asks on, so it has what came before
            urgent = frame.rows <= URGENT_ROWS and frame.position >= session.turn.urgent_from
            dtype = DTYPE_NAMES[frame.dtype]
            position, rows = frame.position, frame.rows
            first = not session.turn.predecessor
            self._stepper.put(
                QueuedTokens(
                    session.id, session.asker, session.epoch, position, rows, frame.body, dtype, urgent, now, first
                )
            )
        elif verdict is FrameAction.REPEAT:
            await self._sender.resend(session, frame.position, frame.position + frame.rows, must=False)
        else:
            await self._sender.complain(session, "gap", f"tokens at {frame.position} do not follow {session.received}")

    async def _obey(self, frame: Frame, peer: str, answers: PeerOutbox) -> None:
        """Do what an asker orders."""
        if frame.kind == Kind.TURN:
            turn = decode_turn(frame)
            await self._stepper.between_steps(partial(self._turn, frame, turn, peer, answers))
            return
        if frame.kind == Kind.CLOSE:  # even of a session that is not known yet: its turn may wait for a step's end
            await self._stepper.between_steps(partial(self._close, frame, peer))
            return
        session = self._sessions.get(frame.session)
        if session is None or session.asker != peer:
            self._stepper.counters.dropped_frames += 1
            if session is None and frame.kind == Kind.PROBE:
                await answers.push(control_frame(plain(Kind.STATE, frame.session, 0)))
            return
        if frame.kind == Kind.PROBE:
            session.heard_at = trio.current_time()
            queued = min(self._stepper.queue.rows, 2**31)
            state = plain(Kind.STATE, session.id, session.epoch, session.length, session.received, queued)
            await answers.push(control_frame(state))
        elif frame.kind == Kind.PACE:
            pace = encode_pace(session.id, session.epoch, session.counters.step_s, session.counters.queue_s)
            await answers.push(control_frame(pace))
        elif frame.kind == Kind.GO and frame.epoch == session.epoch:
            session.send_from = frame.position
            await self._sender.resend(session, frame.position, session.length)

    # --- between steps ------------------------------------------------------------------------------------------------

    async def _turn(self, frame: Frame, turn: EpochOrder, peer: str, answers: PeerOutbox) -> None:
        session = self._sessions.get(frame.session)
        known_epoch = session.epoch if session is not None else self._closed.get(frame.session, -1)
        if frame.epoch <= known_epoch or (session is not None and session.asker != peer) or answers.broken:
            self._stepper.counters.dropped_frames += 1
            return
        if session is not None and not session.goes_on_with(turn):
            self._end(session.id, known_epoch)
            session = None
        if session is None:
            refusal = self._open(frame, turn, peer)
            if refusal is not None:
                await answers.push(control_frame(encode_trouble(frame.session, frame.epoch, 0, refusal)))
                return
            session = self._sessions[frame.session]
        else:
            self._stepper.queue.drop(session.id)
            before = session.length
            session.begin_epoch(frame.epoch, frame.position, turn)
            if session.length < before and self._stepper.runner is not None:
                self._stepper.runner.truncate(session.id, session.length)
        self._sender.begin(session, answers)
        session.heard_at = trio.current_time()
        await answers.push(
            control_frame(plain(Kind.READY, session.id, session.epoch, session.length, rows=session.kept_from))
        )
        if session.send_from is not None:
            await self._sender.resend(session, session.send_from, session.length)

    def _open(self, frame: Frame, turn: EpochOrder, peer: str) -> HopError | None:
        """Admit a new session, or say why not."""
        if self.draining:
            return HopError("draining", "this node is about to leave")
        runner = self._stepper.runner
        refusal = why_not(turn, peer, runner, self._sessions.values(), self._settings.admission)
        if refusal is not None or runner is None:
            return refusal
        try:
            runner.open(frame.session, turn.tokens)
        except EngineError as error:
            return HopError("busy", str(error), "cache_full")
        self._closed.pop(frame.session, None)
        self._sessions[frame.session] = HopSession(frame.session, peer, frame.epoch, turn, trio.current_time())
        self._stepper.counters.opened_by(peer)
        return None

    async def _close(self, frame: Frame, peer: str) -> None:
        session = self._sessions.get(frame.session)
        if session is not None and session.asker == peer and frame.epoch >= session.epoch:
            self._end(session.id, frame.epoch)

    async def _forget_stream(self, answers: PeerOutbox) -> None:
        for id in self._sender.ordered_on(answers):
            self._end(id, self._sessions[id].epoch)

    def _end(self, id: bytes, epoch: int) -> None:
        """Free all that a session holds here."""
        session = self._sessions.pop(id, None)
        if session is None:
            return
        self._stepper.counters.ended(session.counters)
        self._sender.end(id)
        self._stepper.queue.drop(id)
        if self._stepper.runner is not None:
            self._stepper.runner.close(id)
        self._closed[id] = epoch
        if len(self._closed) > _REMEMBERED_CLOSED:
            self._closed.popitem(last=False)
        if not self._sessions:
            self._emptied.set()

    # --- what steps bring ---------------------------------------------------------------------------------------------

    def session(self, id: bytes) -> HopSession:
        """The open session of this id."""
        return self._sessions[id]

    async def computed(self, item: QueuedTokens, output: StepOutput) -> None:
        """Keep a session's outputs and send them on."""
        session = self._sessions[item.session]
        session.computed(item.rows, output.data, output.dtype)
        first, stop = session.send_from, item.position + item.rows
        if first is None or first >= stop:
            if first is not None and not session.turn.successor:
                session.forget_before(stop)
            return
        if first <= item.position:
            await self._sender.send(session, item.position, output.data)
        else:
            await self._sender.resend(session, first, stop)

    async def failed(self, item: QueuedTokens, error: Exception) -> None:
        """End a session whose tokens cannot be computed."""
        session = self._sessions[item.session]
        log.warning("a step of session %s failed: %s", session.id.hex()[:8], error)
        await self._sender.complain(session, "failed", str(error))
        self._end(session.id, session.epoch)

    async def stepped(self, *, bulk: bool) -> None:
        """Look now and then, and behind every large step, whether too much is kept."""
        if bulk or self._stepper.counters.steps % _CHECK_KEPT_EVERY == 0:
            await self._evict()

    async def _evict(self) -> None:
        """Keep the kept outputs within their budget: whole sessions go, and their askers are told."""
        kept_bytes = sum(len(session.kept) for session in self._sessions.values())
        while kept_bytes > self._settings.kept_bytes:
            session = first_to_evict(list(self._sessions.values()))
            kept_bytes -= session.evict()
            await self._sender.complain(session, "evicted", "outputs are no longer kept for replay")

    async def _sweep(self) -> None:
        """End sessions whose askers have gone quiet."""
        while True:
            await trio.sleep(self._settings.idle_s / 8)
            quiet_since = trio.current_time() - self._settings.idle_s
            for session in list(self._sessions.values()):
                if session.heard_at < quiet_since:
                    await self._sender.complain(session, "closed", "the session was idle for too long")
                    await self._stepper.between_steps(partial(self._end_quiet, session, quiet_since))

    async def _end_quiet(self, session: HopSession, quiet_since: float) -> None:
        if self._sessions.get(session.id) is session and session.heard_at < quiet_since:
            self._end(session.id, session.epoch)

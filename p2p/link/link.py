"""One link to one peer: calls and message streams, many at once, over one byte stream.

The link owns a reader, a writer and the handlers it runs. The reader never waits for anybody: what a peer may make us
keep is bounded by windows and quotas, and beyond them it is refused. The writer is the only one to write, so that a
caller that is cancelled never leaves half a frame. Who is linked to whom is for `p2p.link.switchboard`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import trio

from p2p.errors import DeadlineExceeded, PeerUnreachable, ProtocolError, QueueFull, StreamReset
from p2p.link.byte_stream import ByteStream
from p2p.link.calls import Calls
from p2p.link.frames import BUSY, FIRST, PREFACE, Assembler, Frame, FrameDecoder, Kind, body_bytes, failure_of
from p2p.link.handlers import Handlers, Services
from p2p.link.outbox import Outbox, Outgoing, spoken
from p2p.link.streams import MessageStream
from p2p.rate_limit import FloodGuard, LogLimit
from p2p.values import CONTROL, MESSAGE_COST_BYTES, PREFILL, Buffer, Payload, buffers_of, check_name

READ_BYTES = 256 * 1024
FRAMES_A_TURN = 256
MAX_TIMEOUT_MS = 2**32 - 1
UNFINISHED_S = 120.0  # without a byte: then a request or message that was begun is given up
STALLED_S = 60.0  # for one chunk to be taken: a peer that lives and does not read must not keep what waits for it
# Frames about calls and streams that are not known (any more). A window of tiny messages may cross a reset, so many are
# forgiven; who sends nothing else only means to keep this node busy.
IDLE_FRAMES = 32_768
IDLE_FRAMES_PER_S = 2000

log = logging.getLogger("shoal.p2p.link")
log.addFilter(LogLimit())  # peers can bring these lines about


class PeerLink:
    """Calls and streams to one peer; a `paced` link reads at the download limit, an `exempt` one knows no limits."""

    def __init__(
        self, peer: str, stream: ByteStream, services: Services, *, initiator: bool, paced: bool, exempt: bool
    ) -> None:
        self._peer, self._stream, self.services = peer, stream, services
        self.paced, self.exempt = paced, exempt
        self.bytes_in = self.bytes_out = 0
        self.rtt_s: float | None = None
        self.ended = self._condemned = False
        self.hung_up = False  # ended by this node on purpose, so that nobody is told of a loss
        self.own_parity = 1 if initiator else 0
        self._next_id = 1 if initiator else 2
        self._outbox = Outbox()
        self._assembler = Assembler()
        self._streams: dict[int, MessageStream] = {}
        self._asking, self._serving = Calls(self), Handlers(self)
        self._scope = trio.CancelScope()
        self._sweeping = False
        self._wake = trio.Event()
        self._written = trio.Event()
        self._flood = FloodGuard(IDLE_FRAMES, IDLE_FRAMES_PER_S, trio.current_time())
        self.used_at = trio.current_time()

    @property
    def peer(self) -> str:
        """The peer at the other end."""
        return self._peer

    @property
    def busy(self) -> bool:
        """Whether a call or a stream is under way."""
        return bool(self._streams) or self._asking.busy or self._serving.busy

    async def run(self) -> None:
        """Read, write and serve until the link ends; never raises what a peer or the network did."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    self._serving.nursery = nursery
                    nursery.start_soon(self._write)
                    try:
                        await self._read(nursery)
                    finally:
                        self._end()  # before handlers are waited for: some shield themselves
                        nursery.cancel_scope.cancel()
                        with trio.CancelScope(shield=True):
                            await self._stream.reset()  # a write under way is shielded; only this ends it
        except Exception:
            log.exception("the link to %s failed", self._peer)

    def close(self) -> None:
        """End the link at once."""
        self._scope.cancel()

    async def call(self, method: str, body: Payload, *, timeout_s: float, priority: int = CONTROL) -> bytes:
        """One request, one answer; on a timeout, or when the caller is cancelled, the remote handler is cancelled."""
        parts, size = buffers_of(body)
        timeout_ms = int(min(max(timeout_s * 1000, 1), MAX_TIMEOUT_MS))
        name = check_name(method)
        if not self._outbox.has_room(priority):
            raise QueueFull(f"the queue to {self._peer} is full; slow down")
        id = self._take_id()
        pending = self._asking.expect(id)
        self.post(Outgoing(Kind.REQUEST, id, priority, parts, size, name, timeout_ms))
        return await self._asking.outcome(id, pending, timeout_s, f"{method} on {self._peer}")

    async def ping(self, timeout_s: float) -> float:
        """The round-trip time of an empty frame."""
        id = self._take_id()
        pending = self._asking.expect(id)
        started_at = trio.current_time()
        self.post(Outgoing(Kind.PING, id, 0))
        await self._asking.outcome(id, pending, timeout_s, f"a ping of {self._peer}")
        self.rtt_s = trio.current_time() - started_at
        return self.rtt_s

    async def open(self, protocol: str, *, timeout_s: float) -> MessageStream:
        """A new stream, once the peer accepted it."""
        name = check_name(protocol)
        id = self._take_id()
        stream = self._streams[id] = MessageStream(self, id)
        self.post(Outgoing(Kind.OPEN, id, 0, name=name))
        answered = False
        try:
            with trio.move_on_after(max(timeout_s, 0)):
                await stream.opened.wait()
                answered = True
        finally:
            if not answered:
                stream.abort("cancelled", "the opener gave up")
        if not answered:
            raise DeadlineExceeded(f"{self._peer} did not accept {protocol} within {timeout_s:g} s")
        if stream.failure is not None:
            raise stream.failure
        return stream

    # --- what streams and handlers need of their link ---

    def post(self, message: Outgoing) -> None:
        """Queue something for the writer."""
        if self.ended:
            return
        self._outbox.put(message)
        self._wake.set()
        if self._outbox.overrun():
            self.misbehaved("it asks for answers and does not read them")

    def has_room(self, priority: int) -> bool:
        """Whether one more message of this priority may be queued."""
        return self.ended or self._outbox.has_room(priority)

    async def written(self) -> None:
        """Wait for the writer's next write."""
        await self._written.wait()

    def consumed(self, size: int) -> None:
        """Bytes that a stream held for its reader are gone."""
        self.services.quota.release(self._peer, size)

    def stream_done(self, stream: MessageStream, *, broken: bool) -> None:
        """Forget a stream."""
        if self._streams.pop(stream.id, None) is None:
            return
        self._assembler.drop(stream.id)
        if broken:
            self._outbox.drop(stream.id)
        if stream.id % 2 != self.own_parity:
            self.services.quota.end_stream(self._peer)

    def give_up(self, id: int) -> None:
        """Stop a call of ours: what was not sent stays here, the peer's handler is cancelled."""
        self._outbox.drop(id)
        self._assembler.drop(id)
        self.post(Outgoing(Kind.CANCEL, id, 0))

    def refuse(self, kind: int, id: int, why: str, code: str = BUSY) -> None:
        """Say no, and report a peer that was told so too often."""
        self.post(spoken(kind, id, code, why))
        if self.services.quota.refused(self._peer, trio.current_time()):
            self.misbehaved(f"it does not heed refusals: {why}")

    def misbehaved(self, why: str) -> None:
        """End the link and report the peer."""
        if not self._condemned:
            self._condemned = True
            log.warning("%s misbehaves: %s", self._peer, why)
            self.close()
            self.services.misbehaved(self._peer, why)

    def _take_id(self) -> int:
        if self.ended:
            raise self._gone()
        id, self._next_id = self._next_id, self._next_id + 2
        if self._next_id >= 2**32:  # years of calls on one link; a new link starts again at 1
            self.close()
        return id

    def _gone(self) -> PeerUnreachable:
        return PeerUnreachable(f"the link to {self._peer} ended; it may be gone")

    # --- the writer ---

    async def _write(self) -> None:
        up = self.services.bandwidth.up
        try:
            await self._put((PREFACE,), len(PREFACE))
            while True:
                urgency = self._outbox.urgency()
                if urgency is None:
                    self._wake = trio.Event()
                    await self._wake.wait()
                    continue
                if urgency >= PREFILL and not self.exempt and (wait_s := up.wait_s(trio.current_time())) > 0:
                    self._wake = trio.Event()
                    with trio.move_on_after(wait_s):  # something urgent may come meanwhile
                        await self._wake.wait()
                    continue
                parts, size = self._outbox.take()
                self._written.set()
                self._written = trio.Event()
                await self._put(parts, size)
                if not self.exempt:
                    up.spend(size, trio.current_time())
        except StreamReset as error:
            log.debug("the link to %s ended while writing: %s", self._peer, error)
            self.close()

    async def _put(self, parts: Sequence[Buffer], size: int) -> None:
        self.bytes_out += size
        self.used_at = trio.current_time()
        # Half a frame would spoil the link for everybody else.
        with trio.CancelScope(shield=True, deadline=self.used_at + STALLED_S) as scope:
            await self._stream.write_parts(parts)
        if scope.cancelled_caught:
            raise StreamReset(f"{self._peer} did not read for {STALLED_S:g} s")

    # --- the reader ---

    async def _read(self, nursery: trio.Nursery) -> None:
        decoder, down = FrameDecoder(), self.services.bandwidth.down
        try:
            while True:
                if self.paced and not self.exempt:
                    await self._pace()
                data = await self._stream.read(READ_BYTES)
                if not data:
                    return
                self.bytes_in += len(data)
                if not self.exempt:
                    down.spend(len(data), trio.current_time())
                for number, frame in enumerate(decoder.feed(data), 1):
                    self._dispatch(frame)
                    if self._condemned:
                        return
                    if self._assembler and not self._sweeping:
                        self._sweeping = True
                        nursery.start_soon(self._sweep_unfinished)
                    if number % FRAMES_A_TURN == 0:  # a flood of tiny frames must not hold up everybody else
                        await trio.lowlevel.checkpoint()
        except StreamReset as error:
            log.debug("the link to %s ended while reading: %s", self._peer, error)
        except ProtocolError as error:
            self.misbehaved(str(error))

    async def _sweep_unfinished(self) -> None:
        """Give up requests and messages that were begun and of which nothing more arrives; ends when none is left."""
        while self._assembler:
            await trio.sleep(UNFINISHED_S)
            for first in self._assembler.stalled():
                if first.kind == Kind.REQUEST:
                    self._assembler.drop(first.id)
                    self._serving.give_up(first.id, "the request was begun and not finished")
                elif first.kind == Kind.MESSAGE and (stream := self._streams.get(first.id)) is not None:
                    stream.abort(BUSY, "a message was begun and not finished")
        self._sweeping = False

    async def _pace(self) -> None:
        down = self.services.bandwidth.down
        while (wait_s := down.wait_s(trio.current_time())) > 0:  # noqa: ASYNC110 - the wait is time itself
            await trio.sleep(wait_s)

    def _dispatch(self, frame: Frame) -> None:
        kind = frame.kind
        if kind == Kind.MESSAGE:
            self._on_message(frame)
        elif kind in (Kind.ANSWER, Kind.ERROR, Kind.PONG):
            if not self._asking.on_answer(frame, self._assembler):
                self._flood.count(trio.current_time())
        elif kind == Kind.REQUEST:
            if (whole := self._serving.on_request(frame, self._assembler)) is not None:
                self._serving.start(whole)
        elif kind == Kind.CANCEL:
            self._assembler.drop(frame.id)
            self._outbox.drop(frame.id)
            if not self._serving.on_cancel(frame.id):
                self._flood.count(trio.current_time())
        elif kind == Kind.PING:
            self._serving.on_ping(frame.id)
        elif kind == Kind.OPEN:
            self._on_open(frame)
        else:
            self._on_stream_event(frame)

    def _on_message(self, frame: Frame) -> None:
        stream = self._streams.get(frame.id)
        if stream is None:  # closed here while this was on its way
            self._flood.count(trio.current_time())
            return
        if frame.flags & FIRST:
            cost = frame.total + MESSAGE_COST_BYTES
            if not stream.fits(cost):
                raise ProtocolError(f"stream {frame.id} was sent more than its window")
            stream.arrive(cost)
        elif not self._assembler.expects(frame):
            self._flood.count(trio.current_time())
            return
        size = body_bytes(frame) + (MESSAGE_COST_BYTES if frame.flags & FIRST else 0)
        if not self.services.quota.hold(self._peer, size):
            stream.abort("busy", "too many bytes in flight")
            return
        stream.hold(size)
        whole = self._assembler.add(frame)
        if whole is not None:
            stream.deliver(whole.body)

    def _on_open(self, frame: Frame) -> None:
        if frame.id % 2 == self.own_parity or frame.id in self._streams:
            raise ProtocolError(f"stream {frame.id} is not the peer's to open")
        stream = MessageStream(self, frame.id)
        if self._serving.accept(stream, frame.name):
            self._streams[frame.id] = stream
            self.post(Outgoing(Kind.OPENED, frame.id, 0))

    def _on_stream_event(self, frame: Frame) -> None:
        stream = self._streams.get(frame.id)
        if stream is None or (frame.kind == Kind.CREDIT and not frame.arg):
            self._flood.count(trio.current_time())
            return
        if frame.kind == Kind.OPENED:
            stream.opened.set()
        elif frame.kind == Kind.CREDIT:
            if not stream.credit(frame.arg):
                raise ProtocolError(f"stream {frame.id} was credited more than it sent")
        elif frame.kind == Kind.CLOSE:
            stream.remote_closed()
        elif frame.kind == Kind.RESET:
            broken = StreamReset(f"{self._peer} reset the stream: {frame.name}")
            stream.fail(broken if stream.opened.is_set() else failure_of(frame))

    def _end(self) -> None:
        self.ended = True
        self._written.set()
        self._asking.end(self._gone())
        for stream in list(self._streams.values()):
            stream.fail(StreamReset(f"the link to {self._peer} broke; open another stream"))
        self._serving.end()
        self.services.quota.forget(self._peer)

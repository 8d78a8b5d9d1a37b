"""One link to one peer: many calls and message streams at once over one byte stream.

The link owns a reader task, a writer task and the handlers it runs. The reader never waits for a handler: the bytes
that a peer can make this node buffer are bounded by windows and quotas, and more are refused. Only the writer writes,
so that a cancelled caller never leaves half a frame behind. `p2p.link.switchboard` decides which peers are linked.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import trio

from p2p.errors import DeadlineExceeded, PeerUnreachable, ProtocolError, QueueFull, StreamReset
from p2p.link.byte_stream import ByteStream
from p2p.link.calls import Calls
from p2p.link.frames import (
    BUSY,
    FIRST,
    OPTIONAL_KINDS,
    PREFACE,
    SMALL_CHUNKS,
    Assembler,
    Frame,
    FrameDecoder,
    Kind,
    body_bytes,
    failure_of,
)
from p2p.link.handlers import Handlers, Services
from p2p.link.outbox import Outbox, Outgoing, spoken
from p2p.link.quota import Held, Resource
from p2p.link.receive_rate import ReceiveRate
from p2p.link.streams import MessageStream
from p2p.rate_limit import FloodGuard, LogLimit
from p2p.values import BULK, CONTROL, MESSAGE_COST_BYTES, PREFILL, Buffer, Payload, buffers_of, check_name

READ_BYTES = 256 * 1024
FRAMES_A_TURN = 256
MAX_TIMEOUT_MS = 2**32 - 1
UNFINISHED_S = 120.0  # a partly received request or message is dropped after this long without a byte
STALLED_S = 60.0  # for the peer to accept one chunk: a live peer that does not read must not hold memory here for ever
# Frames of unknown kinds, calls and streams that are tolerated. Many are: a window of tiny messages may cross a reset
# on the way. A peer that sends little else only keeps this node busy.
IDLE_FRAMES = 32_768
IDLE_FRAMES_PER_S = 2000
MADE_WAY = "it makes way for peers that have less here"

log = logging.getLogger("shoal.p2p.link")
log.addFilter(LogLimit())  # peers can cause these lines


class PeerLink:
    """Calls and streams to one peer.

    A `paced` link reads no faster than the download limit. No bandwidth limit applies to an `exempt` link.
    """

    def __init__(
        self, peer: str, stream: ByteStream, services: Services, *, initiator: bool, paced: bool, exempt: bool
    ) -> None:
        self._peer, self.services = peer, services
        self._reading = self._writing = stream  # they differ for a moment while the link moves
        self._move: tuple[str, ByteStream] | None = None  # token and byte stream that the writer is to go on with
        self._move_asked: tuple[str, ByteStream] | None = None  # by this side, until the other side has moved too
        self._stream_left = trio.Event()  # set, and replaced, when a byte stream is not used any more
        self.paced, self.exempt = paced, exempt
        self.bytes_in = self.bytes_out = 0
        self.receive_rate = ReceiveRate()
        self.ended = self._condemned = False
        self.hung_up = False  # closed by this node on purpose: not reported as lost
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
        """The peer id of the other end."""
        return self._peer

    @property
    def busy(self) -> bool:
        """True if a call or a stream is in progress."""
        return bool(self._streams) or self._asking.busy or self._serving.busy

    async def run(self) -> None:
        """Read, write and serve until the link ends; errors of the peer or the network are logged, not raised."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    self._serving.nursery = nursery
                    nursery.start_soon(self._write)
                    try:
                        await self._read(nursery)
                    finally:
                        self._end()  # before waiting for the handlers: some are shielded
                        nursery.cancel_scope.cancel()
                        with trio.CancelScope(shield=True):
                            await self._reset_streams()  # the writer's current write is shielded; only this ends it
        except Exception:
            log.exception("the link to %s failed", self._peer)

    def close(self) -> None:
        """End the link at once; `run` returns soon after."""
        self._scope.cancel()

    @property
    def initiated(self) -> bool:
        """True if this side opened the byte stream."""
        return self.own_parity == 1

    @property
    def stream(self) -> ByteStream:
        """The byte stream that the link reads."""
        return self._reading

    def uses(self, stream: ByteStream) -> bool:
        """True if the link has not ended and reads or writes this byte stream."""
        return not self.ended and (stream is self._reading or stream is self._writing)

    async def left(self, stream: ByteStream) -> None:
        """Wait until the link has ended or moved away from this byte stream."""
        while self.uses(stream):
            await self._stream_left.wait()

    def move(self, stream: ByteStream, token: str) -> bool:
        """Go on over `stream`, which the peer has accepted under `token`; False if the link ended or moves already."""
        assert self.initiated
        if self.ended or self._move_asked is not None:
            return False
        self._move = self._move_asked = (token, stream)
        self._wake.set()
        return True

    async def call(self, method: str, body: Payload, *, timeout_s: float, priority: int = CONTROL) -> bytes:
        """Send one request and return its answer; raises `P2PError`.

        On a timeout, and if the caller is cancelled, the remote handler is cancelled too.
        """
        parts, size = buffers_of(body)
        timeout_ms = int(min(max(timeout_s * 1000, 1), MAX_TIMEOUT_MS))
        name = check_name(method)
        if not self._outbox.has_room(priority):
            raise QueueFull(f"the queue to {self._peer} is full; slow down")
        id = self._take_id()
        pending = self._asking.expect(id)
        self.post(Outgoing(Kind.REQUEST, id, priority, parts, size, name, timeout_ms))
        return await self._asking.outcome(id, pending, timeout_s, f"{method} on {self._peer}")

    async def open(self, protocol: str, *, timeout_s: float) -> MessageStream:
        """Open a stream and wait until the peer has accepted it; raises `P2PError`."""
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

    def held(self, resource: Resource) -> list[Held]:
        """Return the calls and streams for which the peer has some of a resource over this link."""
        calls = [Held(size, partial(self._end_call, id), not runs) for id, size, runs in self._serving.held()]
        streams = {id: Held(stream.held, partial(stream.abort, BUSY, MADE_WAY)) for id, stream in self._streams.items()}
        match resource:
            case Resource.CALLS:
                return calls
            case Resource.STREAMS:
                return [stream for id, stream in streams.items() if id % 2 != self.own_parity]
            case Resource.BYTES:
                return [one for one in (*calls, *self._asking.held(), *streams.values()) if one.size]

    # --- used by streams, calls and handlers ---

    def post(self, message: Outgoing) -> None:
        """Queue a message for the writer; dropped if the link has ended."""
        if self.ended:
            return
        self._outbox.put(message)
        self._wake.set()
        if self._outbox.overrun():
            self.misbehaved("it sends requests and does not read the answers")

    def has_room(self, priority: int) -> bool:
        """True if one more message of this priority may be queued."""
        return self.ended or self._outbox.has_room(priority)

    def is_nearly_sent(self, id: int, priority: int) -> bool:
        """True if next to nothing waits of what was queued with this id and priority."""
        return self.ended or self._outbox.is_nearly_sent(id, priority)

    async def written(self) -> None:
        """Wait for the writer's next write."""
        await self._written.wait()

    def consumed(self, size: int) -> None:
        """Release `size` buffered bytes from the peer's quota."""
        self.services.quota.release(self._peer, size)

    def stream_done(self, stream: MessageStream, *, broken: bool) -> None:
        """Remove a stream that has ended."""
        if self._streams.pop(stream.id, None) is None:
            return
        self._assembler.drop(stream.id)
        if broken:
            self._outbox.drop(stream.id)
        if stream.id % 2 != self.own_parity:
            self.services.quota.end_stream(self._peer)

    def drop_chunks(self, id: int) -> None:
        """Forget what has arrived of an unfinished message."""
        self._assembler.drop(id)

    def give_up(self, id: int) -> None:
        """Abort a call of this node: unsent chunks are dropped and the peer's handler is cancelled."""
        self._outbox.drop(id)
        self.post(Outgoing(Kind.CANCEL, id, 0))

    def refuse(self, kind: int, id: int, why: str, code: str = BUSY) -> None:
        """Refuse a call or stream of the peer; a peer that was refused too often is reported as misbehaving."""
        self.post(spoken(kind, id, code, why))
        if not self.ended and self.services.quota.refused(self._peer, trio.current_time()):
            self.misbehaved(f"it ignores refusals: {why}")

    def misbehaved(self, why: str) -> None:
        """End the link, log the reason and report the peer; later calls do nothing."""
        if not self._condemned:
            self._condemned = True
            log.warning("%s misbehaves: %s", self._peer, why)
            self.close()
            self.services.misbehaved(self._peer, why)

    def _take_id(self) -> int:
        if self.ended:
            raise self._gone()
        id, self._next_id = self._next_id, self._next_id + 2
        if self._next_id >= 2**32:  # after years of calls on one link; a new link starts at 1
            self.close()
        return id

    def _gone(self) -> PeerUnreachable:
        return PeerUnreachable(f"the link to {self._peer} ended; the peer may be offline")

    # --- the writer ---

    async def _write(self) -> None:
        up, spare = self.services.bandwidth.up, self.services.bandwidth.spare
        try:
            await self._put((PREFACE,), len(PREFACE))
            while True:
                if self._move is not None:
                    await self._switch_writing(*self._move)
                now = trio.current_time()
                urgency, wait_s = self._next_turn(now)
                if urgency is None:
                    self._wake = trio.Event()
                    await self._wake.wait()
                    continue
                if wait_s > 0:
                    self._wake = trio.Event()
                    with trio.move_on_after(wait_s):  # a message that need not wait may be queued meanwhile
                        await self._wake.wait()
                    continue
                parts, size = self._outbox.take(urgency)
                is_bulk = urgency == BULK and not self.exempt
                self._written.set()
                self._written = trio.Event()
                if is_bulk:
                    spare.begin(now)
                elif urgency != CONTROL and not self.exempt:
                    spare.replied(size, now)
                try:
                    await self._put(parts, size)
                finally:
                    begun_at, now = now, trio.current_time()
                    if is_bulk:
                        spare.end(size, now)
                if not (is_bulk and spare.is_limited(now)):  # what is sent slowly on purpose says nothing of the speed
                    self._outbox.wrote(size, now - begun_at)
                if not self.exempt:
                    up.spend(size, now)
        except StreamReset as error:
            log.debug("the link to %s ended while writing: %s", self._peer, error)
            self.close()

    def _next_turn(self, now: float) -> tuple[int | None, float]:
        """Return the priority that is to be sent next, None if nothing waits, and the seconds that it must wait first.

        One whose turn it is and that must wait for a limit is passed over: what is more urgent may not have to.
        """
        turn, first = self._outbox.next_priority(), self._outbox.urgency()
        if turn is not None and turn != first and self._limit_s(turn, now) > 0:
            turn = first
        return turn, 0.0 if turn is None else self._limit_s(turn, now)

    def _limit_s(self, priority: int, now: float) -> float:
        """Seconds that the limits make a message of this priority wait."""
        if self.exempt or priority < PREFILL:
            return 0.0
        wait_s = self.services.bandwidth.up.wait_s(now)
        return wait_s if priority != BULK else max(wait_s, self.services.bandwidth.spare.wait_s(now))

    async def _switch_writing(self, token: str, stream: ByteStream) -> None:
        (header,), size, _ = Outgoing(Kind.SWITCH, 0, 0, name=token.encode()).next_chunk()
        await self._put((header,), size)
        self._move, self._writing = None, stream
        self._tell_left()

    async def _put(self, parts: Sequence[Buffer], size: int) -> None:
        self.bytes_out += size
        self.used_at = trio.current_time()
        # Shielded, because half a frame would make the link unusable for all other calls.
        with trio.CancelScope(shield=True, deadline=self.used_at + STALLED_S) as scope:
            await self._writing.write_parts(parts)
        if scope.cancelled_caught:
            raise StreamReset(f"{self._peer} did not read for {STALLED_S:g} s")

    # --- the reader ---

    async def _read(self, nursery: trio.Nursery) -> None:
        decoder, down = FrameDecoder(), self.services.bandwidth.down
        try:
            while True:
                if self.paced and not self.exempt:
                    await self._pace()
                stream = self._reading
                data = await stream.read(READ_BYTES)
                if not data:
                    return
                self.bytes_in += len(data)
                read_at = trio.current_time()
                if not self.exempt:
                    down.spend(len(data), read_at)
                frames = decoder.feed(data)
                if decoder.minor >= SMALL_CHUNKS:
                    self._outbox.allow_small_chunks()
                for number, frame in enumerate(frames, 1):
                    if self._reading is not stream:
                        raise ProtocolError("a frame follows a switch on the same byte stream")
                    self._dispatch(frame)
                    if self._condemned:
                        return
                    if self._assembler and not self._sweeping:
                        self._sweeping = True
                        nursery.start_soon(self._sweep_unfinished)
                    if number % FRAMES_A_TURN == 0:  # a flood of tiny frames must not block other tasks
                        await trio.lowlevel.checkpoint()
                self.receive_rate.arrived(len(data), read_at, more=decoder.is_inside or bool(self._assembler))
                if self._reading is not stream:
                    if decoder.is_inside:
                        raise ProtocolError("a frame follows a switch on the same byte stream")
                    if self.initiated:
                        nursery.start_soon(stream.reset)  # both sides have sent their last frame on it
        except StreamReset as error:
            log.debug("the link to %s ended while reading: %s", self._peer, error)
        except ProtocolError as error:
            self.misbehaved(str(error))

    async def _sweep_unfinished(self) -> None:
        """Drop partly received requests and messages that stalled; ends when none is unfinished."""
        while self._assembler:
            await trio.sleep(UNFINISHED_S)
            for first in self._assembler.stalled():
                if first.kind == Kind.REQUEST:
                    self._assembler.drop(first.id)
                    self._serving.give_up(first.id, "the request was not finished")
                elif first.kind == Kind.MESSAGE and (stream := self._streams.get(first.id)) is not None:
                    stream.abort(BUSY, "a message was not finished")
        self._sweeping = False

    async def _pace(self) -> None:
        down = self.services.bandwidth.down
        while (wait_s := down.wait_s(trio.current_time())) > 0:  # noqa: ASYNC110 - only time ends this wait
            await trio.sleep(wait_s)

    def _dispatch(self, frame: Frame) -> None:
        kind = frame.kind
        if kind == Kind.MESSAGE:
            self._on_message(frame)
        elif kind in (Kind.ANSWER, Kind.ERROR, Kind.PONG):
            if not self._asking.on_answer(frame, self._assembler):
                self._flood.count(trio.current_time())
        elif kind == Kind.REQUEST:
            if not self._serving.on_request(frame, self._assembler):
                self._flood.count(trio.current_time())
        elif kind == Kind.CANCEL:
            if not self._cancel(frame.id):
                self._flood.count(trio.current_time())
        elif kind == Kind.PING:
            self._serving.on_ping(frame.id)
        elif kind == Kind.OPEN:
            self._on_open(frame)
        elif kind == Kind.SWITCH:
            self._on_switch(frame.name)
        elif kind < OPTIONAL_KINDS:
            self._on_stream_event(frame)
        else:
            self._flood.count(trio.current_time())

    def _cancel(self, id: int) -> bool:
        """Stop a call of the peer and drop its answer; False if it is unknown."""
        self._assembler.drop(id)
        self._outbox.drop(id)
        return self._serving.on_cancel(id)

    def _end_call(self, id: int) -> None:
        self._cancel(id)
        self.post(spoken(Kind.ERROR, id, BUSY, MADE_WAY))

    def _on_message(self, frame: Frame) -> None:
        stream = self._streams.get(frame.id)
        if stream is None:  # this side closed it while the frame was on its way
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
            raise ProtocolError(f"stream {frame.id} uses an id that is not the peer's to choose")
        stream = MessageStream(self, frame.id)
        if self._serving.accept(stream, frame.name):
            self._streams[frame.id] = stream
            self.post(Outgoing(Kind.OPENED, frame.id, 0))

    def _on_switch(self, token: str) -> None:
        """Read on from the byte stream of this token; the side that accepted the link answers with its own switch."""
        if self.initiated:
            asked, self._move_asked = self._move_asked, None
            if asked is None or asked[0] != token:
                raise ProtocolError("the peer moves a link without being asked")
            self._reading = asked[1]
        else:
            stream = self.services.take_offer(self._peer, token)
            if stream is None or self._move is not None:
                raise StreamReset("the byte stream to which the peer moves the link is not there, or not any more")
            self._reading, self._move = stream, (token, stream)
            self._wake.set()
        self._tell_left()

    def _tell_left(self) -> None:
        self._stream_left.set()
        self._stream_left = trio.Event()

    async def _reset_streams(self) -> None:
        moves = [move for move in (self._move, self._move_asked) if move is not None]
        for stream in {id(s): s for s in (self._reading, self._writing, *(stream for _, stream in moves))}.values():
            await stream.reset()

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
        self._tell_left()
        self._asking.end(self._gone())
        for stream in list(self._streams.values()):
            stream.fail(StreamReset(f"the link to {self._peer} broke; open another stream"))
        self._serving.end()
        self.services.quota.forget(self._peer)

"""A yamux connection over a Noise session; the wire format is in `yamux_wire`.

Two tasks: one reads and waits for nothing but the network, one writes. Everything to be sent goes through one bounded
queue; while the writer is idle and the kernel has room, the task that wants to send does so itself.

A peer can make this node hold: its streams' windows (at most 64 MiB in all), 48 KiB of replies to its control frames,
and one batch being sent. A peer that exceeds a window, floods, or sends invalid frames loses the connection.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Final

import trio

from p2p.channel.noise_session import NoiseSession
from p2p.channel.raw import ConnectionClosed
from p2p.channel.yamux_flow import SendHalf, UnreadBytes
from p2p.channel.yamux_sender import Sender
from p2p.channel.yamux_stream import Buffer, StreamBroken, TooManyStreams, YamuxStream, reset_frame
from p2p.channel.yamux_table import IDLE_FRAMES, IDLE_FRAMES_PER_S, UNKNOWN_RTT_S, PingBook, StreamTable
from p2p.channel.yamux_wire import (
    ACK,
    DATA,
    FIN,
    GO_AWAY,
    PING,
    RST,
    SYN,
    WINDOW_UPDATE,
    FrameParser,
    YamuxFrame,
    pack_header,
)
from p2p.errors import ProtocolError
from p2p.rate_limit import FloodGuard, LogLimit

logger = logging.getLogger("shoal.p2p.yamux")
logger.addFilter(LogLimit())  # peers can cause these lines

ACCEPT_BACKLOG: Final = 64
_FRAMES_PER_TURN: Final = 256  # frames handled before other tasks get a turn
_GOODBYE_S: Final = 1.0
_GO_AWAY_NORMAL: Final = 0
_GO_AWAY_PROTOCOL_ERROR: Final = 1
_MAX_CREDIT: Final = (1 << 32) - 1


class YamuxConnection:
    """The multiplexed connection to one peer, with all its streams."""

    def __init__(self, session: NoiseSession, unread: UnreadBytes | None = None) -> None:
        self.session = session
        self.peer = session.peer
        self.event_started = trio.Event()
        self.event_closed = trio.Event()
        self.table: StreamTable[YamuxStream] = StreamTable(unread)
        self.now = trio.current_time
        self._is_initiator = session.is_initiator
        self._next_id = 1 if self._is_initiator else 2
        self._sender = Sender(session, self._lost)
        self._accepted: tuple[trio.MemorySendChannel[YamuxStream], trio.MemoryReceiveChannel[YamuxStream]]
        self._accepted = trio.open_memory_channel(ACCEPT_BACKLOG)
        self._scope = trio.CancelScope()
        self._pings = PingBook(self.now)
        self._flood = FloodGuard(IDLE_FRAMES, IDLE_FRAMES_PER_S, self.now())
        self._ending: str | None = None

    @property
    def is_established(self) -> bool:
        """True if streams can be opened."""
        return self.event_started.is_set() and self._ending is None

    @property
    def is_ending(self) -> bool:
        """True if no stream can be opened any more; `event_closed` follows once the session below has been closed."""
        return self._ending is not None

    def rtt(self) -> float:
        """The last measured round-trip time in seconds, 0 if there is none yet."""
        return self._pings.rtt_s or 0.0

    async def start(self) -> None:
        """Run the connection until it ends; errors are logged, not raised."""
        if self.event_started.is_set():
            return
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._sender.run)
                    nursery.start_soon(self._measure_rtt)
                    self.event_started.set()
                    await self._read_loop()
                    nursery.cancel_scope.cancel()
        except Exception:
            logger.exception("the connection to %s ended by a bug in this node", self.peer)
        finally:
            self.event_started.set()
            self._end("the connection was lost")
            await self._close_session()

    async def close(self) -> None:
        """Send GO_AWAY if that is possible without waiting, and end the connection."""
        if self._ending is None:
            self._sender.send_last(pack_header(GO_AWAY, 0, 0, _GO_AWAY_NORMAL))
        self._end("this side closed the connection")
        self._scope.cancel()
        await self._close_session()

    def abort(self) -> None:
        """End the connection at once, from any task; used for a peer that does not respond."""
        self._end("the connection was cut")
        self._scope.cancel()
        self.session.pipe.abort()

    async def open_stream(self) -> YamuxStream:
        """Open a stream without waiting; raises `TooManyStreams` or `StreamBroken`."""
        if self._ending is not None:
            raise StreamBroken(self._ending)
        self._reap()
        if not self.table.admit(inbound=False):
            raise TooManyStreams(f"the connection to {self.peer} has {len(self.table.open)} streams; close some")
        stream = YamuxStream(self._next_id, self, is_initiator=True)
        self._next_id += 2
        self.table.add(stream)
        self.control(pack_header(WINDOW_UPDATE, SYN, stream.stream_id, stream.receiving.open_window()))
        return stream

    async def accept_stream(self) -> YamuxStream:
        """Wait for the next stream that the peer opens; raises `ConnectionClosed` at the end."""
        try:
            return await self._accepted[1].receive()
        except trio.EndOfChannel:
            raise ConnectionClosed(self._ending or "the connection is closed") from None

    async def ping(self) -> float:
        """Measure the round-trip time in seconds; raises `StreamBroken`. Use it with a deadline."""
        if self._ending is not None:
            raise StreamBroken(self._ending)
        number, answered = self._pings.begin()
        try:
            self.control(pack_header(PING, SYN, 0, number))
            await answered.wait()
        finally:
            self._pings.forget(number)
        if self._ending is not None:
            raise StreamBroken(self._ending)
        return self.rtt()

    async def _measure_rtt(self) -> None:
        with contextlib.suppress(StreamBroken):
            await self.ping()

    # Used by the streams.

    def offer(self, stream: YamuxStream) -> None:
        """Queue a stream's pending write."""
        self._sender.outbox.offer(stream.sending)
        self._sender.pump()

    def send_at_once(self, stream: YamuxStream, parts: Sequence[Buffer]) -> bool:
        """Send a whole write without waiting; False, and nothing sent, if that is not possible now."""
        return self._sender.send_at_once(stream.sending, parts)

    def grant_credit(self, stream: YamuxStream) -> None:
        """Send the peer credit for a stream, if half of its window was read."""
        credit = stream.receiving.credit_due(self.now(), self._pings.rtt_s or UNKNOWN_RTT_S)
        if credit:
            self.control(pack_header(WINDOW_UPDATE, 0, stream.stream_id, credit))

    def control(self, frame: bytes) -> None:
        """Send a frame without a body, ahead of all data."""
        if self._ending is not None:
            return
        try:
            self._sender.outbox.control(frame)
        except ProtocolError as error:
            self._fail(error)
        else:
            self._sender.pump()

    def reset_stream(self, stream: YamuxStream, reason: str) -> None:
        """End a stream in both directions and send the peer a reset."""
        stream.on_broken(reason)
        if self.table.remove(stream):
            self.control(reset_frame(stream.stream_id))

    # Frames from the peer.

    async def _read_loop(self) -> None:
        parser, handled, empty = FrameParser(), 0, 0
        try:
            while self._ending is None:
                data = await self.session.receive()
                if self.session.empty_records > empty:
                    self._flood.count(self.now(), self.session.empty_records - empty)
                    empty = self.session.empty_records
                for frame in parser.feed(data):
                    if self._ending is not None:  # another task closed the connection while these bytes arrived
                        return
                    self._on_frame(frame)
                    handled += 1
                    if handled % _FRAMES_PER_TURN == 0:
                        await trio.lowlevel.checkpoint()
                self._sender.pump()
        except ConnectionClosed as error:
            self._end(str(error))
        except ProtocolError as error:
            self._fail(error)

    def _on_frame(self, frame: YamuxFrame) -> None:
        if frame.kind == PING:
            self._on_ping(frame)
        elif frame.kind == GO_AWAY:
            raise ConnectionClosed(f"the peer closed the connection (reason {frame.length})")
        else:
            stream = self._on_syn(frame.stream_id) if frame.flags & SYN else self.table.open.get(frame.stream_id)
            if stream is not None:
                self._on_stream_frame(stream, frame)
            elif frame.length or not frame.body:  # later pieces of a body were counted with its first
                self._flood.count(self.now())

    def _on_stream_frame(self, stream: YamuxStream, frame: YamuxFrame) -> None:
        kind, flags, _, length, body = frame
        if kind == DATA:
            if length:
                stream.receiving.announce(length)
            if body and not stream.recv_closed:
                stream.on_body(body)
        elif length:
            self._on_credit(stream.sending, length)
        if flags & RST:
            stream.on_broken("the peer reset the stream")
            self.table.remove(stream)
            self._flood.count(self.now())
        elif flags & FIN:
            if stream.recv_closed or not (length or body or stream.receiving.used):
                self._flood.count(self.now())
            stream.on_end()
            if stream.send_closed:
                self.table.remove(stream)
        elif not (length or body or flags & SYN) or (kind == DATA and stream.recv_closed):
            self._flood.count(self.now())

    def _on_credit(self, half: SendHalf, length: int) -> None:
        if half.window == half.credited:  # nothing was sent since the last credit, so this one serves no purpose
            self._flood.count(self.now())
        half.credited = half.window = min(half.window + length, _MAX_CREDIT)
        self._sender.outbox.offer(half)

    def _on_syn(self, stream_id: int) -> YamuxStream | None:
        if stream_id in self.table.open:
            raise ProtocolError(f"opened stream {stream_id} twice")
        if stream_id % 2 == self._is_initiator:
            raise ProtocolError(f"opened stream {stream_id}, an id that only this side may use")
        self._reap()
        if not self.table.admit(inbound=True):
            self._flood.count(self.now())
            self._sender.outbox.control(reset_frame(stream_id))
            return None
        stream = YamuxStream(stream_id, self, is_initiator=False)
        try:
            self._accepted[0].send_nowait(stream)
        except trio.WouldBlock:
            self._flood.count(self.now())
            self.table.budget.release(stream.receiving.window)
            self._sender.outbox.control(reset_frame(stream_id))
            return None
        self.table.add(stream)
        self._sender.outbox.control(pack_header(WINDOW_UPDATE, ACK, stream_id, stream.receiving.open_window()))
        return stream

    def _on_ping(self, frame: YamuxFrame) -> None:
        if frame.flags & SYN:
            self._sender.outbox.pong(frame.length)
            self._flood.count(self.now())
        elif not self._pings.answer(frame.length):
            self._flood.count(self.now())

    def _reap(self) -> None:
        for stream in self.table.overdue(self.now()):
            self.reset_stream(stream, "the peer did not close the stream")

    # Ending the connection.

    def _fail(self, error: ProtocolError) -> None:
        if self._ending is not None:  # frames that arrive while this side closes are not the peer's fault
            return
        logger.warning("dropped the connection to %s: it %s", self.peer, error)
        self._sender.send_last(pack_header(GO_AWAY, 0, 0, _GO_AWAY_PROTOCOL_ERROR))
        self._end(str(error), keep_answers=False)
        self._scope.cancel()

    def _lost(self, reason: str) -> None:
        self._end(reason)
        self._scope.cancel()

    def _end(self, reason: str, *, keep_answers: bool = True) -> None:
        if self._ending is not None:
            return
        self._ending = reason
        self._accepted[0].close()
        for stream in list(self.table.open.values()):
            # A stream that this side opened may still be read for its answer. Handlers of the peer's streams end with
            # the connection; their unread megabytes are dropped here, because a stream and its connection refer to each
            # other and would wait for the cycle collector.
            stream.on_broken(reason, keep_buffer=stream.is_initiator and keep_answers)
            self.table.remove(stream)
        self.table.budget.leave()
        self._pings.release_all()

    async def _close_session(self) -> None:
        with trio.CancelScope(deadline=self.now() + _GOODBYE_S, shield=True):
            await self.session.close()
        self.event_closed.set()

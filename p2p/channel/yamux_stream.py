"""One yamux stream, whose reads and writes can be cancelled at any point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import trio

from p2p.channel.yamux_flow import ReceiveHalf, SendHalf
from p2p.channel.yamux_table import StreamTable
from p2p.channel.yamux_wire import FIN, RST, WINDOW_UPDATE, pack_header
from p2p.errors import Refused, StreamClosed, StreamReset
from p2p.values import PRIORITIES

_BURST_WRITES: Final = 16  # writes that may return without letting other tasks run
Buffer = bytes | bytearray | memoryview


class StreamEOF(StreamClosed):
    """The peer closed its side and all its bytes were read."""


class WriteClosed(StreamClosed):
    """This side has already closed the stream."""


class StreamBroken(StreamReset):
    """The stream was reset by either side, or its connection was lost."""


class TooManyStreams(Refused):
    """The connection has reached its limit of streams."""


class StreamOwner(Protocol):
    """The attributes and methods of a connection that its streams use."""

    @property
    def table(self) -> StreamTable[YamuxStream]: ...
    def now(self) -> float: ...
    def control(self, frame: bytes) -> None: ...
    def offer(self, stream: YamuxStream) -> None: ...
    def send_at_once(self, stream: YamuxStream, parts: Sequence[Buffer]) -> bool: ...
    def grant_credit(self, stream: YamuxStream) -> None: ...
    def reset_stream(self, stream: YamuxStream, reason: str) -> None: ...


class YamuxStream:
    """One stream; one task may read, and any number may write: writes do not interleave."""

    def __init__(self, stream_id: int, connection: StreamOwner, *, is_initiator: bool) -> None:
        self.stream_id = stream_id
        self._connection = connection
        self.is_initiator = is_initiator
        self.receiving = ReceiveHalf(connection.table.budget)
        self.sending = SendHalf(stream_id)
        self.closed_at: float | None = None  # when this side closed; the peer must close within `LINGER_S`
        self.send_closed = False
        self.recv_closed = False
        self._broken: str | None = None
        self._is_read = True
        self._arrived = trio.Event()
        self._write_lock = trio.Lock()
        self._burst = 0

    @property
    def priority(self) -> int:
        """0 control, 1 decode, 2 prefill, 3 bulk; a lower number overtakes at every batch of 256 KiB."""
        return self.sending.priority

    @priority.setter
    def priority(self, value: int) -> None:
        if not 0 <= value < PRIORITIES:
            raise ValueError(f"priority {value} is not one of 0 to {PRIORITIES - 1}")
        self.sending.priority = value

    @property
    def is_closed(self) -> bool:
        """True if both directions have ended."""
        return self._broken is not None or (self.send_closed and self.recv_closed)

    async def read(self, n: int | None = -1) -> bytes:
        """Wait for 1 to `n` bytes (any number if `n` is negative or None); raises `StreamEOF` or `StreamBroken`."""
        if n == 0:
            return b""
        receiving = self.receiving
        while not receiving.buffered:
            self._check_readable()
            if self._arrived.is_set():
                self._arrived = trio.Event()
            await self._arrived.wait()
        data = receiving.pop(-1 if n is None else n)
        if not self.recv_closed and self._broken is None:
            self._connection.grant_credit(self)
        return data

    async def read_exactly(self, n: int) -> bytes:
        """Wait for exactly `n` bytes; raises `StreamEOF` or `StreamBroken`."""
        data = await self.read(n) if n else b""
        if len(data) == n:
            return data
        parts, missing = [data], n - len(data)
        while missing:
            parts.append(await self.read(missing))
            missing -= len(parts[-1])
        return b"".join(parts)

    def _check_readable(self) -> None:
        if self.recv_closed:
            raise StreamEOF("the peer closed the stream")
        if self._broken is not None:
            raise StreamBroken(self._broken)

    async def write(self, data: Buffer) -> None:
        """Send `data`, and wait for the peer's credit without a deadline; raises `StreamBroken` or `WriteClosed`."""
        await self.write_parts((data,))

    async def write_parts(self, parts: Sequence[Buffer]) -> None:
        """Send `parts` one after another without copying them together; raises `StreamBroken` or `WriteClosed`.

        If this is cancelled after some bytes were sent, the stream is reset, because the peer could not tell where the
        next message starts; the connection and its other streams are not affected.
        """
        self._check_writable()
        if not self._write_lock.locked() and self._connection.send_at_once(self, parts):
            self._burst += 1
            if self._burst >= _BURST_WRITES:
                self._burst = 0
                await trio.lowlevel.checkpoint()
            return
        async with self._write_lock:
            self._check_writable()
            self.sending.load(memoryview(part).cast("B") for part in parts if len(part))
            if not self.sending.left:
                return
            self._connection.offer(self)
            try:
                await self.sending.taken.wait()
            except BaseException:
                self._abandon_write()
                raise
            if self.sending.left:
                self.sending.unload()
                self._check_writable()

    def _abandon_write(self) -> None:
        cut_short = self.sending.started and self.sending.left > 0
        self.sending.unload()
        if cut_short:
            self._connection.reset_stream(self, "a write was cancelled half-way")

    def _check_writable(self) -> None:
        if self._broken is not None:
            raise StreamBroken(self._broken)
        if self.send_closed:
            raise WriteClosed("this side closed the stream")

    def on_body(self, body: bytes) -> None:
        """Buffer bytes that arrived and wake the reader; they are dropped if there is none."""
        if not self._is_read:
            return
        self.receiving.push(body, self._connection.now())
        self._arrived.set()

    def stop_reading(self) -> None:
        """Drop what is unread and what is still to come: whoever read this stream has ended."""
        self._is_read = False
        self.receiving.discard()

    def on_end(self) -> None:
        """Note that the peer has closed its side and wake the reader."""
        self.recv_closed = True
        self._arrived.set()

    def on_broken(self, reason: str, *, keep_buffer: bool = False) -> None:
        """End both directions; bytes that arrived before stay readable only if `keep_buffer`."""
        if self._broken is None:
            self._broken = reason
        self.send_closed = True
        if not keep_buffer:
            self.receiving.discard()
        self._arrived.set()
        self.sending.taken.set()

    async def close_write(self) -> None:
        """Close the sending direction; reading is still possible."""
        if self.send_closed:
            return
        if self.sending.left:
            self._connection.reset_stream(self, "closed in the middle of a write")
            return
        self.send_closed = True
        self._connection.control(pack_header(WINDOW_UPDATE, FIN, self.stream_id, 0))
        if self.recv_closed:
            self._connection.table.remove(self)

    async def close(self) -> None:
        """Close this side; the stream is reset later if the peer does not close its own."""
        await self.close_write()
        if self.closed_at is None:
            self.closed_at = self._connection.now()

    async def reset(self) -> None:
        """End both directions at once and drop unread bytes."""
        self.abort("this side reset the stream")

    def abort(self, reason: str) -> None:
        """End both directions at once and drop unread bytes, from any task."""
        if not self.is_closed:
            self._connection.reset_stream(self, reason)
        self.receiving.discard()


def reset_frame(stream_id: int) -> bytes:
    """Return the frame that resets a stream."""
    return pack_header(WINDOW_UPDATE, RST, stream_id, 0)

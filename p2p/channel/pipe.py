"""Raw bytes under a Noise session: over the TCP socket if there is one, else over any raw connection.

A relayed connection is a stream of another connection and has no socket of its own. It works the same, except that
bytes cannot be given to the kernel directly from the calling task (`send_now`).
"""

from __future__ import annotations

import contextlib
import select
import socket as stdlib_socket
from typing import Final

import trio

from p2p.channel.raw import ConnectionClosed, RawConnection
from p2p.errors import P2PError

MOST_UNSENT_BYTES: Final = 128 << 10
LEAST_UNSENT_BYTES: Final = 16 << 10
UNSENT_S: Final = 0.05
_LOST = (OSError, EOFError, trio.BrokenResourceError, trio.ClosedResourceError, P2PError)


class UnsentBound:
    """How many unsent bytes the kernel should hold: as many as it sends in `UNSENT_S`, within bounds. Pure.

    More would delay urgent frames behind them, fewer would leave a fast connection idle.
    """

    def __init__(self) -> None:
        self.size = LEAST_UNSENT_BYTES
        self._given = 0  # bytes that the kernel took since
        self._room_at: float | None = None  # when it had room again after it was full

    def gave(self, size: int) -> None:
        """Count bytes that the kernel took."""
        self._given += size

    def has_room(self, now: float, *, was_full: bool) -> None:
        """Note that the kernel has room; `was_full` if it had none a moment ago, so that all it took before is sent."""
        if not was_full:
            self.size = min(2 * self.size, MOST_UNSENT_BYTES)
        elif self._room_at is not None and now > self._room_at:
            sent = UNSENT_S * self._given / (now - self._room_at)
            if sent < self.size:
                self.size = max(self.size // 2, LEAST_UNSENT_BYTES)
            elif sent >= 2 * self.size:
                self.size = min(2 * self.size, MOST_UNSENT_BYTES)
        self._room_at, self._given = now if was_full else None, 0


class SocketPipe:
    """Reads and writes raw bytes; one reader and one writer at a time.

    Every way to lose the connection raises `ConnectionClosed`.
    """

    def __init__(self, raw: RawConnection) -> None:
        self.raw = raw
        self.socket = raw.socket
        direct = getattr(self.socket, "_sock", None)
        self._direct = direct if isinstance(direct, stdlib_socket.socket) else None
        self._poll: select.poll | None = None
        self._unsent = UnsentBound()
        if self._direct is not None:
            self._tell_bound()
            if hasattr(select, "poll"):
                self._poll = select.poll()
                self._poll.register(self._direct.fileno(), select.POLLOUT)

    async def receive(self, limit: int) -> bytes:
        """Return 1 to `limit` bytes; raises `ConnectionClosed` at the end."""
        try:
            data = await (self.socket.recv(limit) if self.socket is not None else self.raw.read(limit))
        except _LOST as error:
            raise ConnectionClosed(f"the connection was lost: {error}") from error
        if not data:
            raise ConnectionClosed("the peer closed the connection")
        return data

    @property
    def can_send_now(self) -> bool:
        """True if `send_now` works on this kind of connection."""
        return self._direct is not None

    @property
    def slowness(self) -> int:
        """How many times fewer bytes than usual should be sent at once, so that urgent ones need not wait for long."""
        return MOST_UNSENT_BYTES // self._unsent.size

    def has_room(self) -> bool:
        """True if the kernel holds few unsent bytes, so that more of them would be sent soon."""
        return self._poll is None or bool(self._poll.poll(0))

    def send_now(self, data: bytes | bytearray | memoryview) -> int:
        """Give the kernel as many bytes as it accepts without waiting; returns how many it accepted."""
        if self._direct is None:
            return 0
        try:
            taken = self._direct.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ConnectionClosed(f"the connection was lost: {error}") from error
        self._unsent.gave(taken)
        return taken

    async def wait_room(self) -> None:
        """Wait until the kernel has room; returns at once if there is no socket."""
        if self._direct is None:
            return
        descriptor = self._direct.fileno()
        if descriptor < 0:
            raise ConnectionClosed("the connection was closed")
        was_full = not self.has_room()
        try:
            await trio.lowlevel.wait_writable(descriptor)
        except _LOST as error:
            raise ConnectionClosed(f"the connection was lost: {error}") from error
        before = self._unsent.size
        self._unsent.has_room(trio.current_time(), was_full=was_full)
        if self._unsent.size != before:
            self._tell_bound()

    def _tell_bound(self) -> None:
        option = getattr(stdlib_socket, "TCP_NOTSENT_LOWAT", None)
        if self._direct is not None and option is not None:
            with contextlib.suppress(OSError):
                self._direct.setsockopt(stdlib_socket.IPPROTO_TCP, option, self._unsent.size)

    async def send(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of `data`; a cancelled send leaves the connection unusable."""
        try:
            if self._direct is None:
                await self.raw.write(bytes(data))
                return
        except _LOST as error:
            raise ConnectionClosed(f"the connection was lost: {error}") from error
        view = memoryview(data)
        while view:
            await self.wait_room()
            view = view[self.send_now(view) :]

    async def close(self) -> None:
        """Close the connection without waiting for the peer."""
        with contextlib.suppress(*_LOST):
            await self.raw.close()

    def abort(self) -> None:
        """Close the connection at once, from any task; tasks that wait on it get `ConnectionClosed`."""
        self.raw.abort()

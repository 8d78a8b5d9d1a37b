"""The raw bytes under a secure session: a TCP socket where there is one, any libp2p raw connection otherwise.

A relayed connection is a stream of another connection and has no socket of its own; everything works there too, only
without the short cut of sending at once from the writing task.
"""

from __future__ import annotations

import contextlib
import select
import socket as stdlib_socket
from typing import Final

import trio
from libp2p.abc import IRawConnection
from libp2p.exceptions import BaseLibp2pError
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection

# More unsent bytes than this in the kernel would only delay what is more urgent; fewer would leave a fast link idle.
_UNSENT_BYTES: Final = 128 << 10
_LOST = (OSError, EOFError, trio.BrokenResourceError, trio.ClosedResourceError, BaseLibp2pError)


def tcp_socket(raw: IRawConnection) -> trio.socket.SocketType | None:
    """The TCP socket under a raw connection, if it has one of its own."""
    stream = raw.stream if isinstance(raw, RawConnection) else None
    if isinstance(stream, TrioTCPStream) and isinstance(stream.stream, trio.SocketStream):
        return stream.stream.socket
    return None


class SocketPipe:
    """Reads and writes raw bytes; one reader and one writer at a time. Losing the connection is one kind of error."""

    def __init__(self, raw: IRawConnection) -> None:
        self.raw = raw
        self.socket = tcp_socket(raw)
        direct = getattr(self.socket, "_sock", None)
        self._direct = direct if isinstance(direct, stdlib_socket.socket) else None
        self._poll: select.poll | None = None
        if self._direct is not None:
            option = getattr(stdlib_socket, "TCP_NOTSENT_LOWAT", None)
            if option is not None:
                with contextlib.suppress(OSError):
                    self._direct.setsockopt(stdlib_socket.IPPROTO_TCP, option, _UNSENT_BYTES)
            if hasattr(select, "poll"):
                self._poll = select.poll()
                self._poll.register(self._direct.fileno(), select.POLLOUT)

    async def receive(self, limit: int) -> bytes:
        """Up to `limit` bytes; raises `ConnectionClosedError` at the end."""
        try:
            data = await (self.socket.recv(limit) if self.socket is not None else self.raw.read(limit))
        except _LOST as error:
            raise ConnectionClosedError(f"the connection was lost: {error}") from error
        if not data:
            raise ConnectionClosedError("the peer closed the connection")
        return data

    @property
    def can_send_now(self) -> bool:
        """Whether `send_now` may get anywhere at all on this kind of connection."""
        return self._direct is not None

    def has_room(self) -> bool:
        """Whether the kernel holds few enough unsent bytes that more of them would not wait in line."""
        return self._poll is None or bool(self._poll.poll(0))

    def send_now(self, data: bytes | bytearray | memoryview) -> int:
        """Give the kernel what it takes without waiting; returns how many bytes that was."""
        if self._direct is None:
            return 0
        try:
            return self._direct.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ConnectionClosedError(f"the connection was lost: {error}") from error

    async def wait_room(self) -> None:
        """Wait until the kernel has room; returns at once where there is no socket to ask."""
        if self._direct is None:
            return
        descriptor = self._direct.fileno()
        if descriptor < 0:
            raise ConnectionClosedError("the connection was closed")
        try:
            await trio.lowlevel.wait_writable(descriptor)
        except _LOST as error:
            raise ConnectionClosedError(f"the connection was lost: {error}") from error

    async def send(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of `data`; a cancelled send leaves the connection unusable."""
        try:
            if self._direct is None:
                await self.raw.write(bytes(data))
                return
        except _LOST as error:
            raise ConnectionClosedError(f"the connection was lost: {error}") from error
        view = memoryview(data)
        while view:
            await self.wait_room()
            view = view[self.send_now(view) :]

    async def close(self) -> None:
        """Close the connection; never waits for the peer."""
        with contextlib.suppress(*_LOST):
            await self.raw.close()

    def abort(self) -> None:
        """Cut the connection from outside, at once; whoever waits on it is told that it is lost."""
        if self.socket is not None:
            self.socket.close()

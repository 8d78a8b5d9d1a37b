"""Raw connections, which the handshake runs on: their interface, and the one over a TCP socket.

`p2p.nat.relay_client` has the other one, over a stream through a relay.
"""

from __future__ import annotations

from typing import Protocol

import trio

from p2p import sockets as sockopts
from p2p.errors import StreamClosed


class ConnectionClosed(StreamClosed):
    """The connection has ended, or was lost; all its streams end with it."""


class RawConnection(Protocol):
    """Bytes to and from a peer that has not proved its identity yet."""

    is_initiator: bool  # True on the side that dialled

    @property
    def socket(self) -> trio.socket.SocketType | None:
        """The TCP socket, or None if the connection has none of its own."""

    @property
    def remote(self) -> tuple[str, int] | None:
        """The IP address and port at the other end of the socket, the peer's or its relay's; None if there is none."""

    async def read(self, n: int | None = None) -> bytes:
        """Return 1 to `n` bytes, or b"" at the end; raises `StreamClosed` if the connection is lost."""

    async def write(self, data: bytes) -> None:
        """Send all of `data`; raises `StreamClosed` if the connection is lost."""

    async def close(self) -> None:
        """Close both directions."""

    def abort(self) -> None:
        """Close the connection at once and drop what was not sent; tasks that wait on it get an error."""


class SocketConnection:
    """A TCP socket as a raw connection."""

    def __init__(self, stream: trio.SocketStream, *, is_initiator: bool) -> None:
        self.is_initiator = is_initiator
        self.socket = stream.socket
        self._stream = stream
        name = stream.socket.getpeername()
        is_ip = isinstance(name, tuple)
        self.remote = (str(name[0]).split("%", 1)[0], int(name[1])) if is_ip else None

    async def read(self, n: int | None = None) -> bytes:
        """Return 1 to `n` bytes, or b"" at the end; raises `ConnectionClosed` if the connection is lost."""
        try:
            return bytes(await self._stream.receive_some(n))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionClosed(f"the connection was lost: {error}") from error

    async def write(self, data: bytes) -> None:
        """Send all of `data`; raises `ConnectionClosed` if the connection is lost."""
        try:
            await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionClosed(f"the connection was lost: {error}") from error

    async def close(self) -> None:
        """Close the socket."""
        await self._stream.aclose()

    def abort(self) -> None:
        """Close the socket at once and drop what was not sent; tasks that wait on it get an error."""
        sockopts.abort(self.socket)

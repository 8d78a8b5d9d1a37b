"""Wraps a TCP socket or a relayed stream as libp2p's `RawConnection`, which the handshake runs on.

Two things differ from libp2p's own wrapper: the remote address is known for IPv6 too (the deny list needs it), and
writing to a socket that this side has closed raises an error instead of doing nothing.
"""

from __future__ import annotations

import trio
from libp2p.connection_types import ConnectionType
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from multiaddr import Multiaddr

from p2p import sockets as sockopts
from p2p.addresses import Address


class SocketBytes(TrioTCPStream):
    """A TCP socket as libp2p's byte stream."""

    def __init__(self, stream: trio.SocketStream) -> None:
        super().__init__(stream)
        name = stream.socket.getpeername()
        self._cached_remote_address = (str(name[0]).split("%", 1)[0], int(name[1]))

    async def write(self, data: bytes) -> None:
        async with self.write_lock:
            try:
                await self.stream.send_all(data)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise ConnectionClosedError(f"the connection is gone: {error}", transport="tcp") from error

    def abort(self) -> None:
        """Close the socket at once; tasks that wait on it get an error."""
        sockopts.abort(self.stream.socket)


def raw_connection(stream: trio.SocketStream, *, initiator: bool) -> RawConnection:
    """Wrap a TCP socket as a `RawConnection`; `initiator` is True on the side that dialled."""
    return RawConnection(SocketBytes(stream), initiator)


def relayed_connection(stream: object, *, initiator: bool, circuit: Address) -> RawConnection:
    """Wrap a stream through a relay as a `RawConnection`; `circuit` is the address that it uses."""
    return RawConnection(stream, initiator, ConnectionType.RELAYED, [Multiaddr(str(circuit))])  # type: ignore[arg-type]

"""Opening the sockets that a host listens on: explicit ones as asked, the default port with a free one in reserve."""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence

import trio

from p2p import sockets as sockopts
from p2p.addresses import Address, BadAddress
from p2p.errors import P2PError

DEFAULT_PORT = 7464

log = logging.getLogger("shoal.p2p.host")


class PortTaken(P2PError):
    """The port that was asked for is in use; choose another one, or 0 for any free port."""


async def open_listeners(wanted: Sequence[Address]) -> list[trio.SocketListener]:
    """Listen at `wanted`, or everywhere at the default port, or a free one where that is taken."""
    if wanted:
        return await _bind(wanted)
    try:
        return await _bind(_everywhere(DEFAULT_PORT))
    except PortTaken:
        return await _bind(_everywhere(0))


async def _bind(wanted: Sequence[Address]) -> list[trio.SocketListener]:
    listeners: list[trio.SocketListener] = []
    chosen = 0
    try:
        for address in wanted:
            if address.ip is None:
                raise BadAddress(f"{address}: give an IP address to listen on, not a name")
            try:
                # A second wildcard takes the port that the first one got, so that both families share it.
                port = address.port or (chosen if address.ip.is_unspecified else 0)
                listener = await sockopts.listen(address.host, port)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise PortTaken(f"{address} is in use; choose another --listen port, or 0 for any") from error
                if address.ip.version == 6 and listeners:
                    log.info("no IPv6 here: %s (%s)", address, error)
                    continue
                raise PortTaken(f"{address} cannot be listened on: {error}") from error
            chosen = listener.socket.getsockname()[1]
            listeners.append(listener)
    except BaseException:
        for listener in listeners:
            listener.socket.close()
        raise
    return listeners


def _everywhere(port: int) -> list[Address]:
    return [Address("ip4", "0.0.0.0", port), Address("ip6", "::", port)]

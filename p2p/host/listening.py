"""Opens the sockets that a host listens on: the given addresses, or all interfaces at port 7464 or a free port."""

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
    """The requested address cannot be listened on, mostly because its port is in use."""


async def open_listeners(wanted: Sequence[Address]) -> list[trio.SocketListener]:
    """Listen at `wanted`; if it is empty, on all interfaces at `DEFAULT_PORT` or, if that is taken, a free port.

    Raises `PortTaken`, or `BadAddress` for a host name instead of an IP address.
    """
    if wanted:
        return await _bind(wanted)
    try:
        return await _bind(_all_interfaces(DEFAULT_PORT))
    except PortTaken:
        return await _bind(_all_interfaces(0))


async def _bind(wanted: Sequence[Address]) -> list[trio.SocketListener]:
    listeners: list[trio.SocketListener] = []
    chosen = 0
    try:
        for address in wanted:
            if address.ip is None:
                raise BadAddress(f"{address}: give an IP address to listen on, not a name")
            try:
                # With port 0, the IPv6 wildcard uses the port that the IPv4 one got, so that both share it.
                port = address.port or (chosen if address.ip.is_unspecified else 0)
                listener = await sockopts.listen(address.host, port)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise PortTaken(
                        f"{address} is in use: choose another port with --listen or the setting `listen`; 0 takes any"
                    ) from error
                if address.ip.version == 6 and listeners:
                    log.info("not listening on IPv6 address %s: %s", address, error)
                    continue
                raise PortTaken(f"cannot listen on {address}: {error}") from error
            chosen = listener.socket.getsockname()[1]
            listeners.append(listener)
    except BaseException:
        for listener in listeners:
            listener.socket.close()
        raise
    return listeners


def _all_interfaces(port: int) -> list[Address]:
    return [Address("ip4", "0.0.0.0", port), Address("ip6", "::", port)]

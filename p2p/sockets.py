"""TCP sockets with the options this package needs, and the IP addresses of this machine.

Linux, macOS and Windows name these options differently or lack some of them. Missing ones are skipped: the heartbeat
(`p2p.host.heartbeat`) detects dead peers too, only more slowly.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import socket
import struct
import sys
import time

import psutil
import trio

from p2p.addresses import IPAddress, Scope, scope_of

# For peers without a heartbeat, which gives up sooner. Linux counts from the first loss of a series, also while bytes
# arrive: on a crowded line a series takes a minute.
USER_TIMEOUT_S = 120
_KEEPALIVE_IDLE_S = 10
_KEEPALIVE_INTERVAL_S = 5
_KEEPALIVE_PROBES = 2
_BACKLOG = 128
_INTERFACES_S = 5.0


def tune(sock: trio.socket.SocketType) -> None:
    """Send small writes at once, and let the kernel give up on a peer that acknowledges nothing for long."""
    options = [
        (socket.IPPROTO_TCP, "TCP_NODELAY", 1),
        (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE", _KEEPALIVE_IDLE_S),
        (socket.IPPROTO_TCP, "TCP_KEEPALIVE", _KEEPALIVE_IDLE_S),
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL", _KEEPALIVE_INTERVAL_S),
        (socket.IPPROTO_TCP, "TCP_KEEPCNT", _KEEPALIVE_PROBES),
        (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", USER_TIMEOUT_S * 1000),
    ]
    for level, name, value in options:
        option = getattr(socket, name, None)
        if option is not None:
            try:
                sock.setsockopt(level, option, value)
            except OSError:
                continue


def abort(sock: trio.socket.SocketType) -> None:
    """Close the socket at once and discard unsent bytes; tasks that wait on it get an error."""
    linger = struct.pack("hh" if sys.platform == "win32" else "ii", 1, 0)
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    sock.close()


async def listen(host: str, port: int) -> trio.SocketListener:
    """Listen on a port that no other process uses; raises `OSError` if it is taken.

    Port sharing is switched on only after binding: this node's hole-punching sockets can then use the same source
    port, while another process that binds it gets an error instead of half of the connections.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = trio.socket.socket(family, socket.SOCK_STREAM)
    try:
        if sys.platform == "win32":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        await sock.bind((host, port))
        share_port(sock)
        sock.listen(_BACKLOG)
        return trio.SocketListener(sock)
    except BaseException:
        sock.close()
        raise


def share_port(sock: trio.socket.SocketType | socket.socket) -> None:
    """Let a second socket of this user bind the same port, where the system supports it."""
    option = getattr(socket, "SO_REUSEPORT", None)
    if option is not None and sys.platform != "win32":
        try:
            sock.setsockopt(socket.SOL_SOCKET, option, 1)
        except OSError:
            return


async def resolve(name: str, port: int, kind: str, threads: trio.CapacityLimiter) -> list[str]:
    """Return the IP addresses of a host name, `kind` "dns4" or "dns6" only those of one version; raises `OSError`.

    Peers tell names, and a name server that never answers keeps a thread for half a minute, also if this is cancelled:
    `threads` are those that all look-ups together may have, so that the other threads of the node stay free.
    """
    family = {"dns4": socket.AF_INET, "dns6": socket.AF_INET6}.get(kind, socket.AF_UNSPEC)
    look_up = functools.partial(socket.getaddrinfo, name.encode("ascii"), port, family, socket.SOCK_STREAM)
    found = await trio.to_thread.run_sync(look_up, abandon_on_cancel=True, limiter=threads)  # type: ignore[call-arg]
    return list(dict.fromkeys(str(entry[4][0]).split("%", 1)[0] for entry in found))


async def connect(host: str, port: int, source_port: int | None = None) -> trio.SocketStream:
    """Open a TCP connection to an IP address, from `source_port` if one is given and the system shares it.

    Windows does not (WSAEACCES): the listening socket there is exclusive, see `listen`. Any port is used then.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = trio.socket.socket(family, socket.SOCK_STREAM)
    try:
        if source_port is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            share_port(sock)
            try:
                await sock.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", source_port))
            except OSError:
                sock.close()
                return await connect(host, port)
        await sock.connect((host, port))
        tune(sock)
        return trio.SocketStream(sock)
    except BaseException:
        sock.close()
        raise


def own_interfaces() -> list[ipaddress.IPv4Interface | ipaddress.IPv6Interface]:
    """Return every usable IP address of this machine with its network."""
    found: list[ipaddress.IPv4Interface | ipaddress.IPv6Interface] = []
    for cards in psutil.net_if_addrs().values():
        for card in cards:
            if card.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            try:
                prefix = _prefix(card.netmask, "32" if card.family == socket.AF_INET else "64")
                own = ipaddress.ip_interface(f"{card.address.split('%', 1)[0]}/{prefix}")
            except ValueError:
                continue
            if scope_of(own.ip) is not Scope.UNUSABLE:
                found.append(own)
    return found


@functools.lru_cache(maxsize=1)
def _interfaces_of_period(period: int) -> list[ipaddress.IPv4Interface | ipaddress.IPv6Interface]:
    return own_interfaces()


def recent_interfaces() -> list[ipaddress.IPv4Interface | ipaddress.IPv6Interface]:
    """Like `own_interfaces`, up to `_INTERFACES_S` old: for every dial, and every link whenever links are listed."""
    return _interfaces_of_period(int(time.monotonic() / _INTERFACES_S))


def own_ips() -> list[IPAddress]:
    """Return every usable IP address of this machine."""
    return [own.ip for own in own_interfaces()]


def source_towards(host: str) -> str:
    """Return the IPv4 address from which this machine sends to `host`; raises OSError if it cannot."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((host, 9))  # sends nothing
        return str(sock.getsockname()[0])


def _prefix(netmask: str | None, usual: str) -> str:
    """Return a netmask as `ipaddress` reads it; Windows names none of an IPv6 network."""
    if netmask is None or ":" not in netmask:
        return netmask or usual
    return str(int(ipaddress.IPv6Address(netmask)).bit_count())

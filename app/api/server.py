"""The API's socket and server: loopback unless `api_host` says otherwise, hypercorn in the node's own trio loop.

`app.api.supervisor` restarts the server if it fails.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import trio
from hypercorn.config import Config as ServerConfig
from hypercorn.trio import serve as serve_forever

from app.api.guard import Application
from app.core.errors import AppError

if TYPE_CHECKING:
    from trio_typing import TaskStatus

HOST = "127.0.0.1"
# Seconds that open responses get to finish when the node stops; event streams end by themselves before that.
GRACE_S = 2.0

# Seconds that a connection may be open without a request: on a busy machine it comes late.
IDLE_S = 30

log = logging.getLogger("shoal.api")


class PortInUse(AppError):
    """The API's port is taken: choose another --api-port, or 0 for any free one."""

    code = "port_in_use"


class NoSuchAddress(AppError):
    """The API cannot listen on this address: set `api_host` to an address of this machine."""

    code = "no_such_address"


def open_socket(port: int, *, explicit: bool, host: str = HOST) -> socket.socket:
    """Return a listening socket for the API.

    If the port is taken, any free one is used instead, unless the user chose it (`explicit`): then raises `PortInUse`.
    Raises `NoSuchAddress` if `host` is not an IP address of this machine.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise NoSuchAddress(f"the setting api_host is {host[:60]!r}, not an IP address: use 127.0.0.1") from None
    if not address.is_loopback:
        log.warning("the API listens on %s: anyone who can reach it and has its token controls this node", host)
    try:
        return _listen(host, port)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise NoSuchAddress(f"the API cannot listen on {host}: it is not an address of this machine") from None
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        if explicit:
            raise PortInUse(f"the API's port {port} is taken: choose another --api-port, or 0 for any") from None
        log.info("the API's default port %s is taken: using any free one", port)
        return _listen(host, 0)


def url_of(sock: socket.socket) -> str:
    """Return the URL at which this machine reaches the API."""
    host, port = sock.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = HOST if sock.family == socket.AF_INET else "::1"  # listens on all addresses, so on loopback too
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


async def serve(
    application: Application,
    sock: socket.socket,
    until: Callable[[], Awaitable[None]],
    *,
    task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve on `sock` until `until` returns; closes `sock`."""
    config = ServerConfig()
    config.bind = [f"fd://{sock.detach()}"]
    config.graceful_timeout = GRACE_S
    config.keep_alive_timeout = IDLE_S
    config.include_server_header = False
    config.accesslog = None
    config.errorlog = logging.getLogger("shoal.api.server")
    async with trio.open_nursery() as nursery:
        await nursery.start(lambda task_status: _serve(application, config, until, task_status))
        task_status.started()


async def _serve(
    application: Application,
    config: ServerConfig,
    until: Callable[[], Awaitable[None]],
    task_status: TaskStatus[list[str]],
) -> None:
    await serve_forever(application, config, shutdown_trigger=until, task_status=task_status)  # type: ignore[arg-type]


def _listen(host: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if sys.platform == "win32":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        # Now, because until it listens another process can bind the same port.
        sock.listen(100)
    except BaseException:
        sock.close()
        raise
    return sock

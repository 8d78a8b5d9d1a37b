"""The API's socket and server: loopback unless a person says otherwise, hypercorn on the node's own trio loop."""

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
# Answers that are under way when the node leaves get this long; streams of events end by themselves before.
GRACE_S = 2.0

log = logging.getLogger("shoal.api")


class PortInUse(AppError):
    """The port that was asked for the API is taken; choose another --api-port, or 0 for any free one."""

    code = "port_in_use"


class NoSuchAddress(AppError):
    """The API cannot listen on the address that was asked for; set `api_host` to one of this machine's."""

    code = "no_such_address"


def open_socket(port: int, *, explicit: bool, host: str = HOST) -> socket.socket:
    """A listening socket; a default port that is taken gives way to any free one, a chosen one does not."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise NoSuchAddress(f"the setting api_host is {host[:60]!r}, which is no IP address: write 127.0.0.1") from None
    if not address.is_loopback:
        log.warning("the API listens on %s: whoever reaches it and learns its token commands this node", host)
    try:
        return _listen(host, port)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise NoSuchAddress(f"the API cannot listen on {host}: it is no address of this machine") from None
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        if explicit:
            raise PortInUse(f"the API's port {port} is taken: choose another --api-port, or 0 for any") from None
        log.info("the API's usual port %s is taken; any free one is used", port)
        return _listen(host, 0)


def url_of(sock: socket.socket) -> str:
    """The API's address."""
    host, port = sock.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = HOST if sock.family == socket.AF_INET else "::1"  # it listens everywhere, so here too
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


async def serve(
    application: Application,
    sock: socket.socket,
    until: Callable[[], Awaitable[None]],
    *,
    task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve on `sock`, which is closed at the end, until `until` returns."""
    config = ServerConfig()
    config.bind = [f"fd://{sock.detach()}"]
    config.graceful_timeout = GRACE_S
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
        # At once: until it listens, another process could still bind the same port.
        sock.listen(100)
    except BaseException:
        sock.close()
        raise
    return sock

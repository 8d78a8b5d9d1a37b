"""The API's sockets and server: loopback, and HTTPS on another address if `api_host` names one; hypercorn on trio.

`app.api.supervisor` restarts the server if it fails.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio
from hypercorn.config import Config as ServerConfig
from hypercorn.trio import serve as serve_forever

from app.api.certificate import LanCertificate, addresses_of, lan_certificate
from app.api.guard import Application
from app.config.home import Home
from app.config.keys import read_keys
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


class NoKeys(AppError):
    """The API listens on other addresses than loopback only if there are keys for programs."""

    code = "no_keys"


@dataclass(frozen=True)
class LanListener:
    """The API on another address than loopback, with TLS."""

    sock: socket.socket
    url: str
    certificate: LanCertificate


def is_loopback(host: str) -> bool:
    """True if the setting `api_host` keeps the API on this machine; raises `NoSuchAddress` if it is no IP address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        raise NoSuchAddress(f"the setting api_host is {host[:60]!r}, not an IP address: use 127.0.0.1") from None


def open_lan(home: Home, host: str, loopback_port: int) -> LanListener | None:
    """Return the listener for the setting `api_host`; None if that is a loopback address.

    It takes the port after that of loopback, or any free one. Raises `NoKeys` if no program has a key,
    `NoSuchAddress`, or `HomeError` if the certificate cannot be made.
    """
    if is_loopback(host):
        return None
    if not read_keys(home.keys_file):
        raise NoKeys(
            f"the setting api_host is {host}, but no program has a key: make one with `shoal keys add NAME`, or keep "
            "the API on this machine with `shoal config unset api_host`"
        )
    certificate = lan_certificate(home, host)
    sock = open_socket((loopback_port + 1) % 65536, explicit=False, host=host)
    reached = next(iter(addresses_of(host)), ipaddress.ip_address(host))
    url = _url("https", str(reached), sock.getsockname()[1])
    log.warning("the API listens on %s too; the SHA-256 of its certificate is %s", url, certificate.fingerprint)
    return LanListener(sock, url, certificate)


def open_socket(port: int, *, explicit: bool, host: str = HOST) -> socket.socket:
    """Return a listening socket for the API.

    If the port is taken, any free one is used instead, unless the user chose it (`explicit`): then raises `PortInUse`.
    Raises `NoSuchAddress` if `host` is not an IP address of this machine.
    """
    is_loopback(host)
    try:
        return _listen(host, port)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise NoSuchAddress(f"the API cannot listen on {host}: it is not an address of this machine") from None
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        if explicit:
            raise PortInUse(f"the API's port {port} is taken: choose another --api-port, or 0 for any") from None
        log.info("the API's port %s is taken: using any free one", port)
        return _listen(host, 0)


def url_of(sock: socket.socket) -> str:
    """Return the URL at which this machine reaches the API."""
    host, port = sock.getsockname()[:2]
    return _url("http", host, port)


def _url(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


async def serve(
    application: Application,
    sock: socket.socket,
    until: Callable[[], Awaitable[None]],
    lan: LanListener | None = None,
    *,
    task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve on `sock`, which is closed at the end, and on other addresses if `lan` names one, until `until` returns."""
    config = ServerConfig()
    config.bind = [f"fd://{sock.detach()}"]
    if lan is not None:
        config.insecure_bind, config.bind = config.bind, [f"fd://{lan.sock.dup().detach()}"]
        config.certfile, config.keyfile = str(lan.certificate.certificate_file), str(lan.certificate.key_file)
        config.alpn_protocols = ["http/1.1"]
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

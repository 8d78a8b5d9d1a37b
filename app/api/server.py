"""The API's sockets and server: loopback, and HTTPS on another address if `api_host` names one; hypercorn on trio.

Hypercorn speaks HTTP on each connection. How many there are, and when they end, is decided here: it accepts any number,
and waits without end for a client that does not read. How many have a request under way, and whose, is decided in
`app.api.places`. `app.api.supervisor` restarts the server if it fails.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import math
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import h11
import trio
from hypercorn.config import Config as ServerConfig
from hypercorn.events import Closed, Event, RawData
from hypercorn.protocol.events import Request, StreamClosed
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol, H11WSConnection
from hypercorn.protocol.ws_stream import FrameTooLargeError, WSStream
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.utils import wrap_app
from wsproto.connection import ConnectionState
from wsproto.events import CloseConnection, Message, Ping
from wsproto.frame_protocol import CloseReason

from app.api.certificate import LanCertificate, addresses_of, lan_certificate
from app.api.guard import Application
from app.api.places import STATE, Place, Places
from app.config.home import Home
from app.config.keys import read_keys
from app.core.errors import AppError
from app.core.signal import Signal

if TYPE_CHECKING:
    from trio_typing import TaskStatus

HOST = "127.0.0.1"
# Seconds that open responses get to finish when the node stops; event streams end by themselves before that.
GRACE_S = 2.0

# Seconds that a connection may be open without a request: on a busy machine it comes late.
IDLE_S = 30
SEND_S = 60.0  # a client that takes nothing for so long is given up
# Of a WebSocket; a page sends text, and a few hundred messages a second if the mouse moves.
MAX_MESSAGE_CHARS = 65_536
MAX_FRAMES_PER_S = 1000  # pings and empty frames too
MAX_CONNECTIONS = 128  # more than requests may be under way: beyond that one without gives way, the oldest first

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
    """True if the setting `api_host` keeps the API on this machine."""
    return ipaddress.ip_address(host).is_loopback


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


class Crowd:
    """When a client of the API was last closed because there were too many; shared with the API's test."""

    turned_away_at = -math.inf  # on trio's clock


async def serve(
    application: Application,
    sock: socket.socket,
    until: Callable[[], Awaitable[None]],
    lan: LanListener | None = None,
    crowd: Crowd | None = None,
    *,
    task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve on `sock`, which is closed at the end, and on other addresses if `lan` names one, until `until` returns."""
    config = ServerConfig()
    listener = trio.SocketListener(trio.socket.from_stdlib_socket(sock))
    listeners: list[trio.abc.Listener[Any]] = [listener]
    if lan is not None:
        config.certfile, config.keyfile = str(lan.certificate.certificate_file), str(lan.certificate.key_file)
        config.alpn_protocols = ["http/1.1"]
        context = config.create_ssl_context()
        assert context is not None, "there is a certificate"
        other = trio.SocketListener(trio.socket.from_stdlib_socket(lan.sock.dup()))
        listeners.append(trio.SSLListener(other, context, https_compatible=True))
    config.keep_alive_timeout = IDLE_S
    config.websocket_max_message_size = MAX_MESSAGE_CHARS
    config.include_server_header = False
    config.accesslog = None
    config.errorlog = logging.getLogger("shoal.api.server")
    connections = _Connections(application, config, crowd or Crowd())
    try:
        async with trio.open_nursery() as nursery:
            try:
                async with trio.open_nursery() as accepting:
                    accept = partial(trio.serve_listeners, connections.serve, listeners, handler_nursery=nursery)
                    accepting.start_soon(accept)
                    task_status.started()
                    await until()
                    accepting.cancel_scope.cancel()
                await connections.end()
            finally:
                await connections.abort()
            nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            for one in listeners:
                await one.aclose()


class _Http1(H11Protocol):
    """HTTP/1.1 and WebSockets, never HTTP/2: its clients can be willing to take nothing, and hold a place for ever."""

    async def _check_protocol(self, event: h11.Request) -> None:
        pass

    async def _handle_events(self) -> None:
        await super()._handle_events()
        if isinstance(self.stream, WSStream) and self.stream.closed:  # refused before it was accepted
            await self.send(Closed())

    async def _create_stream(self, request: h11.Request) -> None:
        headers = dict(request.headers)
        wanted = [one.strip() for one in headers.get(b"connection", b"").lower().split(b",")]
        is_web_socket = request.method == b"GET" and b"upgrade" in wanted
        if is_web_socket and headers.get(b"upgrade", b"").lower() == b"websocket":
            await self._create_web_socket(request)
            return
        if b"upgrade" in headers:  # to something else, or written so that hypercorn alone takes it for a WebSocket
            rest = [(name, value) for name, value in request.headers if name != b"upgrade"]
            version = request.http_version
            request = h11.Request(method=request.method, headers=rest, target=request.target, http_version=version)
        await super()._create_stream(request)

    async def _create_web_socket(self, request: h11.Request) -> None:
        self.stream = _WebSocket(
            self.app, self.config, self.context, self.task_group, self.ssl, self.client, self.server,
            self.stream_send, STREAM_ID,
        )  # fmt: skip
        self.connection = H11WSConnection(cast(h11.Connection, self.connection))
        # Without its extensions: a compressed message would be whole in memory before its length is known.
        headers = [(name, value) for name, value in request.headers if name != b"sec-websocket-extensions"]
        version, state = request.http_version.decode(), self.connection_state
        await self.stream.handle(Request(STREAM_ID, headers, version, "GET", request.target, state))


class _WebSocket(WSStream):
    """A WebSocket that is closed if a message is too long, or if more frames come than a page sends."""

    _second = -1  # the present one
    _frames = 0  # that came in it

    async def _handle_events(self) -> None:
        """Pass on what has come, as hypercorn does, which keeps whatever comes after a message that is too long."""
        for event in self.connection.events():
            if (code := self._excess(event)) is not None:
                await self._send_wsproto_event(CloseConnection(code=code))
                await self.send(StreamClosed(stream_id=self.stream_id))
                return
            if isinstance(event, Message) and event.message_finished:
                assert self.app_put is not None, "it was accepted"
                await self.app_put(self.buffer.to_message())
                self.buffer.clear()
            elif isinstance(event, Ping):
                await self._send_wsproto_event(event.response())
            elif isinstance(event, CloseConnection):
                if self.connection.state == ConnectionState.REMOTE_CLOSING:
                    await self._send_wsproto_event(event.response())
                await self.send(StreamClosed(stream_id=self.stream_id))

    def _excess(self, event: object) -> CloseReason | None:
        """Count a frame; return why the WebSocket is to be closed, if it is one too many or its message too long."""
        second = int(trio.current_time())
        self._frames = self._frames + 1 if second == self._second else 1
        self._second = second
        if self._frames > MAX_FRAMES_PER_S:
            return CloseReason.POLICY_VIOLATION
        try:
            if isinstance(event, Message):
                self.buffer.extend(event)
        except FrameTooLargeError:
            return CloseReason.MESSAGE_TOO_BIG
        return None


class _Connection(TCPServer):
    """One client; it is given up if it takes nothing of an answer for `SEND_S`."""

    def __init__(self, app: Any, config: ServerConfig, context: WorkerContext, place: Place, stream: Any) -> None:
        super().__init__(app, config, context, {STATE: place}, stream)
        self.place = place
        self._scope = trio.CancelScope()

    async def run(self) -> None:
        """Serve the client until the connection ends, or is given up."""
        with self._scope:
            await super().run()

    async def _read_data(self) -> None:
        made = self.protocol
        made.protocol = _Http1(
            made.app, made.config, made.context, made.task_group, made.state, made.ssl, made.client, made.server,
            made.send,
        )  # fmt: skip
        await super()._read_data()

    async def protocol_send(self, event: Event) -> None:
        """Carry out what HTTP asks for, as hypercorn does, but without waiting for ever."""
        if not isinstance(event, RawData):
            await super().protocol_send(event)
            return
        async with self.send_lock:
            try:
                # Shielded: an answer that was begun is finished, though its request is cancelled.
                with trio.fail_after(SEND_S) as scope:
                    scope.shield = True
                    await self.stream.send_all(event.data)
            except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
                await trio.aclose_forcefully(self.stream)
                # With all its tasks: the application may have no room left to be told, while it waits here.
                self._scope.cancel()


class _Connections:
    """The clients of one server."""

    def __init__(self, application: Application, config: ServerConfig, crowd: Crowd) -> None:
        self._crowd = crowd
        self._application = wrap_app(application, config.wsgi_max_body_size, "asgi")  # type: ignore[arg-type]
        self._config, self._context = config, WorkerContext(None)
        self._places = Places()
        self._open: dict[_Connection, None] = {}  # the oldest first
        self._ended_one = Signal()

    async def serve(self, stream: trio.SocketStream | trio.SSLStream) -> None:
        """Serve a client until one of the two ends the connection; whatever fails costs this client alone."""
        connection = _Connection(self._application, self._config, self._context, Place(self._places), stream)
        idle = None
        if len(self._open) >= MAX_CONNECTIONS:
            self._crowd.turned_away_at = trio.current_time()
            idle = next(one for one in self._open if not one.place.is_taken)
            del self._open[idle]
        self._open[connection] = None  # before anybody else runs, who would find room
        try:
            if idle is not None:
                await trio.aclose_forcefully(idle.stream)
            await connection.run()
        except Exception:
            log.exception("a connection to the API failed")
        finally:
            self._open.pop(connection, None)
            self._ended_one.notify()
            await trio.aclose_forcefully(stream)

    async def end(self) -> None:
        """Ask the connections to end; those with a request have `GRACE_S` to finish it."""
        await self._context.terminated.set()
        with trio.move_on_after(GRACE_S):
            await self._ended_one.wait_for(lambda: not self._open)

    async def abort(self) -> None:
        """End the connections at once, whatever their clients do."""
        with trio.CancelScope(shield=True):
            for connection in list(self._open):
                await trio.aclose_forcefully(connection.stream)


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

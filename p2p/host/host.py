"""The libp2p host: listens, dials, secures connections, and passes each stream to the handler of its protocol.

It speaks libp2p on the wire: TCP, multistream-select, Noise and yamux (`p2p.channel`). The protocols on the streams
belong to the handlers that others register.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import trio

from p2p import sockets as sockopts
from p2p.addresses import Address, IPAddress, Scope, address_of, advertised, mixed, parse_address
from p2p.channel.raw import RawConnection, SocketConnection
from p2p.channel.upgrade import Channel
from p2p.errors import Denied, NoRoom, P2PError, PeerUnreachable, Refused
from p2p.host import dialer
from p2p.host.address_book import AddressBook
from p2p.host.admission import Admission, ConnectionLimits, DenyList
from p2p.host.connection import Connection, Stream, StreamHandler
from p2p.host.listening import open_listeners
from p2p.host.turns import Turns
from p2p.identity import Identity
from p2p.rate_limit import LogLimit
from p2p.supervise import guarded, supervise

if TYPE_CHECKING:
    from trio_typing import TaskStatus

DIAL_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 5.0
UNAWAITED_DIALS = 16  # each of up to 16 addresses
ADDRESSES_OF_A_RELAY = 4  # that are dialled on the way to a peer behind it
LOOKUPS = 16  # of host names at once
_IPS_OF_A_NAME = 4  # that are tried, one after another

Companion = Callable[[Connection], Awaitable[None]]
RelayDial = Callable[[Address], Awaitable[Connection]]

log = logging.getLogger("shoal.p2p.host")
log.addFilter(LogLimit())  # peers can cause these lines


@dataclass(frozen=True)
class HostConfig:
    """Listen addresses, advertised addresses, connection limits and the deny list of a host."""

    listen: tuple[str, ...] = ()  # empty: every interface, at the default port or, if that is taken, a free one
    advertise: tuple[str, ...] = ()
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    deny: tuple[str, ...] = ()
    listens: bool = True  # False: it only dials


class Host:
    """One node's connections to its peers, by peer id."""

    def __init__(self, identity: Identity, channel: Channel, config: HostConfig, book: AddressBook) -> None:
        self.peer_id = identity.peer_id
        self.book = book
        self.admission = Admission(config.limits, DenyList.parse(config.deny))
        self.channel = channel
        self._turns = Turns(self.admission)
        self.relay_dial: RelayDial | None = None
        self.confirmed: list[Address] = []  # public addresses that are told: see `p2p.nat.traversal`
        self.extra_addresses: list[Address] = []  # addresses through relays
        self._explicit = [parse_address(text).of(identity.peer_id) for text in config.advertise]
        self._listen = [parse_address(text) for text in config.listen]
        self._listens = config.listens
        self._handlers: dict[str, StreamHandler] = {}
        self._companions: list[Companion] = []
        self._connections: dict[str, list[Connection]] = {}
        self._dials: dict[tuple[str, bool], _Dial] = {}  # by peer, and whether it is dialled as a relay
        self._listening: list[Address] = []
        self._lookups = trio.CapacityLimiter(LOOKUPS)
        self._nursery: trio.Nursery | None = None
        self._stopping = False

    # --- addresses, handlers and connections -------------------------------------------------------------------------

    @property
    def addresses(self) -> list[Address]:
        """Addresses to advertise, each with this node's peer id, in the order of `mixed`."""
        return mixed([*self.confirmed, *self.own_addresses, *self.extra_addresses])

    @property
    def own_addresses(self) -> list[Address]:
        """Addresses of this machine at which this host listens, or those of the settings; nobody else has a say.

        A wildcard is expanded to the addresses it covers.
        """
        listening = [address.of(self.peer_id) for address in self._listening]
        return advertised(listening, sockopts.own_ips(), self._explicit)

    @property
    def listening(self) -> list[Address]:
        """Addresses to which this host's sockets are bound."""
        return list(self._listening)

    def handle(self, protocol: str, handler: StreamHandler) -> None:
        """Run `handler` for every stream that a peer opens under `protocol`."""
        self._handlers[protocol] = handler

    def unhandle(self, protocol: str) -> None:
        """Refuse streams under `protocol` from now on."""
        self._handlers.pop(protocol, None)

    @property
    def protocols(self) -> list[str]:
        """Protocols that have a handler."""
        return list(self._handlers)

    def accompany(self, companion: Companion) -> None:
        """Run `companion` in a task of every new connection; it is cancelled when the connection ends."""
        self._companions.append(companion)

    def connection(self, peer: str) -> Connection | None:
        """Return the best open connection to `peer`, direct before relayed, then the newest; None if there is none."""
        usable = self.connections_to(peer)
        return max(usable, key=lambda connection: (not connection.relayed, connection.opened_at), default=None)

    def connections_to(self, peer: str) -> list[Connection]:
        """Return all open connections to `peer`."""
        return [connection for connection in self._connections.get(peer, ()) if connection.is_open]

    def connections(self) -> list[Connection]:
        """Return all open connections."""
        return [connection for group in self._connections.values() for connection in group if connection.is_open]

    async def open_stream(self, peer: str, protocol: str) -> Stream:
        """Open a stream to `peer` under `protocol`, connecting first if needed; raises `P2PError`."""
        connection = await self.connect(peer)
        return await connection.open_stream(protocol)

    async def connect(self, peer: str, addresses: Sequence[Address] = (), *, as_relay: bool = False) -> Connection:
        """Return a connection to `peer`, dialling its known addresses and `addresses` if none is open.

        With `as_relay`, a relayed connection does not count as open, and few addresses are dialled, none of them
        through another relay: of peers that are said to be behind each other, all would be dialled at once. Concurrent
        callers share one dial. It continues if all of them are cancelled, as one of the latest `UNAWAITED_DIALS`: the
        next caller may find a connection. Raises `Denied`, `Refused` (held off, or this node itself) or
        `PeerUnreachable`.
        """
        if peer == self.peer_id:
            raise Refused("a node cannot connect to itself")
        refusal = self.admission.refuse_peer(peer, trio.current_time())
        if refusal is not None:
            kind = Denied if peer in self.admission.deny.peers else Refused
            raise kind(f"connections to {peer} are refused: {refusal}")
        self.book.add(peer, addresses, trio.current_time())
        open_already = self.connection(peer)
        if open_already is not None and not (as_relay and open_already.relayed):
            return open_already
        if self._nursery is None or self._stopping:
            raise PeerUnreachable("the host is not running")
        dial = self._dials.get((peer, as_relay))
        if dial is None:
            dial = self._dials[peer, as_relay] = _Dial(tuple(addresses) if as_relay else None)
            self._nursery.start_soon(self._run_dial, peer, dial)
        dial.callers += 1
        try:
            await dial.done.wait()
        finally:
            dial.callers -= 1
            self._end_unawaited()
        if dial.connection is None:
            raise PeerUnreachable(dial.failure)
        return dial.connection

    def _end_unawaited(self) -> None:
        """End the oldest dials that nobody waits for, beyond `UNAWAITED_DIALS`."""
        unawaited = [dial for dial in self._dials.values() if not dial.callers]
        for dial in unawaited[: max(len(unawaited) - UNAWAITED_DIALS, 0)]:
            dial.scope.cancel()

    async def disconnect(self, peer: str, *, misbehaved: bool = False) -> None:
        """Close all connections to `peer`; if it misbehaved, refuse it for a while, longer each time."""
        if misbehaved:
            seconds = self.admission.punish(peer, trio.current_time())
            log.warning("%s misbehaved; it is held off for %.0f s", peer, seconds)
        async with trio.open_nursery() as nursery:
            for connection in list(self._connections.get(peer, ())):
                nursery.start_soon(connection.close, "misbehaved" if misbehaved else "closed")

    # --- running -----------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen and serve until cancelled; after an unexpected error, restart on the same ports.

        Raises `PortTaken` or `BadAddress` if listening fails at the start.
        """
        listeners = await self._open_listeners()
        started = False

        async def serve() -> None:
            nonlocal listeners, started
            if not listeners:
                listeners = await self._open_listeners()
            current, listeners = listeners, []
            try:
                async with trio.open_nursery() as nursery:
                    self._nursery = nursery
                    if not started:
                        started = True
                        task_status.started()
                    if current:
                        await trio.serve_listeners(self._accept, current)
                    await trio.sleep_forever()  # a host that only dials
            finally:
                self._nursery = None
                for listener in current:
                    listener.socket.close()

        await supervise("the libp2p host", serve)

    async def goodbye(self) -> None:
        """Close all connections with a go-away, in at most 0.5 s; call this before cancelling `run`."""
        self._stopping = True
        async with trio.open_nursery() as nursery:
            for connection in self.connections():
                nursery.start_soon(connection.close, "this node stops")

    async def _open_listeners(self) -> list[trio.SocketListener]:
        listeners = await open_listeners(self._listening or self._listen) if self._listens else []
        self._listening = [address_of(*listener.socket.getsockname()[:2]) for listener in listeners]
        return listeners

    # --- establishing connections ------------------------------------------------------------------------------------

    async def _accept(self, stream: trio.SocketStream) -> None:
        await guarded("an inbound connection", self._admit, stream)

    async def _admit(self, stream: trio.SocketStream) -> None:
        try:
            name = stream.socket.getpeername()
            ip = ipaddress.ip_address(str(name[0]).split("%", 1)[0])
        except (OSError, ValueError):
            sockopts.abort(stream.socket)
            return
        refusal = self.admission.begin_handshake(ip, trio.current_time())
        if refusal is not None:
            log.debug("refused a connection from %s: %s", ip, refusal)
            sockopts.abort(stream.socket)
            return
        try:
            sockopts.tune(stream.socket)
            raw = SocketConnection(stream, is_initiator=False)
            connection = await self._establish(raw, address_of(str(ip), name[1]), None)
        except (P2PError, OSError, trio.TooSlowError) as error:
            log.debug("a connection from %s failed: %s", ip, error)
            sockopts.abort(stream.socket)
            return
        except BaseException:
            sockopts.abort(stream.socket)
            raise
        finally:
            self.admission.end_handshake(ip)
        await self._keep(connection)

    async def dial(self, address: Address, peer: str, source_port: int | None = None) -> Connection:
        """Dial one address once; raises `P2PError` (`NoRoom` before it tries), OSError or `trio.TooSlowError`."""
        if address.relay is not None:
            if self.relay_dial is None:
                raise PeerUnreachable(f"{peer} is behind a relay, and this node uses no relays")
            return await self.relay_dial(address.of(peer))
        if address.ip is not None and not self.admission.has_room_at(address.ip, dialled=True):
            raise NoRoom("this node has too many connections open, in all or with that address")
        if source_port is None and address.scope is Scope.PUBLIC:
            # Dial from the listening port, so that the NAT mapping that the peer observes is the one others can dial.
            source_port = next((own.port for own in self._listening if own.kind == address.kind), None)
        stream = await self._connect_socket(address, source_port)
        try:
            raw = SocketConnection(stream, is_initiator=True)
            return await self.adopt(raw, address.of(peer), peer)
        except BaseException:
            sockopts.abort(stream.socket)
            raise

    async def adopt(self, raw: RawConnection, address: Address, peer: str | None) -> Connection:
        """Secure a raw connection (dialled, relayed or hole-punched) and run it in the host.

        If `peer` is given, the other side must prove that identity. Raises `P2PError` or `trio.TooSlowError`.
        """
        connection = await self._establish(raw, address, peer)
        if self._nursery is None or self._stopping:
            connection.abort()
            raise PeerUnreachable("the host is not running")
        self._nursery.start_soon(self._keep, connection)
        await connection.ready.wait()
        if connection.closed.is_set():
            raise PeerUnreachable(f"the connection to {connection.peer} was closed right after it was opened")
        return connection

    async def proves(self, address: Address, peer: str) -> bool:
        """Dial `address` and return True once `peer` has proved its identity there; the connection is then closed.

        Raises `P2PError`, OSError or `trio.TooSlowError` if that fails.
        """
        stream = await self._connect_socket(address, None)
        try:
            raw = SocketConnection(stream, is_initiator=True)
            await self.channel.secure(raw, peer)
            return True
        finally:
            sockopts.abort(stream.socket)

    async def _connect_socket(self, address: Address, source_port: int | None) -> trio.SocketStream:
        with trio.fail_after(_CONNECT_TIMEOUT_S):
            if address.ip is None:
                return await self._connect_by_name(address)
            if self.admission.deny.denies_ip(address.ip):
                raise Refused(f"{address.host} is in a denied network")
            try:
                return await sockopts.connect(address.host, address.port, source_port)
            except OSError as error:
                # From this port there was a connection to that address a moment ago, or there still is one.
                if source_port is None or error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
                    raise
                return await sockopts.connect(address.host, address.port)

    async def _connect_by_name(self, address: Address) -> trio.SocketStream:
        """Connect to the first IP address of a host name that answers; denied networks are not dialled."""
        found = [
            ip
            for ip in await sockopts.resolve(address.host, address.port, address.kind, self._lookups)
            if not self.admission.deny.denies_ip(ipaddress.ip_address(ip))
        ][:_IPS_OF_A_NAME]
        if not found:
            raise Refused(f"{address.host} is in a denied network")
        for ip in found[:-1]:
            with contextlib.suppress(OSError), trio.move_on_after(_CONNECT_TIMEOUT_S / len(found)):
                return await sockopts.connect(ip, address.port)
        return await sockopts.connect(found[-1], address.port)

    async def _establish(self, raw: RawConnection, address: Address, expected: str | None) -> Connection:
        limits = self.admission.limits
        with trio.fail_after(limits.handshake_timeout_s):
            secured = await self.channel.secure(raw, expected)
            refusal = self.admission.refuse_peer(secured.peer, trio.current_time())
            if secured.peer == self.peer_id:
                refusal = "it is this node itself"
            if refusal is not None:
                raise Refused(f"the connection with {secured.peer} is refused: {refusal}")
            muxed = await self.channel.multiplex(secured)
        return Connection(muxed, raw, address, self._turns, max_streams=limits.streams_per_connection)

    async def _keep(self, connection: Connection) -> None:
        """Register a connection, run it until it ends and unregister it; abort it if the limits are reached."""
        ip = connection.ip or ipaddress.ip_address("0.0.0.0")
        if self._stopping or not self.admission.opened(ip, dialled=connection.initiated):
            connection.abort("too many connections are open")
            connection.ready.set()
            connection.closed.set()
            return
        group = self._connections.setdefault(connection.peer, [])
        group.append(connection)
        try:
            if len(group) > self.admission.limits.connections_per_peer:
                # A restarted peer reconnects before its old connections are known to be dead, so the oldest one goes.
                group[0].abort("a newer connection replaced it")
            await connection.run(self._handlers, self._companions, partial(self._stream_delay_s, ip))
        finally:
            self.admission.closed(ip, dialled=connection.initiated)
            group.remove(connection)
            if not group and self._connections.get(connection.peer) is group:
                del self._connections[connection.peer]

    def _stream_delay_s(self, ip: IPAddress) -> float:
        return self.admission.stream_delay_s(ip, trio.current_time())

    async def _run_dial(self, peer: str, dial: _Dial) -> None:
        try:
            with dial.scope, trio.move_on_after(DIAL_TIMEOUT_S):
                dial.connection = await self._dial_best(peer, dial)
        except P2PError as error:
            dial.failure = str(error)
        except Exception as error:
            log.exception("dialling %s failed", peer)
            dial.failure = f"dialling {peer} failed: {error!r}"
        finally:
            self._dials.pop((peer, dial.relay_at is not None), None)
            dial.failure = dial.failure or f"{peer} did not answer within {DIAL_TIMEOUT_S:.0f} s"
            dial.done.set()

    async def _dial_best(self, peer: str, wanted: _Dial) -> Connection:
        async def attempt(address: Address) -> Connection:
            try:
                connection = await self.dial(address, peer)
            except NoRoom:  # says nothing about the address
                raise
            except Exception:
                self.book.failed(address)
                raise
            self.book.succeeded(address, trio.current_time())
            return connection

        attempts = dialer.order(self.book.addresses(peer), sockopts.recent_interfaces(), self.book.told(peer))
        if wanted.relay_at is not None:
            told = [address.of(peer) for address in wanted.relay_at]
            known = [address for address in attempts if address.relay is None]
            attempts = list(dict.fromkeys((*told, *known)))[:ADDRESSES_OF_A_RELAY]
        return await dialer.first_of(peer, attempts, attempt, lambda late: late.abort("another dial was faster"))


@dataclass
class _Dial:
    relay_at: tuple[Address, ...] | None  # where the peer was said to be, if it is dialled as a relay
    callers: int = 0  # that wait for it
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    done: trio.Event = field(default_factory=trio.Event)
    connection: Connection | None = None
    failure: str = ""

"""The network of one node over libp2p: joins host, heartbeat, links, directory, discovery and NAT traversal.

Implements the protocol `app.core.network.Network` without importing it. A peer is named by its peer id, an address is
the text of a multiaddr.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from p2p.addresses import PUBLIC_ENTRIES, Address, Scope, parse_address, parse_known, same_lan
from p2p.channel.upgrade import channel_of
from p2p.dht import streams as kad
from p2p.dht.directory import Directory
from p2p.dht.host_view import LiveHostView
from p2p.dht.public_directory import PublicDirectory
from p2p.discovery.known_peers import KnownPeers
from p2p.discovery.mdns import LocalNetwork
from p2p.discovery.seeker import MEANS, Means, Seeker
from p2p.errors import HandshakeError, P2PError, Refused
from p2p.host import heartbeat
from p2p.host.address_book import AddressBook
from p2p.host.admission import ConnectionLimits, source_of
from p2p.host.connection import Connection, Stream
from p2p.host.heartbeat import Heartbeat, Hello
from p2p.host.host import Host, HostConfig
from p2p.host.identify import StandardProtocols
from p2p.host.peer_record import RecordSigner
from p2p.host.pruning import LinkUse, surplus
from p2p.identity import Identity
from p2p.link.bandwidth import Bandwidth
from p2p.link.byte_stream import ByteStream
from p2p.link.handlers import RequestHandler, StreamHandler
from p2p.link.quota import Limits
from p2p.link.streams import MessageStream
from p2p.link.switchboard import BULK_LANE, LANES, MOVE, Switchboard
from p2p.nat import reachability
from p2p.nat.reachability import Reachability
from p2p.nat.relay_server import RelayServer
from p2p.nat.traversal import Traversal
from p2p.shares import Holder, alone, home_of
from p2p.sockets import recent_interfaces
from p2p.supervise import guarded, supervise
from p2p.values import BULK, CONTROL, LinkInfo, LinkKind, Payload

if TYPE_CHECKING:
    from trio_typing import TaskStatus

PRUNE_S = 2.0
DEAD_S = 2.0  # for an older connection to answer when the peer connects from another address
FRESH_S = 5.0  # a younger connection is never pruned: its dialler has not used it yet

log = logging.getLogger("shoal.p2p.node")


@dataclass(frozen=True)
class NetworkConfig:
    """Settings of a node's network; the defaults suit a node behind a home router."""

    listen: tuple[str, ...] = ()
    advertise: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()  # multiaddrs with a peer id, redialled for ever
    discovery: frozenset[Means] = frozenset(MEANS)
    public_entries: tuple[str, ...] = PUBLIC_ENTRIES  # of the public directory; see `p2p.dnsaddr`
    remember_at: Path | None = None
    secret: bytes | None = field(default=None, repr=False)
    map_port: bool = False  # ask the router to forward the listening port, unless `advertise` is given
    relay: bool | None = None  # relay connections for others; None: if others can dial this node
    deny: tuple[str, ...] = ()
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    limits: Limits = field(default_factory=Limits)
    heartbeat_s: float = heartbeat.PERIOD_S


class Libp2pNetwork:
    """Calls, streams and directory lookups over libp2p; `run` it in a nursery."""

    def __init__(
        self,
        identity: Identity,
        config: NetworkConfig,
        *,
        is_valid_value: Callable[[bytes, bytes], bool] = lambda key, value: True,
        on_handshake_failure: Callable[[HandshakeError], None] | None = None,
    ) -> None:
        self._config = config
        self._book = AddressBook()
        channel = channel_of(identity, secret=config.secret, on_failure=on_handshake_failure)
        host_config = HostConfig(config.listen, config.advertise, config.connections, config.deny)
        self.host = Host(identity, channel, host_config, self._book)
        self.bandwidth = Bandwidth()
        self._board = Switchboard(self._open_lane, limits=config.limits, bandwidth=self.bandwidth)
        self._board.is_lan = self._is_lan
        self._board.holder_of = self._holder
        self._board.on_misbehaved = self._on_misbehaved
        self._heartbeat = Heartbeat(self._hello, self._on_hello, self._on_other, config.heartbeat_s)
        self._directory: Directory | None = None
        self.public: PublicDirectory | None = None  # while it is used
        self._public_scope = trio.CancelScope()
        self._identity = identity
        self.traversal = Traversal(
            self.host,
            self._ask_reach,
            self._start,
            relay=config.relay,
            map_port=config.map_port and not config.advertise,
            mapping_key=identity.secret_for("port mapping"),
        )
        self.traversal.say_hello = self._heartbeat.say_hello
        self.traversal.seek_again = lambda peer: self._seeker.want(peer, [])
        self.traversal.renew_link = lambda peer: self._board.renew(peer, is_relayed)
        self._signer = RecordSigner(identity)
        on_flood = partial(self._on_misbehaved, why="streams for identify and ping")
        self._standard_protocols = StandardProtocols(self.host, identity, self._own_record, on_flood)
        self._seeker = Seeker(self._reach, self._is_connected, self._dialled_peers)
        self._memory = KnownPeers(config.remember_at if "remembered" in config.discovery else None, self.host)
        self._kept: frozenset[str] = frozenset()
        self._nursery: trio.Nursery | None = None
        self._scope: trio.CancelScope | None = None
        self._stopped = trio.Event()
        self._register_handlers(is_valid_value)

    def _register_handlers(self, is_valid_value: Callable[[bytes, bytes], bool]) -> None:
        for lane in LANES:
            self.host.handle(lane, partial(self._attend, lane))
            self.host.handle(lane + MOVE, partial(self._attend_move, lane))
        self.host.handle(heartbeat.PROTOCOL, self._heartbeat.accepted)
        self.host.accompany(self._heartbeat.accompany)
        self.host.accompany(self._drop_dead)
        self._board.serve(reachability.METHOD, self.traversal.reachability.handle)
        if "dht" in self._config.discovery:
            view = LiveHostView(self.host, self._own_record, self._heartbeat.is_linked)
            self._directory = Directory(self.peer_id, partial(kad.ask, self.host, kad.PROTOCOL), view, is_valid_value)
            requests = kad.RequestServer(self._directory.handle, partial(self._on_misbehaved, why="directory requests"))
            self.host.handle(kad.PROTOCOL, requests.serve)

    # --- the methods of `app.core.network.Network` --------------------------------------------------------------------

    @property
    def peer_id(self) -> str:
        """This node's peer id."""
        return self.host.peer_id

    async def call(self, peer: str, method: str, body: Payload, *, timeout_s: float, priority: int = CONTROL) -> bytes:
        """Send one request and return its answer, dialling the peer if needed; raises `P2PError`."""
        return await self._board.call(peer, method, body, timeout_s=timeout_s, priority=priority)

    def serve(self, method: str, handler: RequestHandler) -> None:
        """Answer calls of `method` with `handler`."""
        self._board.serve(method, handler)

    async def open(self, peer: str, protocol: str, *, timeout_s: float = 10.0) -> MessageStream:
        """Open a message stream and wait until the peer has accepted it; raises `P2PError`."""
        return await self._board.open(peer, protocol, timeout_s=timeout_s)

    def accept(self, protocol: str, handler: StreamHandler) -> None:
        """Run `handler` for each stream that a peer opens with `protocol`."""
        self._board.accept(protocol, handler)

    async def provide(self, key: bytes) -> None:
        """Publish this node as a provider of `key` in the directories; republished for ninety minutes."""
        if self.public is not None:
            self.public.provide(key)
        if self._directory is not None:
            await self._directory.provide(key)

    async def find_providers(self, key: bytes, *, timeout_s: float) -> Sequence[str]:
        """Return peers that provide `key`; their addresses are kept for dialling."""
        found: dict[str, None] = {}

        async def look_up(directory: Directory | PublicDirectory) -> None:
            found.update(dict.fromkeys(await directory.find_providers(key, timeout_s=timeout_s)))
            if found and directory is self._directory:
                nursery.cancel_scope.cancel()  # the look-up in the public directory goes on, for later calls

        async with trio.open_nursery() as nursery:
            for directory in (self._directory, self.public):
                if directory is not None:
                    nursery.start_soon(look_up, directory)
        return list(found)

    async def put_value(self, key: bytes, value: bytes) -> None:
        """Store a small value in the directory."""
        if self._directory is not None:
            await self._directory.put_value(key, value)

    async def get_value(self, key: bytes, *, timeout_s: float) -> bytes | None:
        """Look up the valid value of `key` that most peers store; None if there is none. Nothing is cached."""
        values = await self.get_values(key, timeout_s=timeout_s)
        return values[0] if values else None

    async def get_values(self, key: bytes, *, timeout_s: float) -> list[bytes]:
        """Look up every valid value stored under `key`, the one that most peers store first."""
        return [] if self._directory is None else await self._directory.get_values(key, timeout_s=timeout_s)

    def addresses(self) -> Sequence[str]:
        """The addresses at which others may dial this node."""
        return [str(address) for address in self.host.addresses]

    def learn(self, peer: str, addresses: Sequence[str]) -> None:
        """Remember addresses of a peer for dialling."""
        self._book.add(peer, parse_known(addresses, peer), trio.current_time())

    def seek(self, address: str, *, keep: bool = True) -> None:
        """Connect to the peer at `address` and, with `keep`, reconnect whenever the connection is lost.

        Raises `BadAddress` for an address that cannot be dialled, `Refused` for one without a peer id.
        """
        parsed = parse_address(address)
        if parsed.peer is None:
            raise Refused(f"{address} has no peer id; append /p2p/PEER")
        self._seeker.want(parsed.peer, [parsed], sticky=keep)

    def links(self) -> Sequence[LinkInfo]:
        """One entry for each connected peer, with its round-trip time and the bytes carried."""
        found: dict[str, LinkInfo] = {}
        for connection in self.host.connections():
            peer = connection.peer
            best = self.host.connection(peer)
            if best is connection:
                lanes = self._board.links_to(peer)
                carried_in, carried_out = sum(lane.bytes_in for lane in lanes), sum(lane.bytes_out for lane in lanes)
                speeds = [speed for lane in lanes if (speed := lane.receive_rate.bytes_per_s) is not None]
                down = max(speeds, default=None)
                found[peer] = LinkInfo(peer, _kind(connection), connection.rtt_s, carried_in, carried_out, down)
        return list(found.values())

    def source(self, peer: str) -> str:
        """Return the IP address of a linked peer, or of its relay (IPv6: the /64); empty without a link."""
        connection = self.host.connection(peer)
        return "" if connection is None or connection.ip is None else str(source_of(connection.ip))

    def keep_links(self, peers: Iterable[str]) -> None:
        """Never prune the links to `peers`; replaces the peers of the last call."""
        self._kept = frozenset(peers)

    def on_link_lost(self, listener: Callable[[str], None]) -> Callable[[], None]:
        """Call `listener` with each peer whose last link broke or was closed by the peer; returns the unsubscriber."""
        return self._board.on_link_lost(listener)

    @property
    def is_private(self) -> bool:
        """True if only nodes with the swarm's secret can connect."""
        return self._config.secret is not None

    def allow_relaying(self, allowed: bool) -> None:
        """Allow or forbid this node to relay connections for others; it needs to be dialable to do so."""
        self.traversal.allow_relaying(allowed)

    def use_public(self, wanted: bool) -> None:
        """Take part in the public directory from now on, or leave it; needs a running network."""
        if wanted and self.public is None and self._nursery is not None:
            self.public, self._public_scope = self._public_directory(), trio.CancelScope()
            self._nursery.start_soon(self._run_public, self.public, self._public_scope)
        elif not wanted and self.public is not None:
            self._public_scope.cancel()
            self.public = None

    @property
    def reachability(self) -> Reachability:
        """The test of whether others can dial this node, and its result."""
        return self.traversal.reachability

    @property
    def relay(self) -> RelayServer:
        """The relay that this node runs for others."""
        return self.traversal.server

    async def disconnect(self, peer: str, *, misbehaved: bool = False) -> None:
        """Close all links to `peer`; one that misbehaved may not reconnect for a time that doubles each time."""
        self._board.hang_up(peer)
        await self.host.disconnect(peer, misbehaved=misbehaved)

    # --- running and stopping -----------------------------------------------------------------------------------------

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the network until cancelled or stopped; reports started once it listens."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery, self._scope = nursery, nursery.cancel_scope
                await nursery.start(self.host.run)
                await nursery.start(self._board.run)
                await self._start_discovery(nursery)
                task_status.started()
        finally:
            self._nursery = None
            with trio.CancelScope(shield=True):
                await self._memory.save()
            self._stopped.set()

    async def stop(self) -> None:
        """Say goodbye to every peer and end `run`; takes at most a second, even if peers do not respond.

        If the router has to be told to close a port, it takes up to two seconds more.
        """
        if self._scope is not None:
            await self._memory.save()  # before `goodbye` closes the connections, which are part of what is saved
            await self.host.goodbye()
            self._scope.cancel()
            await self._stopped.wait()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Libp2pNetwork]:
        """Run the network for the duration of the `async with` block."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.run)
            try:
                yield self
            finally:
                with trio.CancelScope(shield=True):
                    await self.stop()

    async def _start_discovery(self, nursery: trio.Nursery) -> None:
        means = self._config.discovery
        for text in self._config.peers:
            self.seek(text)
        for entry in await self._memory.load():
            self._seeker.want(entry.peer, entry.addresses)
        nursery.start_soon(supervise, "remembering peers", self._memory.run)
        if "mdns" in means and not self._config.advertise:
            local = LocalNetwork(self.peer_id, lambda: self.host.addresses, self._seeker.want_neighbour)
            nursery.start_soon(supervise, "mDNS", local.run)
        if self._directory is not None:
            nursery.start_soon(supervise, "the directory", partial(self._directory.maintain, self._probe))
        self.use_public("public" in means)
        nursery.start_soon(supervise, "discovery", self._seeker.run)
        nursery.start_soon(self.traversal.run)
        nursery.start_soon(supervise, "pruning", self._prune)

    async def _run_public(self, public: PublicDirectory, scope: trio.CancelScope) -> None:
        with scope:
            await supervise("the public directory", public.run)

    def _public_directory(self) -> PublicDirectory:
        def learn(peer: str, addresses: Sequence[Address]) -> None:
            self._book.add(peer, addresses, trio.current_time())

        config = self._config
        return PublicDirectory(
            self._identity, config.public_entries, lambda: self.host.addresses, learn, deny=config.deny
        )

    # --- callbacks and helpers ----------------------------------------------------------------------------------------

    async def _open_lane(self, peer: str, lane: str) -> Stream:
        if not self._book.addresses(peer) and self.host.connection(peer) is None and self._directory is not None:
            await self._directory.find_peer(peer)
        stream = await self.host.open_stream(peer, lane)
        best = self.host.connection(peer)
        if stream.connection.relayed and best is not None and not best.relayed:
            # A direct connection came up meanwhile: links that exist have moved to it, and this one would not.
            await stream.reset()
            stream = await best.open_stream(lane)
        return _prioritised(lane, stream)

    async def _attend(self, lane: str, stream: Stream) -> None:
        _prioritised(lane, stream)
        await self._board.attend(stream.peer, lane, stream)

    async def _attend_move(self, lane: str, stream: Stream) -> None:
        _prioritised(lane, stream)
        await self._board.attend_move(stream.peer, lane, stream)

    async def _ask_reach(self, peer: str, body: bytes, timeout_s: float) -> bytes:
        return await self._board.call(peer, reachability.METHOD, body, timeout_s=timeout_s)

    async def _reach(self, peer: str, addresses: list[Address]) -> bool:
        try:
            await self.host.connect(peer, addresses)
        except P2PError as error:
            log.info("%s", error)
            return False
        return True

    async def _probe(self, peer: str) -> bool:
        return self._is_connected(peer) or await self._reach(peer, [])

    def _is_connected(self, peer: str) -> bool:
        return self.host.connection(peer) is not None

    def _dialled_peers(self) -> set[str]:
        """Return the connected peers that this node dialled itself: anybody can connect to it."""
        return {connection.peer for connection in self.host.connections() if connection.initiated}

    def _board_peers(self) -> set[str]:
        return {connection.peer for connection in self.host.connections()}

    def _holder(self, peer: str) -> Holder:
        connection = self.host.connection(peer)
        if connection is None or connection.ip is None:
            return alone(peer)
        return Holder(home_of(connection.ip) or (str(connection.ip) if connection.relayed else peer), peer)

    def _is_lan(self, peer: str) -> bool:
        connection = self.host.connection(peer)
        return connection is not None and _kind(connection) == "lan"

    def _on_misbehaved(self, peer: str, why: str) -> None:
        self._start(partial(self.disconnect, peer, misbehaved=True))

    def _start(self, task: Callable[..., Awaitable[None]], *arguments: object) -> None:
        if self._nursery is not None:
            self._nursery.start_soon(guarded, "a task of the network", task, *arguments)

    def _own_record(self) -> bytes:
        return self._signer.record(self.host.addresses)

    def _hello(self, connection: Connection) -> Hello:
        return self.traversal.hello(connection)

    def _on_hello(self, connection: Connection, hello: Hello) -> None:
        self._book.add(connection.peer, hello.addresses, trio.current_time(), own_word=True)
        self.traversal.heard(connection, hello)
        if self._directory is not None:
            self._directory.saw(connection.peer)

    def _on_other(self, peer: str) -> None:
        """Give a libp2p node that is not a Shoal node a place in the directory, if it answers there."""
        if self._directory is not None:
            self._directory.meet(peer)

    async def _drop_dead(self, newest: Connection) -> None:
        """Beside a new connection: close the older ones to the same peer that do not answer, as after it moved."""
        for older in self.host.connections_to(newest.peer):
            if older is not newest and not older.relayed and older.address.ip != newest.address.ip:
                with trio.move_on_after(DEAD_S):
                    with contextlib.suppress(P2PError):
                        await older.ping()
                    continue
                older.abort("it does not answer, unlike a newer connection")

    async def _prune(self) -> None:
        """Every `PRUNE_S` seconds, close idle links if there are too many."""
        while True:
            await trio.sleep(PRUNE_S)
            kept = self._kept | self.traversal.needed_peers
            for peer in surplus([self._use(peer) for peer in self._board_peers()], kept):
                log.debug("closing the idle link to %s: many others are open", peer)
                await self.disconnect(peer)

    def _use(self, peer: str) -> LinkUse:
        lanes = self._board.links_to(peer)
        opened_at = max((c.opened_at for c in self.host.connections_to(peer)), default=0.0)
        is_fresh = trio.current_time() - opened_at < FRESH_S
        busy = is_fresh or self._seeker.is_sticky(peer) or any(lane.busy for lane in lanes)
        return LinkUse(peer, self.source(peer), max([opened_at, *(lane.used_at for lane in lanes)]), busy)


def _prioritised(lane: str, stream: Stream) -> Stream:
    """Give the bulk lane's stream low priority, so that the live lane overtakes it on their shared connection."""
    if lane.startswith(BULK_LANE):
        stream.muxed.priority = BULK
    return stream


def is_relayed(stream: ByteStream) -> bool:
    """True if a byte stream passes through a relay."""
    return isinstance(stream, Stream) and stream.connection.relayed


def _kind(connection: Connection) -> LinkKind:
    if connection.relayed:
        return "relayed"
    scope, ip = connection.address.scope, connection.address.ip
    near = scope is Scope.LOOPBACK or (scope is Scope.LAN and ip is not None and same_lan(ip, recent_interfaces()))
    return "lan" if near else "direct"

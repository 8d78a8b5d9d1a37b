"""The network of one node over libp2p: puts host, heartbeat, links, directory and discovery together.

Satisfies `app.core.network.Network` without knowing it. Peers are named by their peer id, addresses are multiaddr
texts.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from p2p.addresses import Address, Scope, parse_address, parse_known, same_lan
from p2p.channel.compatibility import check_libp2p
from p2p.channel.upgrade import channel_of
from p2p.dht import directory as dht
from p2p.dht.directory import Directory
from p2p.dht.host_view import LiveHostView
from p2p.discovery.known_peers import KnownPeers
from p2p.discovery.mdns import LocalNetwork
from p2p.discovery.seeker import MEANS, Means, Seeker
from p2p.errors import HandshakeError, P2PError, Refused
from p2p.host import heartbeat
from p2p.host.address_book import AddressBook
from p2p.host.admission import ConnectionLimits
from p2p.host.connection import Connection, Stream
from p2p.host.heartbeat import Heartbeat, Hello
from p2p.host.host import Host, HostConfig
from p2p.host.identify import StandardProtocols
from p2p.host.pruning import LinkUse, surplus
from p2p.identity import Identity
from p2p.link.bandwidth import Bandwidth
from p2p.link.handlers import RequestHandler, StreamHandler
from p2p.link.quota import Limits
from p2p.link.streams import MessageStream
from p2p.link.switchboard import BULK_LANE, LANES, Switchboard
from p2p.nat import reachability
from p2p.nat.reachability import Reachability
from p2p.nat.relay_server import RelayServer
from p2p.nat.traversal import Traversal
from p2p.sockets import own_interfaces
from p2p.supervise import guarded, supervise
from p2p.values import BULK, CONTROL, LinkInfo, LinkKind, Payload

if TYPE_CHECKING:
    from trio_typing import TaskStatus

PRUNE_S = 2.0
FRESH_S = 5.0  # who dialled has not got to what it dialled for

log = logging.getLogger("shoal.p2p.node")


@dataclass(frozen=True)
class NetworkConfig:
    """How a node takes part in the network; the defaults are those of a node at home."""

    listen: tuple[str, ...] = ()
    advertise: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()  # multiaddrs with a peer id, dialled again for ever
    discovery: frozenset[Means] = frozenset(MEANS)
    remember_at: Path | None = None
    secret: bytes | None = field(default=None, repr=False)
    relay: bool | None = None  # carry connections for others: yes, no, or None: if others can dial this node
    deny: tuple[str, ...] = ()
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    limits: Limits = field(default_factory=Limits)
    heartbeat_s: float = heartbeat.PERIOD_S


class Libp2pNetwork:
    """Calls, streams and look-ups among real nodes; run it in a nursery."""

    def __init__(
        self,
        identity: Identity,
        config: NetworkConfig,
        *,
        is_valid_value: Callable[[bytes, bytes], bool] = lambda key, value: True,
        on_handshake_failure: Callable[[HandshakeError], None] | None = None,
    ) -> None:
        check_libp2p()
        self._config = config
        self._book = AddressBook()
        channel = channel_of(identity, secret=config.secret, on_failure=on_handshake_failure)
        host_config = HostConfig(config.listen, config.advertise, config.connections, config.deny)
        self.host = Host(identity, channel, host_config, self._book)
        self.bandwidth = Bandwidth()
        self._board = Switchboard(self._open_lane, limits=config.limits, bandwidth=self.bandwidth)
        self._board.is_lan = self._is_lan
        self._board.on_misbehaved = self._on_misbehaved
        self._heartbeat = Heartbeat(self._hello, self._heard, config.heartbeat_s)
        self._directory: Directory | None = None
        self.traversal = Traversal(self.host, self._ask_reach, self._start, relay=config.relay)
        self.traversal.say_hello = self._heartbeat.say_hello
        self.traversal.renew_link = self._board.renew
        self._courtesies = StandardProtocols(self.host, identity)
        self._seeker = Seeker(self._reach, self._is_connected, lambda: len(self._board_peers()))
        self._memory = KnownPeers(config.remember_at if "remembered" in config.discovery else None, self.host)
        self._kept: frozenset[str] = frozenset()
        self._nursery: trio.Nursery | None = None
        self._scope: trio.CancelScope | None = None
        self._stopped = trio.Event()
        self._plug(is_valid_value)

    def _plug(self, is_valid_value: Callable[[bytes, bytes], bool]) -> None:
        for lane in LANES:
            self.host.handle(lane, partial(self._attend, lane))
        self.host.handle(heartbeat.PROTOCOL, self._heartbeat.accepted)
        self.host.accompany(self._heartbeat.accompany)
        self._board.serve(reachability.METHOD, self.traversal.reachability.handle)
        if "dht" in self._config.discovery:
            self._directory = Directory(self.peer_id, self._ask, LiveHostView(self.host), is_valid_value)
            self._board.serve(dht.METHOD, self._directory.handle)

    # --- what `app.core.network.Network` asks -------------------------------------------------------------------------

    @property
    def peer_id(self) -> str:
        """This node's name."""
        return self.host.peer_id

    async def call(self, peer: str, method: str, body: Payload, *, timeout_s: float, priority: int = CONTROL) -> bytes:
        """One request, one answer, dialling where there is no link."""
        return await self._board.call(peer, method, body, timeout_s=timeout_s, priority=priority)

    def serve(self, method: str, handler: RequestHandler) -> None:
        """Answer calls of `method`."""
        self._board.serve(method, handler)

    async def open(self, peer: str, protocol: str, *, timeout_s: float = 10.0) -> MessageStream:
        """A new message stream, once the peer accepted it."""
        return await self._board.open(peer, protocol, timeout_s=timeout_s)

    def accept(self, protocol: str, handler: StreamHandler) -> None:
        """Run `handler` for each stream a peer opens under `protocol`."""
        self._board.accept(protocol, handler)

    async def provide(self, key: bytes) -> None:
        """Be found under `key` in the directory; published again by itself for ninety minutes."""
        if self._directory is not None:
            await self._directory.provide(key)

    async def find_providers(self, key: bytes, *, timeout_s: float) -> Sequence[str]:
        """Peers that provide `key`; their addresses are remembered for dialling."""
        if self._directory is None:
            return []
        return await self._directory.find_providers(key, timeout_s=timeout_s)

    async def put_value(self, key: bytes, value: bytes) -> None:
        """Keep a small value in the directory."""
        if self._directory is not None:
            await self._directory.put_value(key, value)

    async def get_value(self, key: bytes, *, timeout_s: float) -> bytes | None:
        """The most widely kept valid value of `key`, asked of the network each time."""
        values = await self.get_values(key, timeout_s=timeout_s)
        return values[0] if values else None

    async def get_values(self, key: bytes, *, timeout_s: float) -> list[bytes]:
        """Every valid value that is kept under `key`, the most widely kept first."""
        return [] if self._directory is None else await self._directory.get_values(key, timeout_s=timeout_s)

    def addresses(self) -> Sequence[str]:
        """Where others may dial this node."""
        return [str(address) for address in self.host.addresses]

    def learn(self, peer: str, addresses: Sequence[str]) -> None:
        """Remember where a peer may be dialled."""
        self._book.add(peer, parse_known(addresses, peer), trio.current_time())

    def seek(self, address: str) -> None:
        """Connect to the peer at `address` (which must name it), and again whenever it is lost."""
        parsed = parse_address(address)
        if parsed.peer is None:
            raise Refused(f"{address} does not say which peer is there; append /p2p/PEER")
        self._seeker.want(parsed.peer, [parsed], sticky=True)

    def links(self) -> Sequence[LinkInfo]:
        """Every open link, with its measured round-trip time."""
        found: dict[str, LinkInfo] = {}
        for connection in self.host.connections():
            peer = connection.peer
            best = self.host.connection(peer)
            if best is connection:
                lanes = self._board.links_to(peer)
                carried_in, carried_out = sum(lane.bytes_in for lane in lanes), sum(lane.bytes_out for lane in lanes)
                found[peer] = LinkInfo(peer, _kind(connection), connection.rtt_s, carried_in, carried_out)
        return list(found.values())

    def keep_links(self, peers: Iterable[str]) -> None:
        """Hold on to the links to these peers."""
        self._kept = frozenset(peers)

    def on_link_lost(self, listener: Callable[[str], None]) -> Callable[[], None]:
        """Tell `listener` of each peer whose last link was reset or fell silent, until what is returned is called."""
        return self._board.on_link_lost(listener)

    def allow_relaying(self, allowed: bool) -> None:
        """Whether this node may carry connections for others: it does once others can dial it, or never."""
        self.traversal.allow_relaying(allowed)

    @property
    def reachability(self) -> Reachability:
        """What is known of how others reach this node."""
        return self.traversal.reachability

    @property
    def relay(self) -> RelayServer:
        """The relay role of this node."""
        return self.traversal.server

    async def disconnect(self, peer: str, *, misbehaved: bool = False) -> None:
        """Close the link; a peer that misbehaved is held off with a growing backoff."""
        self._board.hang_up(peer)
        await self.host.disconnect(peer, misbehaved=misbehaved)

    # --- its life -----------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take part until cancelled or stopped; reports started once it listens."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery, self._scope = nursery, nursery.cancel_scope
                await nursery.start(self.host.run)
                await nursery.start(self._board.run)
                await self._start_discovery(nursery)
                task_status.started()
        finally:
            self._nursery = None
            self._memory.save()
            self._stopped.set()

    async def stop(self) -> None:
        """Say goodbye to every peer and end `run`; takes no longer than a second, whoever is frozen."""
        if self._scope is not None:
            self._memory.save()  # while it is known who is connected
            await self.host.goodbye()
            self._scope.cancel()
            await self._stopped.wait()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Libp2pNetwork]:
        """Run for as long as the block lasts."""
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
            local = LocalNetwork(self.peer_id, lambda: self.host.addresses, self._seeker.want)
            nursery.start_soon(supervise, "mDNS", local.run)
        if self._directory is not None:
            nursery.start_soon(supervise, "the directory", partial(self._directory.maintain, self._probe))
        nursery.start_soon(supervise, "discovery", self._seeker.run)
        nursery.start_soon(self.traversal.run)
        nursery.start_soon(supervise, "pruning", self._prune)

    # --- within -------------------------------------------------------------------------------------------------------

    async def _open_lane(self, peer: str, lane: str) -> Stream:
        if not self._book.addresses(peer) and self.host.connection(peer) is None and self._directory is not None:
            await self._directory.find_peer(peer)
        return _in_its_turn(lane, await self.host.open_stream(peer, lane))

    async def _attend(self, lane: str, stream: Stream) -> None:
        _in_its_turn(lane, stream)
        await self._board.attend(stream.peer, lane, stream)

    async def _ask(self, peer: str, body: bytes, timeout_s: float) -> bytes:
        return await self._board.call(peer, dht.METHOD, body, timeout_s=timeout_s)

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

    def _board_peers(self) -> set[str]:
        return {connection.peer for connection in self.host.connections()}

    def _is_lan(self, peer: str) -> bool:
        connection = self.host.connection(peer)
        return connection is not None and _kind(connection) == "lan"

    def _on_misbehaved(self, peer: str, why: str) -> None:
        self._start(partial(self.disconnect, peer, misbehaved=True))

    def _start(self, task: Callable[..., Awaitable[None]], *arguments: object) -> None:
        if self._nursery is not None:
            self._nursery.start_soon(guarded, "a task of the network", task, *arguments)

    def _hello(self, connection: Connection) -> Hello:
        return self.traversal.hello(connection)

    def _heard(self, connection: Connection, hello: Hello) -> None:
        self._book.add(connection.peer, hello.addresses, trio.current_time())
        self.traversal.heard(connection, hello)
        if self._directory is not None:
            self._directory.saw(connection.peer)

    async def _prune(self) -> None:
        """Close links that nobody needs, where there are many."""
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
        return LinkUse(peer, max([opened_at, *(lane.used_at for lane in lanes)]), busy)


def _in_its_turn(lane: str, stream: Stream) -> Stream:
    """The live lane overtakes the bulk lane on the connection that they share."""
    if lane == BULK_LANE:
        stream.muxed.priority = BULK
    return stream


def _kind(connection: Connection) -> LinkKind:
    if connection.relayed:
        return "relayed"
    scope, ip = connection.address.scope, connection.address.ip
    near = scope is Scope.LOOPBACK or (scope is Scope.LAN and ip is not None and same_lan(ip, own_interfaces()))
    return "lan" if near else "direct"

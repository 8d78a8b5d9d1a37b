"""Combines the NAT modules of one host: port mapping, the reachability probe, both sides of relaying, hole punching.

A node that the probe verifies relays for others (unless configured otherwise); one that is not reachable uses relays.
Once a direct connection exists, by hole punching or otherwise, relayed connections to its peer are closed.

An address whose port a router forwards is told to others once a peer outside has confirmed it, and before that only
while there is no such peer to ask: otherwise two nodes behind such routers would never meet through the directory.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import trio

from p2p import sockets
from p2p.addresses import Address, Scope
from p2p.host.connection import Connection
from p2p.host.heartbeat import Hello
from p2p.host.host import Host
from p2p.nat.hole_punching import HolePuncher
from p2p.nat.port_mapping import PortMapper, route_out
from p2p.nat.reachability import Call, Reach, Reachability
from p2p.nat.relay_client import RelayClient
from p2p.nat.relay_server import RelayServer
from p2p.supervise import supervise

RELAY_GRACE_S = 30.0
NETWORK_CHECK_S = 2.0  # no event that all systems have tells of a change of the network
UPLINKS = 3  # routers at which the port is mapped, if this machine has default routes through several

Start = Callable[..., None]  # start a task: (function, *arguments)


class Traversal:
    """Owns the NAT modules of one host and passes their results on to the host and to each other."""

    def __init__(
        self,
        host: Host,
        call: Call,
        start: Start,
        *,
        relay: bool | None,
        map_port: bool = False,
        mapping_key: bytes = b"",
    ) -> None:
        self._host = host
        self._start = start
        self._relay_setting = relay  # None: relay if verified as reachable
        self.say_hello: Callable[[], Awaitable[None]] | None = None
        self.renew_link: Callable[[str], None] = lambda peer: None
        self.seek_again: Callable[[str], None] = lambda peer: None
        self.reachability = Reachability(host, call, self._on_reach_changed)
        self.server = RelayServer(host)
        self.client = RelayClient(host, self._on_addresses_changed)
        self.mapper: PortMapper | None = None  # of the first uplink, while `run` runs, if a port is to be mapped
        self._mapped: dict[int, Address] = {}  # by uplink
        self._map_port = map_port
        self._mapping_key = mapping_key  # with which the node proves to routers that a mapping is its own
        self._puncher = HolePuncher(host, self.reachability.seen_at)
        host.accompany(self._puncher.accompany)
        host.accompany(self._leave_relay)
        if relay:
            self.server.enable()

    def hello(self, connection: Connection) -> Hello:
        """Return the hello for a connection; it contains the peer's observed address if the peer dialled directly."""
        observed = None if connection.relayed or connection.initiated else connection.address.of(None)
        return Hello(tuple(self._host.addresses), observed, self.server.enabled)

    def heard(self, connection: Connection, hello: Hello) -> None:
        """Process the hello of a connection's peer: the address it observed, and its relay offer."""
        dialled = connection.initiated and not connection.relayed
        if dialled:
            self.reachability.observed(connection.ip, hello.observed, connection.local_ip)
        self.reachability.met(connection.peer)
        if hello.relay and dialled:
            self.client.heard_of(connection.peer, connection.address)
        elif not hello.relay:
            self.client.withdrawn(connection.peer)

    def allow_relaying(self, allowed: bool) -> None:
        """Allow relaying for others, which starts once this node is verified as reachable, or forbid it."""
        self._relay_setting = None if allowed else False
        if not allowed:
            self.server.disable()
        self._on_reach_changed()

    @property
    def needed_peers(self) -> frozenset[str]:
        """Peers whose connections must stay open for relaying, by this node or for it."""
        return self.server.served | self.client.relays

    async def run(self) -> None:
        """Run the port mapping, the reachability probe and the relay client, until cancelled."""
        port = self._port_to_map()
        async with trio.open_nursery() as nursery:
            for uplink in range(UPLINKS if port is not None else 0):
                on_mapped, route = partial(self._on_mapped, uplink), partial(route_out, uplink)
                mapper = PortMapper(port or 0, self._mapping_key, on_mapped, route)
                self.mapper = self.mapper if uplink else mapper
                nursery.start_soon(supervise, "the port mapping", mapper.run)
            nursery.start_soon(supervise, "following the network", self._follow_network)
            nursery.start_soon(supervise, "the reachability probe", self.reachability.run)
            nursery.start_soon(supervise, "the relay client", self.client.run)

    def _port_to_map(self) -> int | None:
        """Return the port on which machines of the LAN reach this node; None if there is none or it is not wanted."""
        open_to_lan = [
            address.port
            for address in self._host.listening
            if address.ip is not None
            and address.ip.version == 4
            and (address.ip.is_unspecified or address.scope is Scope.LAN)
        ]
        return open_to_lan[0] if open_to_lan and self._map_port else None

    def _on_mapped(self, uplink: int, address: Address | None) -> None:
        if address is None:
            self._mapped.pop(uplink, None)
        else:
            self._mapped[uplink] = address
        self.reachability.mapped = list(self._mapped.values())
        self.reachability.probe_soon()
        self._tell_confirmed()

    async def _follow_network(self) -> None:
        """Close connections from addresses that this machine has lost, dial their peers again, and tell the others.

        TCP would notice only after minutes and the heartbeat after 15 s, and replies would wait for so long.
        """
        known = set(sockets.own_ips())
        while True:
            await trio.sleep(NETWORK_CHECK_S)
            present = set(sockets.own_ips())
            if present == known:
                continue
            lost, known = known - present, present
            cut = [connection for connection in self._host.connections() if connection.local_ip in lost]
            for connection in cut:
                connection.abort("this machine has left the network")
            for peer in dict.fromkeys(connection.peer for connection in cut if not connection.relayed):
                self.seek_again(peer)
            self.reachability.lost(lost)
            self.reachability.probe_soon()
            self._on_addresses_changed()

    def _on_reach_changed(self) -> None:
        state = self.reachability.state
        self.client.needed = state is Reach.UNVERIFIED
        if self._relay_setting is None:
            (self.server.enable if state is Reach.VERIFIED else self.server.disable)()
        self._tell_confirmed()

    def _tell_confirmed(self) -> None:
        unconfirmed = self._mapped.values() if self.reachability.state is Reach.UNKNOWN else ()
        told = dict.fromkeys(address.of(self._host.peer_id) for address in (*self.reachability.verified, *unconfirmed))
        self._host.confirmed = list(told)
        self._on_addresses_changed()

    def _on_addresses_changed(self) -> None:
        if self.say_hello is not None:
            self._start(self.say_hello)

    async def _leave_relay(self, connection: Connection) -> None:
        """Beside a direct connection: move links to it, then close the relayed connections to the same peer."""
        if connection.relayed or not self._relayed_to(connection.peer):
            return
        self.renew_link(connection.peer)
        await trio.sleep(RELAY_GRACE_S)  # for links to move, or calls to finish with a peer that cannot move them
        for relayed in self._relayed_to(connection.peer):
            await relayed.close("a direct connection replaced it")

    def _relayed_to(self, peer: str) -> list[Connection]:
        return [connection for connection in self._host.connections_to(peer) if connection.relayed]

"""The public libp2p directory as a meeting point: a client of `/ipfs/kad/1.0.0` that publishes and looks up keys.

It is a libp2p host of its own with this node's identity: it dials and never listens, so private swarms can use it too,
and strangers' connections do not count among this node's links. Nothing is believed from this directory but addresses
to try: only public IP addresses, and whoever is found there must prove who it is like everybody else.

It costs at most: 40 look-ups at once and one in ten minutes after that, 48 connections during look-ups and 8 between
them, and 64 MiB a day, of which 16 MiB may be spent at once; the last 4 MiB of those are left to publishing. A key is
published again after an hour, and when this node's addresses change.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from p2p.addresses import Address, Scope, scope_of
from p2p.channel.upgrade import public_channel_of
from p2p.dht.directory import Directory, ProviderVotes
from p2p.dht.host_view import learn, network_of
from p2p.dht.streams import ask
from p2p.dht.wire import Contact, Message
from p2p.dnsaddr import LookUp, resolve
from p2p.errors import Refused
from p2p.host.address_book import AddressBook
from p2p.host.admission import ConnectionLimits
from p2p.host.host import Host, HostConfig
from p2p.host.identify import StandardProtocols
from p2p.identity import Identity
from p2p.rate_limit import TokenBucket, backoff_s
from p2p.supervise import guarded, supervise

if TYPE_CHECKING:
    from trio_typing import TaskStatus

PROTOCOL = "/ipfs/kad/1.0.0"
LOOK_UP_S = 15.0
LOOK_UPS_AT_ONCE = 4
LOOK_UPS_BURST = 40
LOOK_UPS_PER_S = 1 / 600
MAX_CONNECTIONS = 48
KEPT_CONNECTIONS = 8
BYTES_PER_DAY = 64 * 2**20
BYTES_BURST = 16 * 2**20
PUBLISHING_BYTES = 4 * 2**20  # of the bytes to spend at once, which look-ups leave to publishing
REPUBLISH_S = 3600.0
PROVIDE_S = 5400.0
REMEMBER_S = 20.0  # for which the providers found under a key are not looked up again
MAX_KEYS = 64
SETTLE_S = 1.0  # for which a look-up is waited for once it has found somebody
_IDLE_S = 20.0  # after which connections beyond `KEPT_CONNECTIONS` are closed
_CONNECTION_BYTES = 6 * 1024  # handshake, identify and packet headers, as measured with js-libp2p and rounded up
_QUERY_BYTES = 1200  # the negotiation of a stream, frames and packet headers, measured likewise
_FIRST_PAUSE_S = 2.0
_LONGEST_PAUSE_S = 300.0
_CHECK_S = 5.0
_DAY_S = 86400.0

log = logging.getLogger("shoal.p2p.public")


def is_public(address: Address) -> bool:
    """True for a public IP address, or one through a relay that has one; a stranger cannot point into the LAN."""
    return address.ip is not None and scope_of(address.ip) is Scope.PUBLIC and bool(address.port)


@dataclass(frozen=True)
class PublicStatus:
    """The state of this node in the public directory, for people."""

    nodes: int = 0  # in the routing table
    connections: int = 0
    published: int = 0  # keys under which this node can be found
    look_ups: int = 0
    bytes_used: int = 0  # in all, sent and received


@dataclass
class _Search:
    """A look-up that runs or has ended: who was found, and when it ended."""

    found: ProviderVotes = field(default_factory=ProviderVotes)
    some: trio.Event = field(default_factory=trio.Event)  # somebody was found
    done: trio.Event = field(default_factory=trio.Event)
    ended_at: float = float("inf")


class PublicDirectory:
    """Publishes keys in the public directory and looks them up there; `run` it in a nursery."""

    def __init__(
        self,
        identity: Identity,
        entries: Sequence[str],
        own_addresses: Callable[[], Sequence[Address]],
        learn: Callable[[str, Sequence[Address]], None],
        *,
        deny: tuple[str, ...] = (),
        look_up_name: LookUp | None = None,
        is_usable: Callable[[Address], bool] = is_public,
    ) -> None:
        limits = ConnectionLimits(connections=MAX_CONNECTIONS, connections_per_peer=1)
        config = HostConfig(limits=limits, deny=deny, listens=False)
        self._host = Host(identity, public_channel_of(identity), config, AddressBook(max_peers=1024))
        StandardProtocols(self._host, identity)
        self._entries, self._look_up_name = entries, look_up_name
        self._own_addresses, self._learn, self._is_usable = own_addresses, learn, is_usable
        self._directory = Directory(identity.peer_id, self._ask, self)
        self._wanted = trio.Event()  # set at the first use: until then nobody is contacted
        self._known = trio.Event()  # set, and replaced, whenever an entry point answers
        self._keys: dict[bytes, float] = {}  # to publish -> time at which they were provided
        self._published: dict[bytes, tuple[float, tuple[Address, ...]]] = {}
        self._keys_changed = trio.Event()
        self._searches: dict[bytes, _Search] = {}
        self._slots = trio.CapacityLimiter(LOOK_UPS_AT_ONCE)
        self._look_ups = self._bytes_used = 0
        self._look_up_tokens: TokenBucket | None = None
        self._byte_tokens: TokenBucket | None = None
        self._used_at: dict[str, float] = {}
        self._busy: Counter[str] = Counter()  # requests under way
        self._nursery: trio.Nursery | None = None

    @property
    def status(self) -> PublicStatus:
        """What this node does in the public directory."""
        connections = len(self._host.connections())
        return PublicStatus(
            len(self._directory.table), connections, len(self._published), self._look_ups, self._bytes_used
        )

    def provide(self, key: bytes) -> None:
        """Publish this node under `key` soon, and again every `REPUBLISH_S` for `PROVIDE_S` from now."""
        self._keys.pop(key, None)
        self._keys[key] = trio.current_time()
        if len(self._keys) > MAX_KEYS:
            del self._keys[next(iter(self._keys))]
        self._wanted.set()
        self._keys_changed.set()

    async def find_providers(self, key: bytes, *, timeout_s: float) -> list[str]:
        """Return the providers of `key` found within `timeout_s`, or `SETTLE_S` after the first one.

        Their addresses are passed to `learn` as they are found. A look-up that takes longer goes on for later calls.
        Over the limits nothing is looked up.
        """
        self._wanted.set()
        search = self._searches.get(key)
        if search is None or trio.current_time() - search.ended_at >= REMEMBER_S:
            if self._nursery is None or not self._may_look_up():
                return []
            search = self._searches[key] = _Search()
            self._nursery.start_soon(guarded, "a look-up in the public directory", self._search, key, search)
        with trio.move_on_after(timeout_s):
            await search.some.wait()
            with trio.move_on_after(SETTLE_S):
                await search.done.wait()
        return search.found.ranked()

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve `provide` and `find_providers` until cancelled; nobody is contacted before one of them is called."""
        now = trio.current_time()
        self._look_up_tokens = TokenBucket(LOOK_UPS_PER_S, LOOK_UPS_BURST, now)
        self._byte_tokens = TokenBucket(BYTES_PER_DAY / _DAY_S, BYTES_BURST, now)
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self._host.run)
                self._nursery = nursery
                task_status.started()
                await self._wanted.wait()
                nursery.start_soon(supervise, "entering the public directory", self._enter)
                nursery.start_soon(supervise, "publishing in the public directory", self._publish)
                nursery.start_soon(supervise, "connections to the public directory", self._tidy)
        finally:
            self._nursery = None

    # --- the host as the directory sees it ---------------------------------------------------------------------------

    def addresses(self) -> Sequence[Address]:
        """Return the addresses under which this node is published: those that anybody on the internet can dial."""
        return [address for address in self._own_addresses() if self._is_usable(address)]

    def addresses_of(self, peer: str) -> Sequence[Address]:
        """Return the known addresses of a directory node."""
        return self._host.book.addresses(peer)

    def network_of(self, peer: str) -> str | None:
        """Return the network in which a directory node was dialled."""
        return network_of(self._host, peer)

    def learn(self, contact: Contact) -> None:
        """Remember the usable addresses of a peer that a directory node named."""
        learn(self._host.book, contact, self._is_usable)

    def own_record(self) -> bytes:
        """Return nothing: the nodes of the public directory pass no signed records on."""
        return b""

    def record_of(self, peer: str) -> bytes:
        """Return nothing: requests are never served here, so no record is passed on."""
        return b""

    def is_connected(self, peer: str) -> bool:
        """True if a connection to the directory node `peer` is open."""
        return self._host.connection(peer) is not None

    def is_server(self, peer: str) -> bool:
        """False: requests are never served here."""
        return False

    # --- internals ---------------------------------------------------------------------------------------------------

    def _usable(self, addresses: Iterable[Address]) -> list[Address]:
        return [address for address in addresses if self._is_usable(address)]

    def _may_look_up(self) -> bool:
        now = trio.current_time()
        tokens, bytes_left = self._look_up_tokens, self._byte_tokens
        if tokens is None or bytes_left is None or bytes_left.wait_s(now, PUBLISHING_BYTES) > 0 or not tokens.take(now):
            return False
        self._look_ups += 1
        return True

    def _spend(self, size: int) -> None:
        self._bytes_used += size
        if self._byte_tokens is not None:
            self._byte_tokens.spend(trio.current_time(), size)

    async def _ask(self, peer: str, request: Message, timeout_s: float) -> bytes | None:
        now = trio.current_time()
        if self._byte_tokens is None or self._byte_tokens.wait_s(now, 1.0) > 0:
            raise Refused("this node's traffic with the public directory has reached its limit for now")
        if not self.is_connected(peer):
            await self._make_room()
            self._spend(_CONNECTION_BYTES)
        self._spend(_QUERY_BYTES)
        self._busy[peer] += 1
        try:
            answer = await ask(self._host, PROTOCOL, peer, request, timeout_s)
        finally:
            self._used_at[peer] = trio.current_time()
            self._busy[peer] -= 1
        self._spend(len(answer or b""))
        return answer

    async def _make_room(self) -> None:
        """Close the connection used longest ago if there are too many for another; raises `Refused` if all are busy."""
        peers = {connection.peer for connection in self._host.connections()}
        if len(peers) + sum(not self.is_connected(peer) for peer in +self._busy) < MAX_CONNECTIONS:
            return
        idle = [peer for peer in peers if not self._busy[peer]]
        if not idle:
            raise Refused("too many nodes of the public directory are being asked")
        await self._host.disconnect(min(idle, key=lambda peer: self._used_at.get(peer, 0.0)))

    async def _search(self, key: bytes, search: _Search) -> None:
        def is_usable(contact: Contact) -> bool:
            addresses = self._usable(contact.addresses)
            if addresses:
                self._learn(contact.peer, addresses)
                search.some.set()
            return bool(addresses)

        search.found = ProviderVotes(is_usable)
        try:
            async with self._slots:
                await self._entered()
                await self._directory.find_providers(key, timeout_s=LOOK_UP_S, found=search.found)
        finally:
            search.ended_at = trio.current_time()
            search.some.set()
            search.done.set()
            for old in [k for k, s in self._searches.items() if search.ended_at - s.ended_at >= REMEMBER_S]:
                del self._searches[old]

    async def _entered(self) -> None:
        """Wait until a directory node is known, for at most `LOOK_UP_S`."""
        with trio.move_on_after(LOOK_UP_S):
            while not len(self._directory.table):
                await self._known.wait()

    async def _enter(self) -> None:
        """Ask the entry points for nodes near this one, whenever no directory node is known."""
        failures = 0
        while True:
            if not len(self._directory.table):
                await self._ask_entries()
                failures = 0 if len(self._directory.table) else failures + 1
            pause_s = backoff_s(_FIRST_PAUSE_S, failures, _LONGEST_PAUSE_S) if failures else _CHECK_S
            await trio.sleep(pause_s)

    async def _ask_entries(self) -> None:
        addresses = await resolve(self._entries, self._look_up_name)
        async with trio.open_nursery() as nursery:
            for address in addresses:
                if address.peer is not None:
                    self._host.book.add(address.peer, [address], trio.current_time())
            for peer in dict.fromkeys(address.peer for address in addresses):
                if peer is not None:
                    nursery.start_soon(self._greet, peer)
        if len(self._directory.table):
            await self._directory.refresh()
        log.info("the public directory: %d of its nodes are known", len(self._directory.table))

    async def _greet(self, peer: str) -> None:
        if await self._directory.greet(peer):
            self._known.set()
            self._known = trio.Event()

    async def _publish(self) -> None:
        """Publish each key once it is provided, when its time has come, and when this node's addresses changed."""
        while True:
            self._keys_changed = trio.Event()
            now = trio.current_time()
            self._keys = {key: at for key, at in self._keys.items() if now - at < PROVIDE_S}
            self._published = {key: entry for key, entry in self._published.items() if key in self._keys}
            for key in self._due(now):
                await self._entered()
                addresses = tuple(self.addresses())
                if len(self._directory.table) and await self._directory.provide(key):
                    self._published[key] = (trio.current_time(), addresses)
            with trio.move_on_after(_CHECK_S):
                await self._keys_changed.wait()

    def _due(self, now: float) -> list[bytes]:
        addresses = tuple(self.addresses())
        if not addresses:
            return []  # a provider without an address is of no use, and directory nodes refuse it
        never = (float("-inf"), ())
        return [
            key
            for key in self._keys
            if now - self._published.get(key, never)[0] >= REPUBLISH_S or self._published[key][1] != addresses
        ]

    async def _tidy(self) -> None:
        """Close the connections that were not used for `_IDLE_S`, except the `KEPT_CONNECTIONS` used last."""
        while True:
            await trio.sleep(_CHECK_S)
            now = trio.current_time()
            peers = {connection.peer for connection in self._host.connections()}
            self._used_at = {peer: at for peer, at in self._used_at.items() if peer in peers or now - at < _IDLE_S}
            latest = sorted(peers, key=lambda peer: -self._used_at.get(peer, 0.0))
            self._busy = +self._busy
            for peer in latest[KEPT_CONNECTIONS:]:
                if not self._busy[peer] and now - self._used_at.get(peer, 0.0) >= _IDLE_S:
                    await self._host.disconnect(peer)

"""One node of the Kademlia directory: answers other nodes' requests, looks keys up, publishes and republishes.

The algorithm is Kademlia's (buckets of 20, look-ups that halve the distance); `p2p.dht.wire` defines the messages. It
replaces py-libp2p's implementation, whose look-ups answer from a day-old cache, wait 20 s for frozen peers and accept
no more providers for a key than the first 20. This module does not know libp2p: the caller passes in the function that
sends a request to a peer.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import trio

from p2p.addresses import Address, Scope
from p2p.dht.lookup import lookup
from p2p.dht.routing_table import BUCKET_SIZE, RoutingTable, peer_key, position
from p2p.dht.store import PROVIDER_TTL_S, ProviderStore, ValueStore
from p2p.dht.wire import KEY_BYTES, MAX_VALUE_BYTES, Answer, Contact, Op, Request, decode_answer, decode_request
from p2p.errors import P2PError, Refused

METHOD = "kad"
QUERY_TIMEOUT_S = 2.0
STORE_TIMEOUT_S = 3.0
STORE_ON = 8
REPUBLISH_S = 600.0
REFRESH_S = 600.0
PROBE_S = 60.0
MAX_OWN_KEYS = 256
_PROBES_PER_ROUND = 8
_MIN_SOURCES = 3  # nodes that must have named providers before a search ends early
_SMALL_TABLE = 4  # up to this many known peers, each new one triggers a refresh
_REFRESH_GAP_S = 5.0

log = logging.getLogger("shoal.p2p.dht")

Ask = Callable[[str, bytes, float], Awaitable[bytes]]  # (peer, request, timeout_s) -> answer; raises P2PError
Probe = Callable[[str], Awaitable[bool]]


class HostView(Protocol):
    """The host as the directory sees it: addresses, and which peers are connected."""

    def addresses(self) -> Sequence[Address]: ...
    def addresses_of(self, peer: str) -> Sequence[Address]: ...
    def learn(self, contact: Contact) -> None: ...
    def is_connected(self, peer: str) -> bool: ...


class Directory:
    """Stores the records that fall to this node, and finds and publishes records on behalf of this node."""

    def __init__(
        self,
        own_peer: str,
        ask: Ask,
        host_view: HostView,
        is_valid: Callable[[bytes, bytes], bool] = lambda key, value: True,
    ) -> None:
        self.table = RoutingTable(own_peer)
        self.providers = ProviderStore()
        self.values = ValueStore()
        self._own_peer = own_peer
        self._ask = ask
        self._host = host_view
        self._is_valid = is_valid
        self._refresh_wanted = trio.Event()
        self._own_keys: dict[bytes, float] = {}
        self._own_values: dict[bytes, tuple[bytes, float]] = {}

    # --- requests of other nodes -------------------------------------------------------------------------------------

    async def handle(self, peer: str, body: bytes) -> bytes:
        """Answer one request of `peer`; raises `ProtocolError` if it is malformed."""
        now = trio.current_time()
        request = decode_request(body)
        self.saw(peer)
        match request.op:
            case Op.PROVIDE:
                addresses = request.addresses or tuple(self._host.addresses_of(peer))
                contact = Contact(peer, addresses)
                return Answer(stored=self.providers.add(request.key, contact, now, self._host.is_connected)).encode()
            case Op.STORE:
                stored = self._is_valid(request.key, request.value)
                stored = stored and self.values.put(
                    request.key, peer, request.value, now, _network_of(self._host.addresses_of(peer)) or ""
                )
                return Answer(stored=stored).encode()
        nearest = self.table.closest(position(request.key), BUCKET_SIZE, without=[peer])
        return Answer(
            tuple(Contact(name, tuple(self._host.addresses_of(name))[:4]) for name in nearest),
            tuple(self._providers(request.key, now)) if request.op is Op.PROVIDERS else (),
            tuple(self.values.get(request.key, now)) if request.op is Op.VALUES else (),
        ).encode()

    def saw(self, peer: str) -> None:
        """Record that `peer` takes part in the directory and is alive."""
        newcomer = peer not in self.table
        self.table.saw(peer, _network_of(self._host.addresses_of(peer)))
        self.providers.alive(peer, trio.current_time())
        if newcomer and len(self.table) <= _SMALL_TABLE:
            self._refresh_wanted.set()

    # --- look-ups and publishing for this node -----------------------------------------------------------------------

    async def provide(self, key: bytes) -> int:
        """Publish this node as a provider of `key` at the nodes nearest to it; return how many of them stored it."""
        _check_key(key)
        now = trio.current_time()
        if key not in self._own_keys and len(self._own_keys) >= MAX_OWN_KEYS:
            self._own_keys.pop(min(self._own_keys, key=self._own_keys.__getitem__))
        self._own_keys[key] = now
        return await self._publish(Request(Op.PROVIDE, key, tuple(self._host.addresses())))

    async def find_providers(self, key: bytes, *, timeout_s: float, enough: int = 32) -> list[str]:
        """Return the providers of `key` found within `timeout_s`, those that most nodes named first."""
        _check_key(key)
        named: Counter[str] = Counter()  # provider -> nodes that named it
        sources = 0

        def collect(answer: Answer) -> None:
            nonlocal sources
            sources += bool(answer.providers)
            for contact in answer.providers:
                if contact.peer != self._own_peer:
                    self._host.learn(contact)
                    named[contact.peer] += 1

        collect(Answer(providers=tuple(self._providers(key, trio.current_time()))))
        # A single node can invent any number of peers, so it must not end the search or decide the order by itself.
        await self._look_up(
            Op.PROVIDERS, key, timeout_s, collect, lambda: len(named) >= enough and sources >= _MIN_SOURCES
        )
        return [peer for peer, _ in named.most_common()]

    async def find_peer(self, peer: str, timeout_s: float = 5.0) -> None:
        """Look `peer` up and pass the addresses that other nodes know of it to the host."""
        found = False

        def collect(answer: Answer) -> None:
            nonlocal found
            found = found or any(contact.peer == peer and contact.addresses for contact in answer.peers)

        await self._look_up(Op.PEERS, peer_key(peer), timeout_s, collect, lambda: found)

    async def put_value(self, key: bytes, value: bytes) -> int:
        """Store `value` under `key` here and at the nodes nearest to it; return how many of them stored it.

        Raises `Refused` if the value is longer than `MAX_VALUE_BYTES`.
        """
        _check_key(key)
        if len(value) > MAX_VALUE_BYTES:
            raise Refused(f"a directory value has at most {MAX_VALUE_BYTES} bytes, this one has {len(value)}")
        now = trio.current_time()
        self._own_values[key] = (value, now)
        self.values.put(key, self._own_peer, value, now)
        return await self._publish(Request(Op.STORE, key, value=value))

    async def get_values(self, key: bytes, *, timeout_s: float) -> list[bytes]:
        """Return the valid values found under `key`, those that most nodes hold first; it always asks other nodes."""
        _check_key(key)
        holders: Counter[bytes] = Counter(self.values.get(key, trio.current_time()))

        def collect(answer: Answer) -> None:
            holders.update(value for value in set(answer.values) if self._is_valid(key, value))

        await self._look_up(Op.VALUES, key, timeout_s, collect, lambda: holders.total() >= STORE_ON)
        return [value for value, _ in holders.most_common()]

    async def refresh(self, timeout_s: float = 10.0) -> None:
        """Fill the routing table by looking up this node's own key and a random one."""
        for key in (peer_key(self._own_peer), random.randbytes(KEY_BYTES)):
            await self._look_up(Op.PEERS, key, timeout_s)

    async def maintain(self, probe: Probe) -> None:
        """Republish own records, refresh the routing table and drop dead providers, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._republish)
            nursery.start_soon(self._probe, probe)
            while True:
                with trio.move_on_after(REFRESH_S * random.uniform(0.8, 1.2)):
                    await self._refresh_wanted.wait()
                self._refresh_wanted = trio.Event()
                await self.refresh()
                # New peers often appear several at a time; after this pause one refresh finds all of them.
                await trio.sleep(_REFRESH_GAP_S)

    # --- internals ---------------------------------------------------------------------------------------------------

    def _providers(self, key: bytes, now: float) -> list[Contact]:
        return self.providers.get(key, now, self._host.is_connected)

    async def _look_up(
        self,
        op: Op,
        key: bytes,
        timeout_s: float,
        collect: Callable[[Answer], None] = lambda answer: None,
        is_enough: Callable[[], bool] = lambda: False,
    ) -> list[str]:
        body = Request(op, key).encode()

        async def ask(peer: str) -> list[str] | None:
            answer = await self._query(peer, body, QUERY_TIMEOUT_S)
            if answer is None:
                return None
            for contact in answer.peers:
                self._host.learn(contact)
            collect(answer)
            return [contact.peer for contact in answer.peers if contact.peer != self._own_peer]

        return await lookup(position(key), self.table.closest(position(key)), ask, timeout_s, is_enough)

    async def _query(self, peer: str, body: bytes, timeout_s: float) -> Answer | None:
        try:
            answer = decode_answer(await self._ask(peer, body, timeout_s))
        except P2PError as error:
            log.debug("directory query to %s failed: %s", peer, error)
            self.table.failed(peer)
            return None
        self.saw(peer)
        return answer

    async def _publish(self, request: Request) -> int:
        nearest = await self._look_up(Op.PEERS, request.key, 2 * STORE_TIMEOUT_S)
        kept = 0

        async def store(peer: str) -> None:
            nonlocal kept
            answer = await self._query(peer, request.encode(), STORE_TIMEOUT_S)
            kept += answer is not None and answer.stored

        async with trio.open_nursery() as nursery:
            for peer in nearest[:STORE_ON]:
                nursery.start_soon(store, peer)
        return kept

    async def _republish(self) -> None:
        while True:
            await trio.sleep(REPUBLISH_S * random.uniform(0.8, 1.2))
            now = trio.current_time()
            self._own_keys = {k: at for k, at in self._own_keys.items() if now - at < PROVIDER_TTL_S}
            self._own_values = {k: v for k, v in self._own_values.items() if now - v[1] < PROVIDER_TTL_S}
            for key in list(self._own_keys):
                await self._publish(Request(Op.PROVIDE, key, tuple(self._host.addresses())))
            for key, (value, _) in list(self._own_values.items()):
                await self._publish(Request(Op.STORE, key, value=value))

    async def _probe(self, probe: Probe) -> None:
        while True:
            await trio.sleep(PROBE_S * random.uniform(0.8, 1.2))
            now = trio.current_time()
            self.providers.expire(now)
            self.values.expire(now)
            for peer in self.providers.least_proven(_PROBES_PER_ROUND):
                if self._host.is_connected(peer) or await probe(peer):
                    self.providers.alive(peer, trio.current_time())
                else:
                    self.providers.dead(peer)


def _network_of(addresses: Sequence[Address]) -> str | None:
    """Return the /24 (IPv4) or /48 (IPv6) of the first public address as hex; None for peers on a LAN."""
    for address in addresses:
        if address.scope is Scope.PUBLIC and address.ip is not None:
            packed = address.ip.packed
            return packed[: 3 if address.ip.version == 4 else 6].hex()
    return None


def _check_key(key: bytes) -> None:
    if len(key) != KEY_BYTES:
        raise ValueError(f"a directory key has {KEY_BYTES} bytes, this one has {len(key)}")

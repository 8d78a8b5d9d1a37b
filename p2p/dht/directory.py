"""One node of the Kademlia directory: answers other nodes' requests, looks keys up, publishes and republishes.

The algorithm is Kademlia's (buckets of 20, look-ups that halve the distance); `p2p.dht.wire` defines the messages,
which other libp2p implementations speak too. It is used instead of py-libp2p's implementation, whose look-ups answer
from a day-old cache, wait 20 s for frozen peers and accept no more providers for a key than the first 20. This module
knows no streams: the caller passes in the function that sends a request to a peer.
"""

from __future__ import annotations

import logging
import random
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol

import trio

from p2p.addresses import Address
from p2p.dht.lookup import PATHS, in_turn, lookup
from p2p.dht.routing_table import BUCKET_SIZE, RoutingTable, position
from p2p.dht.store import PROVIDER_TTL_S, ProviderStore, ValueStore
from p2p.dht.wire import (
    KEY_BYTES,
    MAX_VALUE_BYTES,
    Answer,
    Contact,
    Message,
    Op,
    decode_answer,
    decode_contact,
    decode_request,
    key_of_value,
    provider_key,
    value_key,
)
from p2p.errors import P2PError, ProtocolError, Refused
from p2p.identity import peer_id_bytes

QUERY_TIMEOUT_S = 2.0
STORE_TIMEOUT_S = 3.0
STORE_ON = 8
REPUBLISH_S = 600.0
REFRESH_S = 600.0
PROBE_S = 60.0
MAX_OWN_KEYS = 256
_PROBES_PER_ROUND = 8
_HERE = -1  # stands for a path where this node's own store is meant
_MIN_SOURCES = 3  # nodes of each path that must have named providers before a search ends early
_SMALL_TABLE = 4  # up to this many known peers, each new one triggers a refresh
_REFRESH_GAP_S = 5.0
_MAX_MET = 1024
_MAX_NEWCOMERS = 64  # peers that wait to be asked whether they answer requests

log = logging.getLogger("shoal.p2p.dht")

# (peer, request, timeout_s) -> answer, or None if the peer ended the stream without one; raises P2PError
Ask = Callable[[str, Message, float], Awaitable[bytes | None]]
Probe = Callable[[str], Awaitable[bool]]


class HostView(Protocol):
    """The host as the directory sees it: addresses, signed records, and who is connected or answers requests."""

    def addresses(self) -> Sequence[Address]: ...
    def addresses_of(self, peer: str) -> Sequence[Address]: ...
    def network_of(self, peer: str) -> str | None: ...
    def own_record(self) -> bytes: ...
    def record_of(self, peer: str) -> bytes: ...
    def learn(self, contact: Contact) -> None: ...
    def is_connected(self, peer: str) -> bool: ...
    def is_server(self, peer: str) -> bool: ...


class ProviderVotes:
    """Who was named as a provider in one look-up, on which path and by how many nodes.

    A single node can invent any number of peers and, as other peers, confirm them. So it must neither end the look-up
    nor decide the order beyond its own path: a node's word is divided among those that it names.
    """

    def __init__(self, count: Callable[[Contact], bool] = lambda contact: True) -> None:
        """`count` is asked of each provider when a node names it, and tells whether it counts."""
        self._count = count
        self._named: defaultdict[int, dict[str, float]] = defaultdict(dict)  # path -> provider -> weight
        self._sources: Counter[int] = Counter()  # path -> nodes that named a provider

    def add(self, named: Sequence[Contact], path: int) -> None:
        """Count the answer of one node."""
        usable = [contact.peer for contact in named if self._count(contact)]
        self._sources[path] += bool(usable)
        for peer in usable:
            self._named[path][peer] = self._named[path].get(peer, 0.0) + 1 / len(usable)

    def are_enough(self, enough: int) -> bool:
        """True if so many providers were named, by enough nodes of each path."""
        found = {peer for path in self._named.values() for peer in path}
        return len(found) >= enough and all(self._sources[path] >= _MIN_SOURCES for path in range(PATHS))

    def ranked(self) -> list[str]:
        """Return the providers: of each path in turn the one that most of its nodes named."""
        return in_turn(sorted(found, key=lambda peer: -found[peer]) for _, found in sorted(self._named.items()))


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
        # Messages of many peers may come at the same moment: each takes its turn with all else that this node does.
        self._reading_request, self._reading_answer = trio.Lock(), trio.Lock()
        self._refresh_wanted = trio.Event()
        self._newcomers: dict[str, None] = {}
        self._newcomer_waits = trio.Event()
        self._met_at: OrderedDict[str, float] = OrderedDict()  # peers that were asked if they answer
        self._own_keys: dict[bytes, float] = {}
        self._own_values: dict[bytes, tuple[bytes, float]] = {}

    # --- requests of other nodes -------------------------------------------------------------------------------------

    async def handle(self, peer: str, body: bytes) -> bytes:
        """Answer one request of `peer`; raises `ProtocolError` if it is malformed, `Refused` if nothing was stored."""
        async with self._reading_request:
            return self._answer(peer, body)

    def _answer(self, peer: str, body: bytes) -> bytes:
        now = trio.current_time()
        request = decode_request(body, peer)
        if not request.key and request.op is not Op.PING:
            raise ProtocolError(f"{peer} sent a directory request without a key")
        self._learn_sender(peer, request)
        if self._host.is_server(peer):
            self.saw(peer)
        else:
            self.meet(peer)
        match request.op:
            case Op.PING:
                return Message(Op.PING).encode()
            case Op.ADD_PROVIDER:
                self._add_provider(peer, request, now)
                return Message(Op.ADD_PROVIDER, request.key).encode()
            case Op.PUT_VALUE:
                self._put_value(peer, request, now)
                return body
        nearest = self.table.closest(position(request.key), BUCKET_SIZE, without=[peer])
        values = self.values.get(request.key, now) if request.op is Op.GET_VALUE else []
        return Message(
            request.op,
            request.key,
            tuple(
                Contact(name, tuple(self._host.addresses_of(name))[:4], self._host.record_of(name)) for name in nearest
            ),
            tuple(self._providers(request.key, now)) if request.op is Op.GET_PROVIDERS else (),
            random.choice(values) if values else None,
        ).encode()

    def _add_provider(self, peer: str, request: Message, now: float) -> None:
        said = next((contact for contact in request.providers if contact.peer == peer), None)
        if said is None:
            raise Refused(f"{peer} named another peer as a provider")
        self._host.learn(Contact(peer, record=said.record))
        contact = Contact(peer, said.addresses or tuple(self._host.addresses_of(peer)))
        network = self._host.network_of(peer) or ""
        if not self.providers.add(request.key, contact, now, network, self._host.is_connected):
            raise Refused(f"{peer} provides too many keys")

    def _put_value(self, peer: str, request: Message, now: float) -> None:
        key = key_of_value(request.key)
        if key is None or request.value is None or not self._is_valid(key, request.value):
            raise Refused(f"{peer} sent a value that is not valid under its key")
        if not self.values.put(request.key, peer, request.value, now, self._host.network_of(peer) or ""):
            raise Refused(f"there is no room for another value of {peer}")

    def meet(self, peer: str) -> None:
        """Ask `peer` soon if it answers requests; only then it is added to the routing table and told to others.

        One that did not answer is asked again after `REFRESH_S` at the earliest: it may be a client only.
        """
        now = trio.current_time()
        if peer in self.table or now - self._met_at.get(peer, -REFRESH_S) < REFRESH_S:
            return
        if len(self._newcomers) < _MAX_NEWCOMERS:
            self._newcomers[peer] = None
            self._newcomer_waits.set()
            self._met_at[peer] = now
            self._met_at.move_to_end(peer)
            if len(self._met_at) > _MAX_MET:
                self._met_at.popitem(last=False)

    def saw(self, peer: str) -> None:
        """Record that `peer` takes part in the directory and is alive."""
        newcomer = peer not in self.table
        self.table.saw(peer, self._host.network_of(peer))
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
        return await self._publish(self._provision(key))

    async def find_providers(
        self,
        key: bytes,
        *,
        timeout_s: float,
        enough: int = 32,
        found: ProviderVotes | None = None,
    ) -> list[str]:
        """Return the providers of `key` found within `timeout_s`, in the order of `ProviderVotes`.

        `found` has those that were named so far, while the look-up goes on.
        """
        _check_key(key)
        votes = found or ProviderVotes()

        def collect(answer: Message, path: int) -> None:
            votes.add([contact for contact in answer.providers if contact.peer != self._own_peer], path)

        name = provider_key(key)
        stored_here = tuple(self._providers(name, trio.current_time()))
        for contact in stored_here:
            self._host.learn(contact)
        collect(Message(Op.GET_PROVIDERS, name, providers=stored_here), _HERE)
        await self._look_up(Op.GET_PROVIDERS, name, timeout_s, collect, lambda: votes.are_enough(enough))
        return votes.ranked()

    async def find_peer(self, peer: str, timeout_s: float = 5.0) -> None:
        """Look `peer` up and pass the addresses that other nodes know of it to the host."""
        found = False

        def collect(answer: Message, path: int) -> None:
            nonlocal found
            found = found or any(contact.peer == peer and contact.addresses for contact in answer.closer)

        await self._look_up(Op.FIND_NODE, peer_id_bytes(peer), timeout_s, collect, lambda: found)

    async def put_value(self, key: bytes, value: bytes) -> int:
        """Store `value` under `key` here and at the nodes nearest to it; return how many of them stored it.

        Raises `Refused` if the value is longer than `MAX_VALUE_BYTES`.
        """
        _check_key(key)
        if len(value) > MAX_VALUE_BYTES:
            raise Refused(f"a directory value has at most {MAX_VALUE_BYTES} bytes, this one has {len(value)}")
        now = trio.current_time()
        self._own_values[key] = (value, now)
        self.values.put(value_key(key), self._own_peer, value, now)
        return await self._publish(Message(Op.PUT_VALUE, value_key(key), value=value))

    async def get_values(self, key: bytes, *, timeout_s: float) -> list[bytes]:
        """Return the valid values found under `key`, those that most nodes hold first; it always asks other nodes."""
        _check_key(key)
        name = value_key(key)
        holders: Counter[bytes] = Counter(self.values.get(name, trio.current_time()))
        sources: Counter[int] = Counter()  # path -> nodes that hold a value

        def collect(answer: Message, path: int) -> None:
            if answer.value is not None and self._is_valid(key, answer.value):
                holders[answer.value] += 1
                sources[path] += 1

        def is_enough() -> bool:
            return sources.total() >= STORE_ON and all(sources[path] for path in range(PATHS))

        await self._look_up(Op.GET_VALUE, name, timeout_s, collect, is_enough)
        return [value for value, _ in holders.most_common()]

    async def greet(self, peer: str) -> bool:
        """Ask `peer` for nodes near this one, and add it to the routing table; False if it does not answer."""
        return (
            await self._query(peer, self._request(Op.FIND_NODE, peer_id_bytes(self._own_peer)), QUERY_TIMEOUT_S)
            is not None
        )

    async def refresh(self, timeout_s: float = 10.0) -> None:
        """Fill the routing table by looking up this node's own key and a random one."""
        for key in (peer_id_bytes(self._own_peer), random.randbytes(KEY_BYTES)):
            await self._look_up(Op.FIND_NODE, key, timeout_s)

    async def maintain(self, probe: Probe) -> None:
        """Republish own records, refresh the routing table and drop dead providers, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._republish)
            nursery.start_soon(self._probe, probe)
            nursery.start_soon(self._meet_newcomers)
            while True:
                with trio.move_on_after(REFRESH_S * random.uniform(0.8, 1.2)):
                    await self._refresh_wanted.wait()
                self._refresh_wanted = trio.Event()
                await self.refresh()
                # New peers often appear several at a time; after this pause one refresh finds all of them.
                await trio.sleep(_REFRESH_GAP_S)

    # --- internals ---------------------------------------------------------------------------------------------------

    def _providers(self, key: bytes, now: float) -> list[Contact]:
        found = self.providers.get(key, now, self._host.is_connected)
        return [replace(contact, record=self._host.record_of(contact.peer)) for contact in found]

    def _learn_sender(self, peer: str, message: Message) -> None:
        if message.sender:
            self._host.learn(Contact(peer, record=message.sender))

    async def _look_up(
        self,
        op: Op,
        key: bytes,
        timeout_s: float,
        collect: Callable[[Message, int], None] = lambda answer, path: None,
        is_enough: Callable[[], bool] = lambda: False,
    ) -> list[str]:
        request = self._request(op, key)

        async def ask(peer: str, path: int) -> list[str] | None:
            undecoded = await self._query(peer, request, QUERY_TIMEOUT_S)
            if undecoded is None:
                return None
            answer = await self._read(undecoded)
            if answer.key in (b"", key):
                collect(answer, path)
            return [contact.peer for contact in answer.closer if contact.peer != self._own_peer]

        start = self.table.closest(position(key))
        return await lookup(position(key), start, ask, timeout_s, is_enough, self.table.radius())

    async def _query(self, peer: str, request: Message, timeout_s: float) -> Answer | None:
        try:
            body = await self._ask(peer, request, timeout_s)
            if body is None:
                raise ProtocolError(f"{peer} gave no answer")
            async with self._reading_answer:
                answer = decode_answer(body)
                self._learn_sender(peer, answer.message)
        except P2PError as error:
            log.debug("directory query to %s failed: %s", peer, error)
            self.table.failed(peer)
            return None
        self.saw(peer)
        return answer

    async def _read(self, answer: Answer) -> Message:
        """Decode the contacts of an answer and learn their addresses, with a checkpoint after each."""
        async with self._reading_answer:
            closer, providers = await self._learnt(answer.closer), await self._learnt(answer.providers)
        return replace(answer.message, closer=closer, providers=providers)

    async def _learnt(self, entries: Sequence[bytes]) -> tuple[Contact, ...]:
        found: dict[str, Contact] = {}
        for entry in entries:
            contact = decode_contact(entry)
            if contact is not None:
                self._host.learn(contact)
                found[contact.peer] = contact
            await trio.lowlevel.checkpoint()
        return tuple(found.values())

    def _request(self, op: Op, key: bytes) -> Message:
        return Message(op, key, sender=self._host.own_record() if op is Op.FIND_NODE else b"")

    async def _publish(self, request: Message) -> int:
        """Send a record to the nodes nearest to its key; return how many took it."""
        nearest = await self._look_up(Op.FIND_NODE, request.key, 2 * STORE_TIMEOUT_S)
        taken = 0

        async def store(peer: str) -> None:
            nonlocal taken
            try:
                answer = await self._ask(peer, request, STORE_TIMEOUT_S)
            except P2PError as error:
                log.debug("%s did not store a record: %s", peer, error)
                self.table.failed(peer)
                return
            # Other implementations of libp2p do not answer an ADD_PROVIDER.
            taken += answer is not None or request.op is Op.ADD_PROVIDER

        async with trio.open_nursery() as nursery:
            for peer in nearest[:STORE_ON]:
                nursery.start_soon(store, peer)
        return taken

    def _provision(self, key: bytes) -> Message:
        own = Contact(self._own_peer, tuple(self._host.addresses()), self._host.own_record())
        return Message(Op.ADD_PROVIDER, provider_key(key), providers=(own,))

    async def _meet_newcomers(self) -> None:
        while True:
            await self._newcomer_waits.wait()
            self._newcomer_waits = trio.Event()
            while self._newcomers:
                peer = next(iter(self._newcomers))
                if peer not in self.table:
                    await self.greet(peer)
                del self._newcomers[peer]

    async def _republish(self) -> None:
        while True:
            await trio.sleep(REPUBLISH_S * random.uniform(0.8, 1.2))
            now = trio.current_time()
            self._own_keys = {k: at for k, at in self._own_keys.items() if now - at < PROVIDER_TTL_S}
            self._own_values = {k: v for k, v in self._own_values.items() if now - v[1] < PROVIDER_TTL_S}
            for key in list(self._own_keys):
                await self._publish(self._provision(key))
            for key, (value, _) in list(self._own_values.items()):
                await self._publish(Message(Op.PUT_VALUE, value_key(key), value=value))

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


def _check_key(key: bytes) -> None:
    if len(key) != KEY_BYTES:
        raise ValueError(f"a directory key has {KEY_BYTES} bytes, this one has {len(key)}")

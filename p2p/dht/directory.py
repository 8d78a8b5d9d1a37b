"""Kademlia among Shoal nodes: who can be found under a key, and small values, with nobody in the middle.

The algorithm is Kademlia's (buckets of twenty, look-ups that halve the distance); the messages are in `dht_wire` and
travel as ordinary calls. It is not libp2p's implementation, whose look-ups answer from a day-old cache, wait twenty
seconds for frozen peers and let the first twenty providers lock a key. Nothing here knows libp2p: the caller says how
to ask a peer.
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
_PROBES = 8
_TELLERS = 3  # nodes that must have named providers before a search ends early
_FEW = 4  # with so few peers known, each new one is worth a look around
_LOOK_AGAIN_S = 5.0

log = logging.getLogger("shoal.p2p.dht")

Ask = Callable[[str, bytes, float], Awaitable[bytes]]  # (peer, request, timeout_s) -> answer; raises P2PError
Probe = Callable[[str], Awaitable[bool]]


class HostView(Protocol):
    """What the directory needs to know of the node it runs in."""

    def addresses(self) -> Sequence[Address]: ...
    def addresses_of(self, peer: str) -> Sequence[Address]: ...
    def learn(self, contact: Contact) -> None: ...
    def is_connected(self, peer: str) -> bool: ...


class Directory:
    """One node of the directory: it keeps a share for others and looks things up for its own node."""

    def __init__(
        self,
        own_peer: str,
        ask: Ask,
        around: HostView,
        is_valid: Callable[[bytes, bytes], bool] = lambda key, value: True,
    ) -> None:
        self.table = RoutingTable(own_peer)
        self.providers = ProviderStore()
        self.values = ValueStore()
        self._own_peer = own_peer
        self._ask = ask
        self._host = around
        self._is_valid = is_valid
        self._look_around = trio.Event()
        self._own_keys: dict[bytes, float] = {}
        self._own_values: dict[bytes, tuple[bytes, float]] = {}

    # --- for others --------------------------------------------------------------------------------------------------

    async def handle(self, peer: str, body: bytes) -> bytes:
        """Answer one request of `peer`."""
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
        """`peer` takes part in the directory and is alive."""
        newcomer = peer not in self.table
        self.table.saw(peer, _network_of(self._host.addresses_of(peer)))
        self.providers.alive(peer, trio.current_time())
        if newcomer and len(self.table) <= _FEW:
            self._look_around.set()

    # --- for this node -----------------------------------------------------------------------------------------------

    async def provide(self, key: bytes) -> int:
        """Be found under `key`, here and at the nodes nearest to it; returns how many of those keep it."""
        _check_key(key)
        now = trio.current_time()
        if key not in self._own_keys and len(self._own_keys) >= MAX_OWN_KEYS:
            self._own_keys.pop(min(self._own_keys, key=self._own_keys.__getitem__))
        self._own_keys[key] = now
        return await self._publish(Request(Op.PROVIDE, key, tuple(self._host.addresses())))

    async def find_providers(self, key: bytes, *, timeout_s: float, enough: int = 32) -> list[str]:
        """Peers that provide `key`, those that most nodes name first; whatever was found when time is up."""
        _check_key(key)
        named: Counter[str] = Counter()  # by how many
        told = 0

        def take(answer: Answer) -> None:
            nonlocal told
            told += bool(answer.providers)
            for contact in answer.providers:
                if contact.peer != self._own_peer:
                    self._host.learn(contact)
                    named[contact.peer] += 1

        take(Answer(providers=tuple(self._providers(key, trio.current_time()))))
        # One node alone can name any number of peers that do not exist: it neither ends the search nor leads the list.
        await self._look_up(Op.PROVIDERS, key, timeout_s, take, lambda: len(named) >= enough and told >= _TELLERS)
        return [peer for peer, _ in named.most_common()]

    async def find_peer(self, peer: str, timeout_s: float = 5.0) -> None:
        """Learn where `peer` can be dialled, from whoever knows."""
        found = False

        def take(answer: Answer) -> None:
            nonlocal found
            found = found or any(contact.peer == peer and contact.addresses for contact in answer.peers)

        await self._look_up(Op.PEERS, peer_key(peer), timeout_s, take, lambda: found)

    async def put_value(self, key: bytes, value: bytes) -> int:
        """Keep `value` under `key`, here and at the nodes nearest to it; returns how many of those keep it."""
        _check_key(key)
        if len(value) > MAX_VALUE_BYTES:
            raise Refused(f"a directory value has at most {MAX_VALUE_BYTES} bytes, this one has {len(value)}")
        now = trio.current_time()
        self._own_values[key] = (value, now)
        self.values.put(key, self._own_peer, value, now)
        return await self._publish(Request(Op.STORE, key, value=value))

    async def get_values(self, key: bytes, *, timeout_s: float) -> list[bytes]:
        """Every valid value that anybody keeps under `key`, the most widely kept first; never only a local memory."""
        _check_key(key)
        holders: Counter[bytes] = Counter(self.values.get(key, trio.current_time()))

        def take(answer: Answer) -> None:
            holders.update(value for value in set(answer.values) if self._is_valid(key, value))

        await self._look_up(Op.VALUES, key, timeout_s, take, lambda: holders.total() >= STORE_ON)
        return [value for value, _ in holders.most_common()]

    async def refresh(self, timeout_s: float = 10.0) -> None:
        """Get to know the nodes around this one, and some elsewhere."""
        for key in (peer_key(self._own_peer), random.randbytes(KEY_BYTES)):
            await self._look_up(Op.PEERS, key, timeout_s)

    async def maintain(self, probe: Probe) -> None:
        """Publish again, get to know others, and drop dead providers: for as long as the node runs."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._republish)
            nursery.start_soon(self._probe, probe)
            while True:
                with trio.move_on_after(REFRESH_S * random.uniform(0.8, 1.2)):
                    await self._look_around.wait()
                self._look_around = trio.Event()
                await self.refresh()
                # Newcomers often come in crowds; one look finds them all.
                await trio.sleep(_LOOK_AGAIN_S)

    # --- within ------------------------------------------------------------------------------------------------------

    def _providers(self, key: bytes, now: float) -> list[Contact]:
        return self.providers.get(key, now, self._host.is_connected)

    async def _look_up(
        self,
        op: Op,
        key: bytes,
        timeout_s: float,
        take: Callable[[Answer], None] = lambda answer: None,
        is_enough: Callable[[], bool] = lambda: False,
    ) -> list[str]:
        body = Request(op, key).encode()

        async def ask(peer: str) -> list[str] | None:
            answer = await self._query(peer, body, QUERY_TIMEOUT_S)
            if answer is None:
                return None
            for contact in answer.peers:
                self._host.learn(contact)
            take(answer)
            return [contact.peer for contact in answer.peers if contact.peer != self._own_peer]

        return await lookup(position(key), self.table.closest(position(key)), ask, timeout_s, is_enough)

    async def _query(self, peer: str, body: bytes, timeout_s: float) -> Answer | None:
        try:
            answer = decode_answer(await self._ask(peer, body, timeout_s))
        except P2PError as error:
            log.debug("%s gave no directory answer: %s", peer, error)
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
            for peer in self.providers.least_proven(_PROBES):
                if self._host.is_connected(peer) or await probe(peer):
                    self.providers.alive(peer, trio.current_time())
                else:
                    self.providers.dead(peer)


def _network_of(addresses: Sequence[Address]) -> str | None:
    """The /24 or /48 of a public address; a LAN's peers all look alike and are not counted."""
    for address in addresses:
        if address.scope is Scope.PUBLIC and address.ip is not None:
            packed = address.ip.packed
            return packed[: 3 if address.ip.version == 4 else 6].hex()
    return None


def _check_key(key: bytes) -> None:
    if len(key) != KEY_BYTES:
        raise ValueError(f"a directory key has {KEY_BYTES} bytes, this one has {len(key)}")

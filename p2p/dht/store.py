"""The records that this node stores for the directory: providers by key and small values by key.

A provider record is only ever about its sender, and expires after 90 minutes. The number of records for each peer and
in all is bounded. Identities cost nothing, so what is full makes room at the cost of the network that stored most: one
machine drives out its own records only. No I/O; the caller passes the time in.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

from p2p.dht.wire import MAX_PROVIDERS, MAX_VALUES, Contact

PROVIDER_TTL_S = 90 * 60.0
VALUE_TTL_S = 90 * 60.0
MAX_PROVIDERS_PER_KEY = 64
MAX_KEYS_PER_PROVIDER = 256
MAX_RECORDS = 16384
MAX_VALUE_RECORDS = 2048
MAX_VALUES_PER_PUBLISHER = 64
MAX_NETWORKS_COUNTED = 16
EVICTION_PAUSE_S = 60.0  # between two values that publishers of one network may evict
_COMPARED = 64  # of the records that a full store may remove

IsConnected = Callable[[str], bool]
T = TypeVar("T")


class _Shares(Generic[T]):
    """The records of a store, by the network that stored them."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, OrderedDict[T, None]] = OrderedDict()  # what was stored longest ago first, in both

    def store(self, network: str, record: T) -> None:
        """Count a record, or one that was stored again, as the latest of a network."""
        theirs = self._of.setdefault(network, OrderedDict())
        theirs[record] = None
        theirs.move_to_end(record)
        self._of.move_to_end(network)

    def remove(self, network: str, record: T) -> None:
        """Count a record no more."""
        del self._of[network][record]
        if not self._of[network]:
            del self._of[network]

    def first_to_go(self, worth: Callable[[T], int]) -> T:
        """Return a record of the network that stored most: of its stalest, the one that is worth least."""
        most = max(self._of.values(), key=len)
        return min(islice(most, _COMPARED), key=worth)


@dataclass
class _Provider:
    contact: Contact
    network: str
    stored_at: float
    alive_at: float


class ProviderStore:
    """Provider records: the peers that provide a key, and their addresses.

    A full key, and a full store, still accept new ones. The network that has most there makes room: in a key by the
    record that was last known alive longest ago, in the store by the one that was stored longest ago, but by those of
    connected peers last.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._keys: dict[bytes, dict[str, _Provider]] = {}
        self._keys_of: dict[str, set[bytes]] = {}
        self._shares = _Shares[tuple[bytes, str]]()
        self._count = 0
        self._rng = rng or random.Random()

    def __len__(self) -> int:
        return self._count

    def add(
        self,
        key: bytes,
        contact: Contact,
        now: float,
        network: str = "",
        is_connected: IsConnected = lambda peer: False,
    ) -> bool:
        """Record that `contact` provides `key`; False if it already provides `MAX_KEYS_PER_PROVIDER` others."""
        peer, network = contact.peer, network or contact.peer
        own_keys = self._keys_of.get(peer, set())
        if key not in own_keys and len(own_keys) >= MAX_KEYS_PER_PROVIDER:
            return False
        providers = self._keys.setdefault(key, {})
        if peer in providers:
            self._remove(key, peer)
        elif len(providers) >= MAX_PROVIDERS_PER_KEY:
            self._remove(key, self._first_to_go(providers, is_connected))
        self._keys.setdefault(key, providers)[peer] = _Provider(contact, network, now, now)
        self._keys_of.setdefault(peer, set()).add(key)
        self._shares.store(network, (key, peer))
        self._count += 1
        if self._count > MAX_RECORDS:
            self._remove(*self._shares.first_to_go(lambda record: is_connected(record[1])))
        return True

    def alive(self, peer: str, now: float) -> None:
        """Record that `peer` was alive at `now`."""
        for key in self._keys_of.get(peer, ()):
            self._keys[key][peer].alive_at = now

    def dead(self, peer: str) -> None:
        """Remove all records of a `peer` that could not be reached."""
        for key in list(self._keys_of.get(peer, ())):
            self._remove(key, peer)

    def get(self, key: bytes, now: float, is_connected: IsConnected) -> list[Contact]:
        """Return up to `MAX_PROVIDERS` of `key`: connected peers, then the newest records, then random older ones."""
        self._expire(key, now)
        providers = self._keys.get(key)
        if not providers:
            return []
        connected = [peer for peer in providers if is_connected(peer)]
        rest = sorted(
            (peer for peer in providers if peer not in set(connected)), key=lambda peer: -providers[peer].stored_at
        )
        self._rng.shuffle(connected)
        half = MAX_PROVIDERS // 2
        # The newest fill at most half of the answer, so that a flood of new providers cannot hide the older ones.
        older = rest[half:]
        self._rng.shuffle(older)
        chosen = (connected + rest[:half] + older)[:MAX_PROVIDERS]
        return [providers[peer].contact for peer in chosen]

    def least_proven(self, count: int) -> list[str]:
        """Return the `count` providers that were last known alive longest ago, which should be probed next."""
        alive_at = {peer: self._keys[next(iter(keys))][peer].alive_at for peer, keys in self._keys_of.items()}
        return heapq.nsmallest(count, alive_at, key=alive_at.__getitem__)

    def expire(self, now: float) -> None:
        """Remove the provider records older than `PROVIDER_TTL_S`."""
        for key in list(self._keys):
            self._expire(key, now)

    @staticmethod
    def _first_to_go(providers: dict[str, _Provider], is_connected: IsConnected) -> str:
        of_network = Counter(one.network for one in providers.values())
        return min(
            providers,
            key=lambda peer: (-of_network[providers[peer].network], is_connected(peer), providers[peer].alive_at),
        )

    def _expire(self, key: bytes, now: float) -> None:
        providers = self._keys.get(key, {})
        for peer in [peer for peer, p in providers.items() if now - p.stored_at >= PROVIDER_TTL_S]:
            self._remove(key, peer)

    def _remove(self, key: bytes, peer: str) -> None:
        providers = self._keys[key]
        self._shares.remove(providers.pop(peer).network, (key, peer))
        if not providers:
            del self._keys[key]
        self._count -= 1
        keys = self._keys_of[peer]
        keys.discard(key)
        if not keys:
            del self._keys_of[peer]


@dataclass
class _Value:
    publisher: str
    first_network: str  # of its publisher
    at: float
    networks: OrderedDict[str, None]  # networks of its publishers, the latest last


class ValueStore:
    """Small values by key: at most `MAX_VALUES` a key, one for each publisher.

    A full key still accepts a new value: it replaces, at random, one that only a single network has published. A value
    that members in two or more networks publish is therefore safe from an attacker with many identities in one network,
    and that attacker cannot block the key either. A full store removes values of the network that stored most.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._keys: OrderedDict[bytes, dict[bytes, _Value]] = OrderedDict()  # key -> value -> record
        self._of_publisher: Counter[str] = Counter()
        self._shares = _Shares[tuple[bytes, bytes]]()  # key and value, by the network that stored it first
        self._evicted_at: OrderedDict[str, float] = OrderedDict()  # network -> time of its last eviction
        self._count = 0
        self._rng = rng or random.Random()

    def __len__(self) -> int:
        return self._count

    def put(self, key: bytes, publisher: str, value: bytes, now: float, network: str = "") -> bool:
        """Store a value in place of the publisher's earlier one under `key`, unless others publish that too.

        False if the publisher has `MAX_VALUES_PER_PUBLISHER` values, or the key is full and none may be evicted.
        """
        values = self._keys.setdefault(key, {})
        network = network or publisher
        for earlier, one in [*values.items()]:
            if one.publisher == publisher and earlier != value and len(one.networks) == 1:
                self._remove(key, earlier)
        values = self._keys.setdefault(key, values)
        kept = values.get(value)
        if kept is None:
            if self._of_publisher[publisher] >= MAX_VALUES_PER_PUBLISHER or not self._make_room(key, network, now):
                self._drop_if_empty(key)
                return False
            kept = values[value] = _Value(publisher, network, now, OrderedDict())
            self._of_publisher[publisher] += 1
            self._count += 1
        kept.at = now
        self._shares.store(kept.first_network, (key, value))
        kept.networks[network] = None
        kept.networks.move_to_end(network)
        if len(kept.networks) > MAX_NETWORKS_COUNTED:
            kept.networks.popitem(last=False)
        self._keys.move_to_end(key)
        if self._count > MAX_VALUE_RECORDS:
            self._remove(*self._shares.first_to_go(self._networks_of))
        return True

    def get(self, key: bytes, now: float) -> list[bytes]:
        """Return the values of `key` that have not expired, the oldest first."""
        for value in [v for v, kept in self._keys.get(key, {}).items() if now - kept.at >= VALUE_TTL_S]:
            self._remove(key, value)
        return list(self._keys.get(key, ()))

    def expire(self, now: float) -> None:
        """Remove the values older than `VALUE_TTL_S`."""
        for key in list(self._keys):
            self.get(key, now)

    def _make_room(self, key: bytes, network: str, now: float) -> bool:
        values = self._keys[key]
        if len(values) < MAX_VALUES:
            return True
        fewest = min(len(kept.networks) for kept in values.values())
        if fewest > 1 or now - self._evicted_at.get(network, -EVICTION_PAUSE_S) < EVICTION_PAUSE_S:
            return False
        self._evicted_at[network] = now
        self._evicted_at.move_to_end(network)
        if len(self._evicted_at) > MAX_VALUE_RECORDS:
            self._evicted_at.popitem(last=False)
        self._remove(key, self._rng.choice([v for v, kept in values.items() if len(kept.networks) == fewest]))
        self._keys.setdefault(key, values)
        return True

    def _networks_of(self, record: tuple[bytes, bytes]) -> int:
        key, value = record
        return len(self._keys[key][value].networks)

    def _remove(self, key: bytes, value: bytes) -> None:
        removed = self._keys[key].pop(value)
        self._drop_if_empty(key)
        self._count -= 1
        self._of_publisher[removed.publisher] -= 1
        if not self._of_publisher[removed.publisher]:
            del self._of_publisher[removed.publisher]
        self._shares.remove(removed.first_network, (key, value))

    def _drop_if_empty(self, key: bytes) -> None:
        if not self._keys[key]:
            del self._keys[key]

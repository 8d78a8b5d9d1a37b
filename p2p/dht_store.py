"""What a node of the directory keeps for others: who provides a key, and small values. Bounded; no I/O, no own clock.

A provider speaks for itself only and is forgotten after ninety minutes. A full key never locks: the newcomer replaces
the provider that was longest not known to be alive. Nobody can fill the store alone, however many keys it names.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from .dht_wire import MAX_PROVIDERS, MAX_VALUES, Contact

PROVIDER_TTL_S = 90 * 60.0
VALUE_TTL_S = 90 * 60.0
MAX_PROVIDERS_PER_KEY = 64
MAX_KEYS_PER_PROVIDER = 256
MAX_RECORDS = 16384
MAX_VALUE_RECORDS = 2048
MAX_VALUES_PER_PUBLISHER = 64

IsConnected = Callable[[str], bool]


@dataclass
class _Provider:
    contact: Contact
    stored_at: float
    alive_at: float


class ProviderStore:
    """Who can be found under which key."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._keys: OrderedDict[bytes, OrderedDict[str, _Provider]] = OrderedDict()
        self._keys_of: dict[str, set[bytes]] = {}
        self._count = 0
        self._rng = rng or random.Random()

    def __len__(self) -> int:
        return self._count

    def add(self, key: bytes, contact: Contact, now: float, is_connected: IsConnected = lambda peer: False) -> bool:
        """Keep that `contact` provides `key`; False where it holds too many keys already."""
        own_keys = self._keys_of.get(contact.peer, set())
        if key not in own_keys and len(own_keys) >= MAX_KEYS_PER_PROVIDER:
            return False
        providers = self._keys.setdefault(key, OrderedDict())
        self._keys.move_to_end(key)
        if contact.peer not in providers:
            if len(providers) >= MAX_PROVIDERS_PER_KEY:
                self._remove(key, min(providers, key=lambda peer: (is_connected(peer), providers[peer].alive_at)))
            self._keys_of.setdefault(contact.peer, set()).add(key)
            self._count += 1
        providers[contact.peer] = _Provider(contact, now, now)
        if self._count > MAX_RECORDS:
            stalest = next(iter(self._keys))  # the key that was longest not provided
            self._remove(stalest, next(iter(self._keys[stalest])))
        return True

    def alive(self, peer: str, now: float) -> None:
        """`peer` was heard of just now, on whatever occasion."""
        for key in self._keys_of.get(peer, ()):
            self._keys[key][peer].alive_at = now

    def dead(self, peer: str) -> None:
        """`peer` could not be reached: forget all that it provides."""
        for key in list(self._keys_of.get(peer, ())):
            self._remove(key, peer)

    def get(self, key: bytes, now: float, is_connected: IsConnected) -> list[Contact]:
        """Providers of `key`: those connected right now, then the freshest, then some of the rest by lot."""
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
        # However fresh the flood of newcomers is, half of the answer is drawn from everybody.
        older = rest[half:]
        self._rng.shuffle(older)
        chosen = (connected + rest[:half] + older)[:MAX_PROVIDERS]
        return [providers[peer].contact for peer in chosen]

    def least_proven(self, count: int) -> list[str]:
        """The providers that were longest not known to be alive, to be probed."""
        alive_at = {peer: self._keys[next(iter(keys))][peer].alive_at for peer, keys in self._keys_of.items()}
        return heapq.nsmallest(count, alive_at, key=alive_at.__getitem__)

    def expire(self, now: float) -> None:
        """Forget what is too old."""
        for key in list(self._keys):
            self._expire(key, now)

    def _expire(self, key: bytes, now: float) -> None:
        providers = self._keys.get(key, OrderedDict())
        for peer in [peer for peer, p in providers.items() if now - p.stored_at >= PROVIDER_TTL_S]:
            self._remove(key, peer)

    def _remove(self, key: bytes, peer: str) -> None:
        providers = self._keys[key]
        del providers[peer]
        if not providers:
            del self._keys[key]
        self._count -= 1
        keys = self._keys_of[peer]
        keys.discard(key)
        if not keys:
            del self._keys_of[peer]


class ValueStore:
    """Small values by key, at most a few a key, each from another publisher."""

    def __init__(self) -> None:
        self._values: OrderedDict[tuple[bytes, str], tuple[bytes, float]] = OrderedDict()
        self._of_publisher: Counter[str] = Counter()
        self._publishers: dict[bytes, list[str]] = {}

    def __len__(self) -> int:
        return len(self._values)

    def put(self, key: bytes, publisher: str, value: bytes, now: float) -> bool:
        """Keep a value; the publisher's own earlier one is replaced, a full key or publisher refuses."""
        publishers = self._publishers.get(key, [])
        if publisher not in publishers:
            same = next((name for name in publishers if self._values[key, name][0] == value), None)
            if same is not None:
                # The same value from somebody else: it lives on, and takes no second place.
                self._values[key, same] = (value, now)
                return True
            if len(publishers) >= MAX_VALUES or self._of_publisher[publisher] >= MAX_VALUES_PER_PUBLISHER:
                return False
            self._publishers.setdefault(key, []).append(publisher)
            self._of_publisher[publisher] += 1
        self._values[key, publisher] = (value, now)
        self._values.move_to_end((key, publisher))
        if len(self._values) > MAX_VALUE_RECORDS:
            self._remove(*next(iter(self._values)))
        return True

    def get(self, key: bytes, now: float) -> list[bytes]:
        """The values of `key`, the longest kept first."""
        for publisher in list(self._publishers.get(key, ())):
            if now - self._values[key, publisher][1] >= VALUE_TTL_S:
                self._remove(key, publisher)
        return [self._values[key, publisher][0] for publisher in self._publishers.get(key, ())]

    def expire(self, now: float) -> None:
        """Forget what is too old."""
        for key in list(self._publishers):
            self.get(key, now)

    def _remove(self, key: bytes, publisher: str) -> None:
        del self._values[key, publisher]
        self._publishers[key].remove(publisher)
        if not self._publishers[key]:
            del self._publishers[key]
        self._of_publisher[publisher] -= 1
        if not self._of_publisher[publisher]:
            del self._of_publisher[publisher]

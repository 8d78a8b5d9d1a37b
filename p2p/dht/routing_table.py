"""Kademlia's routing table: the peers worth asking, ordered by how close their hashed ids are to a key. No I/O."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from p2p.errors import IdentityError
from p2p.identity import public_key_of

BUCKET_SIZE = 20
MAX_REPLACEMENTS = 20
MAX_PER_NETWORK = 4  # of one bucket's peers, so that a rented subnet cannot fill it
_FAILURES_TO_FORGET = 2


@lru_cache(maxsize=8192)
def position(name: bytes) -> int:
    """Where a key or a peer id lies in the key space."""
    return int.from_bytes(hashlib.sha256(name).digest())


@lru_cache(maxsize=8192)
def peer_key(peer: str) -> bytes:
    """The key under which a peer itself lies: its public key, so that one look-up finds keys and peers alike."""
    try:
        return public_key_of(peer)
    except IdentityError:
        return hashlib.sha256(peer.encode()).digest()


def peer_position(peer: str) -> int:
    """Where a peer lies in the key space."""
    return position(peer_key(peer))


@dataclass
class _Entry:
    network: str | None  # what counts as "the same place", None where that says nothing (a LAN)
    failures: int = 0


class RoutingTable:
    """Peers by distance from this node, a bucket of twenty for each halving of the distance."""

    def __init__(self, own_peer: str) -> None:
        self._own = own_peer
        self._origin = peer_position(own_peer)
        self._buckets: dict[int, OrderedDict[str, _Entry]] = {}
        self._replacements: dict[int, OrderedDict[str, _Entry]] = {}

    def __len__(self) -> int:
        return sum(len(bucket) for bucket in self._buckets.values())

    def __contains__(self, peer: str) -> bool:
        return peer in self._buckets.get(self._index(peer), ())

    def peers(self) -> list[str]:
        """Every peer of the table."""
        return [peer for bucket in self._buckets.values() for peer in bucket]

    def saw(self, peer: str, network: str | None = None) -> None:
        """`peer` is alive: keep it if its bucket has room, else as a replacement for one that fails."""
        if peer == self._own:
            return
        index = self._index(peer)
        bucket = self._buckets.setdefault(index, OrderedDict())
        if peer in bucket:
            bucket[peer] = _Entry(network)
            bucket.move_to_end(peer)
            return
        crowded = network is not None and sum(e.network == network for e in bucket.values()) >= MAX_PER_NETWORK
        if len(bucket) < BUCKET_SIZE and not crowded:
            bucket[peer] = _Entry(network)
            self._replacements.get(index, OrderedDict()).pop(peer, None)
            return
        spare = self._replacements.setdefault(index, OrderedDict())
        spare.pop(peer, None)
        spare[peer] = _Entry(network)
        if len(spare) > MAX_REPLACEMENTS:
            spare.popitem(last=False)

    def failed(self, peer: str) -> None:
        """`peer` did not answer: a replacement takes its place, or it goes at the second failure."""
        index = self._index(peer)
        bucket = self._buckets.get(index, OrderedDict())
        self._replacements.get(index, OrderedDict()).pop(peer, None)
        entry = bucket.get(peer)
        if entry is None:
            return
        entry.failures += 1
        spare = self._replacements.get(index)
        if spare or entry.failures >= _FAILURES_TO_FORGET:
            del bucket[peer]
            if spare:
                name, replacement = spare.popitem()
                bucket[name] = replacement

    def closest(self, target: int, count: int = BUCKET_SIZE, without: Iterable[str] = ()) -> list[str]:
        """The `count` peers nearest to a position."""
        left_out = set(without)
        candidates = [peer for bucket in self._buckets.values() for peer in bucket if peer not in left_out]
        return sorted(candidates, key=lambda peer: peer_position(peer) ^ target)[:count]

    def _index(self, peer: str) -> int:
        return (peer_position(peer) ^ self._origin).bit_length()

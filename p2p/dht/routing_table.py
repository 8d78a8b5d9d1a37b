"""Kademlia's routing table: known peers, in buckets by the XOR distance of their hashed keys. No I/O."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from p2p.identity import peer_id_bytes

BUCKET_SIZE = 20
MAX_REPLACEMENTS = 20
MAX_PER_NETWORK = 4  # peers of one network in a bucket, so that a rented subnet cannot fill it
_FAILURES_TO_FORGET = 2


@lru_cache(maxsize=8192)
def position(name: bytes) -> int:
    """Return the position of a key in the 256-bit key space (its SHA-256)."""
    return int.from_bytes(hashlib.sha256(name).digest())


def peer_position(peer: str) -> int:
    """Return the position of a peer in the key space: that of its binary peer id; raises `IdentityError`."""
    return position(peer_id_bytes(peer))


@dataclass
class _Entry:
    network: str | None  # the peer's /24 or /48; None for LAN peers, which `MAX_PER_NETWORK` does not count
    failures: int = 0


class RoutingTable:
    """Peers by distance from this node: one bucket of 20, and 20 replacements, for each power of two."""

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
        """Return all peers in the buckets, without the replacements."""
        return [peer for bucket in self._buckets.values() for peer in bucket]

    def saw(self, peer: str, network: str | None = None) -> None:
        """Record that `peer` is alive: put it into its bucket if there is room, else among the replacements."""
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
        """Record that `peer` did not answer: remove it if a replacement is known, else at the second failure."""
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
        """Return the `count` peers nearest to a position, nearest first, except those in `without`."""
        left_out = set(without)
        candidates = [peer for bucket in self._buckets.values() for peer in bucket if peer not in left_out]
        return sorted(candidates, key=lambda peer: peer_position(peer) ^ target)[:count]

    def radius(self) -> int:
        """Return the distance of the 20th nearest known peer to this node, or the largest one if fewer are known.

        Positions are evenly spread, so about 20 of all nodes lie within this distance of any position.
        """
        nearest = sorted(peer_position(peer) ^ self._origin for peer in self.peers())[:BUCKET_SIZE]
        return nearest[-1] if len(nearest) == BUCKET_SIZE else 2**256 - 1

    def _index(self, peer: str) -> int:
        return (peer_position(peer) ^ self._origin).bit_length()

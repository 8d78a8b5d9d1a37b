"""Whom a node keeps an eye on: a few members, so that its links stay few in a swarm of any size. Pure.

In a small swarm everybody watches everybody. In a larger one each node watches its two neighbours on the ring of all
peer ids, some that are chosen by a hash of both ids, and as many by a hash that only this node knows. The ring leaves
nobody out. The common hash is the same from both sides, so that who watches is mostly watched in turn, over one link.
The private one cannot be aimed at: whoever makes up ids to stand around a victim never has all of its links. A choice
depends on the two ids alone: when a member comes or goes, next to nothing else changes.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect
from collections.abc import Sequence
from hashlib import blake2b

WATCH_ALL = 32
BY_COMMON_HASH = 5
BY_PRIVATE_HASH = 5


class Watch:
    """The members that one node watches, chosen anew only where the members have changed."""

    def __init__(self, own_peer: str, rng: random.Random) -> None:
        self._own = own_peer.encode()
        self._own_peer = own_peer
        self._salt = rng.randbytes(16)
        self._members: Sequence[str] = ()
        self._chosen: tuple[str, ...] = ()
        self._weights: dict[str, tuple[bytes, bytes]] = {}  # by the common hash, by the private one

    def among(self, members: Sequence[str]) -> tuple[str, ...]:
        """Whom to watch among the (sorted) members."""
        if members is not self._members:
            self._members = members
            self._chosen = tuple(members) if len(members) <= WATCH_ALL else self._choose(members)
        return self._chosen

    def _choose(self, members: Sequence[str]) -> tuple[str, ...]:
        known = self._weights
        weights = self._weights = {peer: known.get(peer) or self._weigh(peer) for peer in members}
        at = bisect(members, self._own_peer)
        ring = (members[at % len(members)], members[at - 1])
        common = heapq.nsmallest(BY_COMMON_HASH, members, key=lambda peer: weights[peer][0])
        private = heapq.nsmallest(BY_PRIVATE_HASH, members, key=lambda peer: weights[peer][1])
        return tuple(dict.fromkeys((*ring, *common, *private)))

    def _weigh(self, peer: str) -> tuple[bytes, bytes]:
        other = peer.encode()
        pair = self._own + other if self._own < other else other + self._own
        return blake2b(pair, digest_size=8).digest(), blake2b(other, digest_size=8, key=self._salt).digest()

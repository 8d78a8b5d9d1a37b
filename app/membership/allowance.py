"""How much each peer may ask of this node: token buckets by name, bounded in number. Pure."""

from __future__ import annotations

from collections import OrderedDict


class Allowance:
    """`burst` tokens each, refilled at `per_s`; the peer that was longest silent is forgotten first."""

    def __init__(self, burst: float, per_s: float, max_peers: int = 4096) -> None:
        self._burst, self._per_s, self._max_peers = burst, per_s, max_peers
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # peer -> (tokens, as of)

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, peer: str, now: float) -> bool:
        """Use up one token, if there is one."""
        tokens, at = self._buckets.get(peer, (self._burst, now))
        tokens = min(self._burst, tokens + (now - at) * self._per_s)
        allowed = tokens >= 1
        self._buckets[peer] = (tokens - 1 if allowed else tokens, now)
        self._buckets.move_to_end(peer)
        if len(self._buckets) > self._max_peers:
            self._buckets.popitem(last=False)
        return allowed

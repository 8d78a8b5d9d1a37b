"""Counting what a peer sends that achieves nothing; who sends little else only means to keep this node busy. Pure."""

from __future__ import annotations

from p2p.errors import ProtocolError


class FloodGuard:
    """Forgives `burst` at once and `per_s` a second ever after; beyond that the peer broke the rules."""

    __slots__ = ("_burst", "_count", "_counted_at", "_per_s")

    def __init__(self, burst: float, per_s: float, now: float) -> None:
        self._burst, self._per_s = burst, per_s
        self._count, self._counted_at = 0.0, now

    def count(self, now: float) -> None:
        """Count one; raises `ProtocolError` where there are too many."""
        forgiven = (now - self._counted_at) * self._per_s
        self._count, self._counted_at = max(0.0, self._count - forgiven) + 1, now
        if self._count > self._burst:
            raise ProtocolError("floods this node with frames that do nothing")

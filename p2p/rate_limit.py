"""Rates that a peer may not exceed: lines in the log, frames that achieve nothing, and requests by name. Pure."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from p2p.errors import ProtocolError

BURST = 20.0
PER_S = 0.2


@dataclass
class _Line:
    tokens: float
    at: float
    left_out: int = 0


class LogLimit(logging.Filter):
    """Lets some warnings of each kind through at once, then one every few seconds, which says how many it stands for.

    A kind is a message before its arguments are put in, so there are as many as there are lines in the program.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lines: dict[str, _Line] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is written."""
        if record.levelno < logging.WARNING:
            return True
        now, kind = self._clock(), str(record.msg)
        line = self._lines.setdefault(kind, _Line(BURST, now))
        line.tokens = min(BURST, line.tokens + (now - line.at) * PER_S)
        line.at = now
        if line.tokens < 1:
            line.left_out += 1
            return False
        line.tokens -= 1
        if line.left_out:
            record.msg = f"{kind} (and {line.left_out} more like it)"
            line.left_out = 0
        return True


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


class PeerRateLimit:
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

"""Limits on the rate of bytes up and down, changeable at any time. Pure: the caller brings the clock and waits.

Control and decode never wait but are counted, so that prefill and bulk give way to them. Links on the LAN are exempt.
"""

from __future__ import annotations

from dataclasses import dataclass, field

BURST_S = 0.25  # how much unused rate may be saved up
SHORTEST_WAIT_S = 0.001
RECHECK_S = 0.25  # longest single wait, so that a raised limit is felt soon


@dataclass
class TokenBucket:
    """A rate that may be exceeded by one piece at a time and is paid back by waiting."""

    bytes_per_s: float | None = None  # None: no limit
    _tokens: float = 0.0
    _at: float = 0.0

    def set_rate(self, bytes_per_s: float | None) -> None:
        """Change the limit from now on; a debt run up under the old one is forgiven."""
        if bytes_per_s is not None and bytes_per_s <= 0:
            raise ValueError("a bandwidth limit must be above zero; use none to lift it")
        self.bytes_per_s, self._tokens = bytes_per_s, 0.0

    def wait_s(self, now: float) -> float:
        """How long to wait before the next piece may go; 0 when it may go now."""
        if self.bytes_per_s is None:
            return 0.0
        self._refill(now)
        if self._tokens >= 0:
            return 0.0
        # Never a wait too short for a clock to show: it would be asked for again and again.
        return max(min(-self._tokens / self.bytes_per_s, RECHECK_S), SHORTEST_WAIT_S)

    def spend(self, size: int, now: float) -> None:
        """Count bytes that went."""
        if self.bytes_per_s is not None:
            self._refill(now)
            self._tokens -= size

    def _refill(self, now: float) -> None:
        rate = self.bytes_per_s or 0.0
        self._tokens = min(self._tokens + (now - self._at) * rate, rate * BURST_S)
        self._at = now


@dataclass
class Bandwidth:
    """The node's two buckets, shared by all its links."""

    up: TokenBucket = field(default_factory=TokenBucket)
    down: TokenBucket = field(default_factory=TokenBucket)

    def set_limits(self, up_bytes_per_s: float | None, down_bytes_per_s: float | None) -> None:
        """Change both limits from now on; None lifts one."""
        self.up.set_rate(up_bytes_per_s)
        self.down.set_rate(down_bytes_per_s)

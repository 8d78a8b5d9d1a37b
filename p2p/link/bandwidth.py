"""Limits on the bytes a second that a node sends and receives, changeable at any time.

Pure: the caller passes the clock and does the waiting (`p2p.link.link`). Only traffic of prefill and bulk priority
waits; control and decode are counted all the same, so that the others make room for them. Links on the LAN are exempt.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from p2p.rate_limit import TokenBucket

BURST_S = 0.25  # seconds' worth of unused rate that may be saved up
SHORTEST_WAIT_S = 0.001
RECHECK_S = 0.25  # longest single wait, so that a raised limit takes effect soon


class ByteRateLimit:
    """A limit in bytes a second; one chunk of any size may exceed it, and the next ones wait until it is made up."""

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None  # None: no limit
        self._bucket = TokenBucket(0.0, 0.0, 0.0)

    def set_rate(self, bytes_per_s: float | None) -> None:
        """Change the limit from now on; bytes sent above the old one no longer cause a wait.

        Raises `ValueError` unless the limit is above zero or None.
        """
        if bytes_per_s is not None and bytes_per_s <= 0:
            raise ValueError("a bandwidth limit must be above zero; use none to lift it")
        self.bytes_per_s = bytes_per_s
        rate = bytes_per_s or 0.0
        self._bucket.set_rate(rate, rate * BURST_S)

    def wait_s(self, now: float) -> float:
        """Seconds to wait before asking again, at most `RECHECK_S`; 0 if the next chunk may be sent now."""
        if self.bytes_per_s is None:
            return 0.0
        wait_s = self._bucket.wait_s(now, 0)
        # A wait below the clock's resolution would make the caller ask again at once, many times over.
        return max(min(wait_s, RECHECK_S), SHORTEST_WAIT_S) if wait_s else 0.0

    def spend(self, size: int, now: float) -> None:
        """Count `size` bytes that were sent or received."""
        if self.bytes_per_s is not None:
            self._bucket.spend(now, size)


@dataclass
class Bandwidth:
    """The upload and download limits of a node, shared by all its links."""

    up: ByteRateLimit = field(default_factory=ByteRateLimit)
    down: ByteRateLimit = field(default_factory=ByteRateLimit)

    def set_limits(self, up_bytes_per_s: float | None, down_bytes_per_s: float | None) -> None:
        """Change both limits from now on; None means no limit. Raises `ValueError` for zero or less."""
        self.up.set_rate(up_bytes_per_s)
        self.down.set_rate(down_bytes_per_s)

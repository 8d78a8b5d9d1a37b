"""Limits on the bytes a second that a node sends and receives, changeable at any time, and what bulk leaves to replies.

Pure: the caller passes the clock and does the waiting (`p2p.link.link`). Only traffic of prefill and bulk priority
waits; control and decode are counted all the same, so that the others make room for them. Links on the LAN are exempt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from p2p.rate_limit import TokenBucket

BURST_S = 0.25  # seconds' worth of unused rate that may be saved up
SHORTEST_WAIT_S = 0.001
RECHECK_S = 0.25  # longest single wait, so that a raised limit takes effect soon
REPLY_S = 3.0  # after which tokens count as under way since the last of them
SHARE = 0.6  # of a slow upload that bulk and replies may have together before bulk waits
LONGEST_PAUSE_S = 0.5  # after which bulk may send another chunk, however much replies send
SLOW_UPLOAD_BYTES_PER_S = 4e6  # a faster one is not filled for long by anything that it has to carry
WINDOW_S = 1.0  # of bulk without a pause, to measure the upload
MEASURE_AGAIN_S = 30.0  # after which it is measured once more beside replies, for as long as two windows
_BUSY_SHARE = 0.8  # of a window in which bulk is being written, for it to count
_FALL = 0.9  # a lower speed is believed step by step: who reads slowly makes a fast upload seem slow


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


class SpareUpload:
    """How fast bulk may be sent: freely, but slower than a slow upload can while tokens of replies are under way.

    Bulk that fills an upload makes a queue in the router before it, and every token of a reply waits in that queue at
    every hop, though tokens go first here. The speed of the upload is measured while bulk fills it.
    """

    def __init__(self) -> None:
        self._limit = ByteRateLimit()
        self._bytes_per_s: float | None = None  # of the upload, when bulk filled it
        self._replied_at = self._free_until = -math.inf
        self._measure_at = math.inf
        self._bulk_at = -math.inf  # when the last chunk began
        self._writers = 0  # links that write bulk now
        self._busy_since = self._busy_s = 0.0
        self._window_at, self._window_bytes = 0.0, 0

    def replied(self, size: int, now: float) -> None:
        """Note that so many bytes of a reply were sent."""
        if now - self._replied_at > REPLY_S:
            self._measure_at = now + MEASURE_AGAIN_S
        self._replied_at = now
        if self._limit.wait_s(now) < RECHECK_S:  # bulk need not make up for a whole prompt
            self._limit.spend(size, now)

    def is_limited(self, now: float) -> bool:
        """True if bulk is sent more slowly than it could be."""
        beside_replies = now - self._replied_at <= REPLY_S and now >= self._free_until
        return beside_replies and self._limit.bytes_per_s is not None

    def wait_s(self, now: float) -> float:
        """Seconds for bulk to wait before asking again; 0 if the next chunk may be sent now."""
        if self.is_limited(now) and now >= self._measure_at:
            self._free_until, self._measure_at = now + 2 * WINDOW_S, now + MEASURE_AGAIN_S
        if not self.is_limited(now):
            return 0.0
        return min(self._limit.wait_s(now), max(self._bulk_at + LONGEST_PAUSE_S - now, 0.0))

    def begin(self, now: float) -> None:
        """Note that a link begins to write a chunk of bulk; `end` must follow."""
        if not self._writers:
            if now - self._window_at - self._busy_s > WINDOW_S * (1 - _BUSY_SHARE):  # there was a pause
                self._window_at, self._window_bytes, self._busy_s = now, 0, 0.0
            self._busy_since = now
        self._writers += 1
        self._bulk_at = now

    def end(self, size: int, now: float) -> None:
        """Note that a link has written so many bytes of bulk."""
        self._limit.spend(size, now)
        self._window_bytes += size
        self._writers -= 1
        if not self._writers:
            self._busy_s += now - self._busy_since
        elapsed_s = now - self._window_at
        if elapsed_s < WINDOW_S:
            return
        busy_s = self._busy_s + (now - self._busy_since if self._writers else 0.0)
        if busy_s >= _BUSY_SHARE * elapsed_s and not self.is_limited(now):
            self._measured(self._window_bytes / elapsed_s)
        self._window_at, self._window_bytes, self._busy_s, self._busy_since = now, 0, 0.0, now

    def _measured(self, bytes_per_s: float) -> None:
        self._bytes_per_s = max(bytes_per_s, _FALL * (self._bytes_per_s or 0.0))
        is_slow = self._bytes_per_s < SLOW_UPLOAD_BYTES_PER_S
        self._limit.set_rate(SHARE * self._bytes_per_s if is_slow else None)


@dataclass
class Bandwidth:
    """The upload and download limits of a node, and what bulk may have of its upload; shared by all its links."""

    up: ByteRateLimit = field(default_factory=ByteRateLimit)
    down: ByteRateLimit = field(default_factory=ByteRateLimit)
    spare: SpareUpload = field(default_factory=SpareUpload)

    def set_limits(self, up_bytes_per_s: float | None, down_bytes_per_s: float | None) -> None:
        """Change both limits from now on; None means no limit. Raises `ValueError` for zero or less."""
        self.up.set_rate(up_bytes_per_s)
        self.down.set_rate(down_bytes_per_s)

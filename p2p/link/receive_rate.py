"""The speed of a link, from traffic that flows anyway. Pure: the caller passes the clock.

Only the receiving side can tell: what a sender gives to its kernel may wait there. Time counts only while the peer is
known to have more to send, because a frame or a message has begun and not ended, and not at the beginning of such a
burst, where TCP is still finding its speed. Bytes and seconds are summed, and older ones fade as new ones come.
"""

from __future__ import annotations

SKIPPED_BYTES = 64 * 1024  # at the beginning of a burst
ENOUGH_BYTES = 64 * 1024  # of a burst after that, for it to count
REMEMBERED_BYTES = 8 * 2**20  # older traffic fades with each so many bytes


class ReceiveRate:
    """Bytes a second that one link delivers when it is busy."""

    def __init__(self) -> None:
        self._bytes = self._seconds = 0.0
        self._busy_since: float | None = None  # the time of the last read, within a burst
        self._burst_bytes, self._burst_s = 0, 0.0  # of the present burst, after the skipped ones

    @property
    def bytes_per_s(self) -> float | None:
        """The speed; None before a burst was long enough."""
        return self._bytes / self._seconds if self._seconds > 0 else None

    def arrived(self, size: int, now: float, *, more: bool) -> None:
        """Count `size` bytes that were read now; `more` if the peer has begun what it has not ended yet."""
        if self._busy_since is None:
            self._burst_bytes, self._burst_s = -SKIPPED_BYTES, 0.0
        if self._busy_since is None or self._burst_bytes < 0:
            self._burst_bytes = min(self._burst_bytes + size, 0)
        else:
            self._burst_bytes += size
            self._burst_s += now - self._busy_since
        self._busy_since = now if more else None
        if self._burst_bytes >= (REMEMBERED_BYTES if more else ENOUGH_BYTES):
            self.count(self._burst_bytes, self._burst_s)
            self._burst_bytes, self._burst_s = 0, 0.0

    def count(self, size: int, seconds: float) -> None:
        """Count a burst of so many bytes."""
        kept = max(0.0, 1 - size / REMEMBERED_BYTES)
        self._bytes = self._bytes * kept + size
        self._seconds = self._seconds * kept + seconds

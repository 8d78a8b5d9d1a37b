"""The time of day as records, statements and snapshots hold it; what is only measured here uses a monotonic clock."""

from __future__ import annotations

import time


def wall_ms() -> int:
    """Return milliseconds since 1970."""
    return time.time_ns() // 10**6

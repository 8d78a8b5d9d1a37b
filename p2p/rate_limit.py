"""Token buckets, and the limits built from them: log lines, useless frames, and requests by peer.

Pure: every decision takes the time as an argument, in seconds of a monotonic clock. The modules that use a limit
decide what a refusal costs (`p2p.link.quota`, `p2p.link.bandwidth`, `p2p.host.admission`, `app.membership`).
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from p2p.errors import ProtocolError

BURST = 20.0  # warnings of one kind that are logged at once
PER_S = 0.2  # and how many a second after that
_MAX_DOUBLINGS = 64  # a float overflows beyond 1023

K = TypeVar("K", bound=Hashable)


def backoff_s(first_s: float, failures: int, longest_s: float) -> float:
    """Return the pause after the nth failure in a row: `first_s`, doubled with each further one, up to `longest_s`."""
    return min(first_s * 2.0 ** min(failures - 1, _MAX_DOUBLINGS), longest_s)


class TokenBucket:
    """Earns `rate` tokens a second and saves up at most `burst` of them; full when created.

    Over any period of t seconds, `take` hands out at most `burst + rate * t` tokens. A clock that runs backwards earns
    nothing and costs nothing.
    """

    __slots__ = ("_at", "_burst", "_rate", "_tokens")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate, self._burst = rate, burst
        self._tokens, self._at = burst, now

    def take(self, now: float, amount: float = 1.0) -> bool:
        """Remove `amount` tokens; False, and nothing removed, where there are fewer."""
        self._refill(now)
        if self._tokens < amount:
            return False
        self._tokens -= amount
        return True

    def spend(self, now: float, amount: float) -> None:
        """Remove `amount` tokens whether or not they are there; what is missing is a debt that later tokens pay."""
        self._refill(now)
        self._tokens -= amount

    def wait_s(self, now: float, amount: float = 1.0) -> float:
        """Seconds until `amount` tokens are there, 0 if they are now, infinity if they never will be."""
        self._refill(now)
        if self._tokens >= amount:
            return 0.0
        if amount > self._burst or self._rate <= 0:
            return math.inf
        return (amount - self._tokens) / self._rate

    def set_rate(self, rate: float, burst: float) -> None:
        """Change the rate from now on and empty the bucket; a debt run up under the old rate is dropped."""
        self._rate, self._burst, self._tokens = rate, burst, 0.0

    def _refill(self, now: float) -> None:
        if now > self._at:
            self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
            self._at = now


class KeyedRateLimit(Generic[K]):
    """One token bucket for each key, at most `max_keys` of them; the key unused for longest is dropped first.

    A dropped key starts again with a full bucket, so `max_keys` must be larger than the number of keys that a flooder
    can afford to use in turn.
    """

    def __init__(self, burst: float, per_s: float, max_keys: int = 4096) -> None:
        self._burst, self._per_s, self._max_keys = burst, per_s, max_keys
        self._buckets: OrderedDict[K, TokenBucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, key: K, now: float) -> bool:
        """Use up one token of `key`; False if it has none."""
        return self._bucket(key, now).take(now)

    def has_token(self, key: K, now: float) -> bool:
        """True if `take` would succeed."""
        return key not in self._buckets or self._buckets[key].wait_s(now) == 0.0

    def delay_s(self, key: K, now: float, amount: float = 1.0) -> float:
        """Use up `amount` tokens of `key`, on credit if need be; returns the seconds after which they are paid for."""
        bucket = self._bucket(key, now)
        bucket.spend(now, amount)
        return bucket.wait_s(now, 0.0)

    def _bucket(self, key: K, now: float) -> TokenBucket:
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = TokenBucket(self._per_s, self._burst, now)
            if len(self._buckets) > self._max_keys:
                self._buckets.popitem(last=False)
        else:
            self._buckets.move_to_end(key)
        return bucket


PeerRateLimit = KeyedRateLimit[str]  # by peer id


@dataclass
class _Line:
    bucket: TokenBucket
    left_out: int = 0


class LogLimit(logging.Filter):
    """Drops repeated warnings: of each kind `BURST` pass at once, then one in 5 s, with the number of dropped ones.

    A kind is a message before its arguments are filled in, so that the table holds at most one entry for each logging
    call in the program.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lines: dict[str, _Line] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """True if the record is to be logged; records below WARNING always are."""
        if record.levelno < logging.WARNING:
            return True
        now, kind = self._clock(), str(record.msg)
        line = self._lines.get(kind)
        if line is None:
            line = self._lines[kind] = _Line(TokenBucket(PER_S, BURST, now))
        if not line.bucket.take(now):
            line.left_out += 1
            return False
        if line.left_out:
            record.msg = f"{kind} (and {line.left_out} more like it)"
            line.left_out = 0
        return True


class FloodGuard:
    """Tolerates `burst` useless frames at once and `per_s` a second after that."""

    __slots__ = ("_bucket",)

    def __init__(self, burst: float, per_s: float, now: float) -> None:
        self._bucket = TokenBucket(per_s, burst, now)

    def count(self, now: float, frames: float = 1.0) -> None:
        """Count a frame, or one that counts as several; raises `ProtocolError` where there were too many."""
        if not self._bucket.take(now, frames):
            raise ProtocolError("floods this node with frames that do nothing")

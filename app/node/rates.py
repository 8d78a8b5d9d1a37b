"""Current rates of this node (tokens, bytes, steps per second), derived from readings of counters. No clock, no I/O.

A counter may restart from zero (a block server is replaced, a link is dialled again): a value below the last one is
taken as growth from zero.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from app.snapshot.views import FlowView

WINDOW_S = 10.0  # rates are averages over this time


class Counters(NamedTuple):
    """Running totals of the block server and of this node's own replies."""

    served_tokens: int = 0  # computed for other peers
    asked_tokens: int = 0  # received by this node's user
    steps: int = 0
    urgent_steps: int = 0
    urgent_rows: int = 0


@dataclass(frozen=True)
class RateReading:
    """All counters at one moment; links and sessions have their own."""

    counters: Counters
    links: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # peer -> bytes sent, received
    sessions: Mapping[str, int] = field(default_factory=dict)  # session -> tokens


class _Sums(NamedTuple):
    at_s: float
    counters: Counters
    up_bytes: int
    down_bytes: int
    sessions: Mapping[str, int]


class RateMeter:
    """Rates over the last `WINDOW_S` seconds, from readings passed to `note`."""

    def __init__(self) -> None:
        self._seen = RateReading(Counters())
        self._sums: deque[_Sums] = deque()

    def note(self, now_s: float, reading: RateReading) -> None:
        """Add a reading taken at `now_s`, and drop those older than the window."""
        before, last = self._seen, self._sums[-1] if self._sums else _Sums(now_s, Counters(), 0, 0, {})
        values = zip(last.counters, before.counters, reading.counters, strict=True)
        grown = Counters(*(total + _growth(old, new) for total, old, new in values))
        up, down = last.up_bytes, last.down_bytes
        for peer, (sent, received) in reading.links.items():
            old_sent, old_received = before.links.get(peer, (0, 0))
            up, down = up + _growth(old_sent, sent), down + _growth(old_received, received)
        self._seen = reading
        self._sums.append(_Sums(now_s, grown, up, down, dict(reading.sessions)))
        while self._sums[0].at_s < now_s - WINDOW_S and len(self._sums) > 2:
            self._sums.popleft()

    def view(self, queued: int = 0) -> FlowView:
        """Return the rates over the window; `queued` sessions are passed through."""
        if len(self._sums) < 2:
            return FlowView(queued=queued)
        first, last = self._sums[0], self._sums[-1]
        span_s = max(last.at_s - first.at_s, 1e-3)
        grown = Counters(*(new - old for old, new in zip(first.counters, last.counters, strict=True)))
        return FlowView(
            served_tokens_per_s=grown.served_tokens / span_s,
            asked_tokens_per_s=grown.asked_tokens / span_s,
            up_bytes_per_s=(last.up_bytes - first.up_bytes) / span_s,
            down_bytes_per_s=(last.down_bytes - first.down_bytes) / span_s,
            steps_per_s=grown.steps / span_s,
            batch_rows=grown.urgent_rows / grown.urgent_steps if grown.urgent_steps else 0.0,
            queued=queued,
        )

    def session_rate(self, session: str) -> float:
        """Tokens per second of one session, over the part of the window in which it existed."""
        known = [(sums.at_s, sums.sessions[session]) for sums in self._sums if session in sums.sessions]
        if len(known) < 2:
            return 0.0
        (began_s, first), (now_s, last) = known[0], known[-1]
        return max(0, last - first) / max(now_s - began_s, 1e-3)


def _growth(old: int, new: int) -> int:
    return new - old if new >= old else new

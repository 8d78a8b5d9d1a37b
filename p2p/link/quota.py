"""What one peer, and all peers together, may ask of this node; and what becomes of those who ask for more. Pure.

Over a limit means a `busy` answer and no handler run. A peer that keeps on is reported as misbehaving; how long it is
then held off, and who may connect at all, is for `p2p.host.admission`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds on what peers may have under way here."""

    calls_per_peer: int = 64
    calls: int = 1024
    streams_per_peer: int = 64
    streams: int = 1024
    bytes_per_peer: int = 256 * 2**20  # bodies received and not yet consumed
    bytes: int = 1024 * 2**20
    # Answers that wait for the peer to read them; one alone may be larger. More than an honest peer asks for at once.
    answer_bytes_per_peer: int = 24 * 2**20
    requests_per_s: float = 2000.0
    request_burst: float = 4000.0
    # Refusals a peer may run up before it counts as misbehaving, and how many are forgiven each second.
    refusals: float = 500.0
    refusals_forgiven_per_s: float = 10.0


MAX_REMEMBERED = 4096  # peers that are gone, of whom it is still known how much they asked for


@dataclass
class _Use:
    calls: int = 0
    streams: int = 0
    bytes: int = 0
    answer_bytes: int = 0


@dataclass
class _Peer(_Use):
    tokens: float = 0.0
    tokens_at: float = 0.0
    refusals: float = 0.0
    refusals_at: float = 0.0


class Quota:
    """Counts what is under way and says no; each `begin` that returned None is matched by its `end`."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._all = _Use()
        self._peers: dict[str, _Peer] = {}
        self._gone: OrderedDict[str, _Peer] = OrderedDict()

    def request(self, peer: str, now: float) -> str | None:
        """Count one request against the peer's rate, or the reason why not."""
        use, limits = self._peer(peer, now), self.limits
        use.tokens = min(use.tokens + (now - use.tokens_at) * limits.requests_per_s, limits.request_burst)
        use.tokens_at = now
        if use.tokens < 1:
            return "too many requests a second"
        use.tokens -= 1
        return None

    def begin_call(self, peer: str, size: int, now: float) -> str | None:
        """Take on a call with a body of this size, or the reason why not."""
        refusal = self.request(peer, now)
        if refusal is not None:
            return refusal
        use = self._peer(peer, now)
        if use.calls >= self.limits.calls_per_peer or self._all.calls >= self.limits.calls:
            return "too many calls at once"
        if not self.hold(peer, size, now):
            return "too many bytes in flight"
        use.calls += 1
        self._all.calls += 1
        return None

    def hold_answer(self, peer: str, size: int, now: float) -> bool:
        """Account for an answer until its call ends; False where the peer should read the others first."""
        use = self._peer(peer, now)
        if use.answer_bytes and use.answer_bytes + size > self.limits.answer_bytes_per_peer:
            return False
        if not self.hold(peer, size, now):
            return False
        use.answer_bytes += size
        return True

    def end_call(self, peer: str, size: int, answer_size: int = 0) -> None:
        """A call that began has ended."""
        self._peers[peer].calls -= 1
        self._peers[peer].answer_bytes -= answer_size
        self._all.calls -= 1
        self.release(peer, size + answer_size)

    def begin_stream(self, peer: str, now: float) -> str | None:
        """Take on a stream, or the reason why not."""
        use = self._peer(peer, now)
        if use.streams >= self.limits.streams_per_peer or self._all.streams >= self.limits.streams:
            return "too many streams at once"
        use.streams += 1
        self._all.streams += 1
        return None

    def end_stream(self, peer: str) -> None:
        """A stream that began has ended."""
        self._peers[peer].streams -= 1
        self._all.streams -= 1

    def hold(self, peer: str, size: int, now: float) -> bool:
        """Account for bytes kept for a peer; False where they do not fit."""
        use = self._peer(peer, now)
        if use.bytes + size > self.limits.bytes_per_peer or self._all.bytes + size > self.limits.bytes:
            return False
        use.bytes += size
        self._all.bytes += size
        return True

    def release(self, peer: str, size: int) -> None:
        """Bytes that were held are gone."""
        if size:
            self._peers[peer].bytes -= size
            self._all.bytes -= size

    def refused(self, peer: str, now: float) -> bool:
        """Note that a peer was told no; True once it has been told too often."""
        use = self._peer(peer, now)
        forgiven = (now - use.refusals_at) * self.limits.refusals_forgiven_per_s
        use.refusals, use.refusals_at = max(use.refusals - forgiven, 0.0) + 1, now
        if use.refusals <= self.limits.refusals:
            return False
        use.refusals = 0.0
        return True

    def forget(self, peer: str) -> None:
        """Put the books of a peer away that has nothing under way, so that they do not grow with every passer-by.

        Its rate and its refusals are remembered for a while: a new link must not buy it a new start.
        """
        use = self._peers.get(peer)
        if use is not None and not (use.calls or use.streams or use.bytes):
            self._gone[peer] = self._peers.pop(peer)
            if len(self._gone) > MAX_REMEMBERED:
                self._gone.popitem(last=False)

    def under_way(self, peer: str) -> tuple[int, int, int]:
        """Calls, streams and bytes of one peer."""
        use = self._peers.get(peer) or _Peer()
        return use.calls, use.streams, use.bytes

    def _peer(self, peer: str, now: float) -> _Peer:
        use = self._peers.get(peer)
        if use is None:
            new = _Peer(tokens=self.limits.request_burst, tokens_at=now, refusals_at=now)
            use = self._peers[peer] = self._gone.pop(peer, new)
        return use

"""How much of this node peers may use at once: calls, streams and bytes held for them. Pure; the clock is passed in.

Each of the three is a `SharedLimit`: every peer has a small floor that nobody else can take, and above it draws from a
pool that all share fairly. So strangers who use all they can get leave room for the others, however many they are.
Only bytes that arrived count, never what a message declares.

Over a limit means a `busy` answer and no handler run. A peer that keeps on is reported as misbehaving; how long it is
then held off, and who may connect at all, is decided by `p2p.host.admission`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds on what peers may have under way here.

    A peer may always have its floor; the pool (`calls`, `streams`, `bytes`) holds what peers have above their floors.
    With 256 connections the floors add up to 1024 calls, 1024 streams and 256 MiB.
    """

    calls_per_peer: int = 64
    calls: int = 1024
    calls_floor: int = 4
    streams_per_peer: int = 64
    streams: int = 1024
    streams_floor: int = 4
    bytes_per_peer: int = 256 * 2**20  # bodies received and not yet consumed
    bytes: int = 768 * 2**20
    bytes_floor: int = 2**20
    # Answers that wait for the peer to read them; one alone may be larger. More than an honest peer asks for at once.
    answer_bytes_per_peer: int = 24 * 2**20
    requests_per_s: float = 2000.0
    request_burst: float = 4000.0
    # Refusals a peer may run up before it counts as misbehaving, and how many are forgiven each second.
    refusals: float = 500.0
    refusals_forgiven_per_s: float = 10.0


class SharedLimit:
    """Divides one resource among peers.

    Up to its floor a peer is always served. Above, it draws from the pool: freely while the pool is less than half
    used, and up to an equal share of the pool after that.
    """

    def __init__(self, per_peer: int, pool: int, floor: int) -> None:
        self._per_peer, self._pool, self._floor = per_peer, pool, floor
        self._used: dict[str, int] = {}
        self._pool_used = 0
        self._pool_peers = 0  # that use more than their floor

    def used(self, peer: str) -> int:
        """How much this peer has now."""
        return self._used.get(peer, 0)

    def take(self, peer: str, amount: int) -> bool:
        """Count `amount` more for a peer; False, and nothing counted, where it may not have it."""
        before = self._used.get(peer, 0)
        after = before + amount
        if after > self._per_peer:
            return False
        above_before, above_after = max(before - self._floor, 0), max(after - self._floor, 0)
        pool_used = self._pool_used + above_after - above_before
        if above_after:
            peers = self._pool_peers + (not above_before)
            if pool_used > self._pool or (2 * pool_used > self._pool and above_after * (peers + 1) > self._pool):
                return False
        self._set(peer, after)
        return True

    def give_back(self, peer: str, amount: int) -> None:
        """Count `amount` less for a peer."""
        left = self._used.get(peer, 0) - amount
        assert left >= 0, "nobody gives back more than was taken"
        self._set(peer, left)

    def _set(self, peer: str, amount: int) -> None:
        above_before = max(self._used.get(peer, 0) - self._floor, 0)
        above = max(amount - self._floor, 0)
        self._pool_used += above - above_before
        self._pool_peers += bool(above) - bool(above_before)
        if amount:
            self._used[peer] = amount
        else:
            self._used.pop(peer, None)


MAX_REMEMBERED = 4096  # peers that are gone, of whom it is still known how much they asked for


@dataclass
class _Peer:
    tokens: float = 0.0
    tokens_at: float = 0.0
    refusals: float = 0.0
    refusals_at: float = 0.0
    answer_bytes: int = 0


class Quota:
    """Counts what is under way and says no; each `begin` that returned None is matched by its `end`."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._calls = SharedLimit(self.limits.calls_per_peer, self.limits.calls, self.limits.calls_floor)
        self._streams = SharedLimit(self.limits.streams_per_peer, self.limits.streams, self.limits.streams_floor)
        self._bytes = SharedLimit(self.limits.bytes_per_peer, self.limits.bytes, self.limits.bytes_floor)
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
        """Take on a call of whose body `size` bytes have arrived, or the reason why not."""
        refusal = self.request(peer, now)
        if refusal is not None:
            return refusal
        if not self._calls.take(peer, 1):
            return "too many calls at once"
        if not self._bytes.take(peer, size):
            self._calls.give_back(peer, 1)
            return "too many bytes in flight"
        return None

    def hold_answer(self, peer: str, size: int, now: float) -> bool:
        """Account for an answer until its call ends; False where the peer should read the others first."""
        use = self._peer(peer, now)
        if use.answer_bytes and use.answer_bytes + size > self.limits.answer_bytes_per_peer:
            return False
        if not self._bytes.take(peer, size):
            return False
        use.answer_bytes += size
        return True

    def end_call(self, peer: str, size: int, answer_size: int = 0) -> None:
        """A call that began has ended; `size` bytes of its body were held."""
        self._peers[peer].answer_bytes -= answer_size
        self._calls.give_back(peer, 1)
        self._bytes.give_back(peer, size + answer_size)

    def begin_stream(self, peer: str) -> str | None:
        """Take on a stream, or the reason why not."""
        return None if self._streams.take(peer, 1) else "too many streams at once"

    def end_stream(self, peer: str) -> None:
        """A stream that began has ended."""
        self._streams.give_back(peer, 1)

    def hold(self, peer: str, size: int) -> bool:
        """Account for bytes kept for a peer; False where they do not fit."""
        return self._bytes.take(peer, size)

    def release(self, peer: str, size: int) -> None:
        """Bytes that were held are gone."""
        self._bytes.give_back(peer, size)

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
        if peer in self._peers and self.under_way(peer) == (0, 0, 0):
            self._gone[peer] = self._peers.pop(peer)
            if len(self._gone) > MAX_REMEMBERED:
                self._gone.popitem(last=False)

    def under_way(self, peer: str) -> tuple[int, int, int]:
        """Calls, streams and bytes of one peer."""
        return self._calls.used(peer), self._streams.used(peer), self._bytes.used(peer)

    def _peer(self, peer: str, now: float) -> _Peer:
        use = self._peers.get(peer)
        if use is None:
            new = _Peer(tokens=self.limits.request_burst, tokens_at=now, refusals_at=now)
            use = self._peers[peer] = self._gone.pop(peer, new)
        return use

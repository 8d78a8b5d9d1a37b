"""Bounds on the calls, streams and buffered bytes that peers may have at this node. Pure; the clock is passed in.

Each of the three is a `SharedLimit`: every peer has a small floor that no other peer can use up, and above it draws
from a pool that is shared among homes first, then among the peers of a home (`p2p.shares`). Who holds too much makes
way for those who find no room: calls and streams of it are ended. Only bytes that arrived count, never the length that
a message declares.

A call over a limit is answered `busy` and its handler does not run. A peer that ignores too many refusals is reported
as misbehaving; `p2p.host.admission` decides how long it is then held off, and which peers may connect at all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from p2p.rate_limit import TokenBucket
from p2p.shares import Holder, Shares, alone


@dataclass(frozen=True)
class Limits:
    """Bounds on the calls, streams and bytes that peers may have in progress at this node.

    A peer always gets its floor; the pool (`calls`, `streams`, `bytes`) is shared by what peers use above their floors.
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
    # Answers that the peer has not read yet; a single one may be larger. Honest peers ask for less than this at once.
    answer_bytes_per_peer: int = 24 * 2**20
    requests_per_s: float = 2000.0
    request_burst: float = 4000.0
    # Refusals after which a peer counts as misbehaving, and how many of them are forgiven each second.
    refusals: float = 500.0
    refusals_forgiven_per_s: float = 10.0


class Resource(IntEnum):
    """What peers have of this node over their links."""

    CALLS = 0
    STREAMS = 1
    BYTES = 2


class Held(NamedTuple):
    """The bytes that are held for one call or stream, and how to end it so that others find room."""

    size: int
    end: Callable[[], None]
    ends_at_once: bool = True  # a handler that runs takes a moment to end


class SharedLimit:
    """Divides one resource among peers.

    A peer always gets its floor. What it has above that comes from the pool, by `p2p.shares`.
    """

    def __init__(self, per_peer: int, pool: int, floor: int, holder_of: Callable[[str], Holder] = alone) -> None:
        self._per_peer, self._floor = per_peer, floor
        self._pool = Shares(pool)
        self._holder_of = holder_of
        self._used: dict[str, int] = {}
        self._holders: dict[str, Holder] = {}  # that use the pool, by peer; a peer may change its address meanwhile

    def used(self, peer: str) -> int:
        """The amount that `peer` uses now."""
        return self._used.get(peer, 0)

    def take(self, peer: str, amount: int) -> bool:
        """Count `amount` more for `peer`; False, and nothing counted, if that is over its limit or finds no room."""
        before = self._used.get(peer, 0)
        after = before + amount
        more = self._above_floor(after) - self._above_floor(before)
        if after > self._per_peer or (more and not self._pool.fits(self._holder(peer), more)):
            return False
        self._set(peer, before, after)
        return True

    def first_to_go(self, peer: str, amount: int) -> str | None:
        """Return the peer that is most in the way of `peer` taking so much more, None if no other one is."""
        after = self.used(peer) + amount
        if after > self._per_peer:
            return None
        more = self._above_floor(after) - self._above_floor(self.used(peer))
        holder = self._pool.first_to_go(self._holder(peer), more)
        return None if holder is None else holder.asker

    def give_back(self, peer: str, amount: int) -> None:
        """Count `amount` less for `peer`."""
        before = self._used.get(peer, 0)
        assert before >= amount, "more was given back than was taken"
        self._set(peer, before, before - amount)

    def _above_floor(self, amount: int) -> int:
        return max(amount - self._floor, 0)

    def _holder(self, peer: str) -> Holder:
        return self._holders.get(peer) or self._holder_of(peer)

    def _set(self, peer: str, before: int, after: int) -> None:
        if max(before, after) > self._floor:
            holder = self._holders[peer] = self._holder(peer)
            self._pool.add(holder, self._above_floor(after) - self._above_floor(before))
            if after <= self._floor:
                del self._holders[peer]
        if after:
            self._used[peer] = after
        else:
            self._used.pop(peer, None)


MAX_REMEMBERED = 4096  # disconnected peers whose request rate and refusals are still remembered


@dataclass
class _Peer:
    requests: TokenBucket
    refusals: TokenBucket  # one token for each refusal that is tolerated
    answer_bytes: int = 0


class Quota:
    """Counts the calls, streams and bytes of each peer and refuses those over a limit.

    Every `begin_call` or `begin_stream` that returned None must be followed by one `end_call` or `end_stream`.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        holder_of: Callable[[str], Holder] = alone,
        make_way: Callable[[str, Resource, int], None] = lambda peer, resource, amount: None,
    ) -> None:
        """`make_way` ends a call or stream of a peer that has too much of a resource, so that others find so much."""
        self.limits = limits = limits or Limits()
        calls = SharedLimit(limits.calls_per_peer, limits.calls, limits.calls_floor, holder_of)
        streams = SharedLimit(limits.streams_per_peer, limits.streams, limits.streams_floor, holder_of)
        held_bytes = SharedLimit(limits.bytes_per_peer, limits.bytes, limits.bytes_floor, holder_of)
        self._shared = {Resource.CALLS: calls, Resource.STREAMS: streams, Resource.BYTES: held_bytes}
        self._make_way = make_way
        self._peers: dict[str, _Peer] = {}
        self._leaving: set[str] = set()  # whose link has ended while something was in progress
        self._gone: OrderedDict[str, _Peer] = OrderedDict()

    def request(self, peer: str, now: float) -> str | None:
        """Count one request against the peer's rate; returns the reason if it is refused, else None."""
        return None if self._peer(peer, now).requests.take(now) else "too many requests a second"

    def begin_call(self, peer: str, size: int, now: float) -> str | None:
        """Count a call, and the `size` bytes of its body that have arrived; returns the reason if it is refused."""
        refusal = self.request(peer, now)
        if refusal is not None:
            return refusal
        if not self._take(Resource.CALLS, peer, 1):
            return "too many calls at once"
        if not self._take(Resource.BYTES, peer, size):
            self._shared[Resource.CALLS].give_back(peer, 1)
            return "too many bytes in flight"
        return None

    def hold_answer(self, peer: str, size: int, now: float) -> bool:
        """Count an answer's bytes until its call ends; False if the peer must read earlier answers first."""
        use = self._peer(peer, now)
        if use.answer_bytes and use.answer_bytes + size > self.limits.answer_bytes_per_peer:
            return False
        if not self._take(Resource.BYTES, peer, size):
            return False
        use.answer_bytes += size
        return True

    def end_call(self, peer: str, size: int, answer_size: int = 0) -> None:
        """Stop counting a call, the `size` bytes of its body and the `answer_size` bytes of its answer."""
        self._peers[peer].answer_bytes -= answer_size
        self._shared[Resource.CALLS].give_back(peer, 1)
        self._shared[Resource.BYTES].give_back(peer, size + answer_size)
        self._less(peer)

    def begin_stream(self, peer: str) -> str | None:
        """Count a stream; returns the reason if it is refused, else None."""
        return None if self._take(Resource.STREAMS, peer, 1) else "too many streams at once"

    def end_stream(self, peer: str) -> None:
        """Stop counting one stream of `peer`."""
        self._shared[Resource.STREAMS].give_back(peer, 1)
        self._less(peer)

    def hold(self, peer: str, size: int) -> bool:
        """Count bytes buffered for a peer; False, and nothing counted, if that is over a limit."""
        return self._take(Resource.BYTES, peer, size)

    def release(self, peer: str, size: int) -> None:
        """Stop counting bytes that were buffered for a peer."""
        self._shared[Resource.BYTES].give_back(peer, size)
        self._less(peer)

    def refused(self, peer: str, now: float) -> bool:
        """Count one refusal of a peer; True, and the count restarts, once it was refused too often."""
        use = self._peer(peer, now)
        if use.refusals.take(now):
            return False
        use.refusals = self._refusals(now)
        return True

    def forget(self, peer: str) -> None:
        """Drop the counters of a peer once it has nothing in progress, so that they do not grow with every visitor.

        Its request rate and refusals are kept for the last `MAX_REMEMBERED` peers, so that reconnecting does not reset
        them.
        """
        if peer in self._peers:
            self._leaving.add(peer)
            self._less(peer)

    def _take(self, resource: Resource, peer: str, amount: int) -> bool:
        """Count so much more for a peer, for which others make way as far as they can at once."""
        limit = self._shared[resource]
        while not limit.take(peer, amount):
            other = limit.first_to_go(peer, amount)
            if other is None:
                return False
            before = limit.used(other)
            self._make_way(other, resource, amount)
            if limit.used(other) >= before:  # a handler takes a moment to end
                return False
        return True

    def _less(self, peer: str) -> None:
        if peer in self._leaving and self.under_way(peer) == (0, 0, 0):
            self._leaving.discard(peer)
            self._gone[peer] = self._peers.pop(peer)
            if len(self._gone) > MAX_REMEMBERED:
                self._gone.popitem(last=False)

    def under_way(self, peer: str) -> tuple[int, int, int]:
        """The calls, streams and buffered bytes of one peer."""
        calls, streams, held_bytes = (self._shared[resource].used(peer) for resource in Resource)
        return calls, streams, held_bytes

    def _peer(self, peer: str, now: float) -> _Peer:
        self._leaving.discard(peer)
        use = self._peers.get(peer)
        if use is None:
            use = self._gone.pop(peer, None)
            if use is None:
                requests = TokenBucket(self.limits.requests_per_s, self.limits.request_burst, now)
                use = _Peer(requests, self._refusals(now))
            self._peers[peer] = use
        return use

    def _refusals(self, now: float) -> TokenBucket:
        return TokenBucket(self.limits.refusals_forgiven_per_s, self.limits.refusals, now)

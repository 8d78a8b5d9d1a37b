"""Estimates of peers' speed: times and bytes a second of links between peers, and compute time per block. Pure.

Figures of links come from announcements and from this node's own links. The time per block is learned from whole
tokens over known routes, because only the hop itself knows its own share and it may lie. Each token's surplus over the
expected time is spread evenly over the hops of its route, however many blocks they have: any of them may have made it.
Routes overlap, so a hop that is slow on every route stands out soon. One that a single reply made slower is measured
again soon, without the others of that reply where that is possible, and later each time. Seconds that a reply lost
beside its tokens are put down to the hops that may have cost them (`app.asker.recovery.LostSeconds`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_high
from types import MappingProxyType

from app.core.network import Link
from app.core.pieces import CHUNK, Pieces, at_once, by_chunks
from app.core.span import Span
from app.routing.cost import (
    ASSUMED_BYTES_PER_S,
    HOP_S,
    MOST_BELIEVED_BYTES_PER_S,
    UNKNOWN_LINK_S,
    compute_seconds,
    overhead_seconds,
)
from app.routing.route import Hop, ReadingPace, Route
from app.swarm.records import MAX_RATES, MAX_RTTS, Announcement, tail

_TAKEN_AT_ONCE = 64  # members whose claims are read without a break


@dataclass(frozen=True)
class LinkEstimates:
    """The estimated one-way seconds between two peers; "" is this node.

    Between two other peers the larger of their claims counts, but at least what the triangle inequality allows; a claim
    of one side alone is at least half the way to the farther peer. Without claims it is the way to the farther peer;
    `app.routing.vector_search` relies on that.
    """

    own_peer: str
    rtt_s: Mapping[str, float]  # round-trip times that this node measured
    claimants: Mapping[str, Announcement]  # members that announced round-trip times, by peer

    def is_here(self, peer: str) -> bool:
        """True for this node."""
        return peer in ("", self.own_peer)

    def away_s(self, peer: str) -> float:
        """One-way seconds between this node and a peer."""
        return 0.0 if self.is_here(peer) else self.rtt_s.get(peer, 2 * UNKNOWN_LINK_S) / 2

    def all_away_s(self, peers: Iterable[str]) -> list[float]:
        """One-way seconds between this node and each of these peers."""
        known, unknown_s = self.rtt_s.get, 2 * UNKNOWN_LINK_S
        return [0.0 if peer == self.own_peer else known(peer, unknown_s) / 2 for peer in peers]

    def __call__(self, a: str, b: str) -> float:
        """One-way seconds between two peers."""
        if a == b:
            return 0.0
        a_s, b_s = self.away_s(a), self.away_s(b)
        if self.is_here(a) or self.is_here(b):
            return max(a_s, b_s)
        claimed_s = [
            both_ways_s / 2
            for claimant, other in ((a, b), (b, a))
            if claimant in self.claimants
            and (both_ways_s := self.claimants[claimant].rtt_by_tail.get(tail(other))) is not None
        ]
        if not claimed_s:
            return max(a_s, b_s)
        least_s = abs(a_s - b_s) if a in self.rtt_s and b in self.rtt_s else 0.0
        if len(claimed_s) == 1:
            least_s = max(least_s, max(a_s, b_s) / 2)
        return max(*claimed_s, least_s)


def link_seconds(own_peer: str, rtt_s: Mapping[str, float], members: Iterable[Announcement]) -> LinkEstimates:
    """Return the link estimates from this node's measured round-trip times and the members' claims."""
    return LinkEstimates(own_peer, rtt_s, {member.peer: member for member in members if member.rtts})


def link_seconds_in_pieces(
    own_peer: str, rtt_s: Mapping[str, float], members: Sequence[Announcement]
) -> Pieces[LinkEstimates]:
    """Compute `link_seconds` in pieces."""
    claimants = yield from by_chunks(lambda some: {member.peer: member for member in some if member.rtts}, members)
    return LinkEstimates(own_peer, rtt_s, claimants)


@dataclass(frozen=True)
class RateEstimates:
    """The estimated bytes a second from one peer to another; "" is this node.

    Only the receiver of bytes can measure how fast they come. What comes here, this node knows itself; what goes to
    another peer, that peer says. Its word counts for `MOST_BELIEVED_BYTES_PER_S` at most, and concerns its own links
    alone: of another peer it shows what that one can send, never what it cannot. A link that its receiver says nothing
    about is as fast as the slower of the sender's sending and the receiver's receiving.
    """

    own_peer: str
    measured: Mapping[str, float]  # peer -> bytes a second that come here from it
    claims: Mapping[str, Mapping[str, float]]  # peer -> `tail` of another -> bytes a second from there, it says
    sent: Mapping[str, float]  # `tail` of a peer -> the most that others say comes from it
    received: Mapping[str, float]  # peer -> the most that it says comes to it

    def __call__(self, a: str, b: str) -> float | None:
        """Bytes a second from peer `a` to peer `b`; None if nothing is known about either."""
        a, b = a or self.own_peer, b or self.own_peer
        if a == b:
            return None
        known = self.measured.get(a) if b == self.own_peer else self.claims.get(b, {}).get(tail(a))
        if known is not None:
            return known
        both = [speed for speed in (self.up(a), self.down(b)) if speed is not None]
        return min(both, default=None)

    def up(self, peer: str) -> float | None:
        """Bytes a second that a peer can send, as this node has seen, or else as others say if that is much."""
        measured = self.measured.get(peer)
        if measured is not None:
            return measured
        said = self.sent.get(tail(peer))
        return ASSUMED_BYTES_PER_S if said is not None and said < ASSUMED_BYTES_PER_S else said

    def down(self, peer: str) -> float | None:
        """Bytes a second that a peer can receive, as it says itself; this node's own come from its measurements."""
        if peer == self.own_peer:
            return max(self.measured.values(), default=None)
        return self.received.get(peer)

    def byte_s(self, peers: Iterable[str]) -> dict[str, float]:
        """Seconds that each peer takes to receive a byte and to send it on; without those nothing is known about.

        The speeds are those of `up` and `down`, without a call for each of thousands of peers.
        """
        found = {}
        measured, sent, received = self.measured.get, self.sent.get, self.received.get
        for peer in peers:
            up, down = measured(peer), received(peer)
            if up is None and (up := sent(tail(peer))) is not None and up < ASSUMED_BYTES_PER_S:
                up = ASSUMED_BYTES_PER_S
            if peer == self.own_peer:
                down = self.down(peer)
            if up is not None or down is not None:
                found[peer] = 1 / (up or ASSUMED_BYTES_PER_S) + 1 / (down or ASSUMED_BYTES_PER_S)
        return found


def link_rates(own_peer: str, links: Iterable[Link], members: Sequence[Announcement]) -> RateEstimates:
    """Return the estimated speeds from this node's own links and the members' claims."""
    claims = RateClaims()
    at_once(claims.update(members))
    return claims.estimates(own_peer, links)


class RateClaims:
    """What members say of the speeds of links, kept from one search to the next: only who changed is read again."""

    def __init__(self) -> None:
        self._read: dict[str, Announcement] = {}
        self._claims: dict[str, dict[str, float]] = {}  # as in `RateEstimates`
        self._said: dict[str, dict[str, float]] = {}  # `tail` of a peer -> who says it -> bytes a second from there
        self._sent: dict[str, float] = {}  # the largest of them
        self._received: dict[str, float] = {}

    def update(self, members: Sequence[Announcement]) -> Pieces[None]:
        """Take over what these members say, and forget what others said."""
        for start in range(0, len(members), CHUNK):
            changed = [one for one in members[start : start + CHUNK] if self._read.get(one.peer) is not one]
            for first in range(0, len(changed), _TAKEN_AT_ONCE):
                for member in changed[first : first + _TAKEN_AT_ONCE]:
                    self._take(member)
                yield
            yield
        if len(self._read) > len(members):
            present = {member.peer for member in members}
            for peer in self._read.keys() - present:
                self._forget(peer)

    def estimates(self, own_peer: str, links: Iterable[Link]) -> RateEstimates:
        """Return the estimates, which follow later updates."""
        return RateEstimates(own_peer, _measured_rates(links), self._claims, self._sent, self._received)

    def _take(self, member: Announcement) -> None:
        peer, own = member.peer, tail(member.peer)
        before = self._read.get(peer)
        if before is None or before.rates != member.rates:
            self._forget(peer)
            claims = {who: min(rate, MOST_BELIEVED_BYTES_PER_S) for who, rate in member.rates if who != own}
            if claims:
                self._claims[peer], self._received[peer] = claims, max(claims.values())
            for who, rate in claims.items():
                self._said.setdefault(who, {})[peer] = rate
                self._sent[who] = max(rate, self._sent.get(who, 0.0))
        self._read[peer] = member

    def _forget(self, peer: str) -> None:
        self._read.pop(peer, None)
        self._received.pop(peer, None)
        for who in self._claims.pop(peer, ()):
            said = self._said[who]
            del said[peer]
            if said:
                self._sent[who] = max(said.values())
            else:
                del self._said[who], self._sent[who]


def _measured_rates(links: Iterable[Link]) -> dict[str, float]:
    """Bytes a second that come from each peer; what seems slow on the LAN is a busy machine, not the line."""
    rates = {link.peer: (link.down_bytes_per_s, link.kind) for link in links}
    return {
        peer: max(rate, ASSUMED_BYTES_PER_S) if kind == "lan" else rate
        for peer, (rate, kind) in rates.items()
        if rate is not None
    }


def rates_to_announce(
    links: Iterable[Link], hosted: Span | None, members: Sequence[Announcement]
) -> tuple[tuple[str, float], ...]:
    """Choose up to `MAX_RATES` speeds of links to announce; peers that host the neighbouring blocks come first."""
    measured = _measured_rates(links)
    return tuple(sorted((tail(peer), measured[peer]) for peer in _nearest(hosted, members, measured)[:MAX_RATES]))


def rtts_to_announce(
    links: Iterable[Link], hosted: Span | None, members: Sequence[Announcement]
) -> tuple[tuple[str, float], ...]:
    """Choose up to `MAX_RTTS` round-trip times to announce; peers that host the neighbouring blocks come first."""
    measured_rtt_s = {link.peer: link.rtt_s for link in links if link.rtt_s is not None}
    chosen = _nearest(hosted, members, measured_rtt_s)[:MAX_RTTS]
    return tuple(sorted((tail(peer), measured_rtt_s[peer]) for peer in chosen))


def _nearest(hosted: Span | None, members: Sequence[Announcement], among: Container[str]) -> list[str]:
    """Return these members, those that host the neighbouring blocks first."""
    nearest = dict.fromkeys([*route_neighbours(hosted, (), members), *(member.peer for member in members)])
    return [peer for peer in nearest if peer in among]


_STEP = 0.5  # fraction of the surplus that one reply corrects
_MOST_TIMES = 2.0  # one reply makes all blocks of its route together count as so many times as slow at most
_CLEARLY = 1.1  # a hop that one reply makes count as so many times as slow is measured again
AGAIN_S = 60.0  # after so long; doubled each time, up to `BELIEVED_S`
FAR_SLOWER, SLIGHT_S = 3.0, 0.1  # a token that takes so many times what was believed, and so many seconds besides
_LEAST_S = 1e-6  # lower bound of an estimate
_REMEMBERED = 1024  # peers
BELIEVED_S = (
    1800.0  # after which a measurement counts no more: a peer that was slow once is not used, and so not measured
)


@dataclass(frozen=True)
class _Slowed:
    """A hop that a reply made count as slower, though another hop of that reply may have been slow."""

    before_s: float  # its estimate before
    after_s: Mapping[str, float]  # the estimates of all the reply's hops after it
    again_at: float  # from when on another reply may measure it
    is_likely: bool = False  # another of these hops was as fast as before, without this one


class MeasuredSpeeds:
    """Measured seconds per token and block of each peer."""

    def __init__(self) -> None:
        self._slowed: dict[str, _Slowed] = {}
        self._slow: tuple[Route, float] = (), 0.0  # the last route that took far longer than was believed, and when
        self._pause_s: dict[str, float] = {}  # until such a hop is measured again; kept while it is likely the slow one
        self._block_s: dict[str, float] = {}  # the latest measured last
        self._noted_at: dict[str, float] = {}
        self._at_least: dict[str, tuple[float, float]] = {}  # by `note_wait`: seconds, when; the latest last

    def block_s(self, now: float, again: str = "") -> dict[str, float]:
        """Current estimates by peer; with `again`, those by which a route is found that measures this hop again.

        It counts as before the slow reply, and the other hops of that reply as after it: without them, a reply shows
        which of them was slow.
        """
        while self._block_s and self._noted_at[peer := next(iter(self._block_s))] < now - BELIEVED_S:
            self._forget(peer)
        self._at_least = {peer: noted for peer, noted in self._at_least.items() if noted[1] >= now - BELIEVED_S}
        found = dict(self._block_s)
        if (slowed := self._slowed.get(again)) is not None:
            found |= {peer: max(seconds, found.get(peer, 0.0)) for peer, seconds in slowed.after_s.items()}
            found[again] = slowed.before_s
        return found | {peer: max(seconds, found.get(peer, 0.0)) for peer, (seconds, _) in self._at_least.items()}

    def to_measure_again(self, now: float) -> str:
        """Return a hop that the next reply may measure again; empty if there is none."""
        return next((peer for peer, slowed in self._slowed.items() if now >= slowed.again_at), "")

    def searched(self, again: str, route: Route, now: float) -> None:
        """Note the route that was found to measure a hop again, which is on it only if that route is the best one."""
        slowed = self._slowed.pop(again, None)
        if slowed is not None:
            if any(hop.peer == again for hop in route):
                self._lengthen(again)
            self._slowed[again] = replace(slowed, again_at=now + self._pause_s[again])

    def was_late(self, peer: str, now: float) -> bool:
        """True if a peer was waited for lately, for longer than was believed."""
        return peer in self._at_least and self._at_least[peer][1] >= now - BELIEVED_S

    def note_wait(self, hop: Hop, pace: ReadingPace, tokens: int, waited_s: float, now: float) -> None:
        """Note that a hop was waited for so long, and had not read these tokens of a prompt by then.

        It counts as that much slower than was believed, but not as slower than if it had read a single token. This says
        nothing of other hops: their estimates stay as they are.
        """
        times = waited_s / max(pace.expected_s(tokens), _LEAST_S)
        block_s = min(pace.block_s * times, waited_s / len(hop.span))
        if block_s > self._at_least.get(hop.peer, (0.0, 0.0))[0]:
            self._at_least.pop(hop.peer, None)
            self._at_least[hop.peer] = block_s, now
            if len(self._at_least) > _REMEMBERED:
                del self._at_least[next(iter(self._at_least))]

    def note(
        self,
        route: Route,
        token_s: float,
        links_s: float,
        expected_block_s: Mapping[str, float],
        now: float,
        lost: Mapping[Hop, float] = MappingProxyType({}),
    ) -> Collection[str]:
        """Correct the estimates of a route's hops by a measured token time (normalised least mean squares).

        `token_s` is a reply's mean seconds per token, `links_s` the part of it on links, and `lost` what hops may have
        cost besides; `expected_block_s` is the start value for peers that were not measured yet. A hop that a slow
        reply made count as slower counts as before it, if that explains this one better.

        Returns those that were measured for the first time, if they were far slower than was believed.
        """
        new = [hop.peer for hop in route if hop.peer not in self._block_s]
        estimates = {hop.peer: self._believed(hop.peer, expected_block_s) for hop in route}
        lost_s = {hop.peer: seconds for hop, seconds in lost.items() if hop in route}
        overhead_s = overhead_seconds(route, links_s, dict.fromkeys(estimates, HOP_S))
        took_s = max(token_s - overhead_s, 0.0) + sum(lost_s.values())
        surplus_s = took_s - compute_seconds(route, estimates)
        for hop in route:
            if (slowed := self._slowed.get(hop.peer)) is not None:
                as_before_s = surplus_s + len(hop.span) * (estimates[hop.peer] - slowed.before_s)
                if abs(as_before_s) < abs(surplus_s):
                    estimates[hop.peer], surplus_s = slowed.before_s, as_before_s
                    self._clear(hop.peer, estimates)
        believed_s = compute_seconds(route, estimates)
        # What is known to be lost is put down to those who may have caused it, and to nobody else.
        named_s = min(sum(lost_s.values()), max(surplus_s, 0.0))
        by_name = {peer: seconds * named_s / sum(lost_s.values()) for peer, seconds in lost_s.items() if named_s}
        surplus_s -= named_s
        most_s = (_MOST_TIMES - 1) * believed_s
        # What a hop claims that was not measured yet says least: a delay is put down to such hops alone, and wholly.
        blamed = new if new and surplus_s > 0 else [*estimates]
        # Nor is one reply's word taken for more, unless it is as slow when it is looked at again.
        slow_route, slow_at = self._slow
        is_slow_again = slow_route == route and now - slow_at <= AGAIN_S
        self._slow = (route, now) if _STEP * surplus_s > most_s else ((), 0.0)
        share_s = min(_STEP * surplus_s, math.inf if blamed is new or is_slow_again else most_s) / len(blamed)
        more_s = {
            hop.peer: (share_s if hop.peer in blamed else 0.0) + _STEP * by_name.get(hop.peer, 0.0) for hop in route
        }
        moved = {
            hop.peer: max(estimates[hop.peer] + more_s[hop.peer] / len(hop.span), estimates[hop.peer] / 2)
            for hop in route
        }
        self._put(estimates, moved, now)
        return [peer for peer in new if _is_far_slower(surplus_s + by_name.get(peer, 0.0), believed_s)]

    def note_lost(self, hop: Hop, lost_s: float, expected_block_s: Mapping[str, float], now: float) -> bool:
        """Correct the estimate of a hop that may have cost a reply so many seconds per token before it left the route.

        One loss is told again while the reply goes on, and by all replies that it hit: until the hop is measured again,
        the greatest counts. True if it never was measured, and was far slower than was believed.
        """
        is_new, blocks = hop.peer not in self._block_s, len(hop.span)
        believed_s = self._believed(hop.peer, expected_block_s)
        before_s = self._slowed[hop.peer].before_s if hop.peer in self._slowed else believed_s
        after_s = before_s + _STEP * lost_s / blocks
        if after_s > _CLEARLY * believed_s:
            self._put({hop.peer: before_s}, {hop.peer: after_s}, now)
        return is_new and _is_far_slower(lost_s, before_s * blocks)

    def _believed(self, peer: str, expected_block_s: Mapping[str, float]) -> float:
        """Return a peer's estimate; one that was not measured and has left counts as the middle one of the others."""
        unknown_s = median_high(expected_block_s.values()) if expected_block_s else _LEAST_S
        return self._block_s.get(peer, expected_block_s.get(peer, unknown_s))

    def _put(self, before: Mapping[str, float], after: Mapping[str, float], now: float) -> None:
        """Keep the new estimates of a route's hops."""
        for peer, block_s in after.items():
            self._block_s.pop(peer, None)
            self._block_s[peer], self._noted_at[peer] = max(block_s, _LEAST_S), now
            if block_s > _CLEARLY * before[peer]:
                pause_s = self._pause_s.setdefault(peer, AGAIN_S)
                self._slowed.pop(peer, None)
                self._slowed[peer] = _Slowed(before[peer], after, now + pause_s)
        while len(self._block_s) > _REMEMBERED:
            self._forget(next(iter(self._block_s)))

    def _clear(self, peer: str, route: Container[str]) -> None:
        """Let a hop count as before the slow reply; likely, one of that reply that is not on this route was slow."""
        cleared = self._slowed.pop(peer)
        if not cleared.is_likely:
            del self._pause_s[peer]
        for other in cleared.after_s:
            if other in self._slowed and other not in route:
                self._slowed[other] = replace(self._slowed[other], is_likely=True)
                self._lengthen(other)

    def _lengthen(self, peer: str) -> None:
        self._pause_s[peer] = min(2 * self._pause_s[peer], BELIEVED_S)

    def _forget(self, peer: str) -> None:
        del self._block_s[peer], self._noted_at[peer]
        self._slowed.pop(peer, None)
        self._pause_s.pop(peer, None)


def _is_far_slower(surplus_s: float, believed_s: float) -> bool:
    return surplus_s > (FAR_SLOWER - 1) * believed_s + SLIGHT_S


MOST = 12  # peers that `route_neighbours` returns at most


def route_neighbours(hosted: Span | None, hops: Iterable[str], members: Iterable[Announcement]) -> list[str]:
    """Peers next to this node on routes: first the hops of its own replies, then hosts of the adjacent blocks."""
    chosen = dict.fromkeys(hops)
    if hosted is not None:
        adjacent = (hosted.start - 1, hosted.stop)
        for member in members:
            if member.serves and member.span is not None and any(block in member.span for block in adjacent):
                chosen.setdefault(member.peer)
    return list(chosen)[:MOST]

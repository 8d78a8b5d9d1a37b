"""Which chunks to request next, and how well each peer has answered so far. Pure: no I/O, no clock.

Parts are downloaded in the order given, a few at a time. Within a part every node uses its own random order, so that
nodes downloading the same part soon hold different chunks to exchange. A peer that answers faster gets its next request
sooner, and so delivers more. At the end, requests that slow peers have not answered are repeated to a second peer.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from app.core.smoothing import Ewma
from p2p.rate_limit import backoff_s

MAX_AT_ONCE = 2  # peers that one run is requested from at the same time, once nothing else is left


def choose_peers(peers: Sequence[str], pace_s: Mapping[str, float], most: int) -> list[str]:
    """Choose up to `most` peers: half of the places for the fastest measured, the others for untried peers.

    So slow peers, however many, can keep neither fast nor new ones out. `pace_s` is the seconds per chunk of each peer
    that has delivered one; untried peers keep the caller's order.
    """
    known = sorted((peer for peer in peers if peer in pace_s), key=lambda peer: (pace_s[peer], peer))
    untried = [peer for peer in peers if peer not in pace_s]
    fast = known[: max(most // 2, most - len(untried))]
    return [*fast, *untried[: most - len(fast)]]


def in_turns(peers: Iterable[str], homes: Mapping[str, str]) -> list[str]:
    """Sort peers so that one of each home comes before a second of any; otherwise their order stays.

    A peer without a home in `homes` is one itself. One machine may say that it is a hundred holders.
    """
    turns: Counter[str] = Counter()
    ranked = []
    for peer in peers:
        home = homes.get(peer, peer)
        ranked.append((turns[home], peer))
        turns[home] += 1
    return [peer for _, peer in sorted(ranked, key=itemgetter(0))]


@dataclass(frozen=True)
class ChunkRun:
    """Consecutive chunks of a part that are requested together: `index` to `index + count - 1`."""

    part: str
    index: int
    count: int = 1

    def first(self, count: int) -> ChunkRun:
        """Return the run of the first `count` chunks."""
        return ChunkRun(self.part, self.index, count)

    def rest(self, count: int) -> ChunkRun:
        """Return the run without its first `count` chunks."""
        return ChunkRun(self.part, self.index + count, self.count - count)


def chunk_runs(part: str, chunks: Iterable[int], most: int) -> list[ChunkRun]:
    """Group sorted chunk indexes into runs of consecutive ones, cut at multiples of `most`.

    All nodes cut a part at the same indexes, whatever they miss of it, so a run that one node received answers another
    node's request.
    """
    pieces: list[ChunkRun] = []
    for index in chunks:
        last = pieces[-1] if pieces else None
        if last is not None and last.index + last.count == index and index % most:
            pieces[-1] = ChunkRun(part, last.index, last.count + 1)
        else:
            pieces.append(ChunkRun(part, index))
    return pieces


@dataclass
class ChunkQueue:
    """The chunks that are not here yet: not requested, or requested and not received."""

    rng: random.Random
    most: int = 1  # chunks in a run
    _waiting: dict[str, list[ChunkRun]] = field(default_factory=dict)  # part -> runs not requested
    _asked: dict[ChunkRun, list[tuple[str, float]]] = field(default_factory=dict)  # (peer, time of request)

    def add(self, part: str, missing: Iterable[int]) -> None:
        """Queue the missing chunks of a part, in random order."""
        pieces = chunk_runs(part, missing, self.most)
        self.rng.shuffle(pieces)
        self._waiting[part] = pieces

    def waiting(self, parts: Iterable[str]) -> int:
        """Number of chunks of these parts that no peer was asked for yet."""
        return sum(piece.count for part in parts for piece in self._waiting.get(part, ()))

    def take(
        self, peer: str, parts: Collection[str], *, at_most: int, late_before: float, now: float
    ) -> ChunkRun | None:
        """Return the next run to request from a peer that holds `parts`, marked as requested; None if there is none.

        It has `at_most` so many chunks. Once everything is requested: a run that another peer was asked for before
        `late_before` and has not delivered.
        """
        for part, pieces in self._waiting.items():
            if pieces and part in parts:
                piece = pieces.pop()
                if piece.count > at_most:
                    pieces.append(piece.rest(at_most))
                    piece = piece.first(at_most)
                return self._ask(piece, peer, now)
        for piece, asked in self._asked.items():
            is_late = asked[-1][1] < late_before and len(asked) < MAX_AT_ONCE
            if is_late and piece.count <= at_most and piece.part in parts and all(other != peer for other, _ in asked):
                return self._ask(piece, peer, now)
        return None

    def _ask(self, piece: ChunkRun, peer: str, now: float) -> ChunkRun:
        self._asked.setdefault(piece, []).append((peer, now))
        return piece

    def complete(self, piece: ChunkRun, count: int) -> bool:
        """Mark the first `count` chunks of a run as received and requeue the rest; False if another peer was faster."""
        if self._asked.pop(piece, None) is None:
            return False
        if count < piece.count:
            self._waiting[piece.part].append(piece.rest(count))
        return True

    def failed(self, piece: ChunkRun, peer: str) -> None:
        """Requeue a run that a peer did not deliver, unless a request for it to another peer is still open."""
        asked = self._asked.get(piece)
        if asked is None:
            return
        asked[:] = [entry for entry in asked if entry[0] != peer]
        if not asked:
            del self._asked[piece]
            self._waiting[piece.part].append(piece)

    def redirect(self, piece: ChunkRun, peer: str, other: str) -> bool:
        """Note that another peer is asked for a run in place of `peer`; False if it is asked already, or nobody is."""
        asked = self._asked.get(piece, [])
        if any(name == other for name, _ in asked):
            return False
        for number, (name, at) in enumerate(asked):
            if name == peer:
                asked[number] = (other, at)
                return True
        return False

    def drop(self, part: str) -> None:
        """Forget a part of which no chunk is requested at the moment."""
        assert not any(piece.part == part for piece in self._asked), "its answers would have no place"
        self._waiting.pop(part, None)

    def is_coming(self, part: str, index: int) -> bool:
        """True if a chunk has been requested and has not been received."""
        return any(piece.part == part and 0 <= index - piece.index < piece.count for piece in self._asked)

    def is_over(self, part: str) -> bool:
        """True if every chunk of a part was received; the part is then dropped from the queue."""
        if self._waiting.get(part) or any(piece.part == part for piece in self._asked):
            return False
        self._waiting.pop(part, None)
        return True


SHUN_S = 60.0  # back-off after a failure, doubled with each further one
WRONG_PARTS = 3  # a peer that sends wrong chunks of so many parts is never asked again, before that not for these
LONGEST_SHUN_S = 1024 * SHUN_S
RETRY_S = 180.0  # while nobody else gives a part, a peer that failed is asked again so long after it did
RETRY_GAP_S, RETRIED_AT_ONCE = 20.0, 4  # most of them: members that claim parts and are silent must not take all time
BUSY_S = 0.5  # back-off after a refusal, doubled with each further one up to `SHUN_S`
JITTER = 0.5  # a back-off is longer by up to this share, so that peers that failed together do not come back together
SLOW_S = 10.0  # a peer that takes longer than this for a chunk, or failed last time, is asked for one at a time
_SMOOTHING = 0.25  # share of the latest chunk in a peer's pace
MISLED_AT_MOST = 3  # failed redirects beyond those that succeeded, after which a peer is asked to send the data itself


@dataclass
class PeerPerformance:
    """Measured speed, failures and back-off of each peer in one download."""

    rng: random.Random = field(default_factory=random.Random)
    pace_s: dict[str, float] = field(default_factory=dict)  # seconds per chunk, smoothed, of peers that answered
    _averages: dict[str, Ewma] = field(default_factory=dict)  # that `pace_s` has the values of
    _excluded_until: dict[str, float] = field(default_factory=dict)
    _failures: dict[str, int] = field(default_factory=dict)  # peer -> failures in a row
    _failed_at: dict[str, float] = field(default_factory=dict)  # peer -> its last failure, or when it was let off
    _retried_at: float = float("-inf")
    _wrong: dict[str, set[str]] = field(default_factory=dict)  # peer -> parts of which it sent wrong chunks
    _refusals: dict[str, int] = field(default_factory=dict)  # peer -> refusals in a row
    _failed_redirects: dict[str, int] = field(default_factory=dict)  # peer -> failed redirects beyond succeeded ones

    def is_usable(self, peer: str, now: float) -> bool:
        """True if a peer may be asked at `now`, because no back-off is running."""
        return self._excluded_until.get(peer, 0.0) <= now

    def has_wrong(self, peer: str, part: str) -> bool:
        """True if a peer has sent wrong chunks of a part: it is not to be asked for this one again."""
        return part in self._wrong.get(peer, ())

    def choose(self, peers: list[str], most: int) -> list[str]:
        """Choose up to `most` of these peers to download from at the same time.

        Those that gave lists of chunks alone, which everybody has, count as untried.
        """
        return choose_peers(peers, {peer: self.pace_s[peer] for peer in self._averages}, most)

    def is_slow(self, peer: str) -> bool:
        """True if several chunks at a time could be more than a peer sends before they are given up."""
        return peer in self._failures or self.pace_s.get(peer, 0.0) > SLOW_S

    def is_new(self, peer: str) -> bool:
        """True if a peer has neither given chunks nor failed yet: it may have none."""
        return peer not in self._averages and peer not in self._failures

    def answered(self, peer: str, taken_s: float) -> None:
        """Record a correct answer without chunks: until there is one with chunks, it stands for the peer's pace."""
        self.pace_s.setdefault(peer, taken_s)

    def gave(self, peer: str, taken_s: float) -> None:
        """Record a correct answer that took `taken_s` per chunk; ends a series of failures."""
        self.pace_s[peer] = self._averages.setdefault(peer, Ewma(_SMOOTHING)).add(taken_s)
        self._failures.pop(peer, None)
        self._failed_at.pop(peer, None)
        self._refusals.pop(peer, None)

    def refused_as_busy(self, peer: str, now: float) -> None:
        """Record that a peer refused because it is busy: it may soon be asked again, but ever later."""
        if self.is_usable(peer, now):
            refusals = self._refusals[peer] = self._refusals.get(peer, 0) + 1
            self._excluded_until[peer] = now + self._pause_s(BUSY_S, refusals, SHUN_S)

    def failed(self, peer: str, now: float) -> float:
        """Record a failure and return the back-off in seconds; 0 if a parallel request to the peer already failed.

        The back-off doubles with each failure in a row, so that any number of silent peers leaves time for the others.
        """
        if not self.is_usable(peer, now):
            return 0.0
        failures = self._failures[peer] = self._failures.get(peer, 0) + 1
        pause_s = self._pause_s(SHUN_S, failures, LONGEST_SHUN_S)
        self._excluded_until[peer], self._failed_at[peer] = now + pause_s, now
        return pause_s

    def has_failed(self, peer: str) -> bool:
        """True if a peer failed the last time that it was asked."""
        return peer in self._failures

    def retry(self, holders: Iterable[Collection[str]], now: float) -> None:
        """End the back-offs of a few peers that failed, for parts of which no other holder gives chunks fast.

        `holders` are those of each part. A trouble of hours at the only holder must not cost hours more; peers that
        lied stay excluded.
        """
        if now < self._retried_at + RETRY_GAP_S:
            return
        self._retried_at = now
        resting = {
            peer
            for peers in holders
            if not any(self.is_usable(peer, now) and not self.is_slow(peer) for peer in peers)
            for peer in peers
            if not self.is_usable(peer, now) and now - self._failed_at.get(peer, now) >= RETRY_S
        }
        for peer in sorted(resting, key=lambda peer: (self._failed_at[peer], peer))[:RETRIED_AT_ONCE]:
            self._excluded_until[peer] = self._failed_at[peer] = now

    def _pause_s(self, first_s: float, failures: int, longest_s: float) -> float:
        return backoff_s(first_s, failures, longest_s) * self.rng.uniform(1.0, 1.0 + JITTER)

    def sent_wrong(self, peer: str, part: str) -> bool:
        """Record a wrong chunk; True if the peer is to be excluded, since it sent such of `WRONG_PARTS` parts.

        A bit that flipped on the disk of the only holder must not cost all the other parts that it has.
        """
        self._wrong.setdefault(peer, set()).add(part)
        return len(self._wrong[peer]) >= WRONG_PARTS

    def lied(self, peer: str) -> None:
        """Exclude a peer for the rest of the download."""
        self._excluded_until[peer] = float("inf")
        self._failed_at.pop(peer, None)

    def may_not_redirect(self, peer: str) -> bool:
        """True once `MISLED_AT_MOST` more redirects of a peer failed than succeeded; it must then send the data."""
        return self._failed_redirects.get(peer, 0) >= MISLED_AT_MOST

    def record_redirect(self, peer: str, *, succeeded: bool) -> None:
        """Record whether the member that a peer redirected to delivered the chunks."""
        failed = self._failed_redirects.get(peer, 0)
        self._failed_redirects[peer] = max(0, failed - 1) if succeeded else failed + 1

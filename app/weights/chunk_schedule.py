"""Which chunks to ask whom for next. Pure: no I/O, no clock.

Parts are worked on in the order given, a few at a time; within a part every node goes its own way, so that nodes which
fetch the same part soon have different chunks to give each other. Whoever answers fast is asked again sooner, and so
gives more. At the end, what slow peers still owe is asked for twice.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

MAX_AT_ONCE = 2  # peers that one chunk is asked from, at the end


def choose_peers(peers: Sequence[str], pace_s: Mapping[str, float], most: int) -> list[str]:
    """Whom to ask at once: half the places for the fastest known, the others for those nobody has tried yet.

    So whoever is slow cannot keep the fast ones out by being there first, or by being many. `pace_s` is how long a
    chunk takes at each peer that gave one; the order of untried peers is the caller's.
    """
    known = sorted((peer for peer in peers if peer in pace_s), key=lambda peer: (pace_s[peer], peer))
    untried = [peer for peer in peers if peer not in pace_s]
    fast = known[: max(most // 2, most - len(untried))]
    return [*fast, *untried[: most - len(fast)]]


@dataclass(frozen=True)
class ChunkRun:
    """One chunk of a part, or a few that are asked for together."""

    part: str
    index: int
    count: int = 1

    def rest(self, count: int) -> ChunkRun:
        """What is left of it without the first chunks."""
        return ChunkRun(self.part, self.index + count, self.count - count)


def runs(part: str, chunks: Iterable[int], most: int) -> list[ChunkRun]:
    """Chunks that follow each other put together; everybody cuts a part at the same places, whatever is missing of it.

    So nodes that fetch the same part ask for the same pieces, and can pass them on.
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
    """The chunks that are still to come."""

    rng: random.Random
    most: int = 1  # chunks of a piece
    _waiting: dict[str, list[ChunkRun]] = field(default_factory=dict)  # part -> what nobody was asked for
    _asked: dict[ChunkRun, list[tuple[str, float]]] = field(default_factory=dict)  # who was asked, and when

    def add(self, part: str, missing: Iterable[int]) -> None:
        """Work on one more part."""
        pieces = runs(part, missing, self.most)
        self.rng.shuffle(pieces)
        self._waiting[part] = pieces

    @property
    def waiting(self) -> int:
        """How many chunks nobody was asked for yet."""
        return sum(piece.count for pieces in self._waiting.values() for piece in pieces)

    def take(self, peer: str, parts: Collection[str], *, late_before: float, now: float) -> ChunkRun | None:
        """The next chunk to ask a peer for that has these parts.

        Where all are asked for, one that somebody was asked for before `late_before` and has not given.
        """
        for part, pieces in self._waiting.items():
            if pieces and part in parts:
                return self._ask(pieces.pop(), peer, now)
        for piece, asked in self._asked.items():
            is_late = asked[-1][1] < late_before and len(asked) < MAX_AT_ONCE
            if is_late and piece.part in parts and all(other != peer for other, _ in asked):
                return self._ask(piece, peer, now)
        return None

    def _ask(self, piece: ChunkRun, peer: str, now: float) -> ChunkRun:
        self._asked.setdefault(piece, []).append((peer, now))
        return piece

    def complete(self, piece: ChunkRun, count: int) -> bool:
        """The first chunks of a piece are here, the rest is asked for again; False where they were here already."""
        if self._asked.pop(piece, None) is None:
            return False
        if count < piece.count:
            self._waiting[piece.part].append(piece.rest(count))
        return True

    def failed(self, piece: ChunkRun, peer: str) -> None:
        """A peer did not give a piece: it is to be asked for again unless somebody else still owes it."""
        asked = self._asked.get(piece)
        if asked is None:
            return
        asked[:] = [entry for entry in asked if entry[0] != peer]
        if not asked:
            del self._asked[piece]
            self._waiting[piece.part].append(piece)

    def is_coming(self, part: str, index: int) -> bool:
        """Whether somebody was asked for a chunk."""
        return any(piece.part == part and 0 <= index - piece.index < piece.count for piece in self._asked)

    def is_over(self, part: str) -> bool:
        """Whether nothing of a part is still to come; it is forgotten then."""
        if self._waiting.get(part) or any(piece.part == part for piece in self._asked):
            return False
        self._waiting.pop(part, None)
        return True


SHUN_S = 60.0  # a peer that failed is asked again after this long, and twice as long each time; one that lied never
BUSY_S = 0.5
MISLED_AT_MOST = 3  # times in a row, after which a peer is told to give, not to name others


@dataclass
class PeerPerformance:
    """How peers did when they were asked."""

    pace_s: dict[str, float] = field(default_factory=dict)  # how long a chunk takes, by those who gave some
    _shunned: dict[str, float] = field(default_factory=dict)  # peer -> until when
    _failures: dict[str, int] = field(default_factory=dict)  # in a row
    _misled: dict[str, int] = field(default_factory=dict)  # how often a peer named a member who did not help

    def is_usable(self, peer: str, now: float) -> bool:
        """Whether a peer may be asked."""
        return self._shunned.get(peer, 0.0) <= now

    def choose(self, peers: list[str], most: int) -> list[str]:
        """Whom of these to ask at once."""
        return choose_peers(peers, self.pace_s, most)

    def gave(self, peer: str, taken_s: float) -> None:
        """A peer answered, and rightly."""
        self.pace_s[peer] = (3 * self.pace_s.get(peer, taken_s) + taken_s) / 4
        self._failures.pop(peer, None)

    def is_busy(self, peer: str, now: float) -> None:
        """A peer refused: it is asked again in a moment."""
        self._shunned[peer] = max(self._shunned.get(peer, 0.0), now + BUSY_S)

    def failed(self, peer: str, now: float) -> float:
        """A peer did not give: for how long it is left out; 0 where it already is, by another call at the same time.

        For twice as long each time: however many are silent, the others have their turn.
        """
        if not self.is_usable(peer, now):
            return 0.0
        failures = self._failures[peer] = self._failures.get(peer, 0) + 1
        shun_s = SHUN_S * 2.0 ** min(failures - 1, 10)
        self._shunned[peer] = now + shun_s
        return shun_s

    def lied(self, peer: str) -> None:
        """A peer is never asked again."""
        self._shunned[peer] = float("inf")

    def may_not_redirect(self, peer: str) -> bool:
        """Whether a peer has named others in vain too often."""
        return self._misled.get(peer, 0) >= MISLED_AT_MOST

    def named(self, peer: str, *, helped: bool) -> None:
        """Whether the member that a peer named gave what it was asked for."""
        if helped:
            self._misled.pop(peer, None)
        else:
            self._misled[peer] = self._misled.get(peer, 0) + 1

"""Which chunk to ask whom for next. Pure: no I/O, no clock.

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
class Piece:
    """One chunk of a part."""

    part: str
    index: int


@dataclass
class Work:
    """The chunks that are still to come."""

    rng: random.Random
    _waiting: dict[str, list[int]] = field(default_factory=dict)  # part -> chunks that nobody was asked for
    _asked: dict[Piece, list[tuple[str, float]]] = field(default_factory=dict)  # who was asked, and when

    def add(self, part: str, missing: Iterable[int]) -> None:
        """Work on one more part."""
        chunks = list(missing)
        self.rng.shuffle(chunks)
        self._waiting[part] = chunks

    @property
    def waiting(self) -> int:
        """How many chunks nobody was asked for yet."""
        return sum(len(chunks) for chunks in self._waiting.values())

    def take(self, peer: str, parts: Collection[str], *, late_before: float, now: float) -> Piece | None:
        """The next chunk to ask a peer for that has these parts.

        Where all are asked for, one that somebody was asked for before `late_before` and has not given.
        """
        for part, chunks in self._waiting.items():
            if chunks and part in parts:
                return self._ask(Piece(part, chunks.pop()), peer, now)
        for piece, asked in self._asked.items():
            is_late = asked[-1][1] < late_before and len(asked) < MAX_AT_ONCE
            if is_late and piece.part in parts and all(other != peer for other, _ in asked):
                return self._ask(piece, peer, now)
        return None

    def _ask(self, piece: Piece, peer: str, now: float) -> Piece:
        self._asked.setdefault(piece, []).append((peer, now))
        return piece

    def came(self, piece: Piece) -> bool:
        """A chunk is here; False where it was here already."""
        return self._asked.pop(piece, None) is not None

    def failed(self, piece: Piece, peer: str) -> None:
        """A peer did not give a chunk: it is to be asked for again unless somebody else still owes it."""
        asked = self._asked.get(piece)
        if asked is None:
            return
        asked[:] = [entry for entry in asked if entry[0] != peer]
        if not asked:
            del self._asked[piece]
            self._waiting[piece.part].append(piece.index)

    def is_coming(self, piece: Piece) -> bool:
        """Whether somebody was asked for a chunk."""
        return piece in self._asked

    def is_over(self, part: str) -> bool:
        """Whether nothing of a part is still to come; it is forgotten then."""
        if self._waiting.get(part) or any(piece.part == part for piece in self._asked):
            return False
        self._waiting.pop(part, None)
        return True

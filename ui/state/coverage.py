"""Holders and throughput of each block, and the weakest stretch of the model, computed from a snapshot."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, groupby

from app.core.terminal_text import peer_words
from app.snapshot.views import PeerView, Snapshot


@dataclass(frozen=True)
class Stretch:
    """Neighbouring blocks with the same number of holders."""

    start: int
    stop: int
    holders: int
    tokens_per_s: float | None
    names: tuple[str, ...] = ()  # of the holders, if there are at most 3

    @property
    def label(self) -> str:
        """The stretch as `start:stop`."""
        return f"{self.start}:{self.stop}"


@dataclass(frozen=True)
class Coverage:
    """Holders of each block and the sum of the tokens per second that these report."""

    holders: tuple[int, ...]
    tokens_per_s: tuple[float, ...]
    own: tuple[int, int] | None
    weak: Stretch | None
    holes: tuple[tuple[int, int], ...]

    @property
    def held(self) -> int:
        """Number of blocks that have at least one holder."""
        return sum(1 for number in self.holders if number)

    @property
    def lack(self) -> str:
        """The blocks that nobody hosts, in words, of many the first three spans; empty if there are none."""
        if self.held == len(self.holders) - 1:
            return f"block {self.holders.index(0)}"
        spans = ", ".join(f"{start}:{stop}" for start, stop in self.holes[:3])
        return f"blocks {spans}{' and others' if self.holes[3:] else ''}" if spans else ""


def coverage_of(snapshot: Snapshot | None) -> Coverage | None:
    """Coverage as this node sees it; None while the model's number of blocks is unknown."""
    if snapshot is None or not snapshot.blocks_total:
        return None
    total = snapshot.blocks_total
    serving = holders_in(snapshot)
    counts, speeds = [0] * (total + 1), [0.0] * (total + 1)
    for peer in serving:
        start, stop = _bounds(peer, total)
        counts[start] += 1
        counts[stop] -= 1
        speeds[start] += peer.tokens_per_s
        speeds[stop] -= peer.tokens_per_s
    holders = tuple(accumulate(counts[:-1]))
    tokens_per_s = tuple(max(0.0, round(value, 6)) for value in accumulate(speeds[:-1]))
    own = (snapshot.start, snapshot.stop) if snapshot.start is not None and snapshot.stop is not None else None
    holes = tuple((s.start, s.stop) for s in _stretches(holders, tokens_per_s) if s.holders == 0)
    return Coverage(holders, tokens_per_s, own, _weakest(holders, tokens_per_s, serving, snapshot.peer_id), holes)


def holders_in(snapshot: Snapshot) -> list[PeerView]:
    """Members that serve blocks now, including this node."""
    known = [p for p in snapshot.peers if p.state == "serving" and p.start is not None and p.stop is not None]
    if snapshot.state == "serving" and snapshot.start is not None and snapshot.stop is not None:
        own = PeerView(snapshot.peer_id, "", snapshot.start, snapshot.stop, tokens_per_s=snapshot.tokens_per_s)
        known.append(own)
    return known


def _bounds(peer: PeerView, total: int) -> tuple[int, int]:
    """A peer's span clipped to the model, since a peer may claim anything."""
    start = max(0, min(total, peer.start or 0))
    return start, max(start, min(total, peer.stop or 0))


def _stretches(holders: tuple[int, ...], speeds: tuple[float, ...]) -> list[Stretch]:
    found = []
    for number, group in groupby(range(len(holders)), key=lambda block: holders[block]):
        blocks = list(group)
        slowest = min(speeds[block] for block in blocks)
        found.append(Stretch(blocks[0], blocks[-1] + 1, number, slowest or None))
    return found


def _weakest(holders: tuple[int, ...], speeds: tuple[float, ...], serving: list[PeerView], own: str) -> Stretch | None:
    """The stretch with the fewest holders, the slowest on a tie; None if all blocks have the same number, above 1."""
    stretches = _stretches(holders, speeds)
    worst = min(stretches, key=lambda s: (s.holders, s.tokens_per_s or 0.0))
    if len(stretches) == 1 and worst.holders > 1:
        return None
    within = [p for p in serving if (p.start or 0) < worst.stop and (p.stop or 0) > worst.start]
    named = ("you" if p.peer == own else peer_words(p.peer, p.name) for p in within)
    names = tuple(dict.fromkeys(named)) if len(within) <= 3 else ()
    return Stretch(worst.start, worst.stop, worst.holders, worst.tokens_per_s, names)

"""How far this machine's clock is from those of its peers, judged by their own statements. Pure.

A statement is numbered by its signer's clock (`p2p.envelope`), and every member renews its own in good time. One that
comes from its signer therefore tells how that peer's clock goes, also if it is refused because it is not of this time:
then this machine sees no members, and only this tells why. One address has one vote, as peer ids are free, and more
than half of the votes must agree, so that one liar among several changes nothing.
"""

from __future__ import annotations

import statistics
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

AGE_S = 720.0  # of a peer's latest statement, at most: members renew theirs within ten minutes or so
MADE_S = 5.0  # from making a statement to the contact that brings it
JUMP_S = 60.0  # between the wall clock and trio's: beyond, the clock was set, or the machine slept
MAX_READINGS = 256


@dataclass(frozen=True, slots=True)
class _Reading:
    sequence: int
    heard_at: float  # the latest contact, on trio's clock
    ahead_s: float  # the peer's clock is ahead of this machine's by at least this, negative: behind
    within_s: float  # and by at most so much more
    offset_s: float  # of the wall clock from trio's when it was taken


class PeerClocks:
    """A reading of each peer's clock, of the `MAX_READINGS` peers that spoke last."""

    def __init__(self) -> None:
        self._readings: OrderedDict[str, _Reading] = OrderedDict()

    def heard(self, peer: str, sequence: int, now_s: float, at: float) -> None:
        """Record the number of a statement that came from its signer; `now_s` is the wall clock, `at` trio's."""
        before, offset_s = self._readings.pop(peer, None), now_s - at
        within_s, is_same = AGE_S, False
        if before is not None and abs(offset_s - before.offset_s) < JUMP_S:
            # A newer one was made since the last contact, which would have brought it.
            within_s = min(AGE_S, at - before.heard_at + MADE_S) if sequence > before.sequence else AGE_S
            is_same = before.sequence - 1000 * AGE_S < sequence <= before.sequence
        if before is not None and is_same:  # or one that was on its way for longer
            reading = _Reading(before.sequence, at, before.ahead_s, before.within_s, before.offset_s)
        else:
            reading = _Reading(sequence, at, sequence / 1000 - now_s, within_s, offset_s)
        self._readings[peer] = reading
        if len(self._readings) > MAX_READINGS:
            self._readings.popitem(last=False)

    def ahead_s(self, sources: Mapping[str, str], now_s: float, at: float, tolerance_s: float) -> float | None:
        """Return the seconds by which this machine's clock is ahead of most peers', negative: behind.

        0 if most are within the tolerance or they disagree, None if none was read. `sources` are the connected peers,
        with the addresses that they come from.
        """
        votes = self._votes(sources, now_s - at)
        behind = [vote for vote in votes if vote.ahead_s > tolerance_s]
        ahead = [vote for vote in votes if vote.ahead_s + vote.within_s < -tolerance_s]
        most = max(ahead, behind, key=len)
        if 2 * len(most) <= len(votes):
            return 0.0 if votes else None
        return -statistics.median(vote.ahead_s + vote.within_s / 2 for vote in most)

    def _votes(self, sources: Mapping[str, str], offset_s: float) -> list[_Reading]:
        """Return one reading for each address: of several peers there, the middle one."""
        by_source: dict[str, list[_Reading]] = {}
        for peer, source in sources.items():
            reading = self._readings.get(peer)
            if reading is not None and abs(reading.offset_s - offset_s) < JUMP_S:
                by_source.setdefault(source, []).append(reading)
        return [sorted(several, key=lambda one: one.ahead_s)[len(several) // 2] for several in by_source.values()]

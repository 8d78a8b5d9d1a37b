"""Peers that routes avoid for a while after a failure; a lack of room is none (`app.routing.capacity`)."""

from __future__ import annotations

from dataclasses import dataclass

from app.core.reasons import Reason
from p2p.rate_limit import backoff_s

FAILING = 4  # failures in a row, after which a peer counts as one that does not work
FAILING_S = 600.0  # for so long after its last ban
FADE_S = 3600.0  # after the end of its last ban, a peer's failures are forgotten


@dataclass(frozen=True)
class _Ban:
    """A peer's latest ban, and the row of bans that it ends."""

    until: float
    why: Reason
    times: int  # bans in a row, on which the length depends


class Bans:
    """Temporary bans: each doubles a peer's next one, from `first_s` up to `longest_s`; success or time resets that."""

    def __init__(self, first_s: float = 1.0, longest_s: float = 300.0) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._bans: dict[str, _Ban] = {}

    def ban(self, peer: str, now: float, why: Reason) -> bool:
        """Ban a peer; False if it is banned already.

        All sessions over a hop report the same failure, which counts once.
        """
        self._bans = {one: ban for one, ban in self._bans.items() if now < ban.until + FADE_S}
        last = self._bans.get(peer)
        if last is not None and now < last.until:
            return False
        times = 1 if last is None else last.times + 1
        self._bans[peer] = _Ban(now + backoff_s(self._first_s, times, self._longest_s), why, times)
        return True

    def forgive(self, peer: str) -> None:
        """Remove a peer's ban and forget its failures, because it worked."""
        self._bans.pop(peer, None)

    def failing(self, now: float) -> frozenset[str]:
        """Return the peers that failed again and again, and never worked in between."""
        return frozenset(
            peer for peer, ban in self._bans.items() if ban.times >= FAILING and now < ban.until + FAILING_S
        )

    def active(self, now: float) -> dict[str, Reason]:
        """Return the peers that are banned now, with the reasons."""
        return {peer: ban.why for peer, ban in self._bans.items() if now < ban.until}

"""Peers that routes avoid for a while after a failure."""

from __future__ import annotations

from app.core.reasons import Reason
from p2p.rate_limit import backoff_s

FAILING = 4  # failures in a row, after which a peer counts as one that does not work
FAILING_S = 600.0  # for so long after its last ban


class Bans:
    """Temporary bans: each failure doubles a peer's ban, from `first_s` up to `longest_s`; a success resets it."""

    def __init__(self, first_s: float = 1.0, longest_s: float = 300.0) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._bans: dict[str, tuple[int, float, Reason | None]] = {}  # peer -> (failures, end, reason)
        self._busy: set[str] = set()

    def ban(self, peer: str, now: float, why: Reason, *, brief: bool = False) -> bool:
        """Ban a peer, for half as long if `brief` (it is busy, not broken); False if it is banned already.

        All sessions over a hop report the same failure, which counts once. A failure does replace a ban for being busy.
        """
        times, until, _ = self._bans.get(peer, (0, float("-inf"), None))
        if now < until and (brief or peer not in self._busy):
            return False
        (self._busy.add if brief else self._busy.discard)(peer)
        first_s = self._first_s / 2 if brief else self._first_s
        self._bans[peer] = (times + 1, now + backoff_s(first_s, times + 1, self._longest_s), why)
        return True

    def forgive(self, peer: str) -> None:
        """Remove a peer's ban and forget its failures, because it worked."""
        self._bans.pop(peer, None)
        self._busy.discard(peer)

    def is_busy(self, peer: str) -> bool:
        """True if the peer's last ban was for having no room."""
        return peer in self._busy

    def failing(self, now: float) -> frozenset[str]:
        """Return the peers that failed again and again, and never worked in between; not those that were busy."""
        return frozenset(
            peer
            for peer, (times, until, _) in self._bans.items()
            if times >= FAILING and peer not in self._busy and now < until + FAILING_S
        )

    def active(self, now: float) -> dict[str, Reason]:
        """Return the peers that are banned now, with the reasons."""
        return {peer: why for peer, (_, until, why) in self._bans.items() if why is not None and now < until}

"""Peers that routes avoid for a while after a failure."""

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
    is_busy: bool
    times: int  # bans in a row, on which the length depends
    failures: int  # those of them that were not for being busy


class Bans:
    """Temporary bans: each doubles a peer's next one, from `first_s` up to `longest_s`; success or time resets that."""

    def __init__(self, first_s: float = 1.0, longest_s: float = 300.0) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._bans: dict[str, _Ban] = {}

    def ban(self, peer: str, now: float, why: Reason, *, brief: bool = False) -> bool:
        """Ban a peer, for half as long if `brief` (it is busy, not broken); False if it is banned already.

        All sessions over a hop report the same failure, which counts once. A failure does replace a ban for being busy.
        """
        self._bans = {one: ban for one, ban in self._bans.items() if now < ban.until + FADE_S}
        last = self._bans.get(peer)
        if last is not None and now < last.until and (brief or not last.is_busy):
            return False
        times, failures = (1, 0) if last is None else (last.times + 1, last.failures)
        first_s = self._first_s / 2 if brief else self._first_s
        until = now + backoff_s(first_s, times, self._longest_s)
        self._bans[peer] = _Ban(until, why, brief, times, failures + (not brief))
        return True

    def forgive(self, peer: str) -> None:
        """Remove a peer's ban and forget its failures, because it worked."""
        self._bans.pop(peer, None)

    def is_busy(self, peer: str) -> bool:
        """True if the peer's last ban was for having no room."""
        return peer in self._bans and self._bans[peer].is_busy

    def failing(self, now: float) -> frozenset[str]:
        """Return the peers that failed again and again, and never worked in between; not those that were busy."""
        return frozenset(
            peer
            for peer, ban in self._bans.items()
            if ban.failures >= FAILING and not ban.is_busy and now < ban.until + FAILING_S
        )

    def active(self, now: float) -> dict[str, Reason]:
        """Return the peers that are banned now, with the reasons."""
        return {peer: ban.why for peer, ban in self._bans.items() if now < ban.until}

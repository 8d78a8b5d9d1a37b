"""Peers that routes avoid for a while after a failure."""

from __future__ import annotations

from app.core.reasons import Reason


class Bans:
    """Peers to avoid for a while: longer each time, forgiven by success."""

    def __init__(self, first_s: float = 1.0, longest_s: float = 300.0) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._bans: dict[str, tuple[int, float, Reason | None]] = {}  # peer -> (how often, until, why)
        self._busy: set[str] = set()

    def ban(self, peer: str, now: float, why: Reason, *, brief: bool = False) -> bool:
        """Avoid a peer, `brief` where it is busy rather than broken; False where it is avoided already.

        All sessions over a hop tell of the same failure, which counts once.
        """
        times, until, _ = self._bans.get(peer, (0, float("-inf"), None))
        if now < until and (brief or peer not in self._busy):
            return False
        (self._busy.add if brief else self._busy.discard)(peer)
        first_s = self._first_s / 2 if brief else self._first_s
        self._bans[peer] = (times + 1, now + min(first_s * 2**times, self._longest_s), why)
        return True

    def forgive(self, peer: str) -> None:
        """It worked: forget the past."""
        self._bans.pop(peer, None)
        self._busy.discard(peer)

    def is_busy(self, peer: str) -> bool:
        """Whether it was last avoided for want of room."""
        return peer in self._busy

    def active(self, now: float) -> dict[str, Reason]:
        """Who is avoided now, and why."""
        return {peer: why for peer, (_, until, why) in self._bans.items() if why is not None and now < until}

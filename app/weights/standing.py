"""What is known of those who give parts: how fast each is, and who is left out until when. Pure: no I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field

from app.weights.work import choose_peers

SHUN_S = 60.0  # a peer that failed is asked again after this long, and twice as long each time; one that lied never
BUSY_S = 0.5
MISLED_AT_MOST = 3  # times in a row, after which a peer is told to give, not to name others


@dataclass
class Standing:
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

    def must_give(self, peer: str) -> bool:
        """Whether a peer has named others in vain too often."""
        return self._misled.get(peer, 0) >= MISLED_AT_MOST

    def named(self, peer: str, *, helped: bool) -> None:
        """Whether the member that a peer named gave what it was asked for."""
        if helped:
            self._misled.pop(peer, None)
        else:
            self._misled[peer] = self._misled.get(peer, 0) + 1

"""Which hop a job goes on without when something went wrong, and for how long. Pure: no I/O.

A hop loses its place for good only by what it alone can have done: a message of its own that breaks the protocol, a
refusal, or sums that others contradict though nobody else had a part in them. Of everything else, such as numbers that
cannot be used or a pass that never came back, several may be the cause, and any of them may lie about it. One of them
rests then and may come back; each time it rests twice as long, and each hour one of its rests is forgotten. So a hop
that lies about others costs them a rest at most, one that stops the job whenever it takes part is soon asked once an
hour, and one that fails for a moment now and then rests for half a minute each time.

A hop that the job can do without rests too if the job waits for it alone most of the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

REST_S = 30.0  # the first time
MOST_REST_S = 3600.0  # in which one rest is forgotten, too: more often than that no hop stops a job for long
MOST_AWAITED_S = 120.0  # that a job may have waited for a hop alone, beyond the time in which it did not
_FADING = 0.9  # of a suspicion that is left after each step
_LEAST_SUSPICION = 1e-3


class Blame:
    """Who was suspected, and who rests."""

    def __init__(self, rest_s: float = REST_S) -> None:
        self._rest_s, self._most_rest_s = rest_s, max(MOST_REST_S, rest_s)
        self._most_rests = 1 + math.log2(self._most_rest_s / rest_s)  # that are remembered: more change nothing
        self._suspicion: dict[str, float] = {}  # peer -> incidents in which it was a suspect, lately
        self._forgotten_at: dict[str, float] = {}  # peer -> when the last of its rests is forgotten
        self._until: dict[str, float] = {}  # peer -> when its rest ends
        self._awaited_s: dict[str, float] = {}  # peer -> how much longer the job waited for it alone than it did not

    def choose(self, suspects: Sequence[str], now: float, can_lose: Callable[[str], bool] = lambda peer: False) -> str:
        """Return the one of several suspects to go on without.

        It is one that the job can do without, if there is such a one; and of these the one that was suspected most of
        late: who is behind every incident is suspected in each, and those that it accuses in some. Who is needed takes
        its turn with the others that are.
        """
        for peer in set(suspects):
            self._suspicion[peer] = self._suspicion.get(peer, 0.0) + 1
        spare = [peer for peer in suspects if can_lose(peer)]
        if spare:
            return min(spare, key=lambda peer: (-round(self._suspicion[peer], 6), self.rests(peer, now)))
        return min(suspects, key=lambda peer: self.rests(peer, now))  # of equals the first

    def rest(self, peer: str, now: float) -> None:
        """Have a peer rest, twice as long as the last time."""
        rests = self.rests(peer, now)
        for times in (self._until, self._forgotten_at):
            for other in [other for other, at in times.items() if at <= now]:
                del times[other]
        self._until[peer] = now + min(self._rest_s * 2**rests, self._most_rest_s)
        self._forgotten_at[peer] = now + MOST_REST_S * min(rests + 1, self._most_rests)
        self._awaited_s.pop(peer, None)

    def rests(self, peer: str, now: float) -> float:
        """Return how often a peer had to rest, as far as it is not forgotten."""
        return max(0.0, self._forgotten_at.get(peer, now) - now) / MOST_REST_S

    def resting(self, now: float) -> list[str]:
        """Return who rests now; those whose rest ends first come first."""
        return sorted((peer for peer, until in self._until.items() if now < until), key=self._until.__getitem__)

    def step_made(self) -> None:
        """A step was committed: what was suspected before counts less."""
        faded = {peer: _FADING * suspicion for peer, suspicion in self._suspicion.items()}
        self._suspicion = {peer: suspicion for peer, suspicion in faded.items() if suspicion >= _LEAST_SUSPICION}

    def time_passed(self, seconds: float, awaited: Collection[str] = ()) -> None:
        """Count time in which the job could have gone on but for these peers."""
        before = self._awaited_s
        after = {peer: before[peer] - seconds for peer in before.keys() - set(awaited)}
        after |= {peer: before.get(peer, 0.0) + seconds for peer in awaited}
        self._awaited_s = {peer: waited_s for peer, waited_s in after.items() if waited_s > 0}

    @property
    def too_slow(self) -> list[str]:
        """Those for whom the job waited for too long."""
        return [peer for peer, waited_s in self._awaited_s.items() if waited_s > MOST_AWAITED_S]

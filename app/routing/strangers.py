"""Peers that never did their part for this asker: when they are tried, and who comes first. No I/O.

Anybody can claim to be the fastest, do nothing, and come again under another name. So a stranger is tried by one
session at a time, and after one that failed all are left aside for a while. Then a lot decides who is next, and not
what they claim: each home (`app.serving.homes`) has one voice, and homes of which nobody failed come first. The one
that failed is left aside for longer than the others, and for longer each time. One that answers and is then far slower
than it claims was tried in vain, too: else each of a crowd would answer once and then take its time.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import TypeVar

from app.serving.homes import Homes
from p2p.rate_limit import backoff_s

TRIAL_S = 6.0  # a first use of a peer ends sooner: by its first answer, or because it did not open the session
WARY_S = 10.0  # peers that never worked are avoided for so long after one of them failed; doubled each time, up to
WARIEST_S = 600.0
LEFT_ASIDE_S, LONGEST_ASIDE_S = 20.0, 14_400.0  # the one that failed itself, doubled each time that it fails
REMEMBERED = 1024  # peers that worked, peers that failed, and homes of these


_Value = TypeVar("_Value")


class Strangers:
    """Which peers did their part, which of the others failed, and which are tried now."""

    def __init__(self, homes: Homes, rng: random.Random) -> None:
        self._homes, self._rng = homes, rng
        self._worked: dict[str, bool] = {}  # to False if one was far slower than it claims; the latest last
        self._trials: dict[str, float] = {}  # peers that a session uses for the first time -> until when
        self._failed: dict[str, tuple[int, float]] = {}  # how often, and until when it is left aside; the latest last
        self._failed_homes: dict[str, None] = {}  # the latest last; an ordered set
        self._vain_trials = 0  # first uses that failed, less those that did not
        self._wary_until = float("-inf")

    @property
    def by_lot(self) -> bool:
        """True while strangers are tried one after the other, in the order of `in_order`: some failed lately."""
        return bool(self._worked) and self._vain_trials > 0

    def among(self, peers: Iterable[str]) -> set[str]:
        """Return those peers that never worked."""
        return {peer for peer in peers if peer not in self._worked}

    def failed_among(self, peers: Iterable[str], now: float) -> set[str]:
        """Return those peers that are left aside now because they failed themselves."""
        return {peer for peer in peers if peer in self._failed and now < self._failed[peer][1]}

    def not_now(self, strangers: Collection[str], now: float) -> set[str]:
        """Return those strangers that no other session should try now; none while there is nobody else."""
        if not any(self._worked.values()):
            return set()
        if now < self._wary_until:
            return set(strangers)
        self._trials = {peer: until for peer, until in self._trials.items() if now < until}
        return self._trials.keys() & set(strangers) | self.failed_among(strangers, now)

    def in_order(self, strangers: Collection[str]) -> list[str]:
        """Return strangers in the order in which they are to be tried."""
        drawn = self._rng.sample(sorted(strangers), len(strangers))
        of_home: defaultdict[str, list[str]] = defaultdict(list)
        for peer in sorted(drawn, key=self._failed.__contains__):
            of_home[self._homes.of(peer)].append(peer)
        places: dict[str, tuple[bool, int]] = {}
        for home, peers in of_home.items():
            places |= {peer: (home in self._failed_homes, turn) for turn, peer in enumerate(peers)}
        # Drawn again, since of those drawn above, the first of a large home came early.
        return sorted(self._rng.sample(drawn, len(drawn)), key=places.__getitem__)

    def begin(self, peers: Iterable[str], now: float) -> None:
        """Note that a session is about to use strangers."""
        for peer in self.among(peers):
            self._trials.setdefault(peer, now + TRIAL_S)

    def worked(self, peer: str) -> None:
        """Note that a peer did its part."""
        self._trials.pop(peer, None)
        self._failed.pop(peer, None)
        if peer not in self._worked:
            self._vain_trials = max(self._vain_trials - 1, 0)
        _put_last(self._worked, peer, self._worked.get(peer, True))

    def were_far_slower(self, peers: Collection[str], now: float) -> None:
        """Be wary of strangers: these did their part, but took far longer than they claim.

        Where they are of several homes, nobody knows which of them is at fault.
        """
        slow = [peer for peer in peers if self._worked.get(peer, False)]
        if slow and len({self._homes.of(peer) for peer in peers}) == 1:
            self._worked |= dict.fromkeys(slow, False)
            self._note_vain_trial(slow, now, 2)  # one more than a first answer takes away

    def failed(self, peer: str, now: float) -> None:
        """Be wary of strangers, and of this one most, if it is one."""
        if peer in self._worked:
            return
        self._note_vain_trial([peer], now, 1)
        times = self._failed[peer][0] + 1 if peer in self._failed else 1
        aside_until = now + backoff_s(LEFT_ASIDE_S, times, LONGEST_ASIDE_S)
        _put_last(self._failed, peer, (times, max(aside_until, self._wary_until)))

    def _note_vain_trial(self, peers: Iterable[str], now: float, times: int) -> None:
        self._vain_trials += times
        self._wary_until = now + backoff_s(WARY_S, self._vain_trials, WARIEST_S)
        for peer in peers:
            _put_last(self._failed_homes, self._homes.of(peer), None)


def _put_last(remembered: dict[str, _Value], key: str, value: _Value) -> None:
    remembered.pop(key, None)
    remembered[key] = value
    if len(remembered) > REMEMBERED:
        del remembered[next(iter(remembered))]

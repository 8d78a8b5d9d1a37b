"""Links between hops that broke lately. Routes go round the link for a while, and not round the hops at its ends.

Either end may have broken it, or somebody else, and each may say that it was the other. So nobody is banned for it.
Only a hop whose links to several others broke is gone round itself: others on one machine count once, since whoever has
it may have any number of peer ids. The machine is noted when the link breaks: later a peer may have closed its own link
to this node. All whose machine is unknown then count once too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

AVOIDED_S = 60.0  # new routes go round a link for so long after it broke, if there is another way
SHARED = 3  # and round a hop whose links to so many others broke in that time
REMEMBERED = 256  # links

Link = frozenset[str]  # the peers at its ends


class BrokenLinks:
    """The links between hops that broke lately."""

    def __init__(self) -> None:
        self._until: dict[Link, float] = {}  # the one that broke last at the end
        self._machines: dict[Link, Mapping[str, str]] = {}  # of the peers at its ends

    def note(self, machines: Mapping[str, str], now: float) -> None:
        """Note that rows were lost between two hops; `machines` has the machine of each, empty if it is unknown."""
        link = frozenset(machines)
        self._until.pop(link, None)
        self._until[link], self._machines[link] = now + AVOIDED_S, machines
        while len(self._until) > REMEMBERED:
            oldest = next(iter(self._until))
            del self._until[oldest], self._machines[oldest]

    def active(self, now: float) -> frozenset[Link]:
        """Return the links that are gone round now."""
        return frozenset(link for link, until in self._until.items() if now < until)

    def shared_ends(self, now: float) -> frozenset[str]:
        """Return the hops whose links to several others, on different machines, are gone round now."""
        others: defaultdict[str, set[str]] = defaultdict(set)
        for link in self.active(now):
            for peer in link:
                others[peer] |= {self._machines[link][other] for other in link - {peer}}
        return frozenset(peer for peer, machines in others.items() if len(machines) >= SHARED)

"""How fast hops are as this asker sees it: from the time that whole tokens take over known routes. Pure.

Nobody but the hop itself can tell its own share, and it may lie; but routes overlap, and each token's surplus over what
was expected is laid on all hops of its route by their blocks. Who is slow in every company stands out soon.
"""

from __future__ import annotations

from collections.abc import Mapping

from app.routing.search import HOP_S, Route

_STEP = 0.5  # how far one reply moves the estimates
_LEAST_S = 1e-6
_REMEMBERED = 1024


class Measured:
    """Seconds that one token takes through one block of each peer."""

    def __init__(self) -> None:
        self._block_s: dict[str, float] = {}

    @property
    def block_s(self) -> Mapping[str, float]:
        """What is known by now."""
        return self._block_s

    def note(self, route: Route, token_s: float, links_s: float, expected_block_s: Mapping[str, float]) -> None:
        """A reply's usual token took this long over a route; `expected` stands in for peers not measured yet."""
        estimates = {hop.peer: self._block_s.pop(hop.peer, expected_block_s.get(hop.peer, _LEAST_S)) for hop in route}
        computed_s = max(token_s - links_s - HOP_S * len(route), 0.0)
        surplus_s = computed_s - sum(estimates[hop.peer] * len(hop.span) for hop in route)
        squares = sum(len(hop.span) ** 2 for hop in route)
        for hop in route:
            moved_s = estimates[hop.peer] + _STEP * surplus_s * len(hop.span) / squares
            self._block_s[hop.peer] = max(moved_s, _LEAST_S)
        while len(self._block_s) > _REMEMBERED:  # the least recently used
            del self._block_s[next(iter(self._block_s))]

"""How a hop shares what it has: among homes (`app.serving.homes`), and what a home has among its askers. Pure.

A part is kept for homes within their fair share. A home that holds more than that is in the way of those within theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

RESERVE = 0.25  # of the whole, kept for homes within their fair share


class Holder(NamedTuple):
    """An asker, and its home."""

    home: str
    asker: str


class Shares:
    """Who holds how much of `total`."""

    def __init__(self, total: int, held: Iterable[tuple[Holder, int]]) -> None:
        self._total = total
        self._held: Counter[Holder] = Counter()
        self._homes: Counter[str] = Counter()
        for who, amount in held:
            self._held[who] += amount
            self._homes[who.home] += amount

    def fits(self, who: Holder, amount: int) -> bool:
        """True if an asker may take so much."""
        room = 1.0 if self._is_within(who, amount) else 1 - RESERVE
        return self._homes.total() + amount <= room * self._total

    def in_the_way(self, who: Holder, amount: int) -> set[Holder]:
        """Return those who hold too much while this asker finds no room for so much.

        They are of homes above their fair share if its own is not, else of its own home; and they hold more than it
        would.
        """
        if self._is_within(who, amount):
            most = max(self._fair_share(who.home), self._homes[who.home] + amount)
            if others := {one for one in self._held if self._homes[one.home] > most}:
                return others
        own = {one: held for one, held in self._held.items() if one.home == who.home}
        most = max(self._homes[who.home] / len(own.keys() | {who}), self._held[who] + amount)
        return {one for one, held in own.items() if held > most}

    def _is_within(self, who: Holder, amount: int) -> bool:
        """True if an asker's home stays within its fair share with so much more, or has nothing yet."""
        held = self._homes[who.home]
        return not held or held + amount <= self._fair_share(who.home)

    def _fair_share(self, home: str) -> float:
        """Return a home's part of the whole among those that hold some, and one that may still come."""
        return self._total / (len(self._homes.keys() | {home}) + 1)

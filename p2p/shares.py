"""How what a node has is shared: among homes, and what a home has among its askers. Pure.

Whoever has one address may have any number of peer ids. A home is an IPv4 address or a /48 of IPv6 (`home_of`). A part
is kept for homes within their fair share. A home that holds more than that is in the way of those within theirs.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from p2p.addresses import IPAddress, carried_ip, plain_ip

RESERVE = 0.25  # of the whole, kept for homes within their fair share
_IPV6_BITS = 48  # providers give a customer a /64 to a /48


class Holder(NamedTuple):
    """An asker, and its home."""

    home: str
    asker: str


def home_of(ip: IPAddress) -> str:
    """Return the home at an address; "" on this machine, whose programs are its user's own and count one by one."""
    ip = carried_ip(ip) or plain_ip(ip)
    if ip.is_loopback:
        return ""
    return str(ip) if ip.version == 4 else str(ipaddress.ip_network((ip, _IPV6_BITS), strict=False))


def alone(asker: str) -> Holder:
    """Return an asker that is the only one of its home."""
    return Holder(asker, asker)


class Shares:
    """Who holds how much of `total`."""

    def __init__(self, total: int, held: Iterable[tuple[Holder, int]] = ()) -> None:
        self._total = total
        self._held: Counter[Holder] = Counter()
        self._homes: Counter[str] = Counter()
        self.used = 0
        for who, amount in held:
            self.add(who, amount)

    def add(self, who: Holder, amount: int) -> None:
        """Note that an asker holds so much more, or less if it is negative."""
        self.used += amount
        self._held[who] += amount
        self._homes[who.home] += amount
        if not self._held[who]:
            del self._held[who]
        if not self._homes[who.home]:
            del self._homes[who.home]

    def fits(self, who: Holder, amount: int) -> bool:
        """True if an asker may take so much."""
        room = 1.0 if self._is_within(who, amount) else 1 - RESERVE
        return self.used + amount <= room * self._total

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

    def first_to_go(self, who: Holder, amount: int) -> Holder | None:
        """Return who is most in the way of this asker: of the home with most, the asker with most."""
        return max(
            self.in_the_way(who, amount),
            key=lambda one: (self._homes[one.home], one.home, self._held[one], one.asker),
            default=None,
        )

    def _is_within(self, who: Holder, amount: int) -> bool:
        """True if an asker's home stays within its fair share with so much more, or has nothing yet."""
        held = self._homes[who.home]
        return not held or held + amount <= self._fair_share(who.home)

    def _fair_share(self, home: str) -> float:
        """Return a home's part of the whole among those that hold some, and one that may still come."""
        return self._total / (len(self._homes) + (home not in self._homes) + 1)

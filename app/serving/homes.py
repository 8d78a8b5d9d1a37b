"""Tells which askers may be one: whoever has one address may have any number of peer ids.

A hop shares what it has among homes, and what a home gets among its askers. A home is an IP address (IPv6: a /64), or a
relay with all askers behind it. Askers on this machine are a home each, as their programs are its user's own.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from typing import Protocol

REMEMBERED = 4096  # askers


class Sources(Protocol):
    """What is needed of a network (`app.core.network.Network`)."""

    @property
    def peer_id(self) -> str: ...
    def source(self, peer: str) -> str: ...


class Homes:
    """The home of each asker, also for a while after its last link was closed."""

    def __init__(self, network: Sources) -> None:
        self._network = network
        self._known: OrderedDict[str, str] = OrderedDict()  # asker -> home, the one looked for last at the end

    def of(self, asker: str) -> str:
        """Return an asker's home; those that are not linked and not remembered have one together, ""."""
        if asker == self._network.peer_id:
            return asker
        if source := self._network.source(asker):
            self._known[asker] = asker if _is_this_machine(source) else source
        if asker not in self._known:
            return ""
        self._known.move_to_end(asker)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return self._known[asker]


def _is_this_machine(source: str) -> bool:
    try:
        return ipaddress.ip_address(source).is_loopback
    except ValueError:  # the in-memory network names machines
        return False

"""Tells which peers may be one: whoever has one address may have any number of peer ids.

A home is an IPv4 address, a /48 of IPv6, or a relay with all peers behind it. Peers on this machine are a home each;
those behind a relay on this machine are not. A hop shares what it has among homes, and what a home gets among its
askers (`p2p.shares`). `app.membership.table` keeps the home of each member: what many members of one home say counts
little more than what one of them says.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

from app.core.network import Link
from p2p.shares import home_of

REMEMBERED = 4096  # askers


class Sources(Protocol):
    """What is needed of a network (`app.core.network.Network`)."""

    @property
    def peer_id(self) -> str: ...
    def source(self, peer: str) -> str: ...
    def links(self) -> Sequence[Link]: ...


def peer_home(network: Sources, peer: str) -> str:
    """Return the home of a linked peer; "" without a link."""
    source = network.source(peer)
    return _home_at(source) or (source if _is_relayed(network, peer) else peer) if source else ""


class Homes:
    """The home of each asker, also for a while after its last link was closed."""

    def __init__(self, network: Sources) -> None:
        self._network = network
        self._known: OrderedDict[str, str] = OrderedDict()  # asker -> home, the one looked for last at the end

    def of(self, asker: str) -> str:
        """Return an asker's home; those that are not linked and not remembered have one together, ""."""
        if asker == self._network.peer_id:
            return asker
        if home := peer_home(self._network, asker):
            self._known[asker] = home
        if asker not in self._known:
            return ""
        self._known.move_to_end(asker)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return self._known[asker]

    def machines(self, peers: Iterable[str]) -> dict[str, str]:
        """Return the home of each peer; "" for those behind a relay, as for those that were never linked."""
        relayed = {link.peer for link in self._network.links() if link.kind == "relayed"}
        return {peer: "" if peer in relayed else self.of(peer) for peer in peers}


def _is_relayed(network: Sources, peer: str) -> bool:
    return any(link.peer == peer and link.kind == "relayed" for link in network.links())


def _home_at(source: str) -> str:
    """Return the home at an address; none on this machine."""
    try:
        ip = ipaddress.ip_address(source)
    except ValueError:  # the in-memory network names machines
        return source
    return home_of(ip)

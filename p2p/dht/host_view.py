"""Adapts a running `Host` to the small interface that the directory uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from p2p.addresses import Address
from p2p.dht.wire import Contact
from p2p.host.host import Host


class LiveHostView:
    """Implements `p2p.dht.directory.HostView` with a `Host` and its address book."""

    def __init__(self, host: Host, is_shoal: Callable[[str], bool]) -> None:
        self._host = host
        self._is_shoal = is_shoal

    def addresses(self) -> Sequence[Address]:
        """Return the addresses at which this node can be dialled."""
        return self._host.addresses

    def addresses_of(self, peer: str) -> Sequence[Address]:
        """Return the known addresses of `peer`, the most promising first."""
        return self._host.book.addresses(peer)

    def learn(self, contact: Contact) -> None:
        """Add a contact's addresses to the address book."""
        self._host.book.add(contact.peer, contact.addresses, trio.current_time())

    def is_connected(self, peer: str) -> bool:
        """True if a connection to `peer` is open."""
        return self._host.connection(peer) is not None

    def is_server(self, peer: str) -> bool:
        """True if `peer` is a connected Shoal node: those answer requests, other libp2p nodes may not."""
        return self._is_shoal(peer)

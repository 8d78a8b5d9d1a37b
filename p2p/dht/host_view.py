"""What the directory may know of the host it runs on."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from p2p.addresses import Address
from p2p.dht.wire import Contact
from p2p.host.host import Host


class LiveHostView:
    """A host as `dht.Surroundings`."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def addresses(self) -> Sequence[Address]:
        """Where this node may be dialled."""
        return self._host.addresses

    def addresses_of(self, peer: str) -> Sequence[Address]:
        """Where a peer may be dialled."""
        return self._host.book.addresses(peer)

    def learn(self, contact: Contact) -> None:
        """Remember where a peer may be dialled."""
        self._host.book.add(contact.peer, contact.addresses, trio.current_time())

    def is_connected(self, peer: str) -> bool:
        """Whether there is a connection to a peer right now."""
        return self._host.connection(peer) is not None

"""Adapts a running `Host` to the small interface that the directory uses.

The network of a peer is taken from its connection: addresses that it only claims could be of any network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import trio

from p2p.addresses import Address, Scope, carried_ip, scope_of
from p2p.dht.wire import Contact
from p2p.host.address_book import AddressBook
from p2p.host.host import Host
from p2p.host.peer_record import open_record


def learn(book: AddressBook, contact: Contact, is_usable: Callable[[Address], bool] = lambda address: True) -> None:
    """Add those of a contact's addresses that are usable to `book`: reported ones, and those in a genuine record.

    One from the future is passed over, or it would come before all that its peer signs until then.
    """
    now = trio.current_time()
    book.add(contact.peer, filter(is_usable, contact.addresses), now)
    if contact.record and contact.record != book.record(contact.peer):
        record = open_record(contact.record, contact.peer)
        if record is not None and not record.is_from_the_future:
            usable = tuple(address for address in record.addresses if is_usable(address))
            book.certify(replace(record, addresses=usable), contact.record, now)


NOT_CONNECTED = "not connected"  # the network of all peers that have no connection


def network_of(host: Host, peer: str) -> str | None:
    """Return the /24 (IPv4) or /48 (IPv6) from which a peer is connected, as hex, or that of its relay.

    None for peers on a LAN.
    """
    connection = host.connection(peer)
    if connection is None:
        return NOT_CONNECTED
    if connection.ip is None:
        return None
    ip = carried_ip(connection.ip) or connection.ip
    if scope_of(ip) is not Scope.PUBLIC:
        return None
    return ip.packed[: 3 if ip.version == 4 else 6].hex()


class LiveHostView:
    """Implements `p2p.dht.directory.HostView` with a `Host` and its address book."""

    def __init__(self, host: Host, own_record: Callable[[], bytes], is_shoal: Callable[[str], bool]) -> None:
        self._host = host
        self._own_record = own_record
        self._is_shoal = is_shoal

    def addresses(self) -> Sequence[Address]:
        """Return the addresses at which this node can be dialled."""
        return self._host.addresses

    def addresses_of(self, peer: str) -> Sequence[Address]:
        """Return the known addresses of `peer`, the most promising first."""
        return self._host.book.addresses(peer)

    def network_of(self, peer: str) -> str | None:
        """Return the network from which `peer` is connected; None for peers on a LAN."""
        return network_of(self._host, peer)

    def own_record(self) -> bytes:
        """Return the signed record of this node's addresses."""
        return self._own_record()

    def record_of(self, peer: str) -> bytes:
        """Return the signed record of `peer`; empty if none is known."""
        return self._host.book.record(peer)

    def learn(self, contact: Contact) -> None:
        """Add a contact's addresses and its signed record, if that is genuine, to the address book."""
        learn(self._host.book, contact)

    def is_connected(self, peer: str) -> bool:
        """True if a connection to `peer` is open."""
        return self._host.connection(peer) is not None

    def is_server(self, peer: str) -> bool:
        """True if `peer` is a connected Shoal node: those answer requests, other libp2p nodes may not."""
        return self._is_shoal(peer)

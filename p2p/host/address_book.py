"""Known addresses of peers, in a bounded table. No I/O; the caller passes the time in.

An address that a peer gave itself, on its own connection or in a signed record, ranks before those that others reported
for it, and these do not displace it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from p2p.addresses import MAX_ADDRESSES_PER_PEER, Address, Scope, is_peer_id
from p2p.host.peer_record import PeerRecord

MAX_PEERS = 4096


@dataclass
class _Known:
    addresses: OrderedDict[Address, float] = field(default_factory=OrderedDict)  # -> time reported, the newest last
    proven: dict[Address, float] = field(default_factory=dict)  # -> time of the last successful dial
    own_word: frozenset[Address] = frozenset()  # those that the peer itself gave last
    record: bytes = b""  # its signed record, to be passed on
    sequence: int = 0  # of that record


class AddressBook:
    """Addresses by peer; a full book drops the peer reported longest ago that no dial has reached, if there is one."""

    def __init__(self, max_peers: int = MAX_PEERS) -> None:
        self._max_peers = max_peers
        self._peers: OrderedDict[str, _Known] = OrderedDict()

    def __len__(self) -> int:
        return len(self._peers)

    def add(self, peer: str, addresses: Iterable[Address], now: float, *, own_word: bool = False) -> None:
        """Add addresses reported for `peer`, by others or by itself (`own_word`); unusable ones are ignored."""
        usable = [address.of(peer) for address in addresses if address.scope is not Scope.UNUSABLE and address.port]
        if not usable or not is_peer_id(peer):
            return
        known = self._peers.setdefault(peer, _Known())
        self._peers.move_to_end(peer)
        if own_word:
            known.own_word = frozenset(usable)
        for address in reversed(usable):  # the first address in the report counts as the newest
            known.addresses[address] = now
            known.addresses.move_to_end(address)
        while len(known.addresses) > MAX_ADDRESSES_PER_PEER:
            self._forget_one_address(known)
        if len(self._peers) > self._max_peers:
            self._forget_one_peer()

    def certify(self, record: PeerRecord, raw: bytes, now: float) -> None:
        """Add the addresses of a verified record, unless a later record of the peer is known; `raw` is its envelope."""
        known = self._peers.get(record.peer)
        if known is not None and known.sequence >= record.sequence:
            return
        self.add(record.peer, record.addresses, now, own_word=True)
        known = self._peers.get(record.peer)
        if known is not None:
            known.record, known.sequence = raw, record.sequence

    def record(self, peer: str) -> bytes:
        """Return the envelope of the latest signed record of `peer`; empty if none is known."""
        known = self._peers.get(peer)
        return b"" if known is None else known.record

    def succeeded(self, address: Address, now: float) -> None:
        """Record that a dial reached the peer at `address`."""
        if address.peer is not None:
            self.add(address.peer, [address], now)
            self._peers[address.peer].proven[address] = now

    def failed(self, address: Address) -> None:
        """Record that a dial of `address` failed; it is tried last from now on."""
        known = self._peers.get(address.peer or "")
        if known is not None and address in known.addresses:
            known.proven.pop(address, None)
            known.own_word -= {address}
            known.addresses.move_to_end(address, last=False)

    def addresses(self, peer: str) -> list[Address]:
        """Return the addresses of `peer`: proven ones, the latest success first, then its own word, then reports."""
        known = self._peers.get(peer)
        if known is None:
            return []
        newest = list(reversed(known.addresses))
        never = float("-inf")
        return sorted(newest, key=lambda address: (-known.proven.get(address, never), address not in known.own_word))

    def told(self, peer: str) -> frozenset[Address]:
        """Return the addresses of `peer` that others alone have named, and no dial has proved."""
        known = self._peers.get(peer)
        return frozenset() if known is None else frozenset(known.addresses) - known.own_word - known.proven.keys()

    def proven_peers(self) -> list[tuple[str, list[Address], float]]:
        """Return (peer, proven addresses, time of the last success) of the peers reached by dials, latest first."""
        reached = [
            (peer, list(known.proven), max(known.proven.values()))
            for peer, known in self._peers.items()
            if known.proven
        ]
        return sorted(reached, key=lambda entry: -entry[2])

    @staticmethod
    def _forget_one_address(known: _Known) -> None:
        oldest = min(known.addresses, key=lambda address: (address in known.proven, address in known.own_word))
        known.proven.pop(oldest, None)
        del known.addresses[oldest]

    def _forget_one_peer(self) -> None:
        # Proven peers go to the end of the queue once more, so that no crowd of others displaces them, and those before
        # the next one that is not proven are passed only once. The newest is the one that was just added.
        newest = next(reversed(self._peers))
        while (peer := next(iter(self._peers))) != newest and self._peers[peer].proven:
            self._peers.move_to_end(peer)
        self._peers.move_to_end(newest)
        self._peers.popitem(last=False)

"""Where peers were seen: a bounded table of addresses, the proven and the freshest first. No I/O, no own clock."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from p2p.addresses import MAX_ADDRESSES_PER_PEER, Address, Scope, is_peer_id

MAX_PEERS = 4096
_FORGET_AMONG = 64


@dataclass
class _Known:
    addresses: OrderedDict[Address, float] = field(default_factory=OrderedDict)
    proven: dict[Address, float] = field(default_factory=dict)


class AddressBook:
    """Addresses by peer; a full book forgets the peer it heard of longest ago, but not one that a dial reached."""

    def __init__(self, max_peers: int = MAX_PEERS) -> None:
        self._max_peers = max_peers
        self._peers: OrderedDict[str, _Known] = OrderedDict()

    def __len__(self) -> int:
        return len(self._peers)

    def add(self, peer: str, addresses: Iterable[Address], now: float) -> None:
        """Somebody, perhaps the peer itself, says that it listens there."""
        usable = [address.of(peer) for address in addresses if address.scope is not Scope.UNUSABLE and address.port]
        if not usable or not is_peer_id(peer):
            return
        known = self._peers.setdefault(peer, _Known())
        self._peers.move_to_end(peer)
        for address in reversed(usable):  # the teller's first choice counts as the newest
            known.addresses[address] = now
            known.addresses.move_to_end(address)
        while len(known.addresses) > MAX_ADDRESSES_PER_PEER:
            self._forget_one_address(known)
        if len(self._peers) > self._max_peers:
            self._forget_one_peer()

    def succeeded(self, address: Address, now: float) -> None:
        """A dial reached its peer at `address`."""
        if address.peer is not None:
            self.add(address.peer, [address], now)
            self._peers[address.peer].proven[address] = now

    def failed(self, address: Address) -> None:
        """A dial did not reach its peer at `address`; it is tried last from now on."""
        known = self._peers.get(address.peer or "")
        if known is not None and address in known.addresses:
            known.proven.pop(address, None)
            known.addresses.move_to_end(address, last=False)

    def addresses(self, peer: str) -> list[Address]:
        """What is known of `peer`, the proven first, then the newest."""
        known = self._peers.get(peer)
        if known is None:
            return []
        newest = list(reversed(known.addresses))
        return sorted(newest, key=lambda address: -known.proven.get(address, float("-inf")))

    def proven_peers(self) -> list[tuple[str, list[Address], float]]:
        """Peers that a dial reached, the latest first: peer, its proven addresses, and when that was."""
        reached = [
            (peer, list(known.proven), max(known.proven.values()))
            for peer, known in self._peers.items()
            if known.proven
        ]
        return sorted(reached, key=lambda entry: -entry[2])

    @staticmethod
    def _forget_one_address(known: _Known) -> None:
        oldest = next((address for address in known.addresses if address not in known.proven), None)
        if oldest is None:
            oldest = next(iter(known.addresses))
            known.proven.pop(oldest, None)
        del known.addresses[oldest]

    def _forget_one_peer(self) -> None:
        # Proven peers are kept, unless there are so many of them that looking further would cost too much.
        oldest = list(itertools.islice(self._peers, _FORGET_AMONG))
        del self._peers[next((peer for peer in oldest if not self._peers[peer].proven), oldest[0])]

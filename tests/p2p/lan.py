"""A local network in memory, over which nodes speak mDNS: whatever one sends all hear, the sender too."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Callable
from functools import partial

import trio

from p2p.addresses import Address
from p2p.discovery.mdns import Found, Interfaces, LocalNetwork


class Lan:
    """The network, and a record of what nodes have sent: when, from where, and the packet."""

    def __init__(self) -> None:
        self.cards: list[Card] = []
        self.sent: list[tuple[float, str, bytes]] = []

    def say(self, source: str, packet: bytes) -> None:
        """Let all hear a packet that comes from this address."""
        for card in self.cards:
            card.hear(source, packet)

    def node(
        self, ip: str, peer: str, found: Found = lambda *_: None, addresses: Callable[[], list[Address]] | None = None
    ) -> LocalNetwork:
        """A node with this IP address, which says that it listens there unless it is told otherwise."""
        interface = ipaddress.IPv4Interface(f"{ip}/16")
        own = [Address("ip4", ip, 4001, peer)]
        return LocalNetwork(
            peer, addresses or (lambda: own), found, interfaces=lambda: {interface}, multicast=partial(Card, self, ip)
        )


class Card:
    """Connects one node to the network."""

    def __init__(self, lan: Lan, ip: str, own: Interfaces) -> None:
        self._lan, self._ip = lan, ip
        self._in, self._out = trio.open_memory_channel[tuple[str, bytes]](math.inf)
        lan.cards.append(self)

    def hear(self, source: str, packet: bytes) -> None:
        """Let the node receive a packet."""
        self._in.send_nowait((source, packet))

    def send(self, packet: bytes, over: ipaddress.IPv4Interface | None = None) -> None:
        """Send a packet to all."""
        self._lan.sent.append((trio.current_time(), self._ip, packet))
        self._lan.say(self._ip, packet)

    async def receive(self) -> list[tuple[str, bytes]]:
        """Wait for a packet, and return all that have come."""
        come = [await self._out.receive()]
        while self._out.statistics().current_buffer_used:
            come.append(self._out.receive_nowait())
        return come

    def close(self) -> None:
        """Leave the network."""
        self._lan.cards.remove(self)

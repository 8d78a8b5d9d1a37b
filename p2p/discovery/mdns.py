"""Announces this node on the local network by multicast DNS, and finds others there.

A node says where it is when it starts, when its addresses change, when somebody asks, and once a minute. It asks at the
start and then every minute or so, unless another has just asked. All it says goes to the whole local network, never to
one address. `p2p.discovery.mdns_packets` reads and writes the packets; what to do with found peers is up to the caller.

Anybody on the local network can send anything, so nothing here grows with what others send. Packets that come from no
network of this machine are dropped, as are those that one address sends too fast. The others wait until they are read:
each address has little room for them, and the addresses take turns.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import math
import random
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import trio

from p2p.addresses import Address, BadAddress, Scope, parse_address, same_lan
from p2p.discovery import mdns_packets as packets
from p2p.errors import ProtocolError
from p2p.rate_limit import KeyedRateLimit, TokenBucket
from p2p.sockets import own_interfaces, share_port

MAX_PACKET_BYTES = 9000  # as RFC 6762 has it
PACKETS_AT_ONCE = 40  # of one address; some machines have twenty nodes
PACKETS_PER_S = 4.0
MAX_SOURCES = 256  # addresses whose packets wait to be read
SOURCE_PACKETS = 32
SOURCE_BYTES = 4 * MAX_PACKET_BYTES
READING_SHARE = 0.2  # of the time of one core that reading packets may take
PEERS_AT_ONCE = 32  # that one address names and were not known before
PEERS_PER_S = 0.1
KNOWN_PEERS = 256
TEXTS_AT_ONCE = 4  # of nodes that one address named without one, or all addresses together, that are asked for
AGAIN_S = 60.0  # between announcements, and between questions
_FIRST_PAUSES_S = (0.1, 1.0, 2.0)  # before the questions at the start
_FIRST_ANNOUNCEMENTS = 2
_ANSWER_PAUSE_S = 1.0  # between announcements, whoever asks
_ANSWER_DELAY_S = (0.02, 0.12)  # drawn by lot, so that not all answer at the same time
_CHECK_S = 10.0
_NETWORK_CHECK_S = 2.0  # no event that all systems have tells of a change of the network
_GROUP, _PORT = "224.0.0.251", 5353
_PACKETS_A_LOOK = 256
_LOOK_PAUSE_S, _PACKET_PAUSE_S = 0.01, 0.0004  # after a look; for each packet: to receive one takes a tenth of that

log = logging.getLogger("shoal.p2p.mdns")

Found = Callable[[str, list[Address]], None]
Interfaces = Collection[ipaddress.IPv4Interface]


class Multicast(Protocol):
    """Sends packets to all mDNS software on the local networks, and receives theirs."""

    def send(self, packet: bytes, over: ipaddress.IPv4Interface | None = None) -> None:
        """Send a packet to one of the networks, or to all that can be reached."""

    async def receive(self) -> list[tuple[str, bytes]]:
        """Wait for packets, and return those that have come, each with the IP address that sent it."""

    def close(self) -> None:
        """Stop receiving."""


class LocalNetwork:
    """Announces this node on the LAN and calls `found` for each other node."""

    def __init__(
        self,
        peer_id: str,
        addresses: Callable[[], Sequence[Address]],
        found: Found,
        *,
        interfaces: Callable[[], Interfaces] | None = None,
        multicast: Callable[[Interfaces], Multicast] | None = None,
    ) -> None:
        self._peer_id = peer_id
        self._label = peer_id[-32:]  # a DNS label has at most 63 characters; the whole peer id is in the TXT record
        self._names = packets.names_of(self._label)
        self._words = (b"_shoal", self._label.lower().encode())  # a packet without either is of no interest
        self._addresses = addresses
        self._found = found
        self._interfaces = interfaces or _own_ipv4
        self._open = multicast or MulticastSockets
        self._own: Interfaces = ()
        self._waiting = WaitingPackets()
        self._asked = trio.Event()
        self._asked_at = -math.inf  # by anybody
        self._known: dict[str, None] = {}  # the longest unheard first
        self._packets = KeyedRateLimit[str](PACKETS_AT_ONCE, PACKETS_PER_S)
        self._new_peers = KeyedRateLimit[str](PEERS_AT_ONCE, PEERS_PER_S)
        self._reports = KeyedRateLimit[tuple[str, str]](2, 1 / AGAIN_S)  # of a peer by an address
        self._texts_of_source = KeyedRateLimit[str](TEXTS_AT_ONCE, PEERS_PER_S)
        self._texts_of_name = KeyedRateLimit[packets.Name](1, 1 / 3600, max_keys=256)
        self._texts = TokenBucket(1.0, TEXTS_AT_ONCE, 0.0)

    async def run(self) -> None:
        """Announce and browse until cancelled, also on networks that this machine joins later."""
        while True:
            self._own = self._interfaces()
            multicast = self._open(self._own)
            try:
                async with trio.open_nursery() as nursery:
                    for task in (self._receive, self._announce, self._ask, self._read):
                        nursery.start_soon(task, multicast)
                    while set(self._interfaces()) == set(self._own):  # noqa: ASYNC110
                        await trio.sleep(_NETWORK_CHECK_S)
                    log.info("mDNS: starting again, as the addresses of this machine have changed")
                    nursery.cancel_scope.cancel()
            finally:
                if addresses := self._announced():
                    self._tell(multicast, addresses, is_goodbye=True)
                multicast.close()

    def _announced(self) -> list[Address]:
        direct = [address for address in self._addresses() if address.ip is not None and address.relay is None]
        return sorted(direct, key=lambda address: address.scope)  # local ones first

    def _tell(self, multicast: Multicast, addresses: Sequence[Address], *, is_goodbye: bool = False) -> None:
        """Announce this node to each network, at its addresses there before others: a packet has room for few."""
        for own in self._own:
            nearest = sorted(addresses, key=lambda address: address.ip not in own.network)[: packets.MAX_ADDRESSES]
            multicast.send(packets.announcement(self._label, nearest, is_goodbye=is_goodbye), own)

    async def _announce(self, multicast: Multicast) -> None:
        """Say where this node is, at most once a second."""
        said: list[Address] = []
        said_at, again_at, owed = -math.inf, math.inf, 0
        while True:
            addresses, now = self._announced(), trio.current_time()
            if addresses != said:
                said, owed = addresses, _FIRST_ANNOUNCEMENTS if addresses else 0
            if addresses and (owed or self._asked.is_set() or now >= again_at):
                self._tell(multicast, addresses)
                owed = max(0, owed - 1)
                said_at, again_at = now, now + AGAIN_S * random.uniform(0.8, 1.2)
            self._asked = trio.Event()
            with trio.move_on_after(0 if owed else _CHECK_S):
                await self._asked.wait()
            pause_s = said_at + _ANSWER_PAUSE_S - trio.current_time()
            await trio.sleep(max(pause_s, 0.0) + random.uniform(*_ANSWER_DELAY_S))

    async def _ask(self, multicast: Multicast) -> None:
        """Ask who is there."""
        question = packets.question(self._label)
        for pause_s in _FIRST_PAUSES_S:
            await trio.sleep(pause_s * random.uniform(0.8, 1.2))
            multicast.send(question)
        while True:
            await trio.sleep(AGAIN_S * random.uniform(0.8, 1.2))
            if trio.current_time() >= self._asked_at + AGAIN_S / 2:  # all hear the answers to another's question
                multicast.send(question)

    async def _receive(self, multicast: Multicast) -> None:
        while True:
            received = await multicast.receive()
            for source, packet in received:
                if self._is_of_interest(source, packet):
                    self._waiting.add(source, packet)
            # so that a flood is dropped by the kernel, and takes little time here
            await trio.sleep(max(_LOOK_PAUSE_S, len(received) * _PACKET_PAUSE_S))

    def _is_of_interest(self, source: str, packet: bytes) -> bool:
        text = packet.lower()
        if len(packet) > MAX_PACKET_BYTES or not any(word in text for word in self._words):
            return False
        return same_lan(ipaddress.ip_address(source), self._own) and self._packets.take(source, trio.current_time())

    async def _read(self, multicast: Multicast) -> None:
        """Read the packets that wait, for `READING_SHARE` of the time at most."""
        while True:
            source, packet = await self._waiting.take()
            began = time.perf_counter()
            try:
                self._take_note(source, packets.read(packet), multicast)
            except ProtocolError as error:
                log.debug("mDNS: from %s: %s", source, error)
            await trio.sleep((time.perf_counter() - began) * (1 / READING_SHARE - 1))

    def _take_note(self, source: str, heard: packets.Heard, multicast: Multicast) -> None:
        now = trio.current_time()
        if packets.SERVICE_NAME in heard.asked:
            self._asked_at = now
        if heard.asked & self._names and packets.service_name(self._label) not in heard.known:
            self._asked.set()
        for entries in heard.texts.values():
            self._report(source, entries, now)
        for name in heard.bare:
            # The name comes first: one that is repeated must not use up what others have.
            if (
                self._texts_of_name.take(name, now)
                and self._texts_of_source.take(source, now)
                and self._texts.take(now)
            ):
                multicast.send(packets.text_question(name))

    def _report(self, source: str, entries: list[bytes], now: float) -> None:
        """Pass the addresses of one announcement on: those of the first peer in it that are in this network."""
        said = _addresses_in(entries)
        peer = said[0].peer if said else None
        near = [address for address in said if address.peer == peer and self._is_near(address)]
        if peer is None or peer == self._peer_id or not near:
            return
        if peer not in self._known and not self._new_peers.take(source, now):
            return
        self._known.pop(peer, None)
        self._known[peer] = None
        if len(self._known) > KNOWN_PEERS:
            del self._known[next(iter(self._known))]
        if self._reports.take((source, peer), now):
            log.debug("mDNS: %s at %s", peer, near)
            self._found(peer, near)

    def _is_near(self, address: Address) -> bool:
        """True for an address of a local network; a public one only if it is in a network of this machine."""
        if address.scope in (Scope.LOOPBACK, Scope.LAN):
            return True
        return address.scope is Scope.PUBLIC and address.ip is not None and same_lan(address.ip, self._own)


class WaitingPackets:
    """Packets that wait to be read: few of each address, and the addresses take turns."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, deque[bytes]] = OrderedDict()
        self._come = trio.Event()

    def add(self, source: str, packet: bytes) -> None:
        """Let a packet wait, or drop it where there is no room."""
        waiting = self._of.get(source, ())
        if len(waiting) >= SOURCE_PACKETS or sum(map(len, waiting)) + len(packet) > SOURCE_BYTES:
            return
        if source in self._of or len(self._of) < MAX_SOURCES:
            self._of.setdefault(source, deque()).append(packet)
            self._come.set()

    async def take(self) -> tuple[str, bytes]:
        """Wait for a packet and return it, with the address that sent it."""
        while not self._of:
            self._come = trio.Event()
            await self._come.wait()
        source, waiting = self._of.popitem(last=False)
        packet = waiting.popleft()
        if waiting:
            self._of[source] = waiting
        return source, packet


class MulticastSockets:
    """mDNS over the IPv4 networks of this machine, beside other mDNS software on it.

    One socket hears the group on all networks. To each network a socket speaks that is bound to the own address there:
    others ignore what comes from another port. Packets to such an address alone end there and are never read.
    """

    def __init__(self, own: Interfaces) -> None:
        self._senders: dict[ipaddress.IPv4Interface, socket.socket] = {}
        self._listener = _shared_socket("")
        for network in dict.fromkeys(own):
            try:
                self._senders[network] = _sender(network.ip)
            except OSError as error:  # it is gone already
                log.info("mDNS: not over %s: %s", network, error)
                continue
            group = socket.inet_aton(_GROUP) + network.ip.packed
            try:
                self._listener.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:  # its card has joined already, by another of its addresses
                    log.info("mDNS: nothing is heard over %s: %s", network, error)

    def send(self, packet: bytes, over: ipaddress.IPv4Interface | None = None) -> None:
        """Send a packet to one of the networks, or to all that can be reached."""
        for network, sender in self._senders.items():
            if over not in (None, network):
                continue
            try:
                sender.sendto(packet, (_GROUP, _PORT))
            except OSError as error:  # the network is gone, or its queue is full
                log.debug("mDNS: a packet could not be sent: %s", error)

    async def receive(self) -> list[tuple[str, bytes]]:
        """Wait for packets, and return those that have come, each with the IP address that sent it."""
        await trio.lowlevel.wait_readable(self._listener.fileno())
        come: list[tuple[str, bytes]] = []
        with contextlib.suppress(OSError):  # no more have come
            while len(come) < _PACKETS_A_LOOK:
                packet, sender = self._listener.recvfrom(MAX_PACKET_BYTES + 1)
                come.append((sender[0], packet))
        return come

    def close(self) -> None:
        """Close all sockets."""
        for sock in (self._listener, *self._senders.values()):
            sock.close()


def _sender(ip: ipaddress.IPv4Address) -> socket.socket:
    """A socket that speaks to the group over the network in which this machine has an address; raises OSError."""
    sock = _shared_socket(str(ip))
    try:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, ip.packed)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 255)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
    except OSError:
        sock.close()
        raise
    return sock


def _shared_socket(ip: str) -> socket.socket:
    """A socket at the port of mDNS, which others on this machine use too; raises OSError."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        share_port(sock)
        sock.bind((ip, _PORT))
    except OSError:
        sock.close()
        raise
    return sock


def _addresses_in(entries: list[bytes]) -> list[Address]:
    """Return the addresses in the entries `a0` to `a7` of a TXT record, in that order; others are skipped."""
    values = {key: value for key, _, value in (entry.partition(b"=") for entry in entries)}
    found: list[Address] = []
    for index in range(packets.MAX_ADDRESSES):
        with contextlib.suppress(BadAddress, UnicodeDecodeError):
            found.append(parse_address(values.get(b"a%d" % index, b"").decode()))
    return found


def _own_ipv4() -> list[ipaddress.IPv4Interface]:
    # In the order of the system, which has those of containers last: Linux lets a socket join on twenty cards only.
    return [own for own in own_interfaces() if isinstance(own, ipaddress.IPv4Interface)]

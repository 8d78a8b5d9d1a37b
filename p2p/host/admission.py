"""Limits on inbound handshakes and open connections, the deny list, and hold-offs of peers that misbehaved.

Pure bookkeeping: no I/O, and the caller passes the time in. Methods that may refuse return the reason as text, or None.
Every table holds at most `MAX_TRACKED` entries, so that an attacker with many identities cannot use up memory.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from p2p.addresses import IPAddress, carried_ip, plain_ip
from p2p.rate_limit import KeyedRateLimit, backoff_s

MAX_TRACKED = 4096

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class ConnectionLimits:
    """Upper bounds on connections, handshakes, streams and work for peers, and the durations of hold-offs."""

    connections: int = 256
    connections_per_ip: int = 64
    connections_per_peer: int = 3
    inbound_share: float = 0.75  # of `connections`; the rest is reserved for this node's own dials
    handshakes: int = 64
    handshakes_per_ip: int = 16
    accepts_per_ip_s: float = 20.0
    accepts_per_ip_burst: int = 60
    streams_per_connection: int = 128
    streams_per_ip_s: float = 100.0
    streams_per_ip_burst: int = 400
    loop_share_per_ip: float = 0.1  # of the time of this node's loop, for what peers send: see `p2p.host.turns`
    loop_burst_per_ip_s: float = 0.05
    handshake_timeout_s: float = 10.0
    first_holdoff_s: float = 10.0
    longest_holdoff_s: float = 3600.0


@dataclass(frozen=True)
class DenyList:
    """Peers and networks that this node neither dials nor accepts."""

    peers: frozenset[str] = frozenset()
    networks: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...] = ()

    @classmethod
    def parse(cls, entries: Iterable[str]) -> DenyList:
        """Parse peer ids, IP addresses and CIDR networks; raises ValueError for a malformed address or network."""
        peers, networks = set(), []
        for entry in entries:
            if "." in entry or ":" in entry:
                networks.append(ipaddress.ip_network(entry, strict=False))
            else:
                peers.add(entry)
        return cls(frozenset(peers), tuple(networks))

    def denies_ip(self, ip: IPAddress) -> bool:
        """True if `ip` lies in a denied network, or leads to one."""
        ips = [one for one in (plain_ip(ip), carried_ip(ip)) if one is not None]
        return any(one.version == network.version and one in network for one in ips for network in self.networks)


@dataclass
class _Holdoff:
    strikes: int
    until: float


@dataclass
class Admission:
    """Counts handshakes and connections, decides which to refuse, and holds off peers that misbehaved."""

    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    deny: DenyList = field(default_factory=DenyList)

    def __post_init__(self) -> None:
        self._accepts: KeyedRateLimit[IPAddress] = KeyedRateLimit(
            self.limits.accepts_per_ip_burst, self.limits.accepts_per_ip_s, MAX_TRACKED
        )
        self._streams: KeyedRateLimit[IPAddress] = KeyedRateLimit(
            self.limits.streams_per_ip_burst, self.limits.streams_per_ip_s, MAX_TRACKED
        )
        self._work: KeyedRateLimit[IPAddress] = KeyedRateLimit(
            self.limits.loop_burst_per_ip_s, self.limits.loop_share_per_ip, MAX_TRACKED
        )
        self._holdoffs: OrderedDict[str, _Holdoff] = OrderedDict()
        self._handshakes: Counter[IPAddress] = Counter()
        self._connections: Counter[tuple[IPAddress, bool]] = Counter()  # by address, and whether this node dialled

    @property
    def handshakes_in_flight(self) -> int:
        """Number of inbound handshakes in progress."""
        return self._handshakes.total()

    @property
    def connections_open(self) -> int:
        """Number of connections counted as open."""
        return self._connections.total()

    @property
    def has_room_inbound(self) -> bool:
        """True if one more peer may connect to this node; the rest of the connections is for dials of its own."""
        begun = self._connections.total() + self._handshakes.total()
        return begun < self.limits.connections * self.limits.inbound_share

    def has_room_at(self, ip: IPAddress, *, dialled: bool) -> bool:
        """True if one more connection with `ip` may be open.

        Those that this node dialled are counted apart: else whoever has one address with a peer could come as so many
        others that the peer is not dialled any more.
        """
        in_room = self._connections.total() < self.limits.connections
        return in_room and self._connections[source_of(ip), dialled] < self.limits.connections_per_ip

    def begin_handshake(self, ip: IPAddress, now: float) -> str | None:
        """Count one inbound handshake from `ip`, or return why it is refused; pair it with `end_handshake`."""
        if self.deny.denies_ip(ip):
            return "its network is on the deny list"
        ip = source_of(ip)
        if self._handshakes.total() >= self.limits.handshakes:
            return "too many handshakes are in progress"
        if self._handshakes[ip] >= self.limits.handshakes_per_ip:
            return "too many handshakes from its address are in progress"
        if not self.has_room_inbound:
            return "too many connections are open"
        if not self.has_room_at(ip, dialled=False):
            return "too many connections from its address are open"
        if not self._accepts.take(ip, now):
            return "it connects too often"
        self._handshakes[ip] += 1
        return None

    def end_handshake(self, ip: IPAddress) -> None:
        """Uncount a handshake from `ip` that has succeeded or failed."""
        _decrement(self._handshakes, source_of(ip))

    def refuse_peer(self, peer: str, now: float) -> str | None:
        """Return why connections with `peer` are refused at `now`, or None if they are not."""
        if peer in self.deny.peers:
            return "it is on the deny list"
        holdoff = self._holdoffs.get(peer)
        if holdoff is not None and now < holdoff.until:
            return f"it misbehaved and is held off for {holdoff.until - now:.0f} s"
        return None

    def opened(self, ip: IPAddress, *, dialled: bool) -> bool:
        """Count one open connection with `ip`; False, and nothing counted, if there is no room for it."""
        if not self.has_room_at(ip, dialled=dialled):
            return False
        self._connections[source_of(ip), dialled] += 1
        return True

    def stream_delay_s(self, ip: IPAddress, now: float) -> float:
        """Count one stream that a peer at `ip` opened; returns for how long its connection accepts no other.

        Each connection waits for its own streams alone, so that those of others at this address have their turns.
        """
        return self._streams.delay_s(source_of(ip), now)

    def work_delay_s(self, ip: IPAddress, now: float, worked_s: float = 0.0) -> float:
        """Count `worked_s` of the loop's time for peers at `ip`; returns for how long nothing more is done for them."""
        return self._work.delay_s(source_of(ip), now, worked_s)

    def closed(self, ip: IPAddress, *, dialled: bool) -> None:
        """Uncount a connection with `ip` that was open."""
        _decrement(self._connections, (source_of(ip), dialled))

    def punish(self, peer: str, now: float) -> float:
        """Hold `peer` off, twice as long as the last time, and return the seconds.

        Earlier offences are forgotten once `longest_holdoff_s` has passed since the last hold-off ended.
        """
        holdoff = self._holdoffs.pop(peer, None)
        forgiven = holdoff is None or now > holdoff.until + self.limits.longest_holdoff_s
        strikes = 1 if forgiven or holdoff is None else holdoff.strikes + 1
        seconds = backoff_s(self.limits.first_holdoff_s, strikes, self.limits.longest_holdoff_s)
        self._holdoffs[peer] = _Holdoff(strikes, now + seconds)
        if len(self._holdoffs) > MAX_TRACKED:
            self._holdoffs.popitem(last=False)
        return seconds


def source_of(ip: IPAddress) -> IPAddress:
    """Return the address that limits are counted for: the /64 of an IPv6 address, since a customer owns all of it."""
    ip = plain_ip(ip)
    return ip if ip.version == 4 else ipaddress.IPv6Address(int(ip) >> 64 << 64)


def _decrement(counter: Counter[K], key: K) -> None:
    counter[key] -= 1
    if counter[key] <= 0:
        del counter[key]

"""Who may connect, how often and how many at once: pure bookkeeping over a clock that the caller passes in.

A refusal is a reason in words or None. Every table is bounded, so that ten thousand identities cost no more memory
than the newest few thousand.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from p2p.addresses import IPAddress, plain_ip

MAX_TRACKED = 4096
MAX_STRIKES = 32  # doubling further would change nothing but overflow a float


@dataclass(frozen=True)
class ConnectionLimits:
    """How much of this node others may use at once."""

    connections: int = 256
    connections_per_ip: int = 64
    connections_per_peer: int = 3
    inbound_share: float = 0.75  # the rest of the connections stays free for this node's own dials
    handshakes: int = 64
    handshakes_per_ip: int = 16
    accepts_per_ip_s: float = 20.0
    accepts_per_ip_burst: int = 60
    streams_per_connection: int = 128
    handshake_timeout_s: float = 5.0
    first_holdoff_s: float = 10.0
    longest_holdoff_s: float = 3600.0


@dataclass(frozen=True)
class DenyList:
    """Peers and networks that are never spoken to."""

    peers: frozenset[str] = frozenset()
    networks: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...] = ()

    @classmethod
    def parse(cls, entries: Iterable[str]) -> DenyList:
        """Read peer ids, IP addresses and CIDR networks; raises ValueError for a network that is none."""
        peers, networks = set(), []
        for entry in entries:
            if "." in entry or ":" in entry:
                networks.append(ipaddress.ip_network(entry, strict=False))
            else:
                peers.add(entry)
        return cls(frozenset(peers), tuple(networks))

    def denies_ip(self, ip: IPAddress) -> bool:
        """Whether `ip` lies in a denied network."""
        plain = plain_ip(ip)
        return any(plain.version == network.version and plain in network for network in self.networks)


@dataclass
class _Bucket:
    tokens: float
    updated_at: float


@dataclass
class _Holdoff:
    strikes: int
    until: float


@dataclass
class Admission:
    """Decides on each connection and each peer, and remembers who misbehaved."""

    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    deny: DenyList = field(default_factory=DenyList)

    def __post_init__(self) -> None:
        self._buckets: OrderedDict[IPAddress, _Bucket] = OrderedDict()
        self._holdoffs: OrderedDict[str, _Holdoff] = OrderedDict()
        self._handshakes: Counter[IPAddress] = Counter()
        self._connections: Counter[IPAddress] = Counter()

    @property
    def handshakes_in_flight(self) -> int:
        """How many inbound handshakes are under way."""
        return self._handshakes.total()

    @property
    def connections_open(self) -> int:
        """How many connections are counted as open."""
        return self._connections.total()

    def begin_handshake(self, ip: IPAddress, now: float) -> str | None:
        """Count one inbound handshake from `ip`, or say why it is refused; pair with `end_handshake`."""
        if self.deny.denies_ip(ip):
            return "its network is on the deny list"
        ip = source_of(ip)
        if self._handshakes.total() >= self.limits.handshakes:
            return "too many handshakes are under way"
        if self._handshakes[ip] >= self.limits.handshakes_per_ip:
            return "too many handshakes from its address are under way"
        if self._connections.total() + self._handshakes.total() >= self.limits.connections * self.limits.inbound_share:
            return "too many connections are open"
        if self._connections[ip] >= self.limits.connections_per_ip:
            return "too many connections from its address are open"
        if not self._take_token(ip, now):
            return "it connects too often"
        self._handshakes[ip] += 1
        return None

    def end_handshake(self, ip: IPAddress) -> None:
        """The handshake from `ip` is over, well or badly."""
        _decrement(self._handshakes, source_of(ip))

    def refuse_peer(self, peer: str, now: float) -> str | None:
        """Why `peer` may not be spoken to now, or None."""
        if peer in self.deny.peers:
            return "it is on the deny list"
        holdoff = self._holdoffs.get(peer)
        if holdoff is not None and now < holdoff.until:
            return f"it misbehaved and is held off for {holdoff.until - now:.0f} s"
        return None

    def opened(self, ip: IPAddress) -> bool:
        """Count one open connection; False where there is no room left."""
        if self._connections.total() >= self.limits.connections:
            return False
        self._connections[source_of(ip)] += 1
        return True

    def closed(self, ip: IPAddress) -> None:
        """One open connection less."""
        _decrement(self._connections, source_of(ip))

    def punish(self, peer: str, now: float) -> float:
        """Hold `peer` off, twice as long as the last time; returns for how many seconds."""
        holdoff = self._holdoffs.pop(peer, None)
        forgiven = holdoff is None or now > holdoff.until + self.limits.longest_holdoff_s
        strikes = 1 if forgiven or holdoff is None else min(holdoff.strikes + 1, MAX_STRIKES)
        seconds = min(self.limits.first_holdoff_s * 2.0 ** (strikes - 1), self.limits.longest_holdoff_s)
        self._holdoffs[peer] = _Holdoff(strikes, now + seconds)
        if len(self._holdoffs) > MAX_TRACKED:
            self._holdoffs.popitem(last=False)
        return seconds

    def _take_token(self, ip: IPAddress, now: float) -> bool:
        bucket = self._buckets.pop(ip, None) or _Bucket(self.limits.accepts_per_ip_burst, now)
        earned = (now - bucket.updated_at) * self.limits.accepts_per_ip_s
        bucket.tokens = min(self.limits.accepts_per_ip_burst, bucket.tokens + earned)
        bucket.updated_at = now
        self._buckets[ip] = bucket
        if len(self._buckets) > MAX_TRACKED:
            self._buckets.popitem(last=False)
        if bucket.tokens < 1:
            return False
        bucket.tokens -= 1
        return True


def source_of(ip: IPAddress) -> IPAddress:
    """What counts as one address: an IPv6 customer has a whole /64 to come from."""
    ip = plain_ip(ip)
    return ip if ip.version == 4 else ipaddress.IPv6Address(int(ip) >> 64 << 64)


def _decrement(counter: Counter[IPAddress], ip: IPAddress) -> None:
    counter[ip] -= 1
    if counter[ip] <= 0:
        del counter[ip]

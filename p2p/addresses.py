"""Addresses of peers as values: parses and classifies them, and selects those a node advertises of itself.

The text form is libp2p's multiaddr. Supported are TCP over IPv4, IPv6 or a DNS name, directly or through a circuit
relay (`/ip4/…/tcp/…/p2p/RELAY/p2p-circuit`). No I/O; sockets are in `p2p.sockets`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import zip_longest
from typing import TypeVar

from p2p.errors import IdentityError, P2PError
from p2p.identity import peer_id_bytes, peer_id_from_bytes

MAX_ADDRESS_CHARS = 512
MAX_ADDRESSES_PER_PEER = 16
_HOST_KINDS = ("ip4", "ip6", "dns", "dns4", "dns6")
_DNS_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_DNSADDR = re.compile(r"/dnsaddr/(\w(?:[\w.-]{0,238}\w)?)(?:/p2p/(\w+))?", re.ASCII)
PUBLIC_ENTRIES = ("/dnsaddr/bootstrap.libp2p.io",)  # of the public libp2p directory
_CARRIER_GRADE_NAT = ipaddress.ip_network("100.64.0.0/10")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
T = TypeVar("T")


class BadAddress(P2PError, ValueError):
    """The text is not an address that this node can dial; write it like `/ip4/192.0.2.1/tcp/7464/p2p/PEER`."""


class Scope(IntEnum):
    """The region from which an address can be dialled, nearest first."""

    LOOPBACK = 0
    LAN = 1
    PUBLIC = 2
    RELAY = 3
    UNUSABLE = 4


@dataclass(frozen=True)
class Address:
    """A host and port, the peer id expected there (if known), and the peer id of the relay in between (if any)."""

    kind: str
    host: str
    port: int
    peer: str | None = None
    relay: str | None = None

    def __str__(self) -> str:
        text = f"/{self.kind}/{self.host}/tcp/{self.port}"
        if self.relay is not None:
            text += f"/p2p/{self.relay}/p2p-circuit"
        return text if self.peer is None else f"{text}/p2p/{self.peer}"

    @property
    def ip(self) -> IPAddress | None:
        """The IP address, or None if the host is a DNS name."""
        return ipaddress.ip_address(self.host) if self.kind in ("ip4", "ip6") else None

    @property
    def scope(self) -> Scope:
        """The region from which this address can be dialled."""
        if self.relay is not None:
            return Scope.RELAY
        ip = self.ip
        return Scope.PUBLIC if ip is None else scope_of(ip)

    def of(self, peer: str | None) -> Address:
        """Return the same address with `peer` expected there."""
        return replace(self, peer=peer)

    def through(self, peer: str | None) -> Address:
        """Return the address of `peer` behind the relay at this address.

        Raises `BadAddress` unless this address is direct and has the relay's peer id.
        """
        if self.peer is None or self.relay is not None:
            raise BadAddress(f"{self} cannot be a relay's address: it must be direct and name the relay's peer id")
        return Address(self.kind, self.host, self.port, peer, self.peer)


def is_peer_id(text: str) -> bool:
    """True if `text` is a peer id of any kind of key, as libp2p writes it."""
    try:
        return peer_id_from_bytes(peer_id_bytes(text)) == text
    except IdentityError:
        return False


def scope_of(ip: IPAddress) -> Scope:
    """Return the region from which an IP address can be dialled."""
    ip = plain_ip(ip)
    if ip.is_unspecified or ip.is_multicast:
        return Scope.UNUSABLE
    if ip.is_loopback:
        return Scope.LOOPBACK
    if ip.is_reserved:
        return Scope.UNUSABLE
    if ip.is_link_local or ip.is_private or (ip.version == 4 and ip in _CARRIER_GRADE_NAT):
        return Scope.LAN
    if carried_ip(ip) is not None:
        return Scope.LAN  # it may lead to a machine of the local network
    return Scope.PUBLIC


def plain_ip(ip: IPAddress) -> IPAddress:
    """Convert an IPv4-mapped IPv6 address to IPv4; return any other address unchanged."""
    mapped = getattr(ip, "ipv4_mapped", None)
    return ip if mapped is None else mapped


def carried_ip(ip: IPAddress) -> IPAddress | None:
    """Return the IPv4 address to which an IPv6 address of NAT64 or 6to4 leads; None for any other address."""
    if ip.version == 4:
        return None
    return ipaddress.IPv4Address(ip.packed[-4:]) if ip in _NAT64 else ip.sixtofour


def network_of(ip: IPAddress) -> str:
    """Return the /16 of an IPv4 address or the /48 of an IPv6 address in hex: one owner may have many inside it."""
    ip = plain_ip(ip)
    return ip.packed[: 2 if ip.version == 4 else 6].hex()


def address_of(host: str, port: int, peer: str | None = None) -> Address:
    """Build the address of an IP and a port; raises `BadAddress` if `host` is not an IP address."""
    try:
        ip = plain_ip(ipaddress.ip_address(host.split("%", 1)[0]))
    except ValueError:
        raise BadAddress(f"{host!r} is not an IP address") from None
    return Address(f"ip{ip.version}", str(ip), port, peer)


def parse_address(text: str) -> Address:
    """Parse a multiaddr; raises `BadAddress` for anything that this node cannot dial."""
    if len(text) > MAX_ADDRESS_CHARS:
        raise BadAddress(f"an address of {len(text)} characters is too long")
    fields = text.strip().split("/")
    if len(fields) < 5 or fields[0] or fields[3] != "tcp":
        raise BadAddress(f"{text!r} is not of the form /ip4/HOST/tcp/PORT, optionally followed by /p2p/PEER")
    direct = Address(*_host(fields[1], fields[2], text), _port(fields[4], text))
    rest = fields[5:]
    match rest:
        case []:
            return direct
        case ["p2p", peer]:
            return direct.of(_peer(peer, text))
        case ["p2p", relay, "p2p-circuit"]:
            return direct.of(_peer(relay, text)).through(None)
        case ["p2p", relay, "p2p-circuit", "p2p", peer]:
            return direct.of(_peer(relay, text)).through(_peer(peer, text))
    raise BadAddress(f"{text!r}: after the port only /p2p/PEER or /p2p/RELAY/p2p-circuit/p2p/PEER may follow")


def parse_dnsaddr(text: str) -> tuple[str, str | None] | None:
    """Return the DNS name and the peer id, if any, in `/dnsaddr/NAME[/p2p/PEER]`; None for any other text."""
    found = _DNSADDR.fullmatch(text)
    if found is None or (found[2] is not None and not is_peer_id(found[2])):
        return None
    return found[1], found[2]


def check_entry(text: str) -> str:
    """Return `text` if it is a `/dnsaddr/…` or an address with a peer id; raises `BadAddress` otherwise."""
    if parse_dnsaddr(text) is None and parse_address(text).peer is None:
        raise BadAddress(f"{text!r} has no peer id; append /p2p/PEER")
    return text


def parse_known(texts: Iterable[str], peer: str | None = None, limit: int = MAX_ADDRESSES_PER_PEER) -> list[Address]:
    """Parse a peer's list of addresses; skips invalid, unusable and repeated ones, and returns at most `limit`."""
    found: dict[Address, None] = {}
    for count, text in enumerate(texts):
        if count >= 4 * limit or len(found) >= limit:
            break
        try:
            address = parse_address(text)
        except BadAddress:
            continue
        if peer is not None and address.peer not in (None, peer):
            continue
        if address.scope is not Scope.UNUSABLE and address.port:
            found[address if peer is None else address.of(peer)] = None
    return list(found)


def advertised(
    listening: Sequence[Address], interfaces: Sequence[IPAddress], explicit: Sequence[Address] = ()
) -> list[Address]:
    """Return the addresses to advertise: only the explicit ones if given, else those of the listeners.

    A wildcard listener becomes one address for each interface, never `0.0.0.0`. Loopback addresses are advertised only
    if there are no others, so that a node on another machine does not dial itself.
    """
    if explicit:
        return list(dict.fromkeys(explicit))
    found: dict[Address, None] = {}
    for address in listening:
        ip = address.ip
        if ip is None or not ip.is_unspecified:
            found[address] = None
            continue
        for own in interfaces:
            if own.version == ip.version and scope_of(own) is not Scope.UNUSABLE and not _is_scoped(own):
                found[Address(address.kind, str(own), address.port, address.peer)] = None
    usable = [address for address in found if address.scope is not Scope.UNUSABLE]
    wider = [address for address in usable if address.scope is not Scope.LOOPBACK]
    return wider or usable


def mixed(addresses: Iterable[Address]) -> list[Address]:
    """Return a node's own addresses, each once, in an order in which the first few serve most others.

    Public, local and relayed ones take turns. Statements have room for few: a machine with several containers or
    virtual machines has many local addresses, and behind a router it can be reached at none of them.
    """
    kinds: dict[Scope, list[Address]] = {scope: [] for scope in (Scope.PUBLIC, Scope.LAN, Scope.LOOPBACK, Scope.RELAY)}
    for address in dict.fromkeys(addresses):
        kinds.setdefault(address.scope, []).append(address)
    return in_turns(kinds.values())


def in_turns(queues: Iterable[Iterable[T]]) -> list[T]:
    """Return the items of all queues, of which each gives one in turn; None is no item."""
    return [item for turn in zip_longest(*queues) for item in turn if item is not None]


def same_lan(ip: IPAddress, interfaces: Iterable[ipaddress.IPv4Interface | ipaddress.IPv6Interface]) -> bool:
    """True if `ip` is in the network of one of this machine's interfaces, or is a loopback address."""
    ip = plain_ip(ip)
    return ip.is_loopback or any(ip.version == own.version and ip in own.network for own in interfaces)


def _is_scoped(ip: IPAddress) -> bool:
    """True for link-local IPv6, which is valid only with the name of an interface of this machine."""
    return ip.version == 6 and ip.is_link_local


def _host(kind: str, host: str, text: str) -> tuple[str, str]:
    if kind not in _HOST_KINDS:
        raise BadAddress(f"{text!r}: {kind!r} is not one of {', '.join(_HOST_KINDS)}")
    if kind.startswith("dns"):
        if _DNS_NAME.fullmatch(host) is None:
            raise BadAddress(f"{text!r}: {host!r} is not a host name")
        return kind, host
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        raise BadAddress(f"{text!r}: {host!r} is not an IP address") from None
    if "%" in host:
        raise BadAddress(f"{text!r}: remove the interface after '%', which other machines do not have")
    if ip.version != int(kind[2]):
        raise BadAddress(f"{text!r}: {host!r} is not an IPv{kind[2]} address")
    return kind, str(ip)


def _port(port: str, text: str) -> int:
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 65536):
        raise BadAddress(f"{text!r}: {port!r} is not a port between 0 and 65535")
    return int(port)


def _peer(peer: str, text: str) -> str:
    if not is_peer_id(peer):
        raise BadAddress(f"{text!r}: {peer!r} is not a peer id")
    return peer

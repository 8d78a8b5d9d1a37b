"""Reads and writes the mDNS packets (RFC 6762) by which nodes find each other on a local network.

A node's service is `LABEL._shoal._udp.local.`, where the label is the end of its peer id. An announcement has all of it
in one packet: PTR, SRV and A or AAAA records for other software, and a TXT record, whose entries `a0` to `a7` are the
node's addresses, each with its peer id. No I/O. Which packets are read, and what follows from them, is decided by
`p2p.discovery.mdns`.

Names are read by dnspython, but records are not: `dns.message` refuses packets of other mDNS software (an NSEC record
with a compressed name), and keeps an entry for each type and class that it met, of which one can make up four billion.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import dns.name
import dns.wire

from p2p.addresses import Address
from p2p.errors import ProtocolError

SERVICE = "_shoal._udp.local."
MAX_ADDRESSES = 8
MAX_RECORDS = 64  # of one packet, questions among them
MAX_NAMES = 8  # services that are read of one packet
PTR, TXT = 12, 16
_A, _AAAA, _SRV = 1, 28, 33
_IN = 1
_ONLY_THIS = 0x8001  # IN, and whoever hears it forgets what it knew of the name
_RESPONSE = 0x8400
_TTL_S = 4500
_HOST_TTL_S = 120

Name = dns.name.Name
_Record = tuple[Name, int, int, int, bytes]  # owner, type, class, TTL, data

SERVICE_NAME = dns.name.from_text(SERVICE)


@dataclass
class Heard:
    """What one packet says of the service: `asked` are names with open questions, `texts` the TXT entries of nodes."""

    asked: set[Name] = field(default_factory=set)
    known: set[Name] = field(default_factory=set)  # nodes of which whoever asks need not hear
    texts: dict[Name, list[bytes]] = field(default_factory=dict)
    bare: list[Name] = field(default_factory=list)  # nodes that were named without a TXT record


def service_name(label: str) -> Name:
    """Return the name of a node's service."""
    return Name((label.encode(), *SERVICE_NAME.labels))


def host_name(label: str) -> Name:
    """Return the name of a node's machine in its SRV record."""
    return dns.name.from_text(f"{label}.local.")


def names_of(label: str) -> set[Name]:
    """Return all names whose questions a node answers."""
    return {SERVICE_NAME, service_name(label), host_name(label)}


def question(label: str) -> bytes:
    """Ask which nodes there are; the one that asks, `label`, need not answer."""
    return _packet(0, [(SERVICE_NAME, PTR)], [(SERVICE_NAME, PTR, _IN, _TTL_S, _wire(service_name(label)))])


def text_question(name: Name) -> bytes:
    """Ask for the TXT record of a node."""
    return _packet(0, [(name, TXT)], [])


def announcement(label: str, addresses: Sequence[Address], *, is_goodbye: bool = False) -> bytes:
    """Say that a node is at these addresses, of which there must be one, or was there until now."""
    name, host = service_name(label), host_name(label)
    entries = [f"a{index}={address}".encode() for index, address in enumerate(addresses[:MAX_ADDRESSES])]
    text = b"".join(bytes([len(entry)]) + entry for entry in entries)
    ips = dict.fromkeys(address.ip for address in addresses[:MAX_ADDRESSES])
    server = struct.pack("!HHH", 0, 0, addresses[0].port) + _wire(host)
    records: list[_Record] = [
        (SERVICE_NAME, PTR, _IN, _TTL_S, _wire(name)),
        (name, _SRV, _ONLY_THIS, _HOST_TTL_S, server),
        (name, TXT, _ONLY_THIS, _TTL_S, text),
        *((host, _A if ip.version == 4 else _AAAA, _ONLY_THIS, _HOST_TTL_S, ip.packed) for ip in ips if ip),
    ]
    if is_goodbye:
        records = [(owner, kind, rdclass, 0, data) for owner, kind, rdclass, _, data in records]
    return _packet(_RESPONSE, [], records)


def read(packet: bytes) -> Heard:
    """Read a packet; raises `ProtocolError` if it is none or has more than `MAX_RECORDS` records."""
    try:
        return _read(packet)
    except Exception as error:  # dnspython has many, and they change
        raise ProtocolError(f"no mDNS packet: {error or type(error).__name__}") from error


def _read(packet: bytes) -> Heard:
    parser = dns.wire.Parser(packet)
    _, flags, questions, *counts = parser.get_struct("!6H")
    if flags & 0x7800 or questions + sum(counts) > MAX_RECORDS:
        raise ValueError("another operation than a query, or too many records")
    heard = Heard()
    for _ in range(questions):
        heard.asked.add(dns.name.from_wire_parser(parser))
        parser.get_struct("!HH")
    named: set[Name] = set()
    for name, kind, ttl in _records(parser, sum(counts)):
        if kind == PTR and name == SERVICE_NAME and ttl >= (1 if flags & 0x8000 else _TTL_S / 2):
            named.add(dns.name.from_wire_parser(parser))
        elif kind == TXT and _is_service(name) and ttl and flags & 0x8000 and len(heard.texts) < MAX_NAMES:
            heard.texts[name] = list(_strings(parser))
    if flags & 0x8000:
        heard.asked.clear()  # a response repeats the question of some old software
        heard.bare = [name for name in named if _is_service(name) and name not in heard.texts][:MAX_NAMES]
    else:
        heard.known = named
    return heard


def _records(parser: dns.wire.Parser, count: int) -> Iterator[tuple[Name, int, int]]:
    """Yield name, type and TTL of each record, with the parser at its data."""
    for _ in range(count):
        name = dns.name.from_wire_parser(parser)
        kind, _class, ttl, length = parser.get_struct("!HHIH")
        end = parser.current + length
        with parser.restrict_to(length):
            yield name, kind, ttl
            parser.seek(end)


def _strings(parser: dns.wire.Parser) -> Iterator[bytes]:
    while parser.remaining():
        yield parser.get_counted_bytes()


def _is_service(name: Name) -> bool:
    return len(name) == len(SERVICE_NAME) + 1 and name.is_subdomain(SERVICE_NAME)


def _wire(name: Name) -> bytes:
    """Return a name as packets have it."""
    data = name.to_wire()
    assert data is not None  # without a file to write to
    return data


def _packet(flags: int, questions: Sequence[tuple[Name, int]], answers: Iterable[_Record]) -> bytes:
    records = list(answers)
    out, places = io.BytesIO(), dict[Name, int]()
    out.write(struct.pack("!6H", 0, flags, len(questions), len(records), 0, 0))
    for name, kind in questions:
        name.to_wire(out, places)
        out.write(struct.pack("!HH", kind, _IN))
    for name, kind, rdclass, ttl_s, data in records:
        name.to_wire(out, places)
        out.write(struct.pack("!HHIH", kind, rdclass, ttl_s, len(data)) + data)
    return out.getvalue()

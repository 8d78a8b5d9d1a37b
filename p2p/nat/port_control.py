"""PCP (RFC 6887) and NAT-PMP (RFC 6886): asks the router over UDP to forward a TCP port to this machine.

Both use port 5351 of the gateway. PCP is tried first; a router that only knows NAT-PMP says so. The messages are
encoded and decoded without I/O; `request` sends one and waits for its answer. Anybody on the LAN can forge an answer,
so nothing is taken from it but a port and an address, which peers on the internet test by dialling back.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import trio

from p2p.errors import P2PError

PORT = 5351
LIFETIME_S = 3600
_TRIES_S = (0.25, 0.5, 1.0)  # waits for an answer, each after sending the request again
_TCP = 6
_PMP_ADDRESS, _PMP_MAP_TCP, _PCP_MAP = 0, 2, 1
_ANSWER = 128
_PMP_MAP = struct.Struct("!BBHHHI")  # version, op, reserved, internal port, external port, lifetime
_PMP_MAPPED = struct.Struct("!BBHIHHI")  # version, op, result, epoch, internal port, external port, lifetime
_PMP_IS_AT = struct.Struct("!BBHI4s")  # version, op, result, epoch, external address
_PCP_REQUEST = struct.Struct("!BBHI16s")  # version, op, reserved, lifetime, own address
_PCP_ANSWER = struct.Struct("!BBBBII12s")  # version, op, reserved, result, lifetime, epoch, reserved
_PCP_MAP_BODY = struct.Struct("!12sB3sHH16s")  # nonce, protocol, reserved, internal port, external port, address

T = TypeVar("T")


class MappingRefused(P2PError):
    """The router does not forward the port, or does not answer; forward it in the router's settings instead."""


class OnlyNatPmp(MappingRefused):
    """The router knows no PCP, but NAT-PMP."""


@dataclass(frozen=True)
class Mapping:
    """A port that the router forwards: by which protocol, its external address and port, and for how long."""

    method: str
    ip: str
    port: int
    lifetime_s: int


def pcp_request(nonce: bytes, own_ip: str, port: int, external_port: int, lifetime_s: int) -> bytes:
    """Return the PCP request to map `port`; a lifetime of 0 removes the mapping with this nonce."""
    header = _PCP_REQUEST.pack(2, _PCP_MAP, 0, lifetime_s, _as_ipv6(own_ip))
    return header + _PCP_MAP_BODY.pack(nonce, _TCP, b"", port, external_port, _as_ipv6("0.0.0.0"))


def pcp_answer(data: bytes, nonce: bytes, port: int) -> Mapping | None:
    """Decode the answer to a PCP request; None if it is not one, raises `MappingRefused` if it is a refusal."""
    if len(data) >= 8 and data[0] == 0:
        raise OnlyNatPmp("the router knows NAT-PMP only")  # RFC 6886, 3.5: unsupported version
    if len(data) < _PCP_ANSWER.size or data[0] != 2 or data[1] != _PCP_MAP + _ANSWER:
        return None
    _, _, _, result, lifetime_s, _, _ = _PCP_ANSWER.unpack_from(data)
    if result == 1:
        raise OnlyNatPmp("the router does not know this version of PCP")
    if result:
        raise MappingRefused(f"the router refuses to forward the port (PCP result {result})")
    if len(data) < _PCP_ANSWER.size + _PCP_MAP_BODY.size:
        return None
    said, protocol, _, internal, external, address = _PCP_MAP_BODY.unpack_from(data, _PCP_ANSWER.size)
    if said != nonce or protocol != _TCP or internal != port:
        return None
    ip = ipaddress.IPv6Address(address)
    return Mapping("PCP", str(ip.ipv4_mapped or ip), external, lifetime_s)


def pmp_request(port: int, external_port: int, lifetime_s: int) -> bytes:
    """Return the NAT-PMP request to map `port`; a lifetime of 0 removes its mapping."""
    return _PMP_MAP.pack(0, _PMP_MAP_TCP, 0, port, external_port if lifetime_s else 0, lifetime_s)


def pmp_answer(data: bytes, port: int) -> tuple[int, int] | None:
    """Decode the answer to a NAT-PMP request: the external port and the lifetime in seconds; None if it is not one.

    Raises `MappingRefused` if it is a refusal.
    """
    if len(data) < 8 or data[0] != 0 or data[1] != _PMP_MAP_TCP + _ANSWER:
        return None
    result = int.from_bytes(data[2:4])
    if result:
        raise MappingRefused(f"the router refuses to forward the port (NAT-PMP result {result})")
    if len(data) < _PMP_MAPPED.size:
        return None
    _, _, _, _, internal, external, lifetime_s = _PMP_MAPPED.unpack_from(data)
    return (external, lifetime_s) if internal == port else None


def pmp_address(data: bytes) -> str | None:
    """Decode the answer to the NAT-PMP question for the external address; None if it is not one."""
    if len(data) < _PMP_IS_AT.size or data[0] != 0 or data[1] != _ANSWER or data[2:4] != b"\0\0":
        return None
    return str(ipaddress.IPv4Address(_PMP_IS_AT.unpack_from(data)[4]))


async def request(gateway: str, body: bytes, decode: Callable[[bytes], T | None], port: int = PORT) -> T:
    """Send `body` to the gateway and return what `decode` makes of its answer; raises `MappingRefused`."""
    sock = trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with sock:
        try:
            await sock.connect((gateway, port))  # answers of others are not received
            for wait_s in _TRIES_S:
                await sock.send(body)
                with trio.move_on_after(wait_s):
                    while True:
                        answer = decode(await sock.recv(1100))
                        if answer is not None:
                            return answer
        except OSError as error:
            raise MappingRefused(f"the router at {gateway} does not answer: {error.strerror or error}") from None
    raise MappingRefused(f"the router at {gateway} answers neither PCP nor NAT-PMP")


@dataclass
class PortControl:
    """The mapping of one port at one gateway by PCP or NAT-PMP; `server_port` is another than 5351 in tests.

    A router changes a mapping only for the nonce that made it. `key` is the node's secret from which that follows: so a
    node that was killed, or comes back to this network, has the right to its own mapping, and nobody else has.
    """

    gateway: str
    own_ip: str
    port: int
    key: bytes = field(repr=False)
    server_port: int = PORT

    def __post_init__(self) -> None:
        place = f"{self.gateway} {self.own_ip} {self.port}"
        self.nonce = hmac.digest(self.key, place.encode(), "sha256")[:12]
        self._uses_pcp = True

    async def map(self, external_port: int, lifetime_s: int = LIFETIME_S) -> Mapping:
        """Make the mapping, renew it, or with a lifetime of 0 remove it; raises `MappingRefused`."""
        if self._uses_pcp:
            body = pcp_request(self.nonce, self.own_ip, self.port, external_port, lifetime_s)
            try:
                return await request(self.gateway, body, self._pcp_answer, self.server_port)
            except OnlyNatPmp:
                self._uses_pcp = False
        ip = await request(self.gateway, bytes([0, _PMP_ADDRESS]), pmp_address, self.server_port)
        body = pmp_request(self.port, external_port, lifetime_s)
        external, granted_s = await request(self.gateway, body, self._pmp_answer, self.server_port)
        return Mapping("NAT-PMP", ip, external, granted_s)

    def _pcp_answer(self, data: bytes) -> Mapping | None:
        return pcp_answer(data, self.nonce, self.port)

    def _pmp_answer(self, data: bytes) -> tuple[int, int] | None:
        return pmp_answer(data, self.port)


def _as_ipv6(ip: str) -> bytes:
    address = ipaddress.ip_address(ip)
    return address.packed if address.version == 6 else b"\0" * 10 + b"\xff\xff" + address.packed

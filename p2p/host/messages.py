"""Messages of libp2p's own protocols on a stream: a varint length, then the bytes; and libp2p's binary addresses.

The messages themselves are defined by the module of each protocol, and encoded by `p2p.protobuf`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Protocol, Self, TypeVar

from p2p.addresses import MAX_ADDRESS_CHARS, MAX_ADDRESSES_PER_PEER, Address, BadAddress, Scope, parse_address
from p2p.channel.multistream import NegotiationStream, read_exactly, read_some
from p2p.errors import IdentityError, ProtocolError, StreamClosed
from p2p.identity import peer_id_bytes, peer_id_from_bytes
from p2p.protobuf import varint

MAX_MESSAGE_BYTES = 8192
_MAX_VARINT_BYTES = 4
_HOST_CODES = {"ip4": 4, "ip6": 41, "dns": 53, "dns4": 54, "dns6": 55}
_HOST_KINDS = {code: kind for kind, code in _HOST_CODES.items()}
_TCP, _CIRCUIT, _P2P = 6, 290, 421
_IP_BYTES = {"ip4": 4, "ip6": 16}
_MAX_PARTS, _PEER_PLACES = 5, (2, 4)  # host, port, relay or peer, circuit, peer; to write an id as text takes longest


class WireMessage(Protocol):
    """A message of one of libp2p's protocols; `decode` raises `ProtocolError` for any other bytes."""

    def encode(self) -> bytes: ...
    @classmethod
    def decode(cls, body: bytes) -> Self: ...


M = TypeVar("M", bound=WireMessage)


async def send_message(stream: Any, message: WireMessage) -> None:
    """Write one message with its length; it must not exceed `MAX_MESSAGE_BYTES`."""
    body = message.encode()
    assert len(body) <= MAX_MESSAGE_BYTES
    await send_bytes(stream, body)


async def receive_message(stream: NegotiationStream, kind: type[M]) -> M:
    """Read one message; raises `ProtocolError` if it is too long or not of this kind."""
    body = await receive_bytes(stream, MAX_MESSAGE_BYTES)
    if body is None:
        raise StreamClosed(f"the stream ended without a {kind.__name__}")
    return kind.decode(body)


async def send_bytes(stream: Any, body: bytes) -> None:
    """Write the length of `body` and `body`."""
    await stream.write(varint(len(body)) + body)


async def receive_bytes(stream: NegotiationStream, at_most: int) -> bytes | None:
    """Read a length and as many bytes; None if the stream has ended. Raises `ProtocolError` if there are too many."""
    length = shift = 0
    while True:
        byte = await read_some(stream, 1) if shift == 0 else await read_exactly(stream, 1)
        if not byte:
            return None
        length |= (byte[0] & 127) << shift
        if byte[0] < 128:
            break
        shift += 7
        if shift >= 7 * _MAX_VARINT_BYTES:
            raise ProtocolError("a message announces more bytes than any may have")
    if length > at_most:
        raise ProtocolError(f"a message has {length} bytes; at most {at_most} are accepted")
    return await read_exactly(stream, length)


def address_bytes(address: Address) -> bytes:
    """Encode an address in libp2p's binary form; raises `BadAddress` if it names a peer that is not a peer id."""
    encoded = bytearray(varint(_HOST_CODES[address.kind]))
    if address.kind in _IP_BYTES:
        encoded += ipaddress.ip_address(address.host).packed
    else:
        encoded += _prefixed(address.host.encode())
    encoded += varint(_TCP) + address.port.to_bytes(2)
    try:
        if address.relay is not None:
            encoded += varint(_P2P) + _prefixed(peer_id_bytes(address.relay)) + varint(_CIRCUIT)
        if address.peer is not None:
            encoded += varint(_P2P) + _prefixed(peer_id_bytes(address.peer))
    except IdentityError as error:
        raise BadAddress(f"{address}: {error}") from None
    return bytes(encoded)


def address_from_bytes(data: bytes) -> Address:
    """Decode an address from libp2p's binary form; raises `BadAddress` for any that this node cannot dial."""
    if len(data) > MAX_ADDRESS_CHARS:
        raise BadAddress(f"a binary address of {len(data)} bytes is too long")
    match list(_Parts(data)):
        case [(kind, host), ("tcp", port), *path]:
            direct = parse_address(f"/{kind}/{host}/tcp/{port}")
            match path:  # of peer ids that were checked when they were read: to do so again takes longer than all else
                case []:
                    return direct
                case [("p2p", peer)]:
                    return direct.of(peer)
                case [("p2p", relay), ("p2p-circuit", _)]:
                    return direct.of(relay).through(None)
                case [("p2p", relay), ("p2p-circuit", _), ("p2p", peer)]:
                    return direct.of(relay).through(peer)
    raise BadAddress("a binary address is not a host and a TCP port, directly or through a relay")


def addresses_from_bytes(
    encoded: Sequence[bytes], peer: str, at_most: int = MAX_ADDRESSES_PER_PEER
) -> tuple[Address, ...]:
    """Decode the addresses that a message gives for `peer`, so many at most; others than usable ones are left out.

    Of those that this node could read only twice as many are looked at, as each takes tens of microseconds.
    """
    found: dict[Address, None] = {}
    tried = 0
    for data in encoded[: 4 * at_most]:
        if len(found) >= at_most or tried >= 2 * at_most:
            break
        if len(data) > MAX_ADDRESS_CHARS:
            continue  # and would be kept by `_usable_address`, which remembers what it was asked for
        tried += 1
        if (address := _usable_address(data, peer)) is not None:
            found[address] = None
    return tuple(found)


@lru_cache(maxsize=8192)  # the same few addresses are in most answers of the directory
def _usable_address(data: bytes, peer: str) -> Address | None:
    try:
        address = address_from_bytes(data)
    except BadAddress:
        return None
    is_usable = address.peer in (None, peer) and address.scope is not Scope.UNUSABLE and address.port
    return address.of(peer) if is_usable else None


def _prefixed(data: bytes) -> bytes:
    return varint(len(data)) + data


class _Parts:
    """Reads the parts of a binary address one by one: the kind of each, and its value as text."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __iter__(self) -> Iterator[tuple[str, str]]:
        for place in range(_MAX_PARTS + 1):
            if self._at < len(self._data):
                yield self._next(place)

    def _next(self, place: int) -> tuple[str, str]:
        code = self._varint()
        if code == _TCP:
            return "tcp", str(int.from_bytes(self._take(2)))
        if code == _CIRCUIT:
            return "p2p-circuit", ""
        if code == _P2P and place in _PEER_PLACES:
            try:
                return "p2p", peer_id_from_bytes(self._take(self._varint()))
            except IdentityError as error:
                raise BadAddress(f"a binary address has a bad part: {error}") from None
        kind = _HOST_KINDS.get(code)
        if kind is None:
            raise BadAddress(f"a binary address has a part of the unsupported kind {code}")
        if kind in _IP_BYTES:
            return kind, str(ipaddress.ip_address(self._take(_IP_BYTES[kind])))
        return kind, self._take(self._varint()).decode("ascii", "replace")

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 7 * _MAX_VARINT_BYTES, 7):
            byte = self._take(1)[0]
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise BadAddress("a binary address has a number that is too long")

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise BadAddress("a binary address ends too early")
        taken, self._at = self._data[self._at : end], end
        return taken

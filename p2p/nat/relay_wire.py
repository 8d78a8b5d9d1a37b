"""The messages of circuit relay v2 as bytes: libp2p's protobuf, which js-libp2p, py-libp2p and others speak as well.

A peer that wants a reservation, or a circuit to another peer, speaks `hop` with the relay. The relay speaks `stop` with
the peer at the other end of a circuit. After an `OK` to a CONNECT, the stream carries the bytes of the circuit.

| field of `hop` | field of `stop` | type | meaning |
|---|---|---|---|
| 1 `type` | 1 `type` | enum | hop: 0 RESERVE, 1 CONNECT, 2 STATUS; stop: 0 CONNECT, 1 STATUS |
| 2 `peer` | 2 `peer` | message | the other end of a circuit: 1 `id`, a binary peer id |
| 3 `reservation` | | message | 1 `expire` in Unix seconds, 2 `addrs` of the relay (binary multiaddrs) |
| 4 `limit` | 3 `limit` | message | of a circuit: 1 `duration` in seconds, 2 `data` in bytes |
| 5 `status` | 4 `status` | enum | of an answer, see `Status` |

Other fields are ignored. No sockets, no tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Self

from p2p.errors import IdentityError, ProtocolError
from p2p.identity import peer_id_bytes, peer_id_from_bytes
from p2p.protobuf import Fields, encode

HOP = "/libp2p/circuit/relay/0.2.0/hop"
STOP = "/libp2p/circuit/relay/0.2.0/stop"
_MESSAGE = "a relay's message"


class HopType(IntEnum):
    """The types of messages between a relay and a peer that asks for something."""

    RESERVE = 0
    CONNECT = 1
    STATUS = 2


class StopType(IntEnum):
    """The types of messages between a relay and the peer that a circuit leads to."""

    CONNECT = 0
    STATUS = 1


class Status(IntEnum):
    """A relay's answers; `UNUSED` stands for an answer without a status, and for one that is not listed here."""

    UNUSED = 0
    OK = 100
    RESERVATION_REFUSED = 200
    RESOURCE_LIMIT_EXCEEDED = 201
    PERMISSION_DENIED = 202
    CONNECTION_FAILED = 203
    NO_RESERVATION = 204
    MALFORMED_MESSAGE = 400
    UNEXPECTED_MESSAGE = 401


@dataclass(frozen=True)
class Limit:
    """How long a circuit may last, and how many bytes it may carry."""

    duration_s: int
    data_bytes: int

    def encode(self) -> bytes:
        """Return the limit's bytes."""
        return encode((1, self.duration_s), (2, self.data_bytes))


@dataclass(frozen=True)
class Reservation:
    """A place at a relay: its expiry in Unix seconds, and the relay's addresses in binary."""

    expires_at: int
    addresses: tuple[bytes, ...] = ()

    def encode(self) -> bytes:
        """Return the reservation's bytes."""
        return encode((1, self.expires_at), (2, self.addresses))


@dataclass(frozen=True)
class HopMessage:
    """A request to a relay, or its answer."""

    type: HopType
    peer: str | None = None
    reservation: Reservation | None = None
    limit: Limit | None = None
    status: Status = Status.UNUSED

    def encode(self) -> bytes:
        """Return the message's bytes."""
        return encode(
            (1, self.type),
            (2, _peer_bytes(self.peer)),
            (3, _part_bytes(self.reservation)),
            (4, _part_bytes(self.limit)),
            (5, self.status or None),
        )

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Parse a message; raises `ProtocolError` if it is malformed, or of an unknown type."""
        fields = Fields(body)
        place = fields.message(3)
        reservation = None if place is None else Reservation(place.number(1), tuple(place.repeated(2)))
        kind = fields.type(1, HopType, _MESSAGE)
        return cls(kind, _peer(fields), reservation, _limit(fields, 4), _status(fields, 5))


@dataclass(frozen=True)
class StopMessage:
    """A relay's request to accept a circuit, or the answer to it."""

    type: StopType
    peer: str | None = None
    limit: Limit | None = None
    status: Status = Status.UNUSED

    def encode(self) -> bytes:
        """Return the message's bytes."""
        limit, status = _part_bytes(self.limit), self.status or None
        return encode((1, self.type), (2, _peer_bytes(self.peer)), (3, limit), (4, status))

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Parse a message; raises `ProtocolError` if it is malformed, or of an unknown type."""
        fields = Fields(body)
        kind = fields.type(1, StopType, _MESSAGE)
        return cls(kind, _peer(fields), _limit(fields, 3), _status(fields, 4))


def _part_bytes(part: Limit | Reservation | None) -> bytes | None:
    return None if part is None else part.encode()


def _peer_bytes(peer: str | None) -> bytes | None:
    return None if peer is None else encode((1, peer_id_bytes(peer)))


def _peer(fields: Fields) -> str | None:
    peer = fields.message(2)
    if peer is None or not peer.data(1):
        return None
    try:
        return peer_id_from_bytes(peer.data(1))
    except IdentityError as error:
        raise ProtocolError(f"{_MESSAGE} has no valid peer id: {error}") from None


def _limit(fields: Fields, number: int) -> Limit | None:
    limit = fields.message(number)
    return None if limit is None else Limit(limit.number(1), limit.number(2))


def _status(fields: Fields, number: int) -> Status:
    try:
        return Status(fields.number(number))
    except ValueError:
        return Status.UNUSED

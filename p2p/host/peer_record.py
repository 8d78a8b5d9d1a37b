"""libp2p's signed peer records: a peer's own list of its addresses, which anybody can pass on and nobody can change.

A record is a protobuf message: 1 `peer_id`, 2 `seq` (a later record has a higher one), 3 `addresses`, each with 1
`multiaddr`. It is sent in an envelope: 1 `public_key` (libp2p's message of the key), 2 `payload_type` (`0x03 0x01`), 3
`payload`, 5 `signature`. Signed are the domain `libp2p-peer-record`, the payload type and the payload, each after its
length as a varint. Only Ed25519 keys are understood; records of peers with other keys count as absent.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from p2p.addresses import MAX_ADDRESSES_PER_PEER, Address
from p2p.envelope import CLOCK_TOLERANCE_MS
from p2p.envelope import Sequence as Numbers
from p2p.errors import IdentityError, ProtocolError
from p2p.host.messages import address_bytes, addresses_from_bytes
from p2p.identity import Identity, is_signed, key_in_message, key_message, peer_id_bytes, peer_id_from_bytes, peer_id_of
from p2p.protobuf import Fields, encode, varint

MAX_RECORD_BYTES = 1024  # of an envelope
_DOMAIN = b"libp2p-peer-record"
_TYPE = b"\x03\x01"
_ENVELOPE_BYTES = 160  # at most, beside the addresses
_NS_PER_MS = 10**6


@dataclass(frozen=True)
class PeerRecord:
    """The addresses that a peer signed, and the number of the record: the signer's clock in nanoseconds."""

    peer: str
    sequence: int
    addresses: tuple[Address, ...]

    @property
    def is_from_the_future(self) -> bool:
        """True if the signer's clock was ahead of this one by more than two nodes' clocks may differ."""
        return self.sequence > (_clock_ms() + CLOCK_TOLERANCE_MS) * _NS_PER_MS


def seal(identity: Identity, addresses: Sequence[Address], sequence: int) -> bytes:
    """Return the envelope of a record with as many of `addresses`, in their order, as `MAX_RECORD_BYTES` allows."""
    infos: list[bytes] = []
    for address in addresses[:MAX_ADDRESSES_PER_PEER]:
        info = encode((1, address_bytes(address.of(None))))
        if _ENVELOPE_BYTES + sum(len(other) + 2 for other in (*infos, info)) <= MAX_RECORD_BYTES:
            infos.append(info)
    payload = encode((1, peer_id_bytes(identity.peer_id)), (2, sequence), (3, infos))
    signature = identity.sign(_signed_bytes(payload))
    return encode((1, key_message(identity.public_key)), (2, _TYPE), (3, payload), (5, signature))


def open_record(raw: bytes, peer: str) -> PeerRecord | None:
    """Return the record in an envelope that `peer` signed; None for any other bytes."""
    return _opened(raw, peer) if 0 < len(raw) <= MAX_RECORD_BYTES else None


class RecordSigner:
    """Signs records of this node's addresses; the same addresses give the same record, others a higher sequence.

    After the clock was far ahead, it begins anew: nobody has kept a record of that time.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._addresses: tuple[Address, ...] = ()
        self._numbers = Numbers()
        self._record = b""

    def record(self, addresses: Sequence[Address]) -> bytes:
        """Return the envelope of a record of `addresses`; empty if there are none."""
        now_ms = _clock_ms()
        if tuple(addresses) != self._addresses or self._numbers.last > now_ms + CLOCK_TOLERANCE_MS:
            self._addresses = tuple(addresses)
            sequence = self._numbers.next(now_ms) * _NS_PER_MS
            self._record = seal(self._identity, self._addresses, sequence) if addresses else b""
        return self._record


@lru_cache(maxsize=2048)  # the same few records are in most answers of the directory
def _opened(raw: bytes, peer: str) -> PeerRecord | None:
    try:
        envelope = Fields(raw)
        payload, key = envelope.data(3), key_in_message(envelope.data(1))
        if key is None or peer_id_of(key) != peer or envelope.data(2) != _TYPE:
            return None
        if not is_signed(key, _signed_bytes(payload), envelope.data(5)):
            return None
        record = Fields(payload)
        if peer_id_from_bytes(record.data(1)) != peer:
            return None
        encoded = [Fields(info).data(1) for info in record.repeated(3)]
    except (ProtocolError, IdentityError):
        return None
    return PeerRecord(peer, record.number(2), addresses_from_bytes(encoded, peer))


def _signed_bytes(payload: bytes) -> bytes:
    return b"".join(varint(len(part)) + part for part in (_DOMAIN, _TYPE, payload))


def _clock_ms() -> int:
    return time.time_ns() // _NS_PER_MS

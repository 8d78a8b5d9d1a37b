"""The directory's messages as bytes: libp2p's Kademlia protobuf, which js-libp2p, py-libp2p and others speak as well.

The protocol is `/shoal/kad/1.0.0`; `/ipfs/kad/1.0.0`, of which Shoal is a client only, has the same messages. A stream
carries requests and answers in turn, each a varint length and one `Message`. A request has at most 64 KiB here, an
answer at most 256 KiB.

| field | type | meaning |
|---|---|---|
| 1 `type` | enum | 0 PUT_VALUE, 1 GET_VALUE, 2 ADD_PROVIDER, 3 GET_PROVIDERS, 4 FIND_NODE, 5 PING |
| 2 `key` | bytes, 1 to 128 | the multihash of a CID, the path of a value, or a peer id in binary; not in every answer |
| 3 `record` | message | PUT_VALUE and answers to GET_VALUE: 1 `key`, 2 `value` of at most 16 KiB, 5 `timeReceived` |
| 8 `closerPeers` | messages | answers: up to 20 peers near the key: 1 `id`, 2 `addrs`, 4 `signedRecord` |
| 9 `providerPeers` | messages | ADD_PROVIDER: the sender; answers to GET_PROVIDERS: up to 32 providers |
| 11 `senderRecord` | bytes | FIND_NODE: the sender's signed record; py-libp2p sends it in every message |

`addrs` are multiaddrs, of which the first 8 that can be dialled are kept here.
Both kinds of signed records are those of `p2p.host.peer_record`, of at most 1 KiB; they may be absent. Other fields are
ignored. A key's position is the SHA-256 of its bytes, a peer's that of its binary peer id, and the
distance of two positions is their XOR. Shoal's keys have 32 bytes: as a provider's key such a key is the SHA-256 digest
of a multihash (`0x12 0x20` and the key), as a value's key the path `/shoal/` and the key in
base64url, 50 bytes together, since py-libp2p looks nothing longer up.

A node records a provider only if it is the sender itself, and repeats `type` and `key` as an answer; other
implementations answer an ADD_PROVIDER with the end of the stream. PUT_VALUE is answered with the same message. A
request that is refused is answered with a reset of the stream. A node with several values under one key answers with
one of them, chosen at random, so that those who ask several nodes learn of all. No sockets, no tables.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import IntEnum
from functools import lru_cache

from p2p.addresses import MAX_ADDRESSES_PER_PEER, Address
from p2p.errors import IdentityError, ProtocolError
from p2p.host.messages import address_bytes, addresses_from_bytes
from p2p.host.peer_record import MAX_RECORD_BYTES
from p2p.identity import peer_id_bytes, peer_id_from_bytes
from p2p.protobuf import Fields, encode

KEY_BYTES = 32
MAX_KEY_BYTES = 128
MAX_VALUE_BYTES = 16 * 1024
MAX_VALUES = 4
MAX_PEERS = 20
MAX_PROVIDERS = 32
MAX_ADDRESSES = 8  # of a contact, of which twice as many are looked at
MAX_REQUEST_BYTES = 64 * 1024
MAX_ANSWER_BYTES = 256 * 1024
_SHA256 = b"\x12\x20"
_VALUE_PREFIX = b"/shoal/"
_KEPT_BYTES = 1024  # of a contact whose decoded form is kept: some addresses and a record


class Op(IntEnum):
    """The types of messages."""

    PUT_VALUE = 0
    GET_VALUE = 1
    ADD_PROVIDER = 2
    GET_PROVIDERS = 3
    FIND_NODE = 4
    PING = 5


@dataclass(frozen=True)
class Contact:
    """A peer, the addresses at which it can be dialled, and its signed record of them, if known."""

    peer: str
    addresses: tuple[Address, ...] = ()
    record: bytes = b""  # see `p2p.host.peer_record`; not verified here


@dataclass(frozen=True)
class Message:
    """A request, or the answer to one."""

    op: Op
    key: bytes = b""
    closer: tuple[Contact, ...] = ()
    providers: tuple[Contact, ...] = ()
    value: bytes | None = None
    sender: bytes = b""  # the sender's signed record

    def encode(self) -> bytes:
        """Return the message's bytes; a record is marked as received now, which other implementations require."""
        record = None
        if self.value is not None:
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            record = encode((1, self.key or None), (2, self.value or None), (5, now))
        return encode(
            (1, self.op or None),  # the version of protobuf that Kademlia uses leaves zeros and empty bytes out
            (2, self.key or None),
            (3, record),
            (8, [_contact_bytes(contact) for contact in self.closer]),
            (9, [_contact_bytes(contact) for contact in self.providers]),
            (11, self.sender or None),
        )


@dataclass(frozen=True)
class Answer:
    """An answer whose contacts are as they came: to decode one and open its record takes up to a millisecond."""

    message: Message
    closer: list[bytes]
    providers: list[bytes]


def decode(body: bytes) -> Message:
    """Parse an answer, dropping malformed contacts and addresses; raises `ProtocolError` if the rest is malformed."""
    answer = decode_answer(body)
    return replace(answer.message, closer=_contacts(answer.closer), providers=_contacts(answer.providers))


def decode_answer(body: bytes) -> Answer:
    """Parse an answer, but none of its contacts; raises `ProtocolError` if it is malformed."""
    fields, message = _plain(body, MAX_ANSWER_BYTES)
    return Answer(message, fields.repeated(8)[:MAX_PEERS], fields.repeated(9)[:MAX_PROVIDERS])


def decode_contact(entry: bytes) -> Contact | None:
    """Parse one contact, dropping malformed addresses; None if it names no peer."""
    return _decoded(entry) if len(entry) <= _KEPT_BYTES else _contact(entry)


def decode_request(body: bytes, peer: str) -> Message:
    """Parse a request of `peer`; raises `ProtocolError` if it is malformed.

    Of all contacts only what a provider says of itself is read: nothing else counts, and dozens of contacts with dozens
    of addresses would take the time of thousands of requests.
    """
    fields, message = _plain(body, MAX_REQUEST_BYTES)
    if message.op is not Op.ADD_PROVIDER:
        return message
    own_id = peer_id_bytes(peer)
    own = [entry for entry in fields.repeated(9)[:MAX_PROVIDERS] if Fields(entry).data(1) == own_id]
    return replace(message, providers=_contacts(own[:1]))


def _plain(body: bytes, at_most: int) -> tuple[Fields, Message]:
    """Parse a message without its contacts."""
    if len(body) > at_most:
        raise ProtocolError(f"a directory message has {len(body)} bytes; at most {at_most} are accepted")
    fields = Fields(body)
    op = fields.type(1, Op, "a directory message")
    key, record, value = fields.data(2), fields.message(3), None
    if len(key) > MAX_KEY_BYTES:
        raise ProtocolError(f"a directory key has {len(key)} bytes; at most {MAX_KEY_BYTES} are accepted")
    if op in (Op.PUT_VALUE, Op.GET_VALUE) and record is not None:
        value = record.data(2)
        if key and record.data(1) != key:
            raise ProtocolError("a directory record belongs to another key than its message")
        if len(value) > MAX_VALUE_BYTES:
            raise ProtocolError(f"a directory value has {len(value)} bytes; at most {MAX_VALUE_BYTES} are accepted")
    return fields, Message(op, key, value=value, sender=_record(fields.data(11)))


def provider_key(key: bytes) -> bytes:
    """Return the multihash under which providers of a 32-byte key are recorded."""
    assert len(key) == KEY_BYTES
    return _SHA256 + key


def value_key(key: bytes) -> bytes:
    """Return the path under which values of a 32-byte key are stored."""
    assert len(key) == KEY_BYTES
    return _VALUE_PREFIX + base64.urlsafe_b64encode(key).rstrip(b"=")


def key_of_value(path: bytes) -> bytes | None:
    """Return the 32-byte key in a value's path; None for any other path, whose values nobody here can check."""
    try:
        key = base64.urlsafe_b64decode(path.removeprefix(_VALUE_PREFIX) + b"=")
    except ValueError:
        return None
    return key if len(key) == KEY_BYTES and value_key(key) == path else None


@lru_cache(maxsize=2048)  # the same few contacts are in most answers
def _contact_bytes(contact: Contact) -> bytes:
    addresses = [address_bytes(address.of(None)) for address in contact.addresses[:MAX_ADDRESSES_PER_PEER]]
    return encode((1, peer_id_bytes(contact.peer)), (2, addresses), (4, contact.record or None))


def _contacts(entries: Iterable[bytes]) -> tuple[Contact, ...]:
    decoded = map(decode_contact, entries)
    return tuple({contact.peer: contact for contact in decoded if contact is not None}.values())


def _contact(entry: bytes) -> Contact | None:
    fields = Fields(entry)
    try:
        peer = peer_id_from_bytes(fields.data(1))
    except IdentityError:
        return None
    return Contact(peer, addresses_from_bytes(fields.repeated(2), peer, MAX_ADDRESSES), _record(fields.data(4)))


_decoded = lru_cache(maxsize=2048)(_contact)  # the same few contacts are in most answers


def _record(data: bytes) -> bytes:
    return data if len(data) <= MAX_RECORD_BYTES else b""

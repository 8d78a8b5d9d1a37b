"""Our messages of libp2p's protocols are byte for byte those of py-libp2p, and whatever a peer sends is read alike."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import X25519PublicKey
from libp2p.kad_dht.pb import kademlia_pb2
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb import circuit_pb2, dcutr_pb2
from libp2p.security.noise.messages import NoiseHandshakePayload, make_handshake_payload_sig

from p2p.addresses import parse_address
from p2p.channel.noise_handshake import proven_peer, signed_payload
from p2p.dht import wire
from p2p.errors import HandshakeError, IdentityError, ProtocolError
from p2p.host.messages import address_bytes
from p2p.identity import Identity, peer_id_of
from p2p.nat.hole_punching import HolePunch, PunchType
from p2p.nat.relay_wire import HopMessage, HopType, Limit, Reservation, Status, StopMessage, StopType
from p2p.protobuf import MAX_FIELDS, Fields, encode, varint
from tests.p2p.channels import transport

PEER = peer_id_of(bytes(range(32)))
RAW_PEER = ID.from_base58(PEER).to_bytes()
PLACES = tuple(
    address_bytes(parse_address(text)) for text in ("/ip4/8.8.8.8/tcp/7464", "/ip6/2606:4700::1/tcp/1", "/dns/a/tcp/2")
)

NUMBERS = st.one_of(st.integers(0, 300), st.integers(0, 2**64 - 1))
HOP_TYPES, STOP_TYPES, STATUSES = st.sampled_from(HopType), st.sampled_from(StopType), st.sampled_from(Status)
LIMITS = st.none() | st.builds(Limit, st.integers(0, 2**32 - 1), NUMBERS)
RESERVATIONS = st.none() | st.builds(Reservation, NUMBERS, st.lists(st.binary(max_size=9)).map(tuple))
PEERS = st.none() | st.binary(min_size=32, max_size=32).map(peer_id_of)


def fill(theirs: Any, ours: HopMessage | StopMessage) -> bytes:
    """The message as py-libp2p encodes it."""
    if ours.peer is not None:
        theirs.peer.id = ID.from_base58(ours.peer).to_bytes()
    if ours.limit is not None:
        theirs.limit.duration, theirs.limit.data = ours.limit.duration_s, ours.limit.data_bytes
    if ours.status is not Status.UNUSED:
        theirs.status = int(ours.status)
    if isinstance(ours, HopMessage) and ours.reservation is not None:
        theirs.reservation.expire = ours.reservation.expires_at
        theirs.reservation.addrs.extend(ours.reservation.addresses)
    return bytes(theirs.SerializeToString())


@given(st.builds(HopMessage, HOP_TYPES, PEERS, RESERVATIONS, LIMITS, STATUSES))
def test_messages_to_a_relay(message: HopMessage) -> None:
    kind: Any = int(message.type)
    raw = fill(circuit_pb2.HopMessage(type=kind), message)
    assert message.encode() == raw
    assert HopMessage.decode(raw) == message


@given(st.builds(StopMessage, STOP_TYPES, PEERS, LIMITS, STATUSES))
def test_messages_of_a_relay(message: StopMessage) -> None:
    kind: Any = int(message.type)
    raw = fill(circuit_pb2.StopMessage(type=kind), message)
    assert message.encode() == raw
    assert StopMessage.decode(raw) == message


@pytest.mark.parametrize("kind", [HopMessage, StopMessage])
def test_a_relays_odd_answers(kind: Any) -> None:
    status = 5 if kind is HopMessage else 4
    assert kind.decode(b"").status is Status.UNUSED  # all fields are optional; the type is the first one
    assert kind.decode(encode((status, 999))).status is Status.UNUSED
    assert kind.decode(encode((2, b""))).peer is None
    assert kind.decode(encode((status, 100), (77, 1), (78, b"later version"))).status is Status.OK
    for bad in (encode((1, 3)), encode((1, 2**32)), encode((2, b"\0")), encode((2, encode((1, b"\0" * 38))))):
        with pytest.raises(ProtocolError):
            kind.decode(bad)


@pytest.mark.parametrize(("kind", "name"), [(PunchType.CONNECT, "CONNECT"), (PunchType.SYNC, "SYNC")])
@given(places=st.lists(st.sampled_from(PLACES), max_size=6).map(tuple))
def test_messages_of_hole_punching(kind: PunchType, name: Any, places: tuple[bytes, ...]) -> None:
    raw = dcutr_pb2.HolePunch(type=name, ObsAddrs=places).SerializeToString()
    assert HolePunch(kind, places).encode() == raw
    assert HolePunch.decode(raw) == HolePunch(kind, places)


def test_hole_punching_reads_few_addresses_and_two_types() -> None:
    assert len(HolePunch.decode(HolePunch(PunchType.CONNECT, PLACES * 9).encode()).addresses) == 6
    for bad in (b"", encode((1, 0)), encode((1, 101)), encode((2, PLACES))):
        with pytest.raises(ProtocolError):
            HolePunch.decode(bad)


@given(
    st.sampled_from(wire.Op),
    st.binary(max_size=60),
    st.lists(st.sampled_from([PEER, peer_id_of(bytes(32))]), max_size=3),
    st.none() | st.binary(max_size=30),
)
def test_messages_of_the_directory(op: wire.Op, key: bytes, peers: list[str], value: bytes | None) -> None:
    contacts = tuple(wire.Contact(peer, (parse_address("/ip4/8.8.8.8/tcp/7464").of(peer),)) for peer in peers)
    ours = wire.Message(op, key, contacts[:2], contacts[1:], value).encode()
    theirs = kademlia_pb2.Message(type=op.name, key=key)
    for field, entries in ((theirs.closerPeers, contacts[:2]), (theirs.providerPeers, contacts[1:])):
        for contact in entries:
            field.add(id=ID.from_base58(contact.peer).to_bytes(), addrs=[PLACES[0]])
    if value is not None:
        stamp = kademlia_pb2.Message.FromString(ours).record.timeReceived
        assert datetime.fromisoformat(stamp).tzinfo is not None
        theirs.record.key, theirs.record.value, theirs.record.timeReceived = key, value, stamp
    assert ours == theirs.SerializeToString()


@given(st.binary(min_size=32, max_size=32))
def test_the_payload_of_a_handshake(seed: bytes) -> None:
    identity = Identity(seed)
    noise_key = transport(identity)._noise_key
    public = X25519PublicKey(noise_key.public_key())
    keys = create_new_key_pair(seed)
    theirs = NoiseHandshakePayload(keys.public_key, make_handshake_payload_sig(keys.private_key, public)).serialize()
    assert signed_payload(identity, noise_key) == theirs
    # Other implementations add extensions.
    extended = theirs + encode((4, encode((2, "/yamux/1.0.0"))))
    assert proven_peer(extended, public.to_bytes(), accepts_rsa=False) == identity.peer_id


@given(st.binary(max_size=200))
def test_no_payload_proves_anything_by_chance(payload: bytes) -> None:
    for accepts_rsa in (False, True):
        with pytest.raises(HandshakeError):
            proven_peer(payload, bytes(32), accepts_rsa=accepts_rsa)


# --- the encoding itself ---------------------------------------------------------------------------------------------


def read_by_theirs(raw: bytes) -> tuple[int, list[bytes], bytes] | None:
    """The three fields of a reservation, read by the protobuf package; None if it refuses them."""
    message = circuit_pb2.Reservation()
    try:
        message.ParseFromString(raw)
    except DecodeError:
        return None
    return message.expire, list(message.addrs), message.voucher


def read_by_ours(raw: bytes) -> tuple[int, list[bytes], bytes] | None:
    try:
        fields = Fields(raw)
    except ProtocolError:
        return None
    return fields.number(1), fields.repeated(2), fields.data(3)


def one_field(number: int, kind: int, value: int, data: bytes) -> bytes:
    bodies = {0: varint(value), 1: value.to_bytes(8), 2: varint(len(data)) + data, 5: value.to_bytes(8)[:4]}
    return varint(number << 3 | kind) + bodies[kind]


FIELDS = st.builds(one_field, st.integers(1, 5), st.sampled_from([0, 1, 2, 5]), NUMBERS, st.binary(max_size=20))


@given(st.lists(FIELDS, max_size=8).map(b"".join), st.integers(0, 200))
def test_fields_are_read_as_the_protobuf_package_reads_them(raw: bytes, cut: int) -> None:
    assert read_by_ours(raw) == read_by_theirs(raw) is not None
    assert read_by_ours(raw[:cut]) == read_by_theirs(raw[:cut])


@given(st.binary(max_size=40))
def test_arbitrary_bytes_are_refused_or_read_alike(raw: bytes) -> None:
    ours = read_by_ours(raw)
    assert ours is None or ours == read_by_theirs(raw)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\x01",
        b"\x08",
        b"\x08" + b"\xff" * 10 + b"\x01",
        b"\x08" + b"\xff" * 9 + b"\x02",
        b"\x12\x05abc",
        b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x0d\x01\x02",
        b"\x0b\x0c",
        b"\x0e",
        b"\xff\xff\xff\xff\xff\x01\x00",
        b"\x88\x80\x80\x80\x80\x00\x01",
    ],
    ids="number 0,cut off,11 bytes,65 bits,too short,too long,cut fixed,group,kind 6,long number,long tag".split(","),
)
def test_malformed_messages_are_refused(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        Fields(raw)


def test_a_message_given_twice_is_joined() -> None:
    joined = Fields(encode((3, encode((1, 7))), (3, encode((2, b"two"))))).message(3)
    assert joined is not None
    assert (joined.number(1), joined.data(2)) == (7, b"two")
    assert Fields(b"").message(3) is None


def test_many_tiny_fields_take_little_time() -> None:
    assert len(Fields(b"\x12\x00" * MAX_FIELDS).repeated(2)) == MAX_FIELDS
    began = time.process_time()
    with pytest.raises(ProtocolError, match="too many fields"):
        Fields(b"\x12\x00" * 2**17)
    crowded = wire.MAX_PEERS * [(8, b"\x12\x00" * MAX_FIELDS)] + wire.MAX_PROVIDERS * [(9, b"\x12\x00" * MAX_FIELDS)]
    wire.decode(encode((1, 4), *crowded))
    assert time.process_time() - began < 1


def test_a_peer_id_that_is_none_cannot_be_sent() -> None:
    with pytest.raises(IdentityError):
        HopMessage(HopType.CONNECT, "nobody").encode()
    assert HopMessage(HopType.CONNECT, PEER).encode() == b"\x08\x01\x12\x28\x0a\x26" + RAW_PEER

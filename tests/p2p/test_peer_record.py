"""Signed peer records: the bytes of py-libp2p's own encoder, forgeries, and what a node does with them."""

from __future__ import annotations

import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from libp2p.crypto.ed25519 import create_new_key_pair as ed25519_keys
from libp2p.crypto.rsa import create_new_key_pair as rsa_keys
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.peer.envelope import consume_envelope, seal_record
from libp2p.peer.id import ID
from libp2p.peer.peer_record import PeerRecord as TheirRecord
from multiaddr import Multiaddr

from p2p.addresses import MAX_ADDRESSES_PER_PEER, Address, parse_address
from p2p.dht.host_view import learn
from p2p.dht.wire import MAX_PEERS, MAX_PROVIDERS, MAX_REQUEST_BYTES, Contact, Message, Op, decode
from p2p.envelope import CLOCK_TOLERANCE_MS
from p2p.host import peer_record
from p2p.host.address_book import AddressBook
from p2p.host.identify import IDENTIFY
from p2p.host.messages import receive_bytes
from p2p.host.peer_record import MAX_RECORD_BYTES, PeerRecord, RecordSigner, open_record, seal
from p2p.identity import Identity, key_message, peer_id_of, peer_id_of_message
from p2p.protobuf import Fields, encode
from tests.p2p.nodes import make_host, make_network, until
from tests.p2p.test_host import running

ALICE, MALLORY = Identity(b"a" * 32), Identity(b"m" * 32)
RELAY = peer_id_of(bytes(31) + b"\1")
PLACES = [
    parse_address(text)
    for text in (
        "/ip4/5.5.2.1/tcp/7464",
        "/ip6/2606:4700::1/tcp/1",
        "/dns4/example.org/tcp/443",
        f"/ip4/5.5.5.1/tcp/7464/p2p/{RELAY}/p2p-circuit",
    )
]


def theirs(identity: Identity, addresses: list[Address], sequence: int) -> bytes:
    """The same record as py-libp2p makes it."""
    record = TheirRecord(ID.from_string(identity.peer_id), [Multiaddr(str(address)) for address in addresses], sequence)
    return seal_record(record, ed25519_keys(identity.seed).private_key).marshal_envelope()


@pytest.mark.parametrize("addresses", [[], PLACES[:1], PLACES])
@pytest.mark.parametrize("sequence", [1, 127, 128, 1_800_000_000_000_000_000, 2**64 - 1])
def test_the_bytes_are_py_libp2ps(addresses: list[Address], sequence: int) -> None:
    raw = seal(ALICE, addresses, sequence)
    assert raw == theirs(ALICE, addresses, sequence)
    _, record = consume_envelope(raw, "libp2p-peer-record")
    assert str(record.peer_id) == ALICE.peer_id
    assert record.seq == sequence
    assert [str(address) for address in record.addrs] == [str(address) for address in addresses]
    own = tuple(address.of(ALICE.peer_id) for address in addresses)
    assert open_record(raw, ALICE.peer_id) == PeerRecord(ALICE.peer_id, sequence, own)


def test_nobody_signs_for_another_peer() -> None:
    genuine = seal(ALICE, PLACES, 5)
    assert open_record(genuine, MALLORY.peer_id) is None
    fields = Fields(seal(MALLORY, PLACES, 5))
    lies = [
        # Mallory's payload under Alice's key, and Alice's name in a payload that Mallory signed.
        encode((1, key_message(ALICE.public_key)), (2, fields.data(2)), (3, fields.data(3)), (5, fields.data(5))),
        encode((1, fields.data(1)), (2, fields.data(2)), (3, Fields(genuine).data(3)), (5, fields.data(5))),
    ]
    for lie in lies:
        assert open_record(lie, ALICE.peer_id) is None
        assert open_record(lie, MALLORY.peer_id) is None
    signed_for_another = _signed(MALLORY, Fields(genuine).data(3))
    assert open_record(signed_for_another, MALLORY.peer_id) is None
    assert open_record(signed_for_another, ALICE.peer_id) is None


def _signed(identity: Identity, payload: bytes, domain: bytes = b"libp2p-peer-record", kind: bytes = b"\3\1") -> bytes:
    signed = b"".join(bytes([len(part)]) + part for part in (domain, kind)) + _prefixed(payload)
    return encode((1, key_message(identity.public_key)), (2, kind), (3, payload), (5, identity.sign(signed)))


def _prefixed(payload: bytes) -> bytes:
    return encode((1, payload))[1:]  # the length, then the bytes


def test_other_kinds_of_statements_are_no_records() -> None:
    payload = Fields(seal(ALICE, PLACES, 5)).data(3)
    assert open_record(_signed(ALICE, payload), ALICE.peer_id) is not None
    assert open_record(_signed(ALICE, payload, domain=b"libp2p-relay-rsvp"), ALICE.peer_id) is None
    assert open_record(_signed(ALICE, payload, kind=b"\3\2"), ALICE.peer_id) is None


@given(st.data())
def test_any_change_is_refused(data: st.DataObject) -> None:
    raw = bytearray(seal(ALICE, PLACES, 5))
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= 1 << data.draw(st.integers(0, 7))
    opened = open_record(bytes(raw), ALICE.peer_id)
    # A field number that nobody reads may change; what was signed may not.
    assert opened is None or opened == open_record(seal(ALICE, PLACES, 5), ALICE.peer_id)


@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_no_record(raw: bytes) -> None:
    assert open_record(raw, ALICE.peer_id) is None
    assert open_record(_signed(ALICE, raw), ALICE.peer_id) is None


def test_records_with_other_keys_are_passed_over() -> None:
    keys = rsa_keys()
    peer = peer_id_of_message(keys.public_key.serialize())
    raw = seal_record(TheirRecord(ID.from_string(peer), [], 1), keys.private_key).marshal_envelope()
    assert open_record(raw, peer) is None


def test_a_record_is_bounded() -> None:
    many = [Address("ip4", "5.5.5.1", port, relay=RELAY) for port in range(1, 100)]
    raw = seal(ALICE, many, 2**63)
    assert len(raw) <= MAX_RECORD_BYTES
    record = open_record(raw, ALICE.peer_id)
    assert record is not None
    assert 12 <= len(record.addresses) <= MAX_ADDRESSES_PER_PEER
    assert open_record(theirs(ALICE, many, 1), ALICE.peer_id) is None
    # A record that is too long is left out of a message, the rest of which is read.
    contact = Contact(ALICE.peer_id, (PLACES[0].of(ALICE.peer_id),), bytes(MAX_RECORD_BYTES + 1))
    message = decode(Message(Op.ADD_PROVIDER, b"key", providers=(contact,), sender=bytes(5000)).encode())
    assert message.providers == (Contact(ALICE.peer_id, contact.addresses),)
    assert message.sender == b""
    largest = Contact(ALICE.peer_id, tuple(many[:4]), bytes(MAX_RECORD_BYTES))
    answer = Message(Op.GET_PROVIDERS, b"key", (largest,) * MAX_PEERS, (largest,) * MAX_PROVIDERS)
    assert len(answer.encode()) < 2 * MAX_REQUEST_BYTES


def test_a_new_record_is_made_only_when_the_addresses_change() -> None:
    signer = RecordSigner(ALICE)
    assert signer.record([]) == b""
    first = signer.record(PLACES)
    assert signer.record(list(PLACES)) == first
    records = [open_record(raw, ALICE.peer_id) for raw in (first, signer.record(PLACES[:1]), signer.record(PLACES))]
    numbers = [record.sequence for record in records if record is not None]
    assert len(numbers) == 3
    assert numbers == sorted(set(numbers))


def test_what_a_peer_signed_comes_before_what_others_say_of_it() -> None:
    book = AddressBook()
    peer = ALICE.peer_id
    own, old = PLACES[0].of(peer), PLACES[1].of(peer)
    book.certify(PeerRecord(peer, 5, (own, old)), b"fifth", now=1)
    for number in range(1, 100):  # others report as much as they like, and later
        book.add(peer, [Address("ip4", "6.6.6.6", number)], now=1 + number)
    assert book.addresses(peer)[:2] == [own, old]
    assert len(book.addresses(peer)) == MAX_ADDRESSES_PER_PEER
    book.certify(PeerRecord(peer, 4, (PLACES[2].of(peer),)), b"fourth", now=200)  # an old record played again
    assert book.record(peer) == b"fifth"
    assert book.addresses(peer)[:2] == [own, old]
    new = Address("ip4", "5.5.2.9", 7464, peer)
    book.certify(PeerRecord(peer, 6, (new,)), b"sixth", now=201)
    assert book.record(peer) == b"sixth"
    assert book.addresses(peer)[0] == new
    reached = book.addresses(peer)[-1]
    book.succeeded(reached, now=202)
    book.failed(new)
    assert book.addresses(peer)[0] == reached  # what a dial has proven counts most
    assert book.addresses(peer)[-1] == new


async def test_a_clock_that_was_wrong_once_silences_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody keeps a record from the future, so the right ones that follow need not be later than that."""
    book, signer, right_ms = AddressBook(), RecordSigner(ALICE), time.time_ns() // 10**6
    monkeypatch.setattr(peer_record, "_clock_ms", lambda: right_ms + 2 * CLOCK_TOLERANCE_MS)
    ahead = Contact(ALICE.peer_id, (), signer.record(PLACES[:1]))
    monkeypatch.setattr(peer_record, "_clock_ms", lambda: right_ms)
    learn(book, ahead)
    assert book.record(ALICE.peer_id) == b""
    right = Contact(ALICE.peer_id, (), signer.record(PLACES[:1]))
    learn(book, right)
    learn(book, ahead)
    assert book.record(ALICE.peer_id) == right.record


async def test_identify_carries_a_record_that_py_libp2p_accepts() -> None:
    ours, asker = make_network(), make_host()
    async with ours.running(), running(asker):
        connection = await asker.connect(ours.peer_id, ours.host.addresses)
        stream = await connection.open_stream(IDENTIFY)
        body = await receive_bytes(stream, 65536)
        assert body is not None
        said = Identify()
        said.ParseFromString(body)
        _, record = consume_envelope(said.signedPeerRecord, "libp2p-peer-record")
        assert str(record.peer_id) == ours.peer_id
        own = [str(address.of(None)) for address in ours.host.addresses]
        assert [str(address) for address in record.addrs] == own


async def test_directory_nodes_pass_signed_records_on() -> None:
    """The joiner learns the member's own word from a third node, and a lie about it does not come first."""
    key = os.urandom(32)
    keeper, member, joiner = make_network("dht"), make_network("dht"), make_network("dht")
    async with keeper.running(), member.running(), joiner.running():
        member.seek(keeper.addresses()[0])
        await until(lambda: bool(member._directory and len(member._directory.table)))
        await member.provide(key)
        lie = Address("ip4", "127.0.0.1", 9, member.peer_id)
        keeper._book.add(member.peer_id, [lie], now=1e9)
        joiner.seek(keeper.addresses()[0])
        await until(lambda: bool(joiner._directory and len(joiner._directory.table)))
        joiner._book.add(member.peer_id, [lie], now=1e9)
        assert await joiner.find_providers(key, timeout_s=5) == [member.peer_id]
        record = open_record(joiner._book.record(member.peer_id), member.peer_id)
        assert record is not None
        assert [str(address) for address in record.addresses] == list(member.addresses())
        assert joiner._book.addresses(member.peer_id)[0] == record.addresses[0]

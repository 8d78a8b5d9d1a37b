"""The Noise session: its records, its handshakes, and what it does with those who cheat."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest
import trio
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from hypothesis import given
from hypothesis import strategies as st
from libp2p.crypto.rsa import create_new_key_pair as rsa_keys
from libp2p.crypto.secp256k1 import create_new_key_pair as secp256k1_keys
from libp2p.crypto.x25519 import X25519PublicKey
from libp2p.peer.id import ID
from libp2p.security.noise.messages import NoiseHandshakePayload, make_handshake_payload_sig

from p2p.channel.noise import AESGCM_ID, HANDSHAKE_DEADLINE_S, NOISE_ID, PSK_ID, public_options, security_options
from p2p.channel.noise_handshake import MAX_MESSAGE_BYTES
from p2p.channel.noise_records import MAX_PLAIN_BYTES, Opener, Sealer
from p2p.channel.raw import ConnectionClosed
from p2p.errors import HandshakeError, ProtocolError, WrongSecret
from p2p.identity import Identity
from tests.p2p.channels import PAIRS, close_sockets, memory_pair, secure, socket_pair, transport

__all__ = ["close_sockets"]  # a fixture that every test here uses

CIPHERS = (AESGCM, ChaCha20Poly1305)
KEY = bytes(range(32))


def _cut(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces = []
    for size in sizes:
        pieces.append(data[:size])
        data = data[size:]
    return [*pieces, data]


@pytest.mark.parametrize("cipher", CIPHERS)
@given(messages=st.lists(st.lists(st.binary(max_size=300), min_size=1), max_size=8), sizes=st.lists(st.integers(0, 90)))
def test_records_survive_any_cutting(cipher: Any, messages: list[list[bytes]], sizes: list[int]) -> None:
    sealer, opener = Sealer(cipher(KEY)), Opener(cipher(KEY))
    sealed = b"".join(sealer.seal(parts) for parts in messages)
    opened = b"".join(bytes(opener.feed(piece)) for piece in _cut(sealed, sizes))
    assert opened == b"".join(part for parts in messages for part in parts)


@pytest.mark.parametrize("cipher", CIPHERS)
@pytest.mark.parametrize("size", [MAX_PLAIN_BYTES - 1, MAX_PLAIN_BYTES, MAX_PLAIN_BYTES + 1, 3 * MAX_PLAIN_BYTES + 7])
def test_long_writes_become_several_records(cipher: Any, size: int) -> None:
    plain = bytes(i % 251 for i in range(size))
    sealed = Sealer(cipher(KEY)).seal([plain[:10], plain[10:]])
    assert len(sealed) == size + 18 * -(-size // MAX_PLAIN_BYTES)
    assert Opener(cipher(KEY)).feed(bytes(sealed)) == plain


@given(pieces=st.lists(st.binary(max_size=200), max_size=20))
def test_arbitrary_bytes_raise_nothing_but_protocol_errors(pieces: list[bytes]) -> None:
    opener = Opener(AESGCM(KEY))
    for piece in pieces:
        try:
            assert not opener.feed(piece)
        except ProtocolError:
            return


@given(at=st.integers(0, 117), bit=st.integers(0, 7))
def test_a_changed_bit_is_noticed(at: int, bit: int) -> None:
    sealed = bytearray(Sealer(AESGCM(KEY)).seal([bytes(100)]))
    sealed[at] ^= 1 << bit
    try:
        assert not Opener(AESGCM(KEY)).feed(bytes(sealed))  # a longer length: the record is not complete
        assert at < 2
    except ProtocolError:
        pass


def test_a_replayed_record_is_refused() -> None:
    sealed = bytes(Sealer(AESGCM(KEY)).seal([b"once"]))
    opener = Opener(AESGCM(KEY))
    assert bytes(opener.feed(sealed)) == b"once"
    with pytest.raises(ProtocolError):
        opener.feed(sealed)


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("protocol", [NOISE_ID, AESGCM_ID])
async def test_both_ends_know_each_other_and_talk(kind: str, protocol: str) -> None:
    ends = await secure(PAIRS[kind](), protocol)
    data = bytes(200_000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ends.dialler.write, data)
        assert await ends.listener.read(len(data)) == data
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ends.listener.write, b"answer")
        assert await ends.dialler.read(3) == b"ans"
        assert await ends.dialler.read() == b"wer"


async def _both(dialler: Any, listener: Any, peer: str, raw: Any) -> tuple[BaseException, BaseException]:
    """What each side raises."""
    raised: dict[str, BaseException] = {}

    async def attempt(name: str, shake_hands: Callable[[], Any]) -> None:
        try:
            await shake_hands()
        except Exception as error:
            raised[name] = error

    async with trio.open_nursery() as nursery:
        nursery.start_soon(attempt, "listener", lambda: listener.secure_inbound(raw[1]))
        nursery.start_soon(attempt, "dialler", lambda: dialler.secure_outbound(raw[0], peer))
    return raised["dialler"], raised["listener"]


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize(
    ("dialler_secret", "listener_secret"),
    [(b"a" * 16, b"b" * 16), (None, b"b" * 16), (b"a" * 16, None)],
    ids=["wrong", "dialler has none", "listener has none"],
)
async def test_a_wrong_or_missing_secret_is_named_on_both_sides_at_once(
    kind: str, dialler_secret: bytes | None, listener_secret: bytes | None
) -> None:
    dialling, listening = Identity.generate(), Identity.generate()
    heard: list[HandshakeError] = []
    dialler = security_options(dialling, secret=dialler_secret, on_failure=heard.append)[PSK_ID]
    listener = security_options(listening, secret=listener_secret, on_failure=heard.append)[PSK_ID]
    begun = time.perf_counter()
    raised = await _both(dialler, listener, listening.peer_id, PAIRS[kind]())
    assert time.perf_counter() - begun < HANDSHAKE_DEADLINE_S / 2  # nobody waits until it is over
    for error in raised:
        assert isinstance(error, WrongSecret)
        assert "secret" in str(error)
    assert len(heard) == 2


@pytest.mark.parametrize("kind", PAIRS)
async def test_the_same_secret_opens(kind: str) -> None:
    dialling, listening = Identity.generate(), Identity.generate()
    raw = PAIRS[kind]()
    found: list[Any] = []

    async def listen() -> None:
        found.append(await transport(listening, PSK_ID, b"s" * 16).secure_inbound(raw[1]))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(listen)
        session = await transport(dialling, PSK_ID, b"s" * 16).secure_outbound(raw[0], listening.peer_id)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.write, b"among ourselves")
        assert await found[0].read(15) == b"among ourselves"


def test_a_secret_that_can_be_guessed_is_no_secret() -> None:
    with pytest.raises(ValueError, match="at least 16 bytes"):
        security_options(Identity.generate(), secret=b"hello")


def test_a_private_node_speaks_nothing_else() -> None:
    assert list(security_options(Identity.generate(), secret=b"s" * 16)) == [PSK_ID]
    assert list(security_options(Identity.generate(), secret=None)) == [AESGCM_ID, NOISE_ID, PSK_ID]


async def test_somebody_else_at_the_address_is_refused() -> None:
    dialling, listening, other = (Identity.generate() for _ in range(3))
    dialler_error, listener_error = await _both(transport(dialling), transport(listening), other.peer_id, socket_pair())
    assert isinstance(dialler_error, HandshakeError)
    assert "instead of the peer that was dialled" in str(dialler_error)
    assert isinstance(listener_error, HandshakeError)


async def test_an_identity_that_signed_another_key_is_refused() -> None:
    dialling, listening = Identity.generate(), Identity.generate()
    thief = transport(listening)
    thief._noise_key = transport(listening)._noise_key  # the payload's signature is for another Noise key now
    error, _ = await _both(transport(dialling), thief, listening.peer_id, socket_pair())
    assert "did not sign" in str(error)


@pytest.mark.parametrize(
    "garbage",
    [b"\x00\x00", b"\x00\x20" + bytes(32), b"\x00\x05hello", (MAX_MESSAGE_BYTES + 1).to_bytes(2, "big"), b"GET / HT"],
    ids=["empty", "zero key", "short", "oversized", "http"],
)
async def test_garbage_instead_of_a_handshake(garbage: bytes) -> None:
    left, right = socket_pair()
    await left.write(garbage)
    await left.close()
    with pytest.raises(HandshakeError):
        await transport(Identity.generate()).secure_inbound(right)


@given(garbage=st.binary(max_size=400))
def test_arbitrary_handshakes_raise_only_handshake_errors(garbage: bytes) -> None:
    async def attempt() -> None:
        left, right = socket_pair()
        await left.write(garbage)
        await left.close()
        with pytest.raises(HandshakeError):
            await transport(SOME_KEYS).secure_inbound(right)

    trio.run(attempt)


SOME_KEYS = Identity.generate()


async def test_an_oversized_message_is_refused_before_it_comes() -> None:
    left, right = socket_pair()
    await left.write((MAX_MESSAGE_BYTES + 1).to_bytes(2, "big"))
    with pytest.raises(HandshakeError, match="announced"):
        await transport(Identity.generate()).secure_inbound(right)


async def test_a_half_open_handshake_ends_at_its_deadline(autojump_clock: trio.testing.MockClock) -> None:
    _, right = memory_pair()
    begun = trio.current_time()
    with pytest.raises(HandshakeError, match="too long"):
        await transport(Identity.generate()).secure_inbound(right)
    assert trio.current_time() - begun == pytest.approx(HANDSHAKE_DEADLINE_S)


async def test_a_write_cut_short_stops_all_further_ones(autojump_clock: trio.testing.MockClock) -> None:
    ends = await secure(memory_pair())
    with trio.move_on_after(1):
        await ends.dialler.write(bytes(1 << 20))  # nobody reads
    with pytest.raises(ConnectionClosed):
        await ends.dialler.write(b"more")


async def test_the_end_of_the_connection_is_told() -> None:
    ends = await secure(socket_pair())
    await ends.dialler.write(b"last words")
    await ends.dialler.close()
    assert await ends.listener.read(100) == b"last words"
    with pytest.raises(ConnectionClosed):
        await ends.listener.read(1)


@pytest.mark.parametrize(
    ("keys", "is_public", "refusal"),
    [
        (lambda: rsa_keys(2048), True, None),
        (lambda: rsa_keys(2048), False, "not an Ed25519 key"),
        (lambda: rsa_keys(1024), True, "2048 to 4096 bits"),
        (secp256k1_keys, True, "not an Ed25519 key"),
    ],
    ids=["RSA", "RSA in a swarm", "short RSA", "secp256k1"],
)
async def test_rsa_keys_are_for_the_public_directory_alone(
    keys: Callable[[], Any], is_public: bool, refusal: str | None
) -> None:
    theirs, ours = keys(), Identity.generate()
    peer = str(ID.from_pubkey(theirs.public_key))
    listener = transport(Identity.generate())
    noise_key = X25519PublicKey(listener._noise_key.public_key())
    signature = make_handshake_payload_sig(theirs.private_key, noise_key)
    listener._payload = NoiseHandshakePayload(theirs.public_key, signature).serialize()
    dialler: Any = public_options(ours)[NOISE_ID] if is_public else transport(ours)
    raw = socket_pair()
    outcome: list[str | None] = []

    async def dial() -> None:
        try:
            session = await dialler.secure_outbound(raw[0], peer)
            outcome.append(None if session.peer == peer else "another peer")
        except HandshakeError as error:
            outcome.append(str(error))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(dial)
        with contextlib.suppress(HandshakeError):
            await listener.secure_inbound(raw[1])
    assert outcome == [None] if refusal is None else refusal in str(outcome[0])

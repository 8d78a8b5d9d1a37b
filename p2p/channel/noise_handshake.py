"""One Noise `XX` handshake over a pipe: three messages (four with a shared secret), each at most 8 KiB.

The second and third message carry libp2p's payload, by which each side proves its peer id. It is protobuf: 1
`identity_key`, the sender's public key as libp2p's message of it; 2 `identity_sig`, the signature over
`noise-libp2p-static-key:` and the sender's Noise key. Other fields are ignored. The identity is an Ed25519 key; RSA
keys are accepted only from nodes of the public libp2p network, and secp256k1 and ECDSA keys from nobody.

`noise` chooses the variant and translates errors; `noise_records` encrypts the connection afterwards.
"""

from __future__ import annotations

from typing import Any, Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_public_key
from noise.connection import Keypair, NoiseConnection

from p2p.channel.noise_records import TAG_BYTES, Opener, Sealer
from p2p.channel.pipe import SocketPipe
from p2p.errors import HandshakeError, ProtocolError, WrongSecret
from p2p.identity import Identity, is_signed, key_in_message, key_message, peer_id_of, peer_id_of_message
from p2p.protobuf import Fields, encode

MAX_MESSAGE_BYTES: Final = 8 << 10  # identity and the extensions of other implementations take up to 1 KiB
_LENGTH_BYTES: Final = 2
_REFUSAL: Final = bytes(TAG_BYTES)  # sent in place of the confirming record; no key opens it
_SIGNED_PREFIX: Final = b"noise-libp2p-static-key:"
_RSA_PREFIX: Final = bytes.fromhex("080012")  # libp2p's message of an RSA key: type (field 1) = RSA (0), data (field 2)
_MAX_RSA_BYTES: Final = 600  # of the message of a key of 4096 bits
_RSA_BITS: Final = (2048, 4096)


def signed_payload(identity: Identity, noise_key: X25519PrivateKey) -> bytes:
    """Return the payload by which a node proves that its Noise key belongs to its identity."""
    signature = identity.sign(_SIGNED_PREFIX + noise_key.public_key().public_bytes_raw())
    return encode((1, key_message(identity.public_key)), (2, signature))


def proven_peer(payload: bytes, noise_key: bytes, *, accepts_rsa: bool) -> str:
    """Return the peer id that a payload proves for the peer's public Noise key; raises `HandshakeError`."""
    try:
        fields = Fields(payload)
    except ProtocolError as error:
        raise HandshakeError(f"its identity cannot be read: {error}") from error
    message, signature, signed = fields.data(1), fields.data(2), _SIGNED_PREFIX + noise_key
    public_key = key_in_message(message)
    if public_key is not None:
        peer, is_proven = peer_id_of(public_key), is_signed(public_key, signed, signature)
    elif accepts_rsa and message.startswith(_RSA_PREFIX):
        key = _rsa_key(message)
        # The id is that of the key as libp2p writes it, however the peer wrote it.
        der = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        peer, is_proven = peer_id_of_message(encode((1, 0), (2, der))), _is_signed_by_rsa(key, signed, signature)
    else:
        raise HandshakeError("its identity is not an Ed25519 key")
    if not is_proven:
        raise HandshakeError("its identity did not sign its Noise key")
    return peer


class Handshake:
    """One handshake; call `initiate` or `respond` once, then `ciphers`.

    After it, `peer` is the proven id of the peer, and `early` holds bytes that the peer sent after its last handshake
    message.
    """

    def __init__(
        self,
        pipe: SocketPipe,
        noise_name: bytes,
        noise_key: X25519PrivateKey,
        psk: bytes | None,
        accepts_rsa: bool = False,
    ) -> None:
        self._pipe = pipe
        self._psk = psk
        self._accepts_rsa = accepts_rsa
        self.early = b""
        # `noiseprotocol` is untyped; its objects stay inside this class.
        self._noise: Any = NoiseConnection.from_name(noise_name)
        self._noise.set_keypair_from_private_bytes(Keypair.STATIC, noise_key.private_bytes_raw())
        if psk is not None:
            self._noise.set_psks(psks=[psk])
        self._state: Any = None
        self.peer: str | None = None

    async def initiate(self, payload: bytes, expected: str) -> None:
        """Run the handshake as the dialling side; sends this node's identity only to the peer that was dialled.

        Raises `HandshakeError` or `WrongSecret` if it fails, `ProtocolError` if a message is too long.
        """
        self._noise.set_as_initiator()
        self._start()
        await self._send(self._seal(b""))
        remote_payload = self._open(await self._receive())
        self._identify(remote_payload)
        if self.peer != expected:
            raise HandshakeError(f"{self.peer} answered instead of the peer that was dialled")
        await self._send(self._seal(payload))
        if self._psk is not None:
            await self._await_confirmation()

    async def respond(self, payload: bytes) -> None:
        """Run the handshake as the dialled side; raises the same errors as `initiate`."""
        self._noise.set_as_responder()
        self._start()
        self._open(await self._receive())
        await self._send(self._seal(payload))
        message = await self._receive()
        if self._psk is None:
            self._identify(self._open(message))
            return
        remote_payload = await self._open_with_secret(message)
        self._identify(remote_payload)
        await self._send(self._noise.encrypt(b""))

    def ciphers(self) -> tuple[Sealer, Opener]:
        """Return the ciphers of both directions; only after the handshake."""
        protocol = self._noise.noise_protocol
        sealing, opening = protocol.cipher_state_encrypt, protocol.cipher_state_decrypt
        return Sealer(sealing.cipher.cipher, sealing.n), Opener(opening.cipher.cipher, opening.n)

    def _start(self) -> None:
        self._noise.start_handshake()
        self._state = self._noise.noise_protocol.handshake_state  # the library drops it at the end

    def _seal(self, payload: bytes) -> bytes:
        try:
            return bytes(self._noise.write_message(payload))
        except Exception as error:  # no shared secret can be computed with the peer's key
            raise HandshakeError(f"it sent an unusable key ({type(error).__name__})") from error

    def _open(self, message: bytes) -> bytes:
        try:
            return bytes(self._noise.read_message(message))
        except Exception as error:  # the library raises whatever its cipher or key parser raises
            raise HandshakeError(f"it sent an invalid Noise message ({type(error).__name__})") from error

    async def _open_with_secret(self, message: bytes) -> bytes:
        """Open the third message; raises `WrongSecret` if its static key opens and its payload does not."""
        try:
            return bytes(self._noise.read_message(message))
        except Exception as error:
            await self._send(_REFUSAL)
            if self._static_key() is not None:
                raise WrongSecret from error
            raise HandshakeError("it sent an invalid third Noise message") from error

    async def _await_confirmation(self) -> None:
        record = await self._receive()
        try:
            self._noise.decrypt(record)
        except Exception as error:
            raise WrongSecret from error

    def _identify(self, payload: bytes) -> None:
        """Set the peer's id, once it is proven that it signed the Noise key."""
        noise_key = self._static_key()
        if noise_key is None:
            raise HandshakeError("it sent no Noise key")
        self.peer = proven_peer(payload, noise_key, accepts_rsa=self._accepts_rsa)

    def _static_key(self) -> bytes | None:
        return getattr(self._state.rs, "public_bytes", None)

    async def _send(self, message: bytes | bytearray) -> None:
        await self._pipe.send(len(message).to_bytes(_LENGTH_BYTES, "big") + message)

    async def _receive(self) -> bytes:
        header = await self._read(_LENGTH_BYTES)
        length = int.from_bytes(header, "big")
        if length > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"it announced a handshake message of {length} bytes; {MAX_MESSAGE_BYTES} are allowed")
        return await self._read(length)

    async def _read(self, size: int) -> bytes:
        while len(self.early) < size:
            self.early += await self._pipe.receive(MAX_MESSAGE_BYTES)
        taken, self.early = self.early[:size], self.early[size:]
        return taken


def _rsa_key(message: bytes) -> RSAPublicKey:
    """Return the RSA key in libp2p's message of it; raises `HandshakeError` for one of an unusual size."""
    if len(message) > _MAX_RSA_BYTES:
        raise HandshakeError("its RSA key is too long")
    try:
        key = load_der_public_key(Fields(message).data(2))
    except Exception as error:  # parsers of DER raise many types
        raise HandshakeError("its RSA key cannot be read") from error
    if not isinstance(key, RSAPublicKey) or not _RSA_BITS[0] <= key.key_size <= _RSA_BITS[1]:
        raise HandshakeError(f"its RSA key does not have {_RSA_BITS[0]} to {_RSA_BITS[1]} bits")
    if key.public_numbers().e.bit_length() > 32:
        raise HandshakeError("its RSA key has an unusual exponent")
    return key


def _is_signed_by_rsa(key: RSAPublicKey, data: bytes, signature: bytes) -> bool:
    try:
        key.verify(signature, data, PKCS1v15(), SHA256())
    except InvalidSignature:
        return False
    return True

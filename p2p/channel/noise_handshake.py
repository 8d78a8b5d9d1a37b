"""One Noise `XX` handshake over a pipe: three messages (four with a shared secret), each at most 8 KiB.

`noise` chooses the variant and translates errors; `noise_records` encrypts the connection afterwards.
"""

from __future__ import annotations

from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import load_der_public_key
from libp2p.crypto.keys import PrivateKey, PublicKey
from libp2p.crypto.pb import crypto_pb2
from libp2p.crypto.x25519 import X25519PublicKey
from libp2p.peer.id import ID
from libp2p.security.noise.messages import NoiseHandshakePayload, verify_handshake_payload_sig
from libp2p.security.noise.pb import noise_pb2
from noise.connection import Keypair, NoiseConnection

from p2p.channel.noise_records import TAG_BYTES, Opener, Sealer
from p2p.channel.pipe import SocketPipe
from p2p.errors import HandshakeError, ProtocolError, WrongSecret

MAX_MESSAGE_BYTES: Final = 8 << 10  # identity and the extensions of other implementations take up to 1 KiB
_LENGTH_BYTES: Final = 2
_REFUSAL: Final = bytes(TAG_BYTES)  # sent in place of the confirming record; no key opens it
# libp2p's protobuf message of an Ed25519 public key: the key type, then 32 bytes.
_ED25519_PREFIX: Final = bytes.fromhex("08011220")
_ED25519_BYTES: Final = len(_ED25519_PREFIX) + 32
_RSA_PREFIX: Final = bytes.fromhex("080012")
_MAX_RSA_BYTES: Final = 600  # of the message of a key of 4096 bits
_RSA_BITS: Final = (2048, 4096)


class Handshake:
    """One handshake; call `initiate` or `respond` once, then `ciphers`.

    After it, `remote_peer` and `remote_key` are the proven identity of the peer, and `early` holds bytes that the peer
    sent after its last handshake message.
    """

    def __init__(
        self, pipe: SocketPipe, noise_name: bytes, noise_key: PrivateKey, psk: bytes | None, accepts_rsa: bool = False
    ) -> None:
        self._pipe = pipe
        self._psk = psk
        self._accepts_rsa = accepts_rsa
        self.early = b""
        # `noiseprotocol` is untyped; its objects stay inside this class.
        self._noise: Any = NoiseConnection.from_name(noise_name)
        self._noise.set_keypair_from_private_bytes(Keypair.STATIC, noise_key.to_bytes())
        if psk is not None:
            self._noise.set_psks(psks=[psk])
        self._state: Any = None
        self.remote_key: PublicKey | None = None
        self.remote_peer: ID | None = None

    async def initiate(self, payload: bytes, expected: ID) -> None:
        """Run the handshake as the dialling side; sends this node's identity only to the peer that was dialled.

        Raises `HandshakeError` or `WrongSecret` if it fails, `ProtocolError` if a message is too long.
        """
        self._noise.set_as_initiator()
        self._start()
        await self._send(self._seal(b""))
        remote_payload = self._open(await self._receive())
        self._identify(remote_payload)
        if self.remote_peer != expected:
            raise HandshakeError(f"{self.remote_peer} answered instead of the peer that was dialled")
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
        """Set the peer's identity, once it is proven that it signed the Noise key."""
        static = self._static_key()
        if static is None:
            raise HandshakeError("it sent no Noise key")
        try:
            identity = noise_pb2.NoiseHandshakePayload.FromString(payload).identity_key
            # Before libp2p parses it: an "RSA key" of a few kilobytes can occupy its parser for 15 seconds.
            if self._accepts_rsa and identity.startswith(_RSA_PREFIX):
                _check_rsa(identity)
            elif len(identity) != _ED25519_BYTES or not identity.startswith(_ED25519_PREFIX):
                raise HandshakeError("its identity is not an Ed25519 key")
            parsed = NoiseHandshakePayload.deserialize(payload)
            signed = verify_handshake_payload_sig(parsed, static)
            remote_peer = ID.from_pubkey(parsed.id_pubkey)
        except HandshakeError:
            raise
        except Exception as error:  # protobuf and key parsers raise many types
            raise HandshakeError("its identity cannot be read") from error
        if not signed:
            raise HandshakeError("its identity did not sign its Noise key")
        self.remote_key, self.remote_peer = parsed.id_pubkey, remote_peer

    def _static_key(self) -> X25519PublicKey | None:
        public = getattr(self._state.rs, "public_bytes", None)
        return X25519PublicKey.from_bytes(public) if public is not None else None

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


def _check_rsa(identity: bytes) -> None:
    """Check the size of an RSA key with a parser that bounds its own work, before libp2p's; raises `HandshakeError`."""
    if len(identity) > _MAX_RSA_BYTES:
        raise HandshakeError("its RSA key is too long")
    try:
        key = load_der_public_key(crypto_pb2.PublicKey.FromString(identity).data)
    except Exception as error:  # protobuf and DER parsers raise many types
        raise HandshakeError("its RSA key cannot be read") from error
    if not isinstance(key, RSAPublicKey) or not _RSA_BITS[0] <= key.key_size <= _RSA_BITS[1]:
        raise HandshakeError(f"its RSA key does not have {_RSA_BITS[0]} to {_RSA_BITS[1]} bits")
    if key.public_numbers().e.bit_length() > 32:
        raise HandshakeError("its RSA key has an unusual exponent")

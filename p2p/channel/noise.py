"""Secures connections with libp2p's Noise handshake or one of Shoal's two variants of it.

The messages are in `noise_handshake`, the encrypted connection after it in `noise_session`. All three variants are `XX`
over 25519 and SHA-256, with messages framed by a two-byte length, and libp2p's signed payload in the second and third
message, by which each side proves its peer id:

| protocol id | Noise name | used by |
|---|---|---|
| `/noise` | `Noise_XX_25519_ChaChaPoly_SHA256` | every libp2p implementation |
| `/shoal/1/noise-aesgcm` | `Noise_XX_25519_AESGCM_SHA256` | two Shoal nodes: twice as fast |
| `/shoal/1/noise-psk` | `Noise_XXpsk3_25519_AESGCM_SHA256` | members of a private swarm, who use no other |

`psk3` mixes the swarm's secret into the third message. The responder then sends one empty record, which only a holder
of the same secret can seal or open, so that both sides know whether their secrets are the same. A responder that cannot
open the third message sends sixteen zero bytes instead and disconnects. A node without a secret offers this variant
with a random secret, so that a member that dials it fails with `WrongSecret` and not for lack of a shared protocol.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from typing import Final

import trio
from libp2p.abc import IRawConnection, ISecureConn, ISecureTransport
from libp2p.crypto.keys import KeyPair, PrivateKey
from libp2p.crypto.x25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.peer.id import ID
from libp2p.security.exceptions import HandshakeFailure
from libp2p.security.noise.messages import NoiseHandshakePayload, make_handshake_payload_sig

from p2p.channel.noise_handshake import Handshake
from p2p.channel.noise_session import NoiseSession, Secured
from p2p.channel.pipe import SocketPipe
from p2p.errors import HandshakeError, ProtocolError, WrongSecret

logger = logging.getLogger("shoal.p2p.noise")

NOISE_ID: Final = TProtocol("/noise")
AESGCM_ID: Final = TProtocol("/shoal/1/noise-aesgcm")
PSK_ID: Final = TProtocol("/shoal/1/noise-psk")
HANDSHAKE_DEADLINE_S: Final = 10.0
MIN_SECRET_BYTES: Final = 16

OnFailure = Callable[[HandshakeError], None]


class _Failed(HandshakeError, HandshakeFailure):
    """`HandshakeError` as a type that libp2p's upgrader handles."""


class _WrongSecret(WrongSecret, HandshakeFailure):
    """`WrongSecret` as a type that libp2p's upgrader handles."""


def security_options(
    keypair: KeyPair, *, secret: bytes | None, on_failure: OnFailure | None = None
) -> Mapping[TProtocol, ISecureTransport]:
    """Return the handshakes to offer, most preferred first, in the form of `libp2p.new_host`'s `sec_opt`.

    With a `secret` only the private handshake is offered. `on_failure` is called for every handshake that fails, also
    for inbound ones, which libp2p does not report. Raises `ValueError` for a secret below 16 bytes.
    """
    if secret is not None and len(secret) < MIN_SECRET_BYTES:
        raise ValueError(f"a swarm's secret needs at least {MIN_SECRET_BYTES} bytes, this one has {len(secret)}")
    noise_key = create_new_key_pair().private_key
    psk = hashlib.sha256(b"shoal/1/noise-psk\0" + secret).digest() if secret is not None else os.urandom(32)
    private = NoiseTransport(keypair, noise_key, b"Noise_XXpsk3_25519_AESGCM_SHA256", psk=psk, on_failure=on_failure)
    if secret is not None:
        return {PSK_ID: private}
    fast = NoiseTransport(keypair, noise_key, b"Noise_XX_25519_AESGCM_SHA256", on_failure=on_failure)
    plain = NoiseTransport(keypair, noise_key, b"Noise_XX_25519_ChaChaPoly_SHA256", on_failure=on_failure)
    return {AESGCM_ID: fast, NOISE_ID: plain, PSK_ID: private}


def public_options(keypair: KeyPair) -> Mapping[TProtocol, ISecureTransport]:
    """Return the handshake for nodes of the public libp2p network, some of which have RSA keys."""
    noise_key = create_new_key_pair().private_key
    return {NOISE_ID: NoiseTransport(keypair, noise_key, b"Noise_XX_25519_ChaChaPoly_SHA256", accepts_rsa=True)}


def handshake_error(error: BaseException | None) -> HandshakeError | None:
    """Return the `HandshakeError` among the causes of a libp2p error, or None if there is none."""
    while error is not None and not isinstance(error, HandshakeError):
        error = error.__cause__ or error.__context__
    return error


def _caller(address: tuple[str, int] | None) -> str:
    return "an unknown peer" if address is None else f"the peer at {address[0]} port {address[1]}"


class NoiseTransport(ISecureTransport):
    """Secures raw connections with one variant of the handshake."""

    def __init__(
        self,
        keypair: KeyPair,
        noise_key: PrivateKey,
        noise_name: bytes,
        *,
        psk: bytes | None = None,
        on_failure: OnFailure | None = None,
        accepts_rsa: bool = False,
    ) -> None:
        self._accepts_rsa = accepts_rsa
        self.local_peer = ID.from_pubkey(keypair.public_key)
        self.local_key = keypair.private_key
        self.noise_name = noise_name
        self.psk = psk
        self._noise_key = noise_key
        self._on_failure = on_failure
        signature = make_handshake_payload_sig(keypair.private_key, noise_key.get_public_key())
        self._payload = NoiseHandshakePayload(keypair.public_key, signature).serialize()

    async def secure_inbound(self, conn: IRawConnection) -> ISecureConn:
        """Run the handshake with a peer that dialled; raises `HandshakeError`."""
        return await self._secure(conn, None)

    async def secure_outbound(self, conn: IRawConnection, peer_id: ID) -> ISecureConn:
        """Run the handshake with `peer_id`, which this node dialled; raises `HandshakeError`."""
        return await self._secure(conn, peer_id)

    async def _secure(self, conn: IRawConnection, expected: ID | None) -> NoiseSession:
        whom = str(expected) if expected is not None else _caller(conn.get_remote_address())
        try:
            with trio.fail_after(HANDSHAKE_DEADLINE_S):
                return await self._shake_hands(SocketPipe(conn), expected)
        except WrongSecret as error:
            failure: _Failed | _WrongSecret = _WrongSecret(
                f"{whom} has another swarm secret, or none; ask a member of the private swarm for an invite"
            )
            cause: Exception = error
        except (trio.TooSlowError, ConnectionClosedError, ProtocolError, HandshakeError) as error:
            reason = str(error) or "it took too long"
            failure, cause = _Failed(f"the secure handshake with {whom} failed: {reason}"), error
        failure.peer = None if expected is None else str(expected)
        logger.info("%s", failure)
        if self._on_failure is not None:
            self._on_failure(failure)
        await conn.close()
        raise failure from cause

    async def _shake_hands(self, pipe: SocketPipe, expected: ID | None) -> NoiseSession:
        handshake = Handshake(pipe, self.noise_name, self._noise_key, self.psk, self._accepts_rsa)
        if expected is not None:
            await handshake.initiate(self._payload, expected)
        else:
            await handshake.respond(self._payload)
        assert handshake.remote_peer is not None
        assert handshake.remote_key is not None
        sealer, opener = handshake.ciphers()
        secured = Secured(
            local_peer=self.local_peer,
            local_key=self.local_key,
            remote_peer=handshake.remote_peer,
            remote_key=handshake.remote_key,
            is_initiator=expected is not None,
            sealer=sealer,
            opener=opener,
            early=handshake.early,
        )
        return NoiseSession(pipe, secured)

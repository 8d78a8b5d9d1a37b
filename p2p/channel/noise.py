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
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from p2p.channel.noise_handshake import Handshake, signed_payload
from p2p.channel.noise_session import NoiseSession, Secured
from p2p.channel.pipe import SocketPipe
from p2p.channel.raw import ConnectionClosed, RawConnection
from p2p.errors import HandshakeError, ProtocolError, WrongSecret
from p2p.identity import Identity

logger = logging.getLogger("shoal.p2p.noise")

NOISE_ID: Final = "/noise"
AESGCM_ID: Final = "/shoal/1/noise-aesgcm"
PSK_ID: Final = "/shoal/1/noise-psk"
HANDSHAKE_DEADLINE_S: Final = 10.0
MIN_SECRET_BYTES: Final = 16

OnFailure = Callable[[HandshakeError], None]


def security_options(
    identity: Identity, *, secret: bytes | None, on_failure: OnFailure | None = None
) -> Mapping[str, NoiseTransport]:
    """Return the handshakes to offer by protocol id, most preferred first.

    With a `secret` only the private handshake is offered. `on_failure` is called for every handshake that fails,
    whoever dialled. Raises `ValueError` for a secret below 16 bytes.
    """
    if secret is not None and len(secret) < MIN_SECRET_BYTES:
        raise ValueError(f"a swarm's secret needs at least {MIN_SECRET_BYTES} bytes, this one has {len(secret)}")
    noise_key = X25519PrivateKey.generate()
    psk = hashlib.sha256(b"shoal/1/noise-psk\0" + secret).digest() if secret is not None else os.urandom(32)
    private = NoiseTransport(identity, noise_key, b"Noise_XXpsk3_25519_AESGCM_SHA256", psk=psk, on_failure=on_failure)
    if secret is not None:
        return {PSK_ID: private}
    fast = NoiseTransport(identity, noise_key, b"Noise_XX_25519_AESGCM_SHA256", on_failure=on_failure)
    plain = NoiseTransport(identity, noise_key, b"Noise_XX_25519_ChaChaPoly_SHA256", on_failure=on_failure)
    return {AESGCM_ID: fast, NOISE_ID: plain, PSK_ID: private}


def public_options(identity: Identity) -> Mapping[str, NoiseTransport]:
    """Return the handshake for nodes of the public libp2p network, some of which have RSA keys."""
    noise_key = X25519PrivateKey.generate()
    return {NOISE_ID: NoiseTransport(identity, noise_key, b"Noise_XX_25519_ChaChaPoly_SHA256", accepts_rsa=True)}


def _caller(address: tuple[str, int] | None) -> str:
    return "an unknown peer" if address is None else f"the peer at {address[0]} port {address[1]}"


class NoiseTransport:
    """Secures raw connections with one variant of the handshake."""

    def __init__(
        self,
        identity: Identity,
        noise_key: X25519PrivateKey,
        noise_name: bytes,
        *,
        psk: bytes | None = None,
        on_failure: OnFailure | None = None,
        accepts_rsa: bool = False,
    ) -> None:
        self._accepts_rsa = accepts_rsa
        self.noise_name = noise_name
        self.psk = psk
        self._noise_key = noise_key
        self._on_failure = on_failure
        self._payload = signed_payload(identity, noise_key)

    async def secure_inbound(self, raw: RawConnection) -> NoiseSession:
        """Run the handshake with a peer that dialled; raises `HandshakeError`."""
        return await self._secure(raw, None)

    async def secure_outbound(self, raw: RawConnection, peer: str) -> NoiseSession:
        """Run the handshake with `peer`, which this node dialled; raises `HandshakeError`."""
        return await self._secure(raw, peer)

    async def _secure(self, raw: RawConnection, expected: str | None) -> NoiseSession:
        whom = expected if expected is not None else _caller(raw.remote)
        try:
            with trio.fail_after(HANDSHAKE_DEADLINE_S):
                return await self._shake_hands(SocketPipe(raw), expected)
        except WrongSecret as error:
            failure: HandshakeError = WrongSecret(
                f"{whom} has another swarm secret, or none; ask a member of the private swarm for an invite"
            )
            cause: Exception = error
        except (trio.TooSlowError, ConnectionClosed, ProtocolError, HandshakeError) as error:
            reason = str(error) or "it took too long"
            failure, cause = HandshakeError(f"the secure handshake with {whom} failed: {reason}"), error
        failure.peer = expected
        logger.info("%s", failure)
        if self._on_failure is not None:
            self._on_failure(failure)
        await raw.close()
        raise failure from cause

    async def _shake_hands(self, pipe: SocketPipe, expected: str | None) -> NoiseSession:
        handshake = Handshake(pipe, self.noise_name, self._noise_key, self.psk, self._accepts_rsa)
        if expected is not None:
            await handshake.initiate(self._payload, expected)
        else:
            await handshake.respond(self._payload)
        assert handshake.peer is not None
        sealer, opener = handshake.ciphers()
        secured = Secured(
            peer=handshake.peer,
            is_initiator=expected is not None,
            sealer=sealer,
            opener=opener,
            early=handshake.early,
        )
        return NoiseSession(pipe, secured)

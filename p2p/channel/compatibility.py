"""Checks that the installed libp2p still has the internal functions and interfaces that this package builds on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any, Final

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from libp2p.abc import IMuxedConn, IMuxedStream, ISecureConn, ISecureTransport
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.security.noise import messages

from p2p.channel.noise import NoiseTransport
from p2p.channel.noise_session import NoiseSession
from p2p.channel.yamux import YamuxConnection
from p2p.channel.yamux_stream import YamuxStream
from p2p.errors import P2PError

WRITTEN_FOR: Final = "0.8.1"

_SIGNATURES: Final[tuple[tuple[Callable[..., Any], tuple[str, ...]], ...]] = (
    (messages.make_handshake_payload_sig, ("id_privkey", "noise_static_pubkey")),
    (messages.verify_handshake_payload_sig, ("payload", "noise_static_pubkey")),
    (messages.NoiseHandshakePayload.__init__, ("self", "id_pubkey", "id_sig", "extensions")),
    (RawConnection.__init__, ("self", "stream", "initiator", "connection_type", "addresses")),
    (TrioTCPStream.__init__, ("self", "stream")),
)
_CLASSES: Final[tuple[tuple[type, type], ...]] = (
    (IMuxedConn, YamuxConnection),
    (IMuxedStream, YamuxStream),
    (ISecureConn, NoiseSession),
    (ISecureTransport, NoiseTransport),
)


class IncompatibleLibp2p(P2PError):
    """This version of Shoal cannot run on the installed libp2p; install the version named in the message."""


def changes() -> Iterator[str]:
    """Yield one line for each difference between libp2p and what this package expects of it."""
    for function, expected in _SIGNATURES:
        found = tuple(inspect.signature(function).parameters)
        if found != expected:
            yield f"{function.__qualname__} takes ({', '.join(found)}) instead of ({', '.join(expected)})"
    for theirs, ours in _CLASSES:
        missing = sorted(getattr(ours, "__abstractmethods__", ()))
        if missing:
            yield f"{theirs.__name__} now requires {', '.join(missing)}"
    if not hasattr(AESGCM, "decrypt_into"):
        yield "cryptography has no AESGCM.decrypt_into (install version 47 or later)"


def check_libp2p() -> None:
    """Raise `IncompatibleLibp2p`, which lists the differences, if libp2p's internals have changed."""
    found = list(changes())
    if found:
        raise IncompatibleLibp2p(
            f"libp2p {version('libp2p')} is not the version that Shoal needs ({WRITTEN_FOR}): "
            f"{'; '.join(found)}. Install libp2p=={WRITTEN_FOR}."
        )

"""Checks, before anything runs, that the installed libp2p still has the inside that this package builds on.

`install_yamux` is the one place where something of libp2p is replaced: its muxer negotiation creates the class bound
to one module-level name and ignores the one it was given.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any, Final

import libp2p.stream_muxer.muxer_multistream as muxer_multistream
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from libp2p.abc import IMuxedConn, IMuxedStream, ISecureConn, ISecureTransport
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.security.noise import messages
from libp2p.stream_muxer.yamux.yamux import Yamux

from p2p.channel.noise import NoiseTransport
from p2p.channel.noise_session import NoiseSession
from p2p.channel.yamux import YamuxConnection
from p2p.channel.yamux_stream import YamuxStream
from p2p.errors import P2PError

WRITTEN_FOR: Final = "0.8.1"

_SIGNATURES: Final[tuple[tuple[Callable[..., Any], tuple[str, ...]], ...]] = (
    (Yamux.__init__, ("self", "secured_conn", "peer_id", "is_initiator", "on_close")),
    (muxer_multistream.MuxerMultistream.new_conn, ("self", "conn", "peer_id")),
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
    """The installed libp2p is not one that this version of Shoal can run on."""


def changes() -> Iterator[str]:
    """What of libp2p's inside is not as this package expects it, one line each."""
    for function, expected in _SIGNATURES:
        found = tuple(inspect.signature(function).parameters)
        if found != expected:
            yield f"{function.__qualname__} takes ({', '.join(found)}) instead of ({', '.join(expected)})"
    for theirs, ours in _CLASSES:
        missing = sorted(getattr(ours, "__abstractmethods__", ()))
        if missing:
            yield f"{theirs.__name__} now asks for {', '.join(missing)}"
    if getattr(muxer_multistream, "Yamux", None) not in (Yamux, YamuxConnection):
        yield "muxer_multistream.Yamux is gone or replaced"
    elif "Yamux" not in muxer_multistream.MuxerMultistream.new_conn.__code__.co_names:
        yield "MuxerMultistream.new_conn no longer creates muxer_multistream.Yamux"
    if not hasattr(AESGCM, "decrypt_into"):
        yield "cryptography has no AESGCM.decrypt_into (it came with 47)"


def check_libp2p() -> None:
    """Refuse to run on a libp2p whose inside has changed; raises `IncompatibleLibp2p` that says what."""
    found = list(changes())
    if found:
        raise IncompatibleLibp2p(
            f"libp2p {version('libp2p')} is not the one this version was written for ({WRITTEN_FOR}): "
            f"{'; '.join(found)}. Install libp2p=={WRITTEN_FOR}."
        )


def install_yamux() -> None:
    """Check libp2p, then let every host of this process use this package's yamux; calling it again changes nothing."""
    check_libp2p()
    muxer_multistream.Yamux = YamuxConnection  # type: ignore[assignment, attr-defined]

"""Upgrades a raw connection to a secured and multiplexed one: offers the protocols and negotiates them.

Security and multiplexer implement libp2p's interfaces and are negotiated by the bounded `p2p.channel.multistream`. A
node of a private swarm offers only the private handshake.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from libp2p.abc import ISecureTransport
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.keys import KeyPair
from libp2p.custom_types import TProtocol
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX

from p2p.channel import multistream
from p2p.channel.noise import OnFailure, public_options, security_options
from p2p.channel.yamux import YamuxConnection
from p2p.channel.yamux_flow import UnreadBytes
from p2p.errors import HandshakeError, P2PError, StreamClosed
from p2p.identity import Identity

Muxer = Callable[..., Any]


@dataclass(frozen=True)
class Channel:
    """The security protocols and multiplexers that a node offers, by protocol id, most preferred first."""

    security: Mapping[str, Any]
    muxers: Mapping[str, Muxer]

    async def secure(self, raw: RawConnection, expected_peer: str | None) -> tuple[Any, str]:
        """Authenticate both sides; returns the secured connection and the peer's id.

        Raises `HandshakeError` if that fails or another peer answers, `P2PError` if no protocol is shared.
        """
        try:
            name = await self._negotiate(raw, self.security, raw.is_initiator)
            if raw.is_initiator:
                assert expected_peer is not None
                secured = await self.security[name].secure_outbound(raw, ID.from_base58(expected_peer))
            else:
                secured = await self.security[name].secure_inbound(raw)
        except StreamClosed as error:
            raise HandshakeError(f"{expected_peer or 'an unknown peer'} disconnected during the handshake") from error
        except P2PError:
            raise
        except Exception as error:
            who = expected_peer or "an unknown peer"
            raise HandshakeError(f"the handshake with {who} failed: {error!r}") from error
        peer = str(secured.get_remote_peer())
        if expected_peer not in (None, peer):
            raise HandshakeError(f"dialled {expected_peer}, but {peer} answered; the address is out of date")
        return secured, peer

    async def multiplex(self, secured: Any, peer: str) -> Any:
        """Negotiate a multiplexer and create it over a secured connection."""
        name = await self._negotiate(secured, self.muxers, secured.is_initiator)
        return self.muxers[name](secured, ID.from_base58(peer), is_initiator=secured.is_initiator, on_close=_ignore)

    @staticmethod
    async def _negotiate(stream: Any, offers: Mapping[str, Any], initiator: bool) -> str:
        if initiator:
            return await multistream.propose(stream, list(offers))
        return await multistream.choose(stream, offers)


def libp2p_keys(identity: Identity) -> KeyPair:
    """Return a node's key pair as a libp2p object."""
    return create_new_key_pair(identity.seed)


def channel_of(identity: Identity, *, secret: bytes | None = None, on_failure: OnFailure | None = None) -> Channel:
    """Return a node's channel: Noise and yamux; with a `secret` only the private handshake, and yamux."""
    return _channel(security_options(libp2p_keys(identity), secret=secret, on_failure=on_failure))


def public_channel_of(identity: Identity) -> Channel:
    """Return a node's channel to nodes of the public libp2p network: libp2p's own Noise, and yamux."""
    return _channel(public_options(libp2p_keys(identity)))


def _channel(offers: Mapping[TProtocol, ISecureTransport]) -> Channel:
    muxer = partial(YamuxConnection, unread=UnreadBytes())
    return Channel({str(name): transport for name, transport in offers.items()}, {str(YAMUX): muxer})


async def _ignore() -> None:
    return None

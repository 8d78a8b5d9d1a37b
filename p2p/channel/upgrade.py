"""Upgrades a raw connection to a secured and multiplexed one: offers the protocols and negotiates them.

Security and multiplexer are negotiated by `p2p.channel.multistream`. A node of a private swarm offers only the private
handshake.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from p2p.channel import multistream
from p2p.channel.noise import NoiseTransport, OnFailure, public_options, security_options
from p2p.channel.noise_session import NoiseSession
from p2p.channel.raw import RawConnection
from p2p.channel.yamux import YamuxConnection
from p2p.channel.yamux_flow import UnreadBytes
from p2p.errors import HandshakeError, P2PError, StreamClosed
from p2p.identity import Identity

YAMUX: Final = "/yamux/1.0.0"

Muxer = Callable[[NoiseSession], YamuxConnection]


@dataclass(frozen=True)
class Channel:
    """The security protocols and multiplexers that a node offers, by protocol id, most preferred first."""

    security: Mapping[str, NoiseTransport]
    muxers: Mapping[str, Muxer]

    async def secure(self, raw: RawConnection, expected_peer: str | None) -> NoiseSession:
        """Authenticate both sides and return the secured connection, which knows the peer's id.

        Raises `HandshakeError` if that fails or another peer answers, `P2PError` if no protocol is shared.
        """
        try:
            name = await self._negotiate(raw, self.security, raw.is_initiator)
            if raw.is_initiator:
                assert expected_peer is not None
                secured = await self.security[name].secure_outbound(raw, expected_peer)
            else:
                secured = await self.security[name].secure_inbound(raw)
        except StreamClosed as error:
            raise HandshakeError(f"{expected_peer or 'an unknown peer'} disconnected during the handshake") from error
        except P2PError:
            raise
        except Exception as error:
            who = expected_peer or "an unknown peer"
            raise HandshakeError(f"the handshake with {who} failed: {error!r}") from error
        if expected_peer not in (None, secured.peer):
            raise HandshakeError(f"dialled {expected_peer}, but {secured.peer} answered; the address is out of date")
        return secured

    async def multiplex(self, secured: NoiseSession) -> YamuxConnection:
        """Negotiate a multiplexer and create it over a secured connection."""
        name = await self._negotiate(secured, self.muxers, secured.is_initiator)
        return self.muxers[name](secured)

    @staticmethod
    async def _negotiate(stream: Any, offers: Mapping[str, Any], initiator: bool) -> str:
        if initiator:
            return await multistream.propose(stream, list(offers))
        return await multistream.choose(stream, offers)


def channel_of(identity: Identity, *, secret: bytes | None = None, on_failure: OnFailure | None = None) -> Channel:
    """Return a node's channel: Noise and yamux; with a `secret` only the private handshake, and yamux."""
    return _channel(security_options(identity, secret=secret, on_failure=on_failure))


def public_channel_of(identity: Identity) -> Channel:
    """Return a node's channel to nodes of the public libp2p network: libp2p's own Noise, and yamux."""
    return _channel(public_options(identity))


def _channel(offers: Mapping[str, NoiseTransport]) -> Channel:
    return Channel(offers, {YAMUX: partial(YamuxConnection, unread=UnreadBytes())})

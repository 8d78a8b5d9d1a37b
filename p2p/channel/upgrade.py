"""From raw bytes to a secured and multiplexed connection: which protocols are offered, and in which order.

Security and multiplexer are libp2p's interfaces, negotiated with our own bounded multistream-select. A private swarm
offers its own handshake and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.keys import KeyPair
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX

from p2p.channel import multistream
from p2p.channel.noise import OnFailure, security_options
from p2p.channel.yamux import YamuxConnection
from p2p.channel.yamux_flow import UnreadBytes
from p2p.errors import HandshakeError, P2PError, StreamClosed
from p2p.identity import Identity

Muxer = Callable[..., Any]


@dataclass(frozen=True)
class Channel:
    """The protocols of one node's connections, by the names they are negotiated under."""

    security: Mapping[str, Any]
    muxers: Mapping[str, Muxer]

    async def secure(self, raw: RawConnection, expected_peer: str | None) -> tuple[Any, str]:
        """Authenticate both sides; returns the secured connection and the peer's id."""
        try:
            name = await self._negotiate(raw, self.security, raw.is_initiator)
            if raw.is_initiator:
                assert expected_peer is not None
                secured = await self.security[name].secure_outbound(raw, ID.from_base58(expected_peer))
            else:
                secured = await self.security[name].secure_inbound(raw)
        except StreamClosed as error:
            raise HandshakeError(f"{expected_peer or 'an unknown peer'} vanished in the handshake") from error
        except P2PError:
            raise
        except Exception as error:
            who = expected_peer or "an unknown peer"
            raise HandshakeError(f"the handshake with {who} failed: {error!r}") from error
        peer = str(secured.get_remote_peer())
        if expected_peer not in (None, peer):
            raise HandshakeError(f"{expected_peer} was expected there, {peer} answered; the address is out of date")
        return secured, peer

    async def multiplex(self, secured: Any, peer: str) -> Any:
        """Put a multiplexer on a secured connection."""
        name = await self._negotiate(secured, self.muxers, secured.is_initiator)
        return self.muxers[name](secured, ID.from_base58(peer), is_initiator=secured.is_initiator, on_close=_nothing)

    @staticmethod
    async def _negotiate(stream: Any, offers: Mapping[str, Any], initiator: bool) -> str:
        if initiator:
            return await multistream.propose(stream, list(offers))
        return await multistream.choose(stream, offers)


def libp2p_keys(identity: Identity) -> KeyPair:
    """A node's key pair in libp2p's form."""
    return create_new_key_pair(identity.seed)


def channel_of(identity: Identity, *, secret: bytes | None = None, on_failure: OnFailure | None = None) -> Channel:
    """This node's channel: Noise and yamux, or the private handshake alone where there is a secret."""
    offers = security_options(libp2p_keys(identity), secret=secret, on_failure=on_failure)
    muxer = partial(YamuxConnection, unread=UnreadBytes())
    return Channel({str(name): transport for name, transport in offers.items()}, {str(YAMUX): muxer})


async def _nothing() -> None:
    return None

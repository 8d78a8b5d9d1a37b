"""The errors that `p2p` raises to its users, all under `P2PError`; trio's own are translated into these.

A message says what happened, to which peer, and what to do. `reason_code` is the same for programs and is stable.
"""

from __future__ import annotations


class P2PError(Exception):
    """Base of all errors of this package: something failed between this node and a peer."""

    reason_code = "network"


class ProtocolError(P2PError):
    """A peer sent bytes that break the protocol; the stream or connection they came on is ended."""

    reason_code = "peer_protocol"


class Refused(P2PError):
    """The peer, or this node's own policy (deny list, hold-off, limits), refused; ask another peer, or later."""

    reason_code = "peer_refused"


class Denied(Refused):
    """The peer is on this node's deny list; nothing but a change of the list lets it be reached."""


class NoRoom(Refused):
    """This node has as many connections as it may; close one, or try again later."""


class QueueFull(P2PError):
    """A bounded queue has no room; slow down or drop the message."""

    reason_code = "queue_full"


class StreamClosed(P2PError):
    """The stream has ended; open another one."""

    reason_code = "stream_closed"


class StreamReset(StreamClosed):
    """The stream or its connection broke; open another one and repeat what was not answered."""

    reason_code = "stream_broke"


class HandshakeError(P2PError):
    """The secure handshake with a peer failed; the peer may run other software or another version.

    `peer` is the peer id that this node dialled, or None if the other side dialled.
    """

    reason_code = "handshake"

    peer: str | None = None


class WrongSecret(HandshakeError):
    """The two sides have different secrets of the private swarm; ask a member for a new invite."""

    reason_code = "wrong_secret"


class PeerUnreachable(P2PError):
    """No address of the peer could be connected to."""

    reason_code = "unreachable"


class DeadlineExceeded(P2PError):
    """The peer did not answer in time."""

    reason_code = "deadline"


class RemoteError(P2PError):
    """The peer answered a call with an error; the message is the peer's.

    `code` is stable and short (`internal`, `unknown_method`, or one chosen by the handler). A handler that raises this
    type sends its code and message to the caller; any other exception is sent as `internal` without details.
    """

    reason_code = "peer_error"

    def __init__(self, message: str, code: str = "internal") -> None:
        super().__init__(message)
        self.code = code


class IdentityError(P2PError):
    """A key file, exported identity, passphrase or peer id is not valid."""

    reason_code = "bad_identity"


class EnvelopeError(P2PError):
    """A signed envelope is malformed, forged, expired or from the future, or its payload is invalid; drop it."""

    reason_code = "bad_envelope"


class Untimely(EnvelopeError):
    """A signed envelope has expired or is from the future, by this node's clock; whoever passed it on may be honest."""

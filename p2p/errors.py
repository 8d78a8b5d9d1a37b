"""Every error that leaves `p2p`, under one base; libp2p's and trio's own errors are translated at the edge.

A message says what happened, to which peer, and what to do. `reason_code` says it for programs.
Nothing here knows the wire.
"""

from __future__ import annotations


class P2PError(Exception):
    """Something went wrong between this node and a peer."""

    reason_code = "network"


class ProtocolError(P2PError):
    """A peer sent bytes that break the protocol; it loses the stream or the connection they came on."""

    reason_code = "peer_protocol"


class Refused(P2PError):
    """The peer, or this node's own policy (deny list, backoff, limits), refused; ask somebody else or later."""

    reason_code = "peer_refused"


class QueueFull(P2PError):
    """A bounded queue has no room; slow down or drop the message."""

    reason_code = "queue_full"


class StreamClosed(P2PError):
    """The stream came to its end; open another one."""

    reason_code = "stream_closed"


class StreamReset(StreamClosed):
    """The stream or its connection broke in the middle; open another one and repeat what was not answered."""

    reason_code = "stream_broke"


class HandshakeError(P2PError):
    """The secure handshake with a peer failed; it may run something else or another version.

    `peer` is whom this node dialled, or None where the other side began.
    """

    reason_code = "handshake"

    peer: str | None = None


class WrongSecret(HandshakeError):
    """The two sides hold different secrets of the private swarm; ask a member for a new invite."""

    reason_code = "wrong_secret"


class PeerUnreachable(P2PError):
    """No address of the peer could be connected to."""

    reason_code = "unreachable"


class DeadlineExceeded(P2PError):
    """The peer did not answer in time."""

    reason_code = "deadline"


class RemoteError(P2PError):
    """The peer answered that it could not do what was asked; the message is its own.

    `code` is stable and short (`internal`, `unknown_method`, or what the handler chose): a handler that raises this
    type sends its code and message to the caller, any other exception becomes `internal` with no detail.
    """

    reason_code = "peer_error"

    def __init__(self, message: str, code: str = "internal") -> None:
        super().__init__(message)
        self.code = code


class IdentityError(P2PError):
    """A key file, exported identity, passphrase or peer id is not valid."""

    reason_code = "bad_identity"


class EnvelopeError(P2PError):
    """A signed envelope is malformed, forged, out of its time, or its payload was refused; drop it."""

    reason_code = "bad_envelope"

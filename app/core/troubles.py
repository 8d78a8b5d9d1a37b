"""An error of any of the packages as the reason that a person reads; `p2p` and `engine` know nothing of reasons."""

from __future__ import annotations

from app.core.errors import AppError
from app.core.reasons import Reason, because
from engine.errors import CacheFull, DeviceError, EngineError, SessionError, SourceError
from p2p import errors as p2p

# The first that fits counts.
_CODES: tuple[tuple[type[Exception], str], ...] = (
    (p2p.WrongSecret, "wrong_secret"),
    (p2p.HandshakeError, "handshake"),
    (p2p.ProtocolError, "peer_protocol"),
    (p2p.Refused, "peer_refused"),
    (p2p.QueueFull, "queue_full"),
    (p2p.StreamReset, "stream_broke"),
    (p2p.StreamClosed, "stream_closed"),
    (p2p.PeerUnreachable, "unreachable"),
    (p2p.DeadlineExceeded, "deadline"),
    (p2p.RemoteError, "peer_error"),
    (p2p.IdentityError, "bad_identity"),
    (p2p.EnvelopeError, "bad_envelope"),
    (p2p.P2PError, "network"),
    (SourceError, "bad_source"),
    (DeviceError, "bad_device"),
    (CacheFull, "cache_full"),
    (SessionError, "bad_step"),
    (EngineError, "engine"),
)


def reason_of(error: Exception, *peers: str) -> Reason:
    """What an error of ours says, about these peers where it does not name them itself."""
    if isinstance(error, AppError):
        return error.reason
    code = next((code for kind, code in _CODES if isinstance(error, kind)), "internal")
    concerned = error.peer if isinstance(error, p2p.HandshakeError) else None
    text = str(error) or type(error).__doc__ or code
    return because(code, " ".join(text.split()), *(peers or ((concerned,) if concerned else ())))

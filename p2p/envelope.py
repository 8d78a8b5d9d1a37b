"""Signed envelopes: the format in which a node's statements are sent, stored and verified.

The meaning of a payload is left to the `Rule` of its domain (`app.swarm` defines them). Integers are big-endian:

    2   b"sE"
    1   major version: 1, or 2 if the payload is longer than 65,535 bytes
    1   length of the domain, 1 to 64
    n   domain, ASCII: the kind of statement, so that one kind is never accepted as another
    32  the signer's Ed25519 public key (its peer id is derived from it)
    8   sequence: the signer's wall clock in milliseconds, never decreasing
    8   expiry: milliseconds since 1970; 2**63 - 1 means never
    2   length of the payload; 4 bytes in version 2
    n   payload
    64  signature over b"shoal envelope\\0" and all of the above

Payloads of version 2 are accepted only in a domain whose `Rule` allows so many bytes; anywhere else such an envelope is
refused by its size. Clocks of two nodes may differ by `CLOCK_TOLERANCE_MS`. Whatever the bytes are, only
`EnvelopeError` is raised.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from p2p.errors import EnvelopeError, Untimely
from p2p.identity import KEY_BYTES, SIGNATURE_BYTES, Identity, is_signed, peer_id_of

VERSION, LONG_VERSION = 1, 2
CLOCK_TOLERANCE_MS = 10 * 60 * 1000
NEVER = 2**63 - 1
MAX_PAYLOAD_BYTES = 2**16 - 1  # of version 1, and of every domain whose rule allows no more
MAX_DOMAIN_BYTES = 64

_MAGIC = b"sE"
_CONTEXT = b"shoal envelope\0"
_MIDDLE, _LONG_MIDDLE = struct.Struct(f">{KEY_BYTES}sQQH"), struct.Struct(f">{KEY_BYTES}sQQI")

T = TypeVar("T")


def envelope_bytes(domain_bytes: int, payload_bytes: int) -> int:
    """Return the size of an envelope with a domain and a payload of these lengths."""
    middle = _MIDDLE if payload_bytes <= MAX_PAYLOAD_BYTES else _LONG_MIDDLE
    return 4 + domain_bytes + middle.size + payload_bytes + SIGNATURE_BYTES


MAX_ENVELOPE_BYTES = envelope_bytes(MAX_DOMAIN_BYTES, MAX_PAYLOAD_BYTES)


@dataclass(frozen=True)
class Envelope:
    """One parsed statement; `raw` holds the signed bytes, which are stored and forwarded unchanged."""

    domain: str
    public_key: bytes
    sequence: int
    expires_at_ms: int
    payload: bytes
    raw: bytes

    @property
    def peer(self) -> str:
        """The signer's peer id."""
        return peer_id_of(self.public_key)


@dataclass(frozen=True)
class Rule(Generic[T]):
    """The bounds and the payload parser of one domain.

    `read` parses the payload of a verified envelope; a `ValueError` from it rejects the envelope.
    """

    domain: str
    read: Callable[[Envelope], T]
    max_payload_bytes: int = MAX_PAYLOAD_BYTES
    max_lifetime_ms: int | None = None  # None: any lifetime, also `NEVER`


def seal(
    identity: Identity,
    domain: str,
    payload: bytes,
    *,
    sequence: int,
    expires_at_ms: int,
    max_payload_bytes: int = MAX_PAYLOAD_BYTES,
) -> bytes:
    """Return the signed bytes of a statement; the same values always give the same bytes.

    Raises `EnvelopeError` for a payload that is too large, and for an expiry that is not after `sequence`.
    """
    if len(payload) > max_payload_bytes:
        raise EnvelopeError(f"a payload of {len(payload)} bytes is too large; the bound is {max_payload_bytes}")
    if not 0 <= sequence < expires_at_ms <= NEVER:
        raise EnvelopeError(f"a statement made at {sequence} cannot expire at {expires_at_ms}")
    name = domain.encode("ascii")
    assert 0 < len(name) <= MAX_DOMAIN_BYTES, "domains are constants of this program"
    version, middle = (VERSION, _MIDDLE) if len(payload) <= MAX_PAYLOAD_BYTES else (LONG_VERSION, _LONG_MIDDLE)
    head = _MAGIC + bytes((version, len(name))) + name
    body = head + middle.pack(identity.public_key, sequence, expires_at_ms, len(payload)) + payload
    return body + identity.sign(_CONTEXT + body)


def domain_of(raw: bytes) -> str:
    """Return the domain that an envelope names, however long it is; raises `EnvelopeError`. Verifies nothing else."""
    if len(raw) < 4 or raw[:2] != _MAGIC:
        raise EnvelopeError("these bytes are not an envelope")
    if raw[2] not in (VERSION, LONG_VERSION):
        known = f"versions {VERSION} and {LONG_VERSION}"
        raise EnvelopeError(f"envelope version {raw[2]} is not understood; this Shoal reads {known}")
    domain = raw[4 : 4 + raw[3]]
    if not 0 < raw[3] <= MAX_DOMAIN_BYTES or len(domain) < raw[3]:
        raise EnvelopeError("the envelope is cut off")
    if not domain.isascii():
        raise EnvelopeError("the envelope's domain is not ASCII")
    return domain.decode()


def parse(raw: bytes, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> Envelope:
    """Split an envelope into its fields, or raise `EnvelopeError`; verifies neither signature nor times."""
    most = envelope_bytes(MAX_DOMAIN_BYTES, max_payload_bytes)
    if len(raw) > most:
        raise EnvelopeError(f"an envelope of {len(raw)} bytes is too large; the bound is {most}")
    domain = domain_of(raw)
    at, middle = 4 + raw[3], _MIDDLE if raw[2] == VERSION else _LONG_MIDDLE
    start = at + middle.size
    if len(raw) < start + SIGNATURE_BYTES:
        raise EnvelopeError("the envelope is cut off")
    public_key, sequence, expires_at_ms, length = middle.unpack_from(raw, at)
    if len(raw) != start + length + SIGNATURE_BYTES:
        raise EnvelopeError("the envelope is longer or shorter than the length in its header")
    if length > max_payload_bytes:
        raise EnvelopeError(f"a payload of {length} bytes is too large; the bound is {max_payload_bytes}")
    if raw[2] == LONG_VERSION and length <= MAX_PAYLOAD_BYTES:  # the same values always give the same bytes
        raise EnvelopeError(f"a payload of {length} bytes is not one of version {LONG_VERSION}")
    return Envelope(domain, public_key, sequence, expires_at_ms, raw[start : start + length], raw)


def open_envelope(raw: bytes, rule: Rule[T], *, now_ms: int, peer: str | None = None) -> tuple[Envelope, T]:
    """Parse and verify an envelope, or raise `EnvelopeError`; `peer`, if given, must be its signer."""
    envelope = parse(raw, max(MAX_PAYLOAD_BYTES, rule.max_payload_bytes))
    return envelope, verify(envelope, rule, now_ms=now_ms, peer=peer)


def verify(envelope: Envelope, rule: Rule[T], *, now_ms: int, peer: str | None = None) -> T:
    """Verify a parsed envelope and read its payload, or raise `EnvelopeError`; `peer`, if given, must be its signer.

    The cheap checks come before the signature, and the payload is read only after it.
    """
    raw = envelope.raw
    if envelope.domain != rule.domain:
        raise EnvelopeError(f"expected a statement of {rule.domain!r}, got one of {envelope.domain!r}")
    if len(envelope.payload) > rule.max_payload_bytes:
        raise EnvelopeError(f"a {rule.domain} payload of {len(envelope.payload)} bytes is too large")
    _check_times(envelope, rule.max_lifetime_ms, now_ms)
    signer = envelope.peer
    if peer is not None and signer != peer:
        raise EnvelopeError(f"the statement was signed by {signer}, not by {peer}")
    if not is_signed(envelope.public_key, _CONTEXT + raw[:-SIGNATURE_BYTES], raw[-SIGNATURE_BYTES:]):
        raise EnvelopeError(f"the signature of {signer} is forged or damaged")
    try:
        return rule.read(envelope)
    except ValueError as error:
        raise EnvelopeError(f"the {rule.domain} of {signer} was refused: {error}") from error


def _check_times(envelope: Envelope, max_lifetime_ms: int | None, now_ms: int) -> None:
    """Raise `Untimely` for a statement that has expired or is from the future, `EnvelopeError` for impossible times."""
    lifetime_ms = envelope.expires_at_ms - envelope.sequence
    if lifetime_ms <= 0 or envelope.expires_at_ms > NEVER:
        raise EnvelopeError("the statement expires before it was made, or at an impossible time")
    if max_lifetime_ms is not None and lifetime_ms > max_lifetime_ms:
        raise EnvelopeError(f"a {envelope.domain} may last {max_lifetime_ms} ms, this one lasts {lifetime_ms} ms")
    if envelope.sequence > now_ms + CLOCK_TOLERANCE_MS:
        raise Untimely(f"the statement of {envelope.peer} is from the future; check both machines' clocks")
    if envelope.expires_at_ms + CLOCK_TOLERANCE_MS <= now_ms:
        raise Untimely(f"the statement of {envelope.peer} has expired; if it is new, check both clocks")


class Sequence:
    """Numbers a node's statements: by its clock in milliseconds, but always above the last number."""

    def __init__(self, last: int = 0) -> None:
        self.last = last

    def next(self, now_ms: int) -> int:
        """Return the next number.

        If the last number is further ahead than the clock tolerance, no peer ever accepted it. Only then does the
        sequence restart at the clock, so that a clock that was wrong once does not silence this node for ever.
        """
        self.last = now_ms if self.last >= now_ms + CLOCK_TOLERANCE_MS else max(now_ms, self.last + 1)
        return self.last

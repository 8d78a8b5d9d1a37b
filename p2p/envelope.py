"""Signed envelopes: the one form in which a node's statements travel, are kept, and are checked.

What the payload means is for whoever registers a `Rule` with a validator. Everything is big-endian:

    2   b"sE"
    1   major version, 1
    1   length of the domain, 1 to 64
    n   domain, ASCII: which kind of statement this is, so that one kind never passes for another
    32  the signer's Ed25519 public key (its peer id is derived from it)
    8   sequence: the signer's wall clock in milliseconds, never decreasing
    8   expiry: milliseconds since 1970; 2**63 - 1 means never
    2   length of the payload
    n   payload
    64  signature over b"shoal envelope\\0" and all of the above

Clocks may be `CLOCK_TOLERANCE_MS` apart. Any bytes either open or raise `EnvelopeError`, and nothing else.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from p2p.errors import EnvelopeError
from p2p.identity import KEY_BYTES, SIGNATURE_BYTES, Identity, is_signed, peer_id_of

VERSION = 1
CLOCK_TOLERANCE_MS = 10 * 60 * 1000
NEVER = 2**63 - 1
MAX_PAYLOAD_BYTES = 2**16 - 1
MAX_DOMAIN_BYTES = 64

_MAGIC = b"sE"
_CONTEXT = b"shoal envelope\0"
_MIDDLE = struct.Struct(f">{KEY_BYTES}sQQH")
_OVERHEAD = 4 + _MIDDLE.size + SIGNATURE_BYTES
MAX_ENVELOPE_BYTES = _OVERHEAD + MAX_DOMAIN_BYTES + MAX_PAYLOAD_BYTES

T = TypeVar("T")


@dataclass(frozen=True)
class Envelope:
    """One statement as its signer made it; `raw` is what is stored and passed on, byte for byte."""

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
    """What makes a statement of one domain acceptable.

    `read` turns a verified envelope into the value it stands for; a `ValueError` from it is a refusal.
    """

    domain: str
    read: Callable[[Envelope], T]
    max_payload_bytes: int = MAX_PAYLOAD_BYTES
    max_lifetime_ms: int | None = None  # None: it may also never expire


def seal(identity: Identity, domain: str, payload: bytes, *, sequence: int, expires_at_ms: int) -> bytes:
    """The signed bytes of a statement; the same values always give the same bytes."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise EnvelopeError(f"a payload of {len(payload)} bytes is too large; the bound is {MAX_PAYLOAD_BYTES}")
    if not 0 <= sequence < expires_at_ms <= NEVER:
        raise EnvelopeError(f"a statement made at {sequence} cannot expire at {expires_at_ms}")
    name = domain.encode("ascii")
    assert 0 < len(name) <= MAX_DOMAIN_BYTES, "domains are constants of our own"
    head = _MAGIC + bytes((VERSION, len(name))) + name
    body = head + _MIDDLE.pack(identity.public_key, sequence, expires_at_ms, len(payload)) + payload
    return body + identity.sign(_CONTEXT + body)


def parse(raw: bytes) -> Envelope:
    """The fields of an envelope whose *form* is right; nothing is verified yet."""
    if len(raw) > MAX_ENVELOPE_BYTES:
        raise EnvelopeError(f"an envelope of {len(raw)} bytes is too large; the bound is {MAX_ENVELOPE_BYTES}")
    if len(raw) < 4 or raw[:2] != _MAGIC:
        raise EnvelopeError("these bytes are no envelope")
    if raw[2] != VERSION:
        raise EnvelopeError(f"envelope version {raw[2]} is not understood; this Shoal reads version {VERSION}")
    middle = 4 + raw[3]
    start = middle + _MIDDLE.size
    if not 0 < raw[3] <= MAX_DOMAIN_BYTES or len(raw) < start + SIGNATURE_BYTES:
        raise EnvelopeError("the envelope is cut off")
    domain = raw[4:middle]
    if not domain.isascii():
        raise EnvelopeError("the envelope's domain is not ASCII")
    public_key, sequence, expires_at_ms, length = _MIDDLE.unpack_from(raw, middle)
    if len(raw) != start + length + SIGNATURE_BYTES:
        raise EnvelopeError("the envelope's length is not what it says")
    return Envelope(domain.decode(), public_key, sequence, expires_at_ms, raw[start : start + length], raw)


def open_envelope(raw: bytes, rule: Rule[T], *, now_ms: int, peer: str | None = None) -> tuple[Envelope, T]:
    """Verify everything and read the payload, or raise `EnvelopeError`; `peer` is who it must come from, if known.

    The signature is checked after all that is cheap, and before the payload is looked at.
    """
    envelope = parse(raw)
    if envelope.domain != rule.domain:
        raise EnvelopeError(f"expected a statement of {rule.domain!r}, got one of {envelope.domain!r}")
    if len(envelope.payload) > rule.max_payload_bytes:
        raise EnvelopeError(f"a {rule.domain} payload of {len(envelope.payload)} bytes is too large")
    check_times(envelope, rule.max_lifetime_ms, now_ms)
    signer = envelope.peer
    if peer is not None and signer != peer:
        raise EnvelopeError(f"the statement was signed by {signer}, not by {peer}")
    if not is_signed(envelope.public_key, _CONTEXT + raw[:-SIGNATURE_BYTES], raw[-SIGNATURE_BYTES:]):
        raise EnvelopeError(f"the signature of {signer} is forged or damaged")
    try:
        return envelope, rule.read(envelope)
    except ValueError as error:
        raise EnvelopeError(f"the {rule.domain} of {signer} was refused: {error}") from error


def check_times(envelope: Envelope, max_lifetime_ms: int | None, now_ms: int) -> None:
    """Refuse, with `EnvelopeError`, what has expired, comes from the future, or wants to last too long."""
    lifetime_ms = envelope.expires_at_ms - envelope.sequence
    if lifetime_ms <= 0 or envelope.expires_at_ms > NEVER:
        raise EnvelopeError("the statement expires before it was made, or at an impossible time")
    if max_lifetime_ms is not None and lifetime_ms > max_lifetime_ms:
        raise EnvelopeError(f"a {envelope.domain} may last {max_lifetime_ms} ms, this one wants {lifetime_ms}")
    if envelope.sequence > now_ms + CLOCK_TOLERANCE_MS:
        raise EnvelopeError(f"the statement of {envelope.peer} comes from the future; is a clock wrong?")
    if envelope.expires_at_ms + CLOCK_TOLERANCE_MS <= now_ms:
        raise EnvelopeError(f"the statement of {envelope.peer} has expired; is a clock wrong?")


class Sequence:
    """The numbers one node gives its statements: its clock in milliseconds, but always above the last."""

    def __init__(self, last: int = 0) -> None:
        self.last = last

    def next(self, now_ms: int) -> int:
        """The next number.

        A last number beyond everybody's clock tolerance was never accepted by anybody, and a clock that was wrong
        once must not silence this node for ever: then, and only then, counting starts again at the clock.
        """
        self.last = now_ms if self.last >= now_ms + CLOCK_TOLERANCE_MS else max(now_ms, self.last + 1)
        return self.last


Freshness = Literal["new", "repeated", "outdated"]


class Latest:
    """The highest sequence heard of each signer and domain, so that nothing older is taken again.

    Bounded: the entry that was refreshed longest ago goes first. Once forgotten, an old statement of that signer can
    pass again until it expires; live members refresh theirs long before.
    """

    def __init__(self, capacity: int = 8192) -> None:
        self._capacity = capacity
        self._heard: OrderedDict[tuple[bytes, str], int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._heard)

    def offer(self, envelope: Envelope) -> Freshness:
        """Whether a *verified* envelope says something new; if so it is remembered."""
        key = (envelope.public_key, envelope.domain)
        known = self._heard.get(key, -1)
        if envelope.sequence <= known:
            return "repeated" if envelope.sequence == known else "outdated"
        self._heard[key] = envelope.sequence
        self._heard.move_to_end(key)
        if len(self._heard) > self._capacity:
            self._heard.popitem(last=False)
        return "new"

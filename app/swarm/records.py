"""Formats of the signed statements of a swarm: swarm records, announcements and suspicions. Pure.

Each is a payload of compact canonical JSON inside a `p2p.envelope`. `v` is the major version; other versions are
rejected. Unknown fields are ignored, and survive because envelopes are stored and forwarded unchanged. The signer and
the time are in the envelope only.

    shoal/swarm         v, name, model (hash in hex), private, settings (model_name: the model's name for people)
    shoal/announcement  v, swarm, state, and unless empty: span, grow, held, ends, decode, prefill, kv, kvall, busy,
                        quant, dtype, device, name, addrs, rtt, rate, wires, app, train
                        (spans are [start, stop], those of held have no block in common; addrs are
                        multiaddrs without the peer's own id; rtt has the last 8 characters of peers' ids and the
                        round-trip times to them in units of 0.1 ms; rate has the same for some and the speed at which
                        they send to this node in units of 10 kB/s)
    shoal/suspicion     v, swarm, accused, number (of the accused's latest announcement: a newer one refutes it)
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

from app.core.canonical_json import Fields, canonical, check_version, decode_object
from app.core.errors import RecordError
from app.core.span import Span
from app.swarm.names import is_model_hash, is_swarm_name, pinned
from p2p.addresses import parse_known
from p2p.envelope import NEVER, Envelope, Rule, open_envelope, parse, seal, verify
from p2p.errors import EnvelopeError, IdentityError
from p2p.identity import Identity, public_key_of

VERSION = 1
SWARM_DOMAIN = "shoal/swarm"
ANNOUNCEMENT_DOMAIN = "shoal/announcement"
SUSPICION_DOMAIN = "shoal/suspicion"

MAX_RECORD_BYTES = 4096
MAX_ANNOUNCEMENT_BYTES = 1024
MAX_LIFETIME_MS = 60 * 60 * 1000
SUSPICION_LIFETIME_MS = 2 * 60 * 1000
MAX_ADDRESSES = 6
MAX_ADDRESS_CHARS = 160  # without the signer's peer id
MAX_RTTS = 12
MAX_RATES = 8
MAX_WIRES = 8

MODEL_NAME = "model_name"  # key of `SwarmRecord.settings`
MAX_MODEL_NAME_CHARS = 64

SLOWEST_TOKENS_PER_S = 0.1  # assumed for members that announce no speed

_TAIL_CHARS = 8
_RTT_UNITS_PER_S = 10_000
MAX_DEVICE_CHARS = 32
_MAX_RTT_S = 60.0
_BYTES_PER_RATE_UNIT = 10_000
_MAX_RATE_UNITS = 10_000_000  # 100 GB/s
_MAX_SPEED = 1e9
_MAX_TOKENS = 2**48
_SWARM_ID_BYTES = 16

Setting = bool | int | str
_FEWEST_BITS = "int4"  # weights that a node rounded to 4 bits; those of a file that has so few are "stored"


def swarm_id(name: str, model_hash: str) -> str:
    """Return the id that announcements use for a swarm: 32 hex digits of a hash of its name and model."""
    assert is_swarm_name(name), name
    assert is_model_hash(model_hash), model_hash
    return hashlib.sha256(f"shoal swarm\0{name}\0{model_hash}".encode()).hexdigest()[: 2 * _SWARM_ID_BYTES]


def tail(peer: str) -> str:
    """Return the last characters of a peer id, by which announcements name other peers to save bytes."""
    return peer[-_TAIL_CHARS:]


def is_coarse(number_format: str) -> bool:
    """True for weights that were rounded to 4 bits: honest results differ from those of other formats by much."""
    return _FEWEST_BITS in number_format


@dataclass(frozen=True)
class SwarmRecord:
    """A swarm as its creator signed it; `raw` is the envelope to store and forward."""

    name: str
    model_hash: str
    creator: str
    created_ms: int
    private: bool = False
    settings: Mapping[str, Setting] = field(default_factory=dict)
    raw: bytes = field(default=b"", repr=False, compare=False)

    @property
    def model_name(self) -> str:
        """The model's name for people, as the creator gave it; empty if it gave none that can be shown."""
        name = self.settings.get(MODEL_NAME, "")
        return name if isinstance(name, str) and name.isprintable() and len(name) <= MAX_MODEL_NAME_CHARS else ""

    @property
    def id(self) -> str:
        """The swarm's id, shared by all records of this name and model."""
        return swarm_id(self.name, self.model_hash)

    def __str__(self) -> str:
        return pinned(self.name, self.model_hash)


@dataclass(frozen=True)
class Announcement:
    """A node's statement of the blocks that it hosts in one swarm, and how fast.

    `sequence` is the wall-clock time in ms when it was made, made strictly increasing; valid until `expires_at_ms`.
    `raw` is the envelope that it was read from, which is passed on to other members; empty before it is signed.
    """

    peer: str
    sequence: int
    expires_at_ms: int
    swarm: str
    state: str  # joining, fetching, loading, serving, client, paused, draining, left; newer versions may add some
    span: Span | None = None
    decode_tokens_per_s: float = 0.0  # through its whole span, one session
    prefill_tokens_per_s: float = 0.0
    kv_free_tokens: int = 0  # KV-cache room for new sessions, in tokens through its whole span
    kv_total_tokens: int = 0  # the largest session that it can ever have; 0: not said
    quantisation: str = "none"
    cache: str = "own"  # how keys and values are kept: as computed with, or in fewer bits
    device: str = "cpu"
    name: str = ""  # given by the owner
    addresses: tuple[str, ...] = ()
    app_version: str = ""
    growing: Span | None = None  # its future span, while part of it is still loading
    held: tuple[Span, ...] = ()  # blocks whose parts are on its disk
    holds_ends: bool = False  # embedding, head and tokenizer are on its disk
    busy: float = 0.0  # recent share of time that its device was computing, 0 to 1
    dtype: str = "f32"  # it computes in this; with `quantisation` and `cache` it bounds how far its results may differ
    rtts: tuple[tuple[str, float], ...] = ()  # (`tail` of a peer, round-trip seconds that it measured)
    rates: tuple[tuple[str, float], ...] = ()  # (`tail` of a peer, bytes a second that it measured from there)
    wires: tuple[str, ...] = ()  # number formats of hidden states that it understands besides f32, bf16 and f16
    train: str = "never"  # whose jobs it trains: never, trusted, members; newer versions may add some
    raw: bytes = field(default=b"", repr=False, compare=False)

    @property
    def serves(self) -> bool:
        """True if new sessions may be routed through it."""
        return self.state == "serving" and self.span is not None

    @cached_property
    def decode_block_s(self) -> float:
        """Seconds that one token takes in one of its blocks, by its own word; it must have a span."""
        assert self.span is not None
        return 1 / max(self.decode_tokens_per_s, SLOWEST_TOKENS_PER_S) / len(self.span)

    @cached_property
    def prefill_block_s(self) -> float:
        """Seconds that one token of a prompt takes in one of its blocks, by its own word; it must have a span."""
        assert self.span is not None
        fastest = max(self.prefill_tokens_per_s, self.decode_tokens_per_s, SLOWEST_TOKENS_PER_S)
        return 1 / fastest / len(self.span)

    @cached_property
    def rtt_by_tail(self) -> Mapping[str, float]:
        """The round-trip times that it measured, by the `tail` of the other peer."""
        return dict(self.rtts)

    @cached_property
    def rtt_columns(self) -> bytes:
        """The same for searches through thousands of members: the hashes of the tails, then as many times.

        Bytes are nothing to Python's search for circular garbage, which arrays and tuples of them made longer.
        """
        rtts = dict(self.rtts)  # not `rtt_by_tail`, which is then never made for most members
        return array("q", map(hash, rtts)).tobytes() + array("d", rtts.values()).tobytes()

    @cached_property
    def host(self) -> str:
        """A name for the machine that it runs on: its addresses in its own network; empty if it gives none.

        A public address is often that of a whole house.
        """
        return _host_of(self.addresses)

    @property
    def training_format(self) -> str:
        """Formats of its weights and of its computation; training needs no more, because it has no cache."""
        return f"{self.quantisation} {self.dtype}"

    @property
    def number_format(self) -> str:
        """Formats of its weights, of its computation and, unless it is the same, of its cache; nodes that share it
        differ least."""
        return self.training_format + ("" if self.cache == "own" else f" {self.cache} cache")

    @cached_property
    def is_coarse(self) -> bool:
        """True if it says that it rounded its weights to 4 bits."""
        return is_coarse(self.number_format)


@dataclass(frozen=True)
class Suspicion:
    """A node's statement that another one did not answer; receivers probe the accused themselves before they act.

    `number` is the sequence number of the accused's latest announcement that the signer knew; `raw` is the envelope.
    """

    peer: str
    sequence: int
    swarm: str
    accused: str
    number: int
    raw: bytes = field(default=b"", repr=False, compare=False)


@dataclass(frozen=True)
class SwarmTerms:
    """Facts of a swarm that its statements must match: its id, and the number of blocks of its model."""

    swarm: str
    n_blocks: int


# --- signing ---------------------------------------------------------------------------------------------------------


def sign_record(
    identity: Identity,
    name: str,
    model_hash: str,
    *,
    now_ms: int,
    private: bool = False,
    settings: Mapping[str, Setting] | None = None,
) -> SwarmRecord:
    """Make and sign the record of a new swarm."""
    payload = {"v": VERSION, "name": name, "model": model_hash, "private": private, "settings": dict(settings or {})}
    raw = seal(identity, SWARM_DOMAIN, canonical(payload), sequence=now_ms, expires_at_ms=NEVER)
    return read_record(raw, now_ms=now_ms)


def announceable(addresses: Iterable[str], peer: str) -> tuple[str, ...]:
    """Return those of a peer's own addresses that its announcement has room for, in their order.

    A host name may be too long, and a relay chooses its own.
    """
    short = [one for one in addresses if len(one.removesuffix(f"/p2p/{peer}")) <= MAX_ADDRESS_CHARS]
    return tuple(short[:MAX_ADDRESSES])


def sign_announcement(identity: Identity, announcement: Announcement) -> bytes:
    """Return the signed envelope of this node's announcement."""
    assert announcement.peer == identity.peer_id, "a node can sign its own announcements only"
    payload: dict[str, Any] = {"v": VERSION, "swarm": announcement.swarm, "state": announcement.state}
    optional = {
        "span": _pair(announcement.span) if announcement.span else None,
        "grow": _pair(announcement.growing) if announcement.growing else None,
        "held": [_pair(span) for span in announcement.held],
        "ends": announcement.holds_ends,
        "decode": round(announcement.decode_tokens_per_s, 2),
        "prefill": round(announcement.prefill_tokens_per_s, 2),
        "kv": announcement.kv_free_tokens,
        "kvall": announcement.kv_total_tokens,
        "busy": round(announcement.busy, 2),
        "dtype": "" if announcement.dtype == "f32" else announcement.dtype,
        "quant": "" if announcement.quantisation == "none" else announcement.quantisation,
        "cache": "" if announcement.cache == "own" else announcement.cache,
        "device": "" if announcement.device == "cpu" else _announced_device(announcement.device),
        "name": announcement.name,
        "addrs": [address.removesuffix(f"/p2p/{announcement.peer}") for address in announcement.addresses],
        "rtt": {who: round(min(rtt_s, _MAX_RTT_S) * _RTT_UNITS_PER_S) for who, rtt_s in announcement.rtts},
        "rate": {who: _rate_units(bytes_per_s) for who, bytes_per_s in announcement.rates},
        "wires": list(announcement.wires),
        "app": announcement.app_version,
        "train": "" if announcement.train == "never" else announcement.train,
    }
    payload |= {key: value for key, value in optional.items() if value}
    return seal(
        identity,
        ANNOUNCEMENT_DOMAIN,
        canonical(payload),
        sequence=announcement.sequence,
        expires_at_ms=announcement.expires_at_ms,
    )


def _rate_units(bytes_per_s: float) -> int:
    return min(max(round(bytes_per_s / _BYTES_PER_RATE_UNIT), 1), _MAX_RATE_UNITS)


def _announced_device(name: str) -> str:
    """Return the driver's device name without unprintable characters, cut to `MAX_DEVICE_CHARS`."""
    return "".join(character for character in name if character.isprintable())[:MAX_DEVICE_CHARS]


def sign_suspicion(identity: Identity, swarm: str, accused: str, number: int, *, sequence: int) -> bytes:
    """Return the signed envelope of this node's suspicion that `accused` is gone."""
    payload = canonical({"v": VERSION, "swarm": swarm, "accused": accused, "number": number})
    expires_at_ms = sequence + SUSPICION_LIFETIME_MS
    return seal(identity, SUSPICION_DOMAIN, payload, sequence=sequence, expires_at_ms=expires_at_ms)


# --- reading ---------------------------------------------------------------------------------------------------------


def _record_in(envelope: Envelope) -> SwarmRecord:
    fields = _payload(envelope, "swarm record", MAX_RECORD_BYTES)
    name, model_hash = fields.text("name", 63), fields.text("model", 64)
    if not is_swarm_name(name):
        fields.refuse("name", "a swarm's name")
    if not is_model_hash(model_hash):
        fields.refuse("model", "the hash of a manifest")
    settings = fields.inner("settings")
    if len(settings.values) > 32:
        raise RecordError("swarm record: more than 32 settings")
    for key, value in settings.values.items():
        short = len(key) <= 32 and type(value) in (bool, int, str) and len(str(value)) <= 256
        if not (short and key.isprintable() and str(value).isprintable()):
            settings.refuse(key, "true, false, a whole number or a short text")
    private = fields.flag("private", default=False)
    return SwarmRecord(
        name, model_hash, envelope.peer, envelope.sequence, private, settings=settings.values, raw=envelope.raw
    )


def _announcement_in(envelope: Envelope) -> Announcement:
    fields = _payload(envelope, "announcement", MAX_ANNOUNCEMENT_BYTES)
    peer, addresses = envelope.peer, _addresses(fields, envelope.peer)
    _host_of(addresses)  # already here, a few statements at a time: a snapshot needs those of all members at once
    return Announcement(
        peer=peer,
        sequence=envelope.sequence,
        expires_at_ms=envelope.expires_at_ms,
        swarm=fields.hex_bytes("swarm", _SWARM_ID_BYTES).hex(),
        state=fields.printable("state", 16),
        span=_span(fields, "span", fields.values["span"]) if "span" in fields.values else None,
        decode_tokens_per_s=fields.number("decode", 0, _MAX_SPEED, 0.0),
        prefill_tokens_per_s=fields.number("prefill", 0, _MAX_SPEED, 0.0),
        kv_free_tokens=fields.integer("kv", 0, _MAX_TOKENS, 0),
        kv_total_tokens=fields.integer("kvall", 0, _MAX_TOKENS, 0),
        quantisation=fields.printable("quant", 16, "none"),
        cache=fields.printable("cache", 16, "own"),
        device=fields.printable("device", MAX_DEVICE_CHARS, "cpu"),
        name=fields.printable("name", 32, ""),
        addresses=addresses,
        app_version=fields.printable("app", 32, ""),
        growing=_span(fields, "grow", fields.values["grow"]) if "grow" in fields.values else None,
        held=_held(fields),
        holds_ends=fields.flag("ends", default=False),
        busy=fields.number("busy", 0, 1, 0.0),
        dtype=fields.printable("dtype", 8, "f32"),
        rtts=_rtts(fields),
        rates=_rates(fields),
        wires=_wires(fields),
        train=fields.printable("train", 16, "never"),
        raw=envelope.raw,
    )


def _suspicion_in(envelope: Envelope) -> Suspicion:
    fields = _payload(envelope, "suspicion", MAX_ANNOUNCEMENT_BYTES)
    accused = fields.text("accused", 64)
    try:
        public_key_of(accused)
    except IdentityError:
        fields.refuse("accused", "a peer id")
    swarm = fields.hex_bytes("swarm", _SWARM_ID_BYTES).hex()
    number = fields.integer("number", 0, NEVER)
    return Suspicion(envelope.peer, envelope.sequence, swarm, accused, number, raw=envelope.raw)


SWARM_RULE: Rule[SwarmRecord] = Rule(SWARM_DOMAIN, _record_in, MAX_RECORD_BYTES)
ANNOUNCEMENT_RULE: Rule[Announcement] = Rule(
    ANNOUNCEMENT_DOMAIN, _announcement_in, MAX_ANNOUNCEMENT_BYTES, MAX_LIFETIME_MS
)
SUSPICION_RULE: Rule[Suspicion] = Rule(SUSPICION_DOMAIN, _suspicion_in, MAX_ANNOUNCEMENT_BYTES, MAX_LIFETIME_MS)


def read_record(raw: bytes, *, now_ms: int) -> SwarmRecord:
    """Verify an envelope and return its swarm record; raises `p2p.errors.EnvelopeError` if anything is wrong."""
    return open_envelope(raw, SWARM_RULE, now_ms=now_ms)[1]


def read_announcement(raw: bytes, *, now_ms: int, peer: str | None = None) -> Announcement:
    """Verify an envelope and return its announcement; raises `p2p.errors.EnvelopeError` if anything is wrong."""
    return open_envelope(raw, ANNOUNCEMENT_RULE, now_ms=now_ms, peer=peer)[1]


def read_suspicion(raw: bytes, *, now_ms: int) -> Suspicion:
    """Verify an envelope and return its suspicion; raises `p2p.errors.EnvelopeError` if anything is wrong."""
    return open_envelope(raw, SUSPICION_RULE, now_ms=now_ms)[1]


def read_record_or_announcement(raw: bytes, *, now_ms: int) -> SwarmRecord | Announcement:
    """Verify an envelope of either kind and return its value; raises `EnvelopeError` if it is of another kind."""
    envelope = parse(raw)
    if envelope.domain == SWARM_DOMAIN:
        return verify(envelope, SWARM_RULE, now_ms=now_ms)
    return verify(envelope, ANNOUNCEMENT_RULE, now_ms=now_ms)


def verify_announcement(envelope: Envelope, terms: SwarmTerms, now_ms: int) -> Announcement:
    """Return the announcement in a parsed envelope.

    Raises `EnvelopeError` if it is malformed, not signed by the peer that it names, expired, from the future, of
    another swarm, or about blocks that the model does not have.
    """
    announcement = verify(envelope, ANNOUNCEMENT_RULE, now_ms=now_ms)
    if announcement.swarm != terms.swarm:
        raise EnvelopeError(f"the announcement of {announcement.peer} belongs to another swarm")
    spans = [span for span in (announcement.span, announcement.growing, *announcement.held) if span is not None]
    if any(span.stop > terms.n_blocks for span in spans):
        raise EnvelopeError(f"{announcement.peer} announces blocks beyond the model's {terms.n_blocks}")
    return announcement


def verify_suspicion(envelope: Envelope, terms: SwarmTerms, now_ms: int) -> Suspicion:
    """Return the suspicion in a parsed envelope; raises `EnvelopeError` for the same faults as an announcement's."""
    suspicion = verify(envelope, SUSPICION_RULE, now_ms=now_ms)
    if suspicion.swarm != terms.swarm:
        raise EnvelopeError(f"the suspicion of {suspicion.peer} belongs to another swarm")
    return suspicion


def _payload(envelope: Envelope, what: str, max_bytes: int) -> Fields:
    fields = decode_object(envelope.payload, what, max_bytes=max_bytes)
    check_version(fields, "v", VERSION)
    return fields


def _pair(span: Span) -> list[int]:
    return [span.start, span.stop]


def _span(fields: Fields, name: str, value: Any) -> Span:
    if isinstance(value, list) and len(value) == 2 and all(type(bound) is int for bound in value):
        start, stop = value
        if Span.is_possible(start, stop):
            return Span(start, stop)
    fields.refuse(name, "[start, stop] with 0 <= start < stop")


def _held(fields: Fields) -> tuple[Span, ...]:
    """Read spans that have no block in common, so that to go through their blocks takes as long as for one model."""
    spans = tuple(_span(fields, "held", item) for item in fields.items("held", 16, []))
    if any(after.start < before.stop for before, after in pairwise(sorted(spans))):
        fields.refuse("held", "spans that have no block in common")
    return spans


def _addresses(fields: Fields, peer: str) -> tuple[str, ...]:
    """Read addresses and append the signer's id, so that no peer can make others dial a third party in its name."""
    texts = fields.texts("addrs", MAX_ADDRESSES, MAX_ADDRESS_CHARS, [])
    if not all(text.startswith("/") and text.isascii() and text.isprintable() for text in texts):
        fields.refuse("addrs", "multiaddrs")
    return tuple(f"{text}/p2p/{peer}" for text in texts)


@lru_cache(maxsize=4096)
def _host_of(addresses: tuple[str, ...]) -> str:
    direct = [address for address in parse_known(addresses) if address.relay is None]
    return " ".join(sorted({one.host for one in direct if one.ip is not None and not one.ip.is_global}))


def _rtts(fields: Fields) -> tuple[tuple[str, float], ...]:
    """Read claimed round-trip times; `app.routing` believes them only as far as its own measurements allow."""
    if "rtt" not in fields.values:
        return ()
    rtts = fields.inner("rtt")
    if len(rtts.values) > MAX_RTTS or any(len(who) > _TAIL_CHARS for who in rtts.values):
        fields.refuse("rtt", f"the round-trip times to at most {MAX_RTTS} peers")
    most = int(_MAX_RTT_S * _RTT_UNITS_PER_S)
    return tuple((who, rtts.integer(who, 0, most) / _RTT_UNITS_PER_S) for who in rtts.values)


def _rates(fields: Fields) -> tuple[tuple[str, float], ...]:
    """Read claimed speeds; `app.routing` believes them only as far as its own measurements allow."""
    if "rate" not in fields.values:
        return ()
    rates = fields.inner("rate")
    if len(rates.values) > MAX_RATES or any(len(who) > _TAIL_CHARS for who in rates.values):
        fields.refuse("rate", f"the speeds from at most {MAX_RATES} peers")
    return tuple((who, float(_BYTES_PER_RATE_UNIT * rates.integer(who, 1, _MAX_RATE_UNITS))) for who in rates.values)


def _wires(fields: Fields) -> tuple[str, ...]:
    wires = fields.texts("wires", MAX_WIRES, 8, [])
    if not all(wire.isprintable() for wire in wires):
        fields.refuse("wires", "names of number formats")
    return tuple(wires)

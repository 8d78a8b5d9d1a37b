"""What islands say of a round that is under way, each signed by the one who says it. Pure.

Payloads are canonical JSON in envelopes of `p2p.envelope`; `v` is the major version, unknown fields are ignored. All
have `job` (the hash that names it) and `round` (from 0).

    shoal/round/arrival  prev (hash of the round before), steps, tokens, change (root over the hashes of its leaves),
                         traces (root over the hashes of its traces, see `app.rounds.traces`; only in jobs whose steps
                         are computed again, and not of an island of several machines), network (in jobs with a grid,
                         of members on one local network: the place of the first of them among those expected)
    shoal/round/list     attempt, prev, arrivals (envelopes in base64): who takes part, in the order of their shares
    shoal/round/result   list (its hash), root (of the state after the round; empty if the exchange failed), failed
                         (peer -> why), report (peer -> norm and agreement of its change, in the share merged here),
                         past (thousandths: cosine of each change in that share, in the order of the list, with what
                         was merged in the round before; empty or missing if that is not known here),
                         tested (thousandths: losses with changes of the round before over those without, which the
                         signer was drawn to measure, see `app.rounds.testers`; empty or missing if it was not),
                         recomputed (thousandths: by how much the gradient of each test's step is off; likewise)
    shoal/round/share    list (its hash), root (over the hashes of the leaves that the signer merged in that attempt)
    shoal/round/data     (no round) tokens, source, licence: what the signer trains on in a job of `own_data`

An entry of the log holds a list and all its results in one envelope, so arrivals and results that count are short.
Each statement is met several times, an arrival alone, in lists and in an entry, and is verified once.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any, TypeVar

from app.core.canonical_json import Fields, canonical, check_version, decode_object
from app.core.errors import RecordError
from app.manifest.merkle import HASH_BYTES
from app.rounds.testers import MOST_RATIO, MOST_TESTED
from p2p.envelope import (
    MAX_ENVELOPE_BYTES,
    MAX_PAYLOAD_BYTES,
    NEVER,
    Envelope,
    Rule,
    envelope_bytes,
    open_envelope,
    seal,
)
from p2p.errors import EnvelopeError
from p2p.identity import PEER_ID_CHARS, Identity

VERSION = 1
ARRIVAL, LIST, RESULT = "shoal/round/arrival", "shoal/round/list", "shoal/round/result"
SHARE, DATA = "shoal/round/share", "shoal/round/data"
MAX_MEMBERS = 64  # of one round
MAX_MEMBERS_TOGETHER = 16  # of one round without a grid, whose results tell of all members
MAX_WHY_CHARS, MAX_WHY_BYTES = 200, 400  # of one reason, and of its JSON
FIELDS_BYTES = 448  # of a list or an entry besides what grows with its members, at most
TEXT_BYTES = 3  # of each text in a list of JSON: quotes and comma
MAX_ARRIVAL_BYTES = 384
MAX_COUNTED_BYTES = 1740  # of a result that can be part of an entry
# of one that failed, with its reasons
MAX_RESULT_BYTES = MAX_COUNTED_BYTES + MAX_MEMBERS * (PEER_ID_CHARS + 2 * TEXT_BYTES + MAX_WHY_BYTES)
MAX_DATA_BYTES = 2048
MAX_SOURCE_CHARS, MAX_LICENCE_CHARS = 400, 100
MAX_ATTEMPTS = 64
MAX_ROUNDS = 10**7
MAX_TOKENS = 2**50
GENESIS = bytes(HASH_BYTES)  # stands for the round before the first
KEPT_STATEMENTS = 4 * MAX_MEMBERS  # of one kind that were verified, so that they are not verified again

T = TypeVar("T")


def verified_once(most: int) -> Callable[[Callable[[bytes], T]], Callable[[bytes], T]]:
    """Let a reader of signed statements read the same bytes once, of the last `most` that it has accepted.

    These statements never expire, so what was accepted is accepted later as well. What is refused is not kept.
    """

    def decorated(read: Callable[[bytes], T]) -> Callable[[bytes], T]:
        known: dict[bytes, T] = {}
        lock = threading.Lock()  # many are read in threads

        @wraps(read)
        def reading(raw: bytes) -> T:
            with lock:
                found = known.get(raw)
            if found is None:
                found = read(raw)
                with lock:
                    known[raw] = found
                    if len(known) > most:
                        del known[next(iter(known))]
            return found

        return reading

    return decorated


@dataclass(frozen=True)
class Arrival:
    """An island has made its steps of a round, and has committed itself to its change."""

    job: bytes
    round: int
    prev: bytes
    steps: int
    tokens: int
    change: bytes
    peer: str = ""
    raw: bytes = b""
    traces: bytes = b""  # empty: there are none
    network: int | None = None  # the local network that it shares with other members, see `app.rounds.grid`
    at_ms: int = 0  # by the clock of its peer


@dataclass(frozen=True)
class MemberList:
    """Who takes part in an attempt at a round, by the word of the one who leads it."""

    job: bytes
    round: int
    attempt: int
    prev: bytes
    arrivals: tuple[Arrival, ...]
    leader: str = ""
    raw: bytes = b""

    @property
    def members(self) -> list[str]:
        """Peers in the order of their shares."""
        return [arrival.peer for arrival in self.arrivals]

    @cached_property
    def hash(self) -> bytes:
        """The hash that results refer to."""
        return hashlib.sha256(self.raw).digest()


@dataclass(frozen=True)
class Result:
    """How an attempt ended for one member."""

    job: bytes
    round: int
    list: bytes
    root: bytes  # empty: the exchange failed
    failed: Mapping[str, str]
    report: Mapping[str, tuple[float, float]]
    peer: str = ""
    raw: bytes = b""
    past: tuple[int, ...] = ()  # thousandths
    tested: tuple[int, ...] = ()  # likewise
    recomputed: tuple[int, ...] = ()  # likewise
    at_ms: int = 0  # by the clock of its peer


@dataclass(frozen=True)
class MergedShare:
    """A member's word for the leaves that it merged in an attempt: it cannot give others to somebody else."""

    job: bytes
    list: bytes
    root: bytes
    peer: str = ""
    raw: bytes = b""


@dataclass(frozen=True)
class OwnData:
    """What a member says of the text that it trains on and keeps to itself."""

    job: bytes
    tokens: int
    source: str
    licence: str
    peer: str = ""
    raw: bytes = b""


def sign_arrival(identity: Identity, arrival: Arrival, now_ms: int) -> Arrival:
    """Return the arrival with its signed bytes."""
    values = {
        "job": arrival.job.hex(), "round": arrival.round, "prev": arrival.prev.hex(), "steps": arrival.steps,
        "tokens": arrival.tokens, "change": arrival.change.hex(),
        **({"traces": arrival.traces.hex()} if arrival.traces else {}),
        **({} if arrival.network is None else {"network": arrival.network}),
    }  # fmt: skip
    return read_arrival(signed(identity, ARRIVAL, values, now_ms))


@verified_once(KEPT_STATEMENTS)
def read_arrival(raw: bytes) -> Arrival:
    """Verify and read an arrival; raises `RecordError`."""
    envelope, fields = opened(raw, ARRIVAL, MAX_ARRIVAL_BYTES)
    return Arrival(
        job=fields.hex_bytes("job", HASH_BYTES),
        round=fields.integer("round", 0, MAX_ROUNDS),
        prev=fields.hex_bytes("prev", HASH_BYTES),
        steps=fields.integer("steps", 1, 10**6),
        tokens=fields.integer("tokens", 1, MAX_TOKENS),
        change=fields.hex_bytes("change", HASH_BYTES),
        peer=envelope.peer,
        raw=raw,
        traces=fields.hex_bytes("traces", HASH_BYTES) if "traces" in fields.values else b"",
        network=fields.integer("network", 0, MAX_MEMBERS - 1) if "network" in fields.values else None,
        at_ms=envelope.sequence,
    )


def sign_list(identity: Identity, job: bytes, attempt: int, arrivals: Sequence[Arrival], now_ms: int) -> MemberList:
    """Return a signed list of arrivals, which are all of one round."""
    values = {
        "job": job.hex(), "round": arrivals[0].round, "attempt": attempt, "prev": arrivals[0].prev.hex(),
        "arrivals": [_text(arrival.raw) for arrival in arrivals],
    }  # fmt: skip
    return read_list(signed(identity, LIST, values, now_ms))


@verified_once(MAX_MEMBERS)
def read_list(raw: bytes) -> MemberList:
    """Verify and read a member list and the arrivals in it; raises `RecordError`."""
    envelope, fields = opened(raw, LIST)
    texts = fields.texts("arrivals", MAX_MEMBERS, 2 * MAX_ENVELOPE_BYTES)
    found = MemberList(
        job=fields.hex_bytes("job", HASH_BYTES),
        round=fields.integer("round", 0, MAX_ROUNDS),
        attempt=fields.integer("attempt", 0, MAX_ATTEMPTS),
        prev=fields.hex_bytes("prev", HASH_BYTES),
        arrivals=tuple(read_arrival(_bytes(text)) for text in texts),
        leader=envelope.peer,
        raw=raw,
    )
    same = {(found.job, found.round, found.prev)}
    if not found.arrivals or {(one.job, one.round, one.prev) for one in found.arrivals} != same:
        raise RecordError("a member list names arrivals of another round, or none")
    if len(set(found.members)) != len(found.members) or found.leader not in found.members:
        raise RecordError("a member list names somebody twice, or not the one who signed it")
    return found


def sign_result(identity: Identity, result: Result, now_ms: int) -> Result:
    """Return the result with its signed bytes."""
    values = {
        "job": result.job.hex(), "round": result.round, "list": result.list.hex(), "root": result.root.hex(),
        "failed": {peer: _brief(why) for peer, why in result.failed.items()},
        "report": {peer: [float(f"{number:.6g}") for number in pair] for peer, pair in result.report.items()},
        "past": list(result.past), "tested": list(result.tested),
        **({"recomputed": list(result.recomputed)} if result.recomputed else {}),
    }  # fmt: skip
    return read_result(signed(identity, RESULT, values, now_ms))


@verified_once(KEPT_STATEMENTS)
def read_result(raw: bytes) -> Result:
    """Verify and read a result; raises `RecordError`."""
    envelope, fields = opened(raw, RESULT, MAX_RESULT_BYTES)
    root = fields.text("root", 2 * HASH_BYTES)
    if root and len(envelope.payload) > MAX_COUNTED_BYTES:
        raise RecordError(f"a result of {len(envelope.payload)} bytes is too long to be part of a round's entry")
    report = {}
    for peer, pair in _by_peer(fields.inner("report")).items():
        numbers = Fields(fields.what, {"norm": pair[0], "agreement": pair[1]}) if _is_pair(pair) else fields
        report[peer] = (numbers.number("norm", 0, 1e30), numbers.number("agreement", -1.01, 1.01))
    failed = fields.inner("failed")
    return Result(
        job=fields.hex_bytes("job", HASH_BYTES),
        round=fields.integer("round", 0, MAX_ROUNDS),
        list=fields.hex_bytes("list", HASH_BYTES),
        root=fields.hex_bytes("root", HASH_BYTES) if root else b"",
        failed={peer: failed.text(peer, MAX_WHY_CHARS) for peer in _by_peer(failed)},
        report=report,
        peer=envelope.peer,
        raw=raw,
        past=tuple(fields.integers("past", -1010, 1010, max_items=MAX_MEMBERS_TOGETHER, default=[])),
        tested=tuple(fields.integers("tested", 0, MOST_RATIO, max_items=2 * MOST_TESTED, default=[])),
        recomputed=tuple(fields.integers("recomputed", 0, MOST_RATIO, max_items=MOST_TESTED, default=[])),
        at_ms=envelope.sequence,
    )


def sign_share(identity: Identity, share: MergedShare, now_ms: int) -> MergedShare:
    """Return the word for a merged share with its signed bytes."""
    values = {"job": share.job.hex(), "list": share.list.hex(), "root": share.root.hex()}
    return read_share(signed(identity, SHARE, values, now_ms))


@verified_once(KEPT_STATEMENTS)
def read_share(raw: bytes) -> MergedShare:
    """Verify and read a member's word for the share that it merged; raises `RecordError`."""
    envelope, fields = opened(raw, SHARE, MAX_ARRIVAL_BYTES)
    job, found, root = (fields.hex_bytes(name, HASH_BYTES) for name in ("job", "list", "root"))
    return MergedShare(job, found, root, envelope.peer, raw)


def sign_data(identity: Identity, data: OwnData, now_ms: int) -> OwnData:
    """Return what a member says of its text with its signed bytes."""
    values = {"job": data.job.hex(), "tokens": data.tokens, "source": data.source, "licence": data.licence}
    return read_data(signed(identity, DATA, values, now_ms))


def read_data(raw: bytes) -> OwnData:
    """Verify and read what a member says of its text; raises `RecordError`."""
    envelope, fields = opened(raw, DATA, MAX_DATA_BYTES)
    return OwnData(
        job=fields.hex_bytes("job", HASH_BYTES),
        tokens=fields.integer("tokens", 1, MAX_TOKENS),
        source=fields.text("source", MAX_SOURCE_CHARS),
        licence=fields.text("licence", MAX_LICENCE_CHARS),
        peer=envelope.peer,
        raw=raw,
    )


# --- for all statements -----------------------------------------------------------------------------------------------


def signed(
    identity: Identity, domain: str, values: Mapping[str, Any], now_ms: int, max_bytes: int = MAX_PAYLOAD_BYTES
) -> bytes:
    """Return the signed bytes of a statement; raises `RecordError` if its payload is larger than `max_bytes`."""
    payload = canonical({"v": VERSION, **values})
    try:
        return seal(identity, domain, payload, sequence=now_ms, expires_at_ms=NEVER, max_payload_bytes=max_bytes)
    except EnvelopeError as error:
        raise RecordError(f"{domain}: {error}") from error


def opened(raw: bytes, domain: str, max_bytes: int = MAX_PAYLOAD_BYTES) -> tuple[Envelope, Fields]:
    """Verify a statement and return its fields; raises `RecordError`.

    It is read whatever its time is: a member that dates its own ahead would part those whose clocks let them read a
    list with it from the others.
    """

    def read(envelope: Envelope) -> Fields:
        fields = decode_object(envelope.payload, domain, max_bytes=len(envelope.payload))
        check_version(fields, "v", VERSION)
        return fields

    try:
        return open_envelope(raw, Rule(domain, read, max_bytes), now_ms=NEVER)
    except EnvelopeError as error:
        raise RecordError(f"{domain}: {error}") from error


def list_bytes(members: int) -> int:
    """Return how long the payload of a list of so many members is at most; that of `MAX_MEMBERS` fits."""
    return FIELDS_BYTES + members * base64_bytes(envelope_bytes(len(ARRIVAL), MAX_ARRIVAL_BYTES))


def base64_bytes(size_bytes: int) -> int:
    """Return how much of a JSON list so many bytes take as base64."""
    return 4 * -(-size_bytes // 3) + TEXT_BYTES


def texts_of(raws: Sequence[bytes]) -> list[str]:
    """Return signed bytes as texts for JSON."""
    return [_text(raw) for raw in raws]


def raws_in(fields: Fields, name: str, most: int) -> list[bytes]:
    """Return the signed bytes in a list of texts; raises `RecordError`."""
    return [_bytes(text) for text in fields.texts(name, most, 2 * MAX_ENVELOPE_BYTES)]


def reasons_in(fields: Fields, name: str) -> dict[str, str]:
    """Return an object of peers and reasons; raises `RecordError`."""
    inner = fields.inner(name)
    return {peer: inner.text(peer, MAX_WHY_CHARS) for peer in _by_peer(inner)}


def _by_peer(fields: Fields) -> Mapping[str, Any]:
    if len(fields.values) > MAX_MEMBERS or any(len(peer) > 2 * PEER_ID_CHARS for peer in fields.values):
        raise RecordError(f"{fields.what}: more than {MAX_MEMBERS} peers, or a name that is none")
    return fields.values


def _brief(why: str) -> str:
    """A reason as it fits into a result; others choose its letters, and some take six bytes of JSON."""
    why = why[:MAX_WHY_CHARS]
    while len(canonical(why)) > MAX_WHY_BYTES:
        why = why[: len(why) // 2]
    return why


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RecordError(f"a statement is not base64: {error}") from error

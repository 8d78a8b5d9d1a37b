"""The record of a training job: everything that decides what is trained, signed by its founder and never changed.

Wire format: canonical JSON in an envelope of `p2p.envelope` with the domain `shoal/train`. The SHA-256 of the payload
names the job, so the name depends on nothing but the content.

With `own_data` (absent: false) every member trains on text of its own, which never leaves it: there is no `tokens`, and
`held` only if the founder names a public text to validate with. What a member trains on, it says itself
(`app.rounds.statements.OwnData`); `source` and `licence` are those of the founder's text.

With `significance` (absent: 0) a leaf of a change that is smaller than this share of its weights, by their norms, waits
for the next round and is empty in this one; leaf i may do so in round r if i + r is odd.

With `recompute` (absent: false) members commit to traces of their steps, of which testers compute some again
(`app.rounds.traces`); not with `own_data`, where nobody else has the text.

With `grid` (absent: false) more than eight members of a round merge in rows and columns (`app.rounds.grid`).

With `islands` a round has up to so many members, and its entry in the log may be longer than 64 KiB. Jobs of older
versions do not have it: their rounds have up to 20 members with a grid, and 16 without. It needs a grid.
"""

from __future__ import annotations

import hashlib
import re
import sys
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from app.core.canonical_json import Fields, canonical, check_version, decode_object
from app.core.errors import RecordError
from app.manifest.manifest import MAX_TOKENIZER_BYTES
from app.manifest.merkle import HASH_BYTES
from app.rounds.statements import MAX_MEMBERS, MAX_MEMBERS_TOGETHER
from app.training.wire import MAX_STATE_BYTES, OPTIMISERS, StatePart
from p2p.envelope import NEVER, Rule, open_envelope, seal
from p2p.errors import EnvelopeError
from p2p.identity import PEER_ID_CHARS, Identity

VERSION = 1
DOMAIN = "shoal/train"
MAX_RECORD_BYTES = 48 * 1024
MAX_STEPS = 10**9
MAX_EVERY = 10**5
WIRES = {  # number formats of rounds; the first round has the first
    "auto": ("int8", "f32", "int4"),
    "f32": ("f32",),
    "int8": ("int8",),
    "int4": ("int4",),
}
MERGING = ("clip", "mean")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_MEMBERS_BEFORE = 20  # of a round in a grid, where the record does not say
_LEAST = sys.float_info.min


@dataclass(frozen=True)
class TrainingRecord:
    """What a job trains, on what, and how; the same for all islands."""

    name: str
    founder: str  # peer that signed it
    swarm: str  # id of the swarm
    model: str  # hash of the model it starts from; empty: drawn from the shape and the seed
    shape: dict[str, Any]  # a config.json
    start: str  # hash of the roots of all parts before the first round
    tokens: StatePart | None  # the text as token ids, 32 bits each; None: every member has its own
    held: StatePart | None  # token ids to validate with; None: every member has its own
    tokenizer: StatePart  # a JSON object
    source: str  # where the text is from
    licence: str
    length: int  # tokens of a sequence
    batch: int  # sequences of a step
    steps: int  # of each island
    every: int  # steps of the first round
    least_every: int
    most_every: int
    optimiser: str
    rate: float
    warm_up: int
    weight_decay: float
    clip: float
    wire: str
    merging: str
    outer_rate: float
    outer_momentum: float
    seed: int
    created_ms: int
    own_data: bool = False
    significance: float = 0.0
    recompute: bool = False
    grid: bool = False
    islands: int = 0  # most members of a round; 0: of an older version, see `most_members`

    def payload(self) -> bytes:
        """The record as canonical JSON."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}  # `asdict` copies all of the shape
        for name in ("tokens", "held", "tokenizer"):
            part: StatePart | None = getattr(self, name)
            if part is None:
                del values[name]
            else:
                values[name] = [part.root.hex(), part.size_bytes]
        for name in ("own_data", "significance", "recompute", "grid", "islands"):
            if not values[name]:
                del values[name]
        return canonical({"v": VERSION, **values})

    @cached_property
    def id(self) -> bytes:
        """The hash that names the job."""
        return hashlib.sha256(self.payload()).digest()

    @property
    def most_members(self) -> int:
        """How many members a round has at most."""
        return self.islands or (_MEMBERS_BEFORE if self.grid else MAX_MEMBERS_TOGETHER)

    @property
    def codecs(self) -> tuple[str, ...]:
        """The number formats that rounds may have; the first round has the first."""
        return WIRES[self.wire]

    @property
    def texts(self) -> dict[str, StatePart]:
        """The text and the tokenizer, which members exchange by hash, by the name of their file."""
        named = {"tokens": self.tokens, "held": self.held, "tokenizer.json": self.tokenizer}
        return {name: part for name, part in named.items() if part is not None}

    @property
    def parts(self) -> tuple[StatePart, ...]:
        """The text and the tokenizer as parts."""
        return tuple(self.texts.values())


def sign_training(identity: Identity, record: TrainingRecord) -> bytes:
    """Return the signed bytes of a record; raises `RecordError` if it cannot be read again."""
    raw = seal(identity, DOMAIN, record.payload(), sequence=record.created_ms, expires_at_ms=NEVER)
    read_training(raw, now_ms=record.created_ms)
    return raw


def read_training(raw: bytes, *, now_ms: int) -> TrainingRecord:
    """Verify and read a signed record; raises `RecordError`."""
    rule = Rule(DOMAIN, lambda envelope: _read(envelope.payload), MAX_RECORD_BYTES)
    try:
        envelope, record = open_envelope(raw, rule, now_ms=now_ms)
    except EnvelopeError as error:
        raise RecordError(f"the job's record: {error}") from error
    if envelope.peer != record.founder:
        raise RecordError("the job's record is not signed by the founder that it names")
    return record


def _read(payload: bytes) -> TrainingRecord:
    fields = decode_object(payload, "the job's record", max_bytes=MAX_RECORD_BYTES)
    check_version(fields, "v", VERSION)
    own_data = fields.flag("own_data", False)
    record = TrainingRecord(
        name=fields.text("name", 63),
        founder=fields.text("founder", PEER_ID_CHARS),
        swarm=fields.text("swarm", 128),
        model=fields.text("model", 64),
        shape=dict(fields.inner("shape").values),
        start=fields.hex_bytes("start", HASH_BYTES).hex(),
        tokens=None if own_data else _part(fields, "tokens"),
        held=None if own_data and "held" not in fields.values else _part(fields, "held"),
        tokenizer=_part(fields, "tokenizer", MAX_TOKENIZER_BYTES),
        source=fields.text("source", 400),
        licence=fields.text("licence", 100),
        length=fields.integer("length", 2, 1 << 20),
        batch=fields.integer("batch", 1, 1 << 20),
        steps=fields.integer("steps", 1, MAX_STEPS),
        every=fields.integer("every", 1, MAX_EVERY),
        least_every=fields.integer("least_every", 1, MAX_EVERY),
        most_every=fields.integer("most_every", 1, MAX_EVERY),
        optimiser=_one_of(fields, "optimiser", OPTIMISERS),
        rate=fields.number("rate", _LEAST, 1e3),
        warm_up=fields.integer("warm_up", 0, MAX_STEPS),
        weight_decay=fields.number("weight_decay", 0, 10),
        clip=fields.number("clip", _LEAST, 1e9),
        wire=_one_of(fields, "wire", tuple(WIRES)),
        merging=_one_of(fields, "merging", MERGING),
        outer_rate=fields.number("outer_rate", _LEAST, 10),
        outer_momentum=fields.number("outer_momentum", 0, 0.999),
        seed=fields.integer("seed", 0, 2**63 - 1),
        created_ms=fields.integer("created_ms", 0, 2**53),
        own_data=own_data,
        significance=fields.number("significance", 0, 1, 0.0),
        recompute=fields.flag("recompute", False),
        grid=fields.flag("grid", False),
        islands=fields.integer("islands", 0, MAX_MEMBERS, 0),
    )
    if not _NAME.fullmatch(record.name) or not re.fullmatch(r"([0-9a-f]{64})?", record.model):
        raise RecordError("the job's record: the name or the model's hash is malformed")
    if not record.least_every <= record.every <= record.most_every:
        raise RecordError("the job's record: the steps of a round are outside their own bounds")
    if record.own_data and record.recompute:
        raise RecordError("the job's record: steps on a text that only its reader has cannot be computed again")
    if record.islands and not record.grid:
        raise RecordError("the job's record: a number of islands is only for jobs with a grid")
    if record.payload() != payload:
        raise RecordError("the job's record is not canonical")
    return record


def _one_of(fields: Fields, name: str, known: tuple[str, ...]) -> str:
    value = fields.text(name, 16)
    if value not in known:
        fields.refuse(name, f"one of {', '.join(known)}")
    return value


def _part(fields: Fields, name: str, most_bytes: int = MAX_STATE_BYTES) -> StatePart:
    match fields.items(name, 2):
        case [str(root), int(size)] if 0 < size <= most_bytes:
            return StatePart(Fields(fields.what, {name: root}).hex_bytes(name, HASH_BYTES), size)
        case _:
            fields.refuse(name, f"a hash and a number of bytes, {most_bytes} at most")

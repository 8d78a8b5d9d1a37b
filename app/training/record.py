"""The record of a fine-tuning job: everything that decides its result, in canonical JSON whose hash names the job."""

from __future__ import annotations

import hashlib
import math
import re
import sys
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from app.core.canonical_json import canonical, check_version, decode_object
from app.core.errors import AppError, RecordError
from engine.budget import ADAPTER_ROLES

VERSION = 1
MAX_RECORD_BYTES = 64 * 1024
ID_DIGITS = 12
_LEAST = sys.float_info.min  # of a positive number
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class JobRecord:
    """What a job trains, on what, and how. Equal records give equal results on machines of one kind."""

    out: str  # name of the adapter
    model: str  # hash of the model's manifest
    data: str  # SHA-256 of the data's file, and of the validation file if there is one
    rank: int
    alpha: float
    targets: tuple[str, ...]
    dropout: float
    epochs: int
    batch: int  # sequences a step
    length: int  # most tokens of a sequence
    rows: int  # most rows of a micro-batch
    rate: float
    steps: int
    warm_up: int
    clip: float
    validation: float
    seed: int
    created_ms: int

    def encoded(self) -> bytes:
        """The record's bytes."""
        return canonical({"version": VERSION, **asdict(self), "targets": list(self.targets)})

    @cached_property
    def id(self) -> str:
        """The beginning of the record's hash, which names the job."""
        return hashlib.sha256(self.encoded()).hexdigest()[:ID_DIGITS]


def decode_record(raw: bytes) -> JobRecord:
    """Parse and check a record; raises `RecordError`."""
    fields = decode_object(raw, "the job's record", max_bytes=MAX_RECORD_BYTES)
    check_version(fields, "version", VERSION)
    targets = fields.texts("targets", len(ADAPTER_ROLES), 8)
    record = JobRecord(
        out=checked_name(fields.text("out", 63)),
        model=fields.text("model", 64),
        data=fields.text("data", 64),
        rank=fields.integer("rank", 1, 256),
        alpha=fields.number("alpha", _LEAST, math.inf),
        targets=targets,
        dropout=fields.number("dropout", 0.0, 1.0),
        epochs=fields.integer("epochs", 1, 10**6),
        batch=fields.integer("batch", 1, 10**6),
        length=fields.integer("length", 2, 1 << 20),
        rows=fields.integer("rows", 2, 1 << 20),
        rate=fields.number("rate", _LEAST, math.inf),
        steps=fields.integer("steps", 1, 10**9),
        warm_up=fields.integer("warm_up", 0, 10**9),
        clip=fields.number("clip", _LEAST, math.inf),
        validation=fields.number("validation", 0.0, 1.0),
        seed=fields.integer("seed", 0, 2**63 - 1),
        created_ms=fields.integer("created_ms", 0, 2**53),
    )
    if not targets or set(targets) - set(ADAPTER_ROLES) or list(targets) != sorted(targets, key=ADAPTER_ROLES.index):
        raise RecordError("the job's record: the targets are not roles of a block in their order")
    if not _HASH.fullmatch(record.model) or not _HASH.fullmatch(record.data):
        raise RecordError("the job's record: a hash is not 64 hex digits")
    return record


def checked_name(name: Any) -> str:
    """Return the name of an adapter; raises `AppError` unless it can be a folder's name on every system."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise AppError(
            f"{str(name)[:60]!r} cannot be an adapter's name: use at most 63 letters, digits, dots, dashes, underscores"
        )
    return name

"""Founding a swarm: from a model's files to a manifest in the cache and a record signed by this node."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from app.config.home import Home
from app.core.errors import AppError, UsageError
from app.manifest.importing import in_order, survey, tokenizer_bytes
from app.swarm.invite import new_secret
from app.swarm.names import SwarmName
from app.swarm.records import sign_record
from app.swarm.saved import SavedSwarm, load
from app.weights.library import remember_source
from app.weights.manifest_store import ManifestStore
from engine.sources.base import ModelSource
from engine.sources.layout import part_names
from engine.sources.opening import BUILT_IN, open_source
from p2p.identity import load_or_create

# (bytes done, bytes in all)
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class SwarmSpec:
    """The swarm that somebody wants to found."""

    name: str
    model: str
    private: bool = False


def found(home: Home, cache: Path, wish: SwarmSpec, fetching: Progress, reading: Progress) -> SavedSwarm:
    """Read the whole model, keep its manifest, and sign the swarm's record; the caller remembers the swarm."""
    name = new_name(home, wish.name)
    source = open_source(wish.model, cache, fetching)
    total, done = _total_bytes(source), 0

    def count(read: int) -> None:
        nonlocal done
        done += read
        reading(min(done, total), total)

    studied = survey(source, count)
    label = wish.model if wish.model in BUILT_IN else str(Path(wish.model).expanduser().absolute())
    ManifestStore(cache).save_survey(studied, label)
    remember_source(cache, studied.manifest, source, tokenizer_bytes(source))
    now_ms = time.time_ns() // 10**6
    identity = load_or_create(home.key_file)
    record = sign_record(identity, name, studied.manifest.hash, now_ms=now_ms, private=wish.private)
    return SavedSwarm.from_record(record, now_ms=now_ms, secret=new_secret() if wish.private else None)


def new_name(home: Home, text: str) -> str:
    """A name that this node can found a swarm under."""
    wanted = SwarmName.parse(text)
    if wanted.pin is not None:
        raise UsageError(f"a new swarm's name has no '#': its model follows from --model; write {wanted.name}")
    known = load(home).matching(wanted)
    if known:
        words = f"this node is a member of {known[0]} already: leave it first, or choose another name"
        raise AppError(words, code="already_member")
    return wanted.name


def _total_bytes(source: ModelSource) -> int:
    return sum(entry.length for name in part_names(source.config) for entry in in_order(source, name))

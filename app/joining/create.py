"""Creates a swarm: reads a model's files, stores its manifest in the cache, and signs the swarm's record.

The caller saves the swarm (`app.swarm.saved`) and starts taking part in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from app.config.home import Home
from app.core.errors import AppError, UsageError
from app.core.wall_clock import wall_ms
from app.manifest.importing import hash_source, in_order, tokenizer_bytes
from app.swarm.invite import new_secret
from app.swarm.names import SwarmName
from app.swarm.records import MAX_MODEL_NAME_CHARS, MODEL_NAME, sign_record
from app.swarm.saved import SavedSwarm, load
from app.weights.library import remember_source
from app.weights.manifest_store import ManifestStore
from engine.sources.base import ModelSource
from engine.sources.layout import part_names
from engine.sources.opening import BUILT_IN, open_source
from p2p.identity import load_or_create

# (bytes done, total bytes)
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class SwarmSpec:
    """The swarm to create, as the user asked for it; `model` is a built-in name or a path."""

    name: str
    model: str
    private: bool = False


def create_swarm(home: Home, cache: Path, spec: SwarmSpec, fetching: Progress, reading: Progress) -> SavedSwarm:
    """Read the whole model, store its manifest and source, and return the new swarm with a signed record.

    `fetching` reports the progress of a download, `reading` that of hashing the model. Blocks: run it on a thread.
    Raises `UsageError` or `AppError` if the name cannot be used.
    """
    name = new_name(home, spec.name)
    source = open_source(spec.model, cache, fetching)
    tokenizer = tokenizer_bytes(source)
    total, done = _weight_bytes(source) + len(tokenizer), 0

    def count(read: int) -> None:
        nonlocal done
        done += read
        reading(done, total)

    surveyed = hash_source(source, count)
    label = spec.model if spec.model in BUILT_IN else str(Path(spec.model).expanduser().absolute())
    ManifestStore(cache).save_survey(surveyed, label)
    remember_source(cache, surveyed.manifest, source, tokenizer)
    now_ms = wall_ms()
    identity = load_or_create(home.key_file)
    named = "".join(c for c in source.label if c.isprintable())[:MAX_MODEL_NAME_CHARS]
    record = sign_record(
        identity, name, surveyed.manifest.hash, now_ms=now_ms, private=spec.private, settings={MODEL_NAME: named}
    )
    return SavedSwarm.from_record(record, now_ms=now_ms, secret=new_secret() if spec.private else None)


def new_name(home: Home, text: str) -> str:
    """Check the name of a new swarm; raises `UsageError` if it has a pin, `AppError` if this node has one so named."""
    wanted = SwarmName.parse(text)
    if wanted.pin is not None:
        raise UsageError(f"the name of a new swarm has no '#', as --model chooses the model; write {wanted.name}")
    known = load(home).matching(wanted)
    if known:
        words = f"this node is already a member of {known[0]}: leave it first, or choose another name"
        raise AppError(words, code="already_member")
    return wanted.name


def _weight_bytes(source: ModelSource) -> int:
    return sum(entry.length for name in part_names(source.config) for entry in in_order(source, name))

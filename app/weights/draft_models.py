"""Finds a draft model on this machine: one with the tokenizer of the swarm's model, and much smaller.

Only models that were pulled or are named count; parts that came from peers do not make a whole model.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from app.core.errors import RecordError, UsageError
from app.manifest.importing import tokenizer_bytes
from engine.budget import block_weights
from engine.config import ModelConfig
from engine.errors import EngineError
from engine.sources.base import ModelSource
from engine.sources.opening import list_cached, open_source
from engine.sources.starter import NAME as STARTER

log = logging.getLogger("shoal.replies")

AUTO, OFF = "auto", "off"
SMALLER = 4  # a draft model found by itself has at most this fraction of the large model's weights


def find_draft(cache: Path, target: ModelSource, wanted: str) -> ModelSource | None:
    """Return the draft model for `target` that the setting names; with `auto` the smallest that fits, or None.

    Raises `UsageError` or `EngineError` if a named model cannot be used.
    """
    tokenizer = tokenizer_hash(target)
    if wanted != AUTO:
        source = open_source(wanted, cache)
        if tokenizer_hash(source) != tokenizer:
            raise UsageError(f"{wanted} cannot guess for this swarm's model: it has another tokenizer")
        return source
    found = [
        source for source in _at_hand(cache) if SMALLER * weight_count(source.config) <= weight_count(target.config)
    ]
    fitting = [source for source in found if _hash_or_none(source) == tokenizer]
    return min(fitting, key=lambda source: weight_count(source.config), default=None)


def _at_hand(cache: Path) -> list[ModelSource]:
    sources = []
    for model in list_cached(cache):
        try:
            # By its path, because opening the starter by name would download a damaged one again.
            sources.append(open_source(model.path if model.name == STARTER else model.name, cache))
        except EngineError as error:
            log.info("%s is no draft model: %s", model.name, error)
    return sources


def _hash_or_none(source: ModelSource) -> bytes | None:
    try:
        return tokenizer_hash(source)
    except RecordError as error:
        log.info("%s is no draft model: %s", source.label, error)
        return None


def tokenizer_hash(source: ModelSource) -> bytes:
    """Return the hash of a model's tokenizer, the same for all models that use it; raises `RecordError`."""
    return hashlib.sha256(tokenizer_bytes(source)).digest()


def weight_count(config: ModelConfig) -> int:
    """Number of weights in a model's blocks: what a token costs to compute."""
    return config.n_blocks * block_weights(config)

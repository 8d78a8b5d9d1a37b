"""A made-up model of several chunks a part, imported into a cache folder, and libraries of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from app.manifest.importing import HashedSource, hash_source, tokenizer_bytes
from app.weights.library import Library, remember_source
from app.weights.manifest_store import ManifestStore
from tests.app.tiny_source import CONFIG, tiny_source

# Blocks of 3.3 MB: four chunks, the last one short.
WIDE = dataclasses.replace(CONFIG, n_blocks=4, hidden_size=512, head_dim=64, n_heads=8, intermediate_size=1536)


def import_model(folder: Path, cache: Path) -> HashedSource:
    """Make the model's files in `folder`, and import them."""
    source = tiny_source(folder, WIDE)
    studied = hash_source(source)
    ManifestStore(cache).save_survey(studied, str(folder))
    remember_source(cache, studied.manifest, source, tokenizer_bytes(source))
    return studied


def empty_library(cache: Path, studied: HashedSource) -> Library:
    """A library of the same model on a machine that has nothing of it."""
    ManifestStore(cache).save(studied.manifest)
    return Library(cache, studied.manifest)

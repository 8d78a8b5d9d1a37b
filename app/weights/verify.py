"""Every model on this machine read again: its manifest's parts, whether they came from peers or lie in its own files.

What turns out wrong is named and forgotten, so that a node fetches it anew; a model's own files are never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from app.weights.library import Library
from app.weights.manifest_store import ManifestStore


@dataclass(frozen=True)
class VerifiedPart:
    """What is known of one model after, or before, its parts were read."""

    manifest: str
    source: str | None  # the model's own files, as they were named
    licence: str | None
    blocks: int
    parts_total: int
    parts_held: int
    bytes_held: int
    wrong: tuple[str, ...] = ()  # parts whose bytes are not what the manifest says, or cannot be read


def models_by_manifest(cache: Path) -> list[VerifiedPart]:
    """Every model of which something is here, as far as can be seen without reading it."""
    found = [_seen(library, ()) for library in _libraries(cache)]
    return [model for model in found if model.parts_held]


def bytes_to_read(cache: Path) -> int:
    """How much `verify` will read."""
    return sum(
        library.manifest.by_name[name].size_bytes for library in _libraries(cache) for name in library.recorded()
    )


def verify(cache: Path, on_bytes: Callable[[int], None]) -> Iterator[VerifiedPart]:
    """Read every part of every model that is here; `on_bytes` hears of each piece that was read."""
    for library in _libraries(cache):
        names = sorted(library.recorded())
        if names:
            wrong = tuple(library.check(names, again=True, on_bytes=on_bytes))
            yield _seen(library, wrong)


def _libraries(cache: Path) -> Iterator[Library]:
    store = ManifestStore(cache)
    for model_hash in store.hashes():
        manifest = store.load(model_hash)
        if manifest is not None:
            yield Library(cache, manifest)


def _seen(library: Library, wrong: tuple[str, ...]) -> VerifiedPart:
    manifest, held = library.manifest, library.held()
    return VerifiedPart(
        manifest.hash,
        ManifestStore(library.files.cache).source(manifest.hash),
        manifest.licence,
        manifest.config.n_blocks,
        len(manifest.parts),
        len(held),
        sum(part.size_bytes for part in manifest.parts if part.name in held),
        wrong,
    )

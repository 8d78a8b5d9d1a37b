"""`shoal models verify`: reads every part of every model on this machine again, in the cache and in model files.

Wrong parts are reported and no longer count as held, so that a node downloads them again; the model's own files are
never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from app.weights.library import Library
from app.weights.manifest_store import ManifestStore


@dataclass(frozen=True)
class VerifiedPart:
    """One model on this machine, before or after its parts were verified."""

    manifest: str
    source: str | None  # path or name it was imported from
    licence: str | None
    blocks: int
    parts_total: int
    parts_held: int
    bytes_held: int
    wrong: tuple[str, ...] = ()  # names of parts that do not match the manifest or cannot be read
    gone: str = ""  # what is not there of the files that it was imported from


def models_by_manifest(cache: Path) -> list[VerifiedPart]:
    """List the models of which at least one part is here, or was, without reading their parts."""
    found = [_summary(library, ()) for library in _libraries(cache)]
    return [model for model in found if model.parts_held or model.gone]


def bytes_to_read(cache: Path) -> int:
    """Bytes that `verify` will read."""
    return sum(
        library.manifest.by_name[name].size_bytes for library in _libraries(cache) for name in library.recorded()
    )


def verify(cache: Path, on_bytes: Callable[[int], None]) -> Iterator[VerifiedPart]:
    """Read every part that is here and yield the result per model; `on_bytes` is called with each length read."""
    for library in _libraries(cache):
        names = sorted(library.recorded())
        if names:
            wrong = tuple(library.check(names, again=True, on_bytes=on_bytes))
            yield _summary(library, wrong)


def _libraries(cache: Path) -> Iterator[Library]:
    store = ManifestStore(cache)
    for model_hash in store.hashes():
        manifest = store.load(model_hash)
        if manifest is not None:
            yield Library(cache, manifest)


def _summary(library: Library, wrong: tuple[str, ...]) -> VerifiedPart:
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
        library.gone(part.name for part in manifest.parts),
    )

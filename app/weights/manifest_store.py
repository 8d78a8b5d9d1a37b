"""Manifests on disk, shared by all home folders of a user: `manifests/` in the cache folder.

    HASH.json     the manifest's own bytes
    HASH.chunks   the chunk hashes of all parts in order, if the model was imported on this machine
    HASH.source   the model it was imported from, as given to `shoal create --model`
    HASH.index    where its parts are in those model files (`app.weights.source_index`)

Files are validated when read, like input from a peer; a damaged file counts as missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from app.core.errors import HomeError, RecordError
from app.manifest.importing import HashedSource
from app.manifest.manifest import MAX_MANIFEST_BYTES, Manifest
from app.manifest.merkle import HASH_BYTES, chunk_count, leaves_from
from app.swarm.names import is_model_hash
from app.weights.source_index import MAX_INDEX_BYTES, SourceIndex
from engine.errors import is_disk_full
from engine.sources import starter
from p2p.platform import write_private

_MAX_CHUNK_LIST_BYTES = 64 * 2**20
_MAX_SOURCE_BYTES = 4096


@dataclass(frozen=True)
class ManifestStore:
    """Reads and writes the manifests under one cache folder; writing raises `HomeError` if the disk refuses."""

    cache: Path

    def save(self, manifest: Manifest) -> None:
        """Write a manifest."""
        self._write(manifest.hash, "json", manifest.raw)

    def save_survey(self, survey: HashedSource, source: str) -> None:
        """Write manifest, chunk hashes and origin of an imported model; `source` is a path or a name like "starter"."""
        chunks = b"".join(leaf for part in survey.manifest.parts for leaf in survey.leaves[part.name])
        self._write(survey.manifest.hash, "chunks", chunks)
        self._write(survey.manifest.hash, "source", source.encode())
        self.save(survey.manifest)  # last, so that a manifest that is found has its other files too

    def load(self, model_hash: str) -> Manifest | None:
        """Return the manifest of this hash; None if it is missing or damaged."""
        raw = self._read(model_hash, "json", MAX_MANIFEST_BYTES)
        try:
            manifest = None if raw is None else Manifest.from_bytes(raw)
        except RecordError:
            return None
        return manifest if manifest is not None and manifest.hash == model_hash else None

    def leaves(self, manifest: Manifest) -> Mapping[str, tuple[bytes, ...]] | None:
        """Return the chunk hashes of every part by its name; None if they are missing or damaged."""
        raw = self._read(manifest.hash, "chunks", _MAX_CHUNK_LIST_BYTES)
        found: dict[str, tuple[bytes, ...]] = {}
        at = 0
        try:
            for part in manifest.parts if raw is not None else ():
                stop = at + chunk_count(part.size_bytes) * HASH_BYTES
                found[part.name] = leaves_from((raw or b"")[at:stop], size_bytes=part.size_bytes, root=part.root)
                at = stop
        except RecordError:
            return None
        return found or None

    def source(self, model_hash: str) -> str | None:
        """Return the path or name that a model was imported from on this machine; None if it was not."""
        raw = self._read(model_hash, "source", _MAX_SOURCE_BYTES)
        return raw.decode("utf-8", "replace") if raw else None

    def index(self, model_hash: str) -> SourceIndex:
        """Return the index of a model's own files; empty if it is missing or damaged."""
        raw = self._read(model_hash, "index", MAX_INDEX_BYTES)
        try:
            return SourceIndex({}, {}) if raw is None else SourceIndex.decode(raw)
        except RecordError:
            return SourceIndex({}, {})

    def save_index(self, model_hash: str, index: SourceIndex) -> None:
        """Write the index of a model's own files."""
        self._write(model_hash, "index", index.encode())

    def hashes(self) -> list[str]:
        """Hashes of all models whose manifest is here, sorted."""
        names = (path.stem for path in self._folder.glob("*.json"))
        return sorted(name for name in names if is_model_hash(name))

    @property
    def _folder(self) -> Path:
        return self.cache / "manifests"

    def _write(self, model_hash: str, kind: str, data: bytes) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_private(self._folder / f"{model_hash}.{kind}", data)
        except OSError as error:
            code = "disk_full" if is_disk_full(error) else None
            raise HomeError(f"{self._folder} cannot be written: {error.strerror or error}", code=code) from error

    def _read(self, model_hash: str, kind: str, max_bytes: int) -> bytes | None:
        assert is_model_hash(model_hash), model_hash
        try:
            with open(self._folder / f"{model_hash}.{kind}", "rb") as file:
                raw = file.read(max_bytes + 1)
        except OSError:
            return None
        return raw if len(raw) <= max_bytes else None


def model_name(source: str | None) -> str:
    """Return the model's display name, from the path or name it was imported from; empty if it was not imported."""
    if source == starter.NAME:
        return starter.LABEL
    return "" if source is None else PurePath(source).name.removesuffix(".gguf")

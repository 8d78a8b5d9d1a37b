"""Manifests on this machine's disk, shared by all home folders: `manifests/` in the cache folder.

    HASH.json     the manifest's own bytes
    HASH.chunks   the hashes of its chunks, part after part, once they are known
    HASH.source   which model files of this machine it was made from, as `shoal create --model` was told
    HASH.index    where its parts lie in these files (`app.weights.source_index`)

What is read back is checked as if a stranger had sent it: a damaged file is as good as none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from app.core.errors import HomeError, RecordError
from app.manifest.importing import SourceSurvey
from app.manifest.manifest import MAX_MANIFEST_BYTES, Manifest
from app.manifest.merkle import HASH_BYTES, chunk_count, leaves_from
from app.swarm.names import is_model_hash
from app.weights.source_index import MAX_INDEX_BYTES, SourceIndex
from p2p.platform import write_private

_MAX_CHUNK_LIST_BYTES = 64 * 2**20
_MAX_SOURCE_BYTES = 4096


@dataclass(frozen=True)
class ManifestStore:
    """The manifests under one cache folder."""

    cache: Path

    def save(self, manifest: Manifest) -> None:
        """Keep a manifest."""
        self._write(manifest.hash, "json", manifest.raw)

    def save_survey(self, survey: SourceSurvey, source: str) -> None:
        """Keep what was learnt by importing `source`, a path or a name like "starter"."""
        chunks = b"".join(leaf for part in survey.manifest.parts for leaf in survey.leaves[part.name])
        self._write(survey.manifest.hash, "chunks", chunks)
        self._write(survey.manifest.hash, "source", source.encode())
        self.save(survey.manifest)  # last: what is found by its manifest is complete

    def load(self, model_hash: str) -> Manifest | None:
        """The manifest of this hash, or None where it is not here or was damaged."""
        raw = self._read(model_hash, "json", MAX_MANIFEST_BYTES)
        try:
            manifest = None if raw is None else Manifest.from_bytes(raw)
        except RecordError:
            return None
        return manifest if manifest is not None and manifest.hash == model_hash else None

    def leaves(self, manifest: Manifest) -> Mapping[str, tuple[bytes, ...]] | None:
        """The chunk hashes of every part, or None where they are not here or were damaged."""
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
        """Which files of this machine a manifest was made from, as they were named."""
        raw = self._read(model_hash, "source", _MAX_SOURCE_BYTES)
        return raw.decode("utf-8", "replace") if raw else None

    def index(self, model_hash: str) -> SourceIndex:
        """Where a model's parts lie in files of this machine; empty where nothing is known."""
        raw = self._read(model_hash, "index", MAX_INDEX_BYTES)
        try:
            return SourceIndex({}, {}) if raw is None else SourceIndex.decode(raw)
        except RecordError:
            return SourceIndex({}, {})

    def save_index(self, model_hash: str, index: SourceIndex) -> None:
        """Keep where a model's parts lie."""
        self._write(model_hash, "index", index.encode())

    def hashes(self) -> list[str]:
        """Every model whose manifest is here."""
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
            raise HomeError(f"{self._folder} cannot be written: {error.strerror or error}") from error

    def _read(self, model_hash: str, kind: str, max_bytes: int) -> bytes | None:
        assert is_model_hash(model_hash), model_hash
        try:
            with open(self._folder / f"{model_hash}.{kind}", "rb") as file:
                raw = file.read(max_bytes + 1)
        except OSError:
            return None
        return raw if len(raw) <= max_bytes else None


def model_name(source: str | None) -> str:
    """What a person calls the model, from how its files were named; empty where they are not here."""
    return "" if source is None else PurePath(source).name.removesuffix(".gguf")

"""The index of a model's own files on this machine, which lets parts be read from them without copying.

Stored by `manifest_store` as `manifests/HASH.index`, in JSON:

    version   1
    files     [path, size, mtime_ns] of each file
    parts     part name -> list of [index into `files`, offset, length], in the order of the part's bytes
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.core.canonical_json import canonical, check_version, decode_object
from app.core.errors import RecordError
from app.weights.extents import Stamp
from engine.sources.base import Extent

VERSION = 1
MAX_INDEX_BYTES = 16 * 2**20
_MAX_FILES = 4096
_MAX_PARTS = 2**13
_MAX_PIECES = 64


@dataclass(frozen=True)
class SourceIndex:
    """Byte ranges of each part, and the stamp of each file at its last full check."""

    extents: Mapping[str, tuple[Extent, ...]]
    stamps: Mapping[Path, Stamp]

    @classmethod
    def of(cls, extents: Mapping[str, tuple[Extent, ...]]) -> SourceIndex:
        """Build the index of parts with the files' present stamps; raises `OSError` if a file is missing."""
        files = {extent.file for pieces in extents.values() for extent in pieces}
        stamps = {}
        for file in sorted(files):
            status = file.stat()
            stamps[file] = Stamp(status.st_size, status.st_mtime_ns)
        return cls(extents, stamps)

    def is_unchanged(self, file: Path) -> bool:
        """True if a file has the size and mtime of its last check."""
        return Stamp.of(file) == self.stamps[file]

    def changed_files(self) -> frozenset[Path]:
        """Files that were changed or removed since their last check."""
        return frozenset(file for file in self.stamps if not self.is_unchanged(file))

    def stamped(self, files: Iterable[Path]) -> SourceIndex:
        """Return the index with the present stamps of these files; one that is gone meanwhile keeps its old one."""
        present = {file: stamp for file in files if (stamp := Stamp.of(file)) is not None}
        return dataclasses.replace(self, stamps={**self.stamps, **present})

    def only(self, parts: Iterable[str]) -> SourceIndex:
        """Return the index reduced to these parts; a damaged index file may name others."""
        return self.without(self.extents.keys() - set(parts))

    def without(self, parts: Iterable[str]) -> SourceIndex:
        """Return the index without these parts."""
        gone = set(parts)
        kept = {name: pieces for name, pieces in self.extents.items() if name not in gone}
        return dataclasses.replace(self, extents=kept)

    def encode(self) -> bytes:
        """Return the index as JSON, for its file."""
        numbers = {file: number for number, file in enumerate(self.stamps)}
        parts = {
            name: [[numbers[extent.file], extent.offset, extent.length] for extent in pieces]
            for name, pieces in self.extents.items()
        }
        files = [[str(file), stamp.size, stamp.mtime_ns] for file, stamp in self.stamps.items()]
        return canonical({"version": VERSION, "files": files, "parts": parts})

    @classmethod
    def decode(cls, raw: bytes) -> SourceIndex:
        """Read the index from its file's bytes; raises `RecordError` if they are damaged."""
        fields = decode_object(raw, "index of a model's files", max_bytes=MAX_INDEX_BYTES)
        check_version(fields, "version", VERSION)
        stamps: dict[Path, Stamp] = {}
        for item in fields.items("files", _MAX_FILES):
            path, size, mtime_ns = _row(item, (str, int, int))
            stamps[Path(path)] = Stamp(size, mtime_ns)
        files = list(stamps)
        extents: dict[str, tuple[Extent, ...]] = {}
        for name, pieces in fields.inner("parts").values.items():
            if not isinstance(pieces, list) or len(pieces) > _MAX_PIECES or len(extents) >= _MAX_PARTS:
                raise RecordError("index of a model's files: its parts are damaged")
            extents[name] = tuple(_extent(item, files) for item in pieces)
        return cls(extents, stamps)


def _extent(item: Any, files: list[Path]) -> Extent:
    number, offset, length = _row(item, (int, int, int))
    if not (0 <= number < len(files) and offset >= 0 and length >= 0):
        raise RecordError("index of a model's files: a byte range is invalid")
    return Extent(files[number], offset, length)


def _row(item: Any, kinds: tuple[type, ...]) -> list[Any]:
    right = isinstance(item, list) and [type(value) for value in item] == list(kinds)
    if not right:
        raise RecordError("index of a model's files: a row is damaged")
    return list(item)

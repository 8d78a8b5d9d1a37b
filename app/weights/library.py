"""The parts of one model on this machine, in the cache (`part_store`) or in the model's own files (`source_index`).

Invariant: only bytes that were checked against the manifest reach the engine or a peer. Parts are checked when they
arrive or are imported, and again before use if the file that holds them has changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from app.core.errors import HomeError
from app.manifest.importing import in_order
from app.manifest.manifest import TOKENIZER_PART, Manifest, Part
from app.manifest.merkle import ChunkHasher
from app.weights.extents import Stamp, WeightsError, chunk_length, matching_chunks
from app.weights.manifest_store import ManifestStore
from app.weights.part_set import PartSet
from app.weights.part_store import PartFiles
from app.weights.source_index import SourceIndex
from engine.sources.base import EMBEDDING_PART, HEAD_PART, Extent, ModelSource, TensorEntry, block_part
from engine.sources.layout import part_names

OnBytes = Callable[[int], None]
ENDS = (TOKENIZER_PART, EMBEDDING_PART, HEAD_PART)  # needed to ask the swarm for a reply


def _ignore(count: int) -> None:
    """Drop the progress report."""


def span_parts(start: int, stop: int) -> tuple[str, ...]:
    """Names of the parts of blocks `start` to `stop - 1`."""
    return tuple(block_part(index) for index in range(start, stop))


class Library(PartSet):
    """Finds, checks and reads the parts of one model on this machine; methods may be called from any thread."""

    def __init__(self, cache: Path, manifest: Manifest) -> None:
        super().__init__(cache, manifest.parts, f"model {manifest.hash[:8]}")
        self.manifest = manifest
        self._store = ManifestStore(cache)
        self._index = self._store.index(manifest.hash).only(part.name for part in manifest.parts)
        self._source_leaves: Mapping[str, tuple[bytes, ...]] | None = None
        self._gone: Mapping[Path, Path] = {}  # files of the model that were not there at the last look -> what is gone

    # --- what is here -------------------------------------------------------------------------------------------------

    def held(self) -> frozenset[str]:
        """Names of the parts that are here, judged by file sizes and stamps without reading them."""
        return super().held() | self._in_source()

    def recorded(self) -> frozenset[str]:
        """Names of the parts that are here, or were in model files that have changed since."""
        return self.held().union(self._index.extents)

    def check(self, names: Iterable[str], *, again: bool = False, on_bytes: OnBytes = _ignore) -> list[str]:
        """Verify parts before use; return the names of those that are wrong or missing, which no longer count as held.

        Reads only parts whose files have changed since the last full check, or all of them with `again`. `on_bytes` is
        called with the length of each chunk read.
        """
        self._check_source(again, on_bytes)
        in_source = self._in_source()
        return [name for name in names if name not in in_source and not self._in_cache(name, again, on_bytes)]

    def gone(self, names: Iterable[str]) -> str:
        """Name the file or folder of the model that is gone, with some of these parts; empty if none is.

        It was looked for when the parts were last counted, so that this does not touch the disk.
        """
        files = (extent.file for name in names for extent in self._index.extents.get(name, ()))
        file = next((file for file in files if file in self._gone), None)
        if file is None:
            return ""
        place = self._gone[file]
        return f"the model's {'file' if place == file else 'folder'} {place}"

    def _in_source(self) -> frozenset[str]:
        index = self._index
        changed = index.changed_files()
        self._gone = {file: _gone_with(file) for file in changed if Stamp.of(file) is None}
        return frozenset(
            name
            for name, pieces in index.extents.items()
            if not changed or changed.isdisjoint(extent.file for extent in pieces)
        )

    def _in_cache(self, name: str, again: bool, on_bytes: OnBytes) -> bool:
        part = self.by_name[name]
        if not again and self.files.holds(part) and self.files.is_checked(part):
            return True
        return self.files.check(part, on_bytes)

    def _check_source(self, again: bool, on_bytes: OnBytes) -> None:
        """Read those of the model's own files that have changed again, or all, and drop the parts that are wrong.

        Parts in files that are not there stay in the index, though they do not count as held: a disk may be mounted
        later.
        """
        index = self._index
        changed = index.changed_files()
        gone = frozenset(file for file in changed if Stamp.of(file) is None)
        files = (frozenset(index.stamps) if again else changed) - gone
        stale = {name: pieces for name, pieces in index.extents.items() if any(one.file in files for one in pieces)}
        if not stale:
            return
        stamped = index.stamped(files)  # taken before reading, so that a change during the check shows up
        wrong = [
            name
            for name, pieces in stale.items()
            if any(one.file in gone for one in pieces) or not self._is_right(name, pieces, on_bytes)
        ]
        self._keep_index(stamped.without(wrong))

    def _keep_index(self, index: SourceIndex) -> None:
        self._index = index
        with contextlib.suppress(HomeError):  # such as a full disk: then the files are read again after a restart
            self._store.save_index(self.manifest.hash, index)

    def distrust(self, part: Part) -> None:
        """Count a part with a wrong chunk as missing, in the model's own files if it is read from these."""
        if part.name in self._in_source():
            self._keep_index(self._index.without([part.name]))
        else:
            super().distrust(part)

    def _is_right(self, name: str, pieces: Sequence[Extent], on_bytes: OnBytes) -> bool:
        part = self.by_name[name]
        leaves = self.leaves(part)
        if leaves is None or sum(extent.length for extent in pieces) != part.size_bytes:
            return False
        for index, right in enumerate(matching_chunks(pieces, part.size_bytes, leaves)):
            on_bytes(chunk_length(part.size_bytes, index))
            if not right:
                return False
        return True

    def leaves(self, part: Part) -> tuple[bytes, ...] | None:
        """Return the hashes of a part's chunks; None if they are not known here."""
        if self._source_leaves is None:
            self._source_leaves = self._store.leaves(self.manifest) or {}
        return self._source_leaves.get(part.name) or super().leaves(part)

    def _extents(self, part: Part) -> Sequence[Extent]:
        index = self._index
        pieces = index.extents.get(part.name)
        if pieces is not None and all(index.is_unchanged(file) for file in {extent.file for extent in pieces}):
            return pieces
        return super()._extents(part)

    # --- the model ----------------------------------------------------------------------------------------------------

    def source(self, names: Iterable[str]) -> ModelSource:
        """Return the model for the engine with these parts; the tokenizer is empty unless it is among them.

        Raises `WeightsError` if a part is missing or does not match the manifest.
        """
        wanted = list(names)
        wrong = self.check(wanted)
        if wrong:
            raise WeightsError(f"{', '.join(wrong[:4])} of {self._owner}: not on this machine, or damaged")
        for name in wanted:
            self.files.touch(self.by_name[name])
        parts = {name: self._entries(self.by_name[name]) for name in wanted if name != TOKENIZER_PART}
        tokenizer = self.whole(self.by_name[TOKENIZER_PART]) if TOKENIZER_PART in wanted else b""
        spec = self.manifest.tokenizer_spec(tokenizer)
        return ModelSource(self._owner, self.manifest.config, parts, spec, self.manifest.licence)

    def _entries(self, part: Part) -> tuple[TensorEntry, ...]:
        """Locate a part's tensors: each has its own extents in the model's files, all share one file in the cache."""
        left = list(self._extents(part))
        entries = []
        for tensor in part.tensors:
            own: list[Extent] = []
            missing = tensor.size_bytes
            while missing:
                first = left.pop(0)
                took = Extent(first.file, first.offset, min(first.length, missing))
                if took.length < first.length:
                    left.insert(0, Extent(first.file, first.offset + took.length, first.length - took.length))
                own.append(took)
                missing -= took.length
            entries.append(
                TensorEntry(
                    tensor.role, f"{part.name}.{tensor.role}", tensor.kind, tensor.shape, own[0].file, own[0].offset,
                    tensor.size_bytes, tensor.interleaved_heads, tuple(own[1:]),
                )
            )  # fmt: skip
        return tuple(entries)


def _gone_with(file: Path) -> Path:
    """Return the highest folder that is gone with a file, or the file if its folder is there."""
    missing = [path for path in (file, *file.parents) if not path.exists()]
    return missing[-1] if missing else file


def remember_source(cache: Path, manifest: Manifest, source: ModelSource, tokenizer: bytes) -> None:
    """Index a model's own files right after they were hashed for its manifest.

    Only the tokenizer is written to the cache, because its canonical JSON is in none of the files.
    """
    extents = {
        name: tuple(
            replace(extent, file=extent.file.absolute()) for entry in in_order(source, name) for extent in entry.extents
        )
        for name in part_names(source.config)
    }
    part = manifest.by_name[TOKENIZER_PART]
    hasher = ChunkHasher()
    hasher.update(tokenizer)
    PartFiles(cache).keep(part, hasher.finish(), tokenizer)
    ManifestStore(cache).save_index(manifest.hash, SourceIndex.of(extents))

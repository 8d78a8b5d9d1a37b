"""Which parts of a model are on this machine, whether in a model's own files or in the cache; and the model of them.

Nothing that was not checked against the manifest reaches the engine or a peer: parts are checked when they arrive or
are imported, and again before their use when the file they lie in has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from app.manifest.importing import in_order
from app.manifest.manifest import TOKENIZER_PART, Manifest, Part
from app.manifest.merkle import CHUNK_BYTES, ChunkHasher
from app.weights.extents import Extent, WeightsError, chunk_length, matching_chunks, read_at_hand, read_range
from app.weights.manifest_store import ManifestStore
from app.weights.part_store import NewPart, PartFiles
from app.weights.source_index import SourceIndex
from engine.sources.base import EMBEDDING_PART, HEAD_PART, ModelSource, TensorEntry, block_part
from engine.sources.layout import part_names

OnBytes = Callable[[int], None]
ENDS = (TOKENIZER_PART, EMBEDDING_PART, HEAD_PART)  # what an asker needs


def _ignore(count: int) -> None:
    """For who does not ask how far it is."""


def span_parts(start: int, stop: int) -> tuple[str, ...]:
    """The parts of a span of blocks."""
    return tuple(block_part(index) for index in range(start, stop))


class Library:
    """The parts of one model on this machine; any thread may ask."""

    def __init__(self, cache: Path, manifest: Manifest) -> None:
        self.manifest, self.files = manifest, PartFiles(cache)
        self._store = ManifestStore(cache)
        self._index = self._store.index(manifest.hash).only(part.name for part in manifest.parts)
        self._source_leaves: Mapping[str, tuple[bytes, ...]] | None = None
        self._by_root = {part.root: part for part in manifest.parts}
        self._leaves: dict[bytes, tuple[bytes, ...]] = {}
        self._new: dict[bytes, NewPart] = {}  # being fetched

    # --- what is here -------------------------------------------------------------------------------------------------

    def held(self) -> frozenset[str]:
        """The names of the parts that are here, as far as can be seen without reading them."""
        in_cache = {part.name for part in self.manifest.parts if self.files.holds(part)}
        return frozenset(in_cache.union(self._in_source()))

    def recorded(self) -> frozenset[str]:
        """The names of the parts that are here or were, in files that have changed since."""
        return self.held().union(self._index.extents)

    def missing(self, names: Iterable[str]) -> list[str]:
        """Which of these parts are not here."""
        held = self.held()
        return [name for name in names if name not in held]

    def check(self, names: Iterable[str], *, again: bool = False, on_bytes: OnBytes = _ignore) -> list[str]:
        """Make sure of parts before they are used: those that turned out wrong or absent, which are forgotten.

        Read are only those whose files have changed since they were last read in full; `again` reads all.
        """
        index = self._index
        if index.extents and (again or index.changed_files()):
            self._check_source(index, on_bytes)
        in_source = self._in_source()
        return [name for name in names if name not in in_source and not self._in_cache(name, again, on_bytes)]

    def _in_source(self) -> frozenset[str]:
        index = self._index
        changed = index.changed_files()
        return frozenset(
            name
            for name, pieces in index.extents.items()
            if not changed or changed.isdisjoint(extent.file for extent in pieces)
        )

    def _in_cache(self, name: str, again: bool, on_bytes: OnBytes) -> bool:
        part = self.manifest.by_name[name]
        if not again and self.files.holds(part) and self.files.is_checked(part):
            return True
        return self.files.check(part, on_bytes)

    def _check_source(self, index: SourceIndex, on_bytes: OnBytes) -> None:
        """Read the model's own files again, and keep in the index what is right."""
        present = {name: pieces for name, pieces in index.extents.items() if all(e.file.exists() for e in pieces)}
        stamped = SourceIndex.of(present)  # before reading: a change meanwhile shows in the stamps
        wrong = [name for name, pieces in present.items() if not self._is_right(name, pieces, on_bytes)]
        self._index = stamped.without(wrong)
        self._store.save_index(self.manifest.hash, self._index)

    def _is_right(self, name: str, pieces: Sequence[Extent], on_bytes: OnBytes) -> bool:
        part = self.manifest.by_name[name]
        leaves = self.leaves(part)
        if leaves is None or sum(extent.length for extent in pieces) != part.size_bytes:
            return False
        for index, right in enumerate(matching_chunks(pieces, part.size_bytes, leaves)):
            on_bytes(chunk_length(part.size_bytes, index))
            if not right:
                return False
        return True

    # --- its bytes ----------------------------------------------------------------------------------------------------

    def leaves(self, part: Part) -> tuple[bytes, ...] | None:
        """The hashes of a part's chunks, where they are known."""
        if self._source_leaves is None:
            self._source_leaves = self._store.leaves(self.manifest) or {}
        known = self._source_leaves.get(part.name) or self._leaves.get(part.root)
        if known is None and (known := self.files.leaves(part)) is not None:
            self._leaves[part.root] = known  # checked against the root once: peers may ask for them often
        return known

    def part(self, root: bytes) -> Part | None:
        """The part of this model with this hash."""
        return self._by_root.get(root)

    def chunk(self, part: Part, index: int) -> bytes | None:
        """One chunk of a part that is here, or is being fetched and has it; None otherwise."""
        try:
            extents = self._extents_of_chunk(part, index)
            return read_range(extents, index * CHUNK_BYTES, chunk_length(part.size_bytes, index))
        except (OSError, WeightsError):
            return None

    def chunk_at_hand(self, part: Part, index: int) -> bytearray | None:
        """As `chunk`, without waiting for a disk: None also where it would have to."""
        try:
            extents = self._extents_of_chunk(part, index)
        except WeightsError:
            return None
        return read_at_hand(extents, index * CHUNK_BYTES, chunk_length(part.size_bytes, index))

    def _extents_of_chunk(self, part: Part, index: int) -> Sequence[Extent]:
        new = self._new.get(part.root)
        return self._extents(part) if new is None else new.extents(index)

    def _extents(self, part: Part) -> Sequence[Extent]:
        index = self._index
        pieces = index.extents.get(part.name)
        if pieces is not None and all(index.is_unchanged(file) for file in {extent.file for extent in pieces}):
            return pieces
        if not self.files.holds(part):
            raise WeightsError(f"{part.name} of model {self.manifest.hash[:8]} is not on this machine")
        return self.files.extents(part)

    def open_new(self, part: Part, leaves: Sequence[bytes]) -> NewPart:
        """Begin, or go on, to fetch a part."""
        new = self._new[part.root] = self.files.open_new(part, leaves)
        return new

    def finish(self, new: NewPart) -> None:
        """A part that was fetched is whole."""
        try:
            self.files.finish(new)
        finally:
            self.abandon(new)

    def abandon(self, new: NewPart) -> None:
        """Leave a part half fetched."""
        self._new.pop(new.part.root, None)
        new.close()

    # --- the model ----------------------------------------------------------------------------------------------------

    def source(self, names: Iterable[str]) -> ModelSource:
        """The model as the engine reads it, with these parts and the tokenizer (empty where it is not here).

        Raises `WeightsError` where one of them is not here, or not what the manifest says.
        """
        wanted = list(names)
        wrong = self.check(wanted)
        if wrong:
            raise WeightsError(
                f"{', '.join(wrong[:4])} of model {self.manifest.hash[:8]}: not on this machine, or damaged"
            )
        for name in wanted:
            self.files.touch(self.manifest.by_name[name])
        parts = {name: self._entries(self.manifest.by_name[name]) for name in wanted if name != TOKENIZER_PART}
        tokenizer = self._bytes(TOKENIZER_PART) if TOKENIZER_PART in wanted else b""
        spec = self.manifest.tokenizer_spec(tokenizer)
        return ModelSource(f"model {self.manifest.hash[:8]}", self.manifest.config, parts, spec, self.manifest.licence)

    def _bytes(self, name: str) -> bytes:
        part = self.manifest.by_name[name]
        try:
            return read_range(self._extents(part), 0, part.size_bytes)
        except OSError as error:
            raise WeightsError(f"{name} of model {self.manifest.hash[:8]} cannot be read: {error}") from error

    def _entries(self, part: Part) -> tuple[TensorEntry, ...]:
        """A part's tensors where they lie: in a model's own files each is a piece, in the cache all are one."""
        extents = self._extents(part)
        if len(extents) == 1:
            whole, at, pieces = extents[0], extents[0].offset, []
            for tensor in part.tensors:
                pieces.append(Extent(whole.file, at, tensor.size_bytes))
                at += tensor.size_bytes
            extents = pieces
        return tuple(
            TensorEntry(
                t.role, f"{part.name}.{t.role}", t.kind, t.shape, e.file, e.offset, e.length, t.interleaved_heads
            )
            for t, e in zip(part.tensors, extents, strict=True)
        )


def remember_source(cache: Path, manifest: Manifest, source: ModelSource, tokenizer: bytes) -> None:
    """Index a model's own files, whose bytes were just read for its manifest; only the tokenizer's text is written."""
    extents = {
        name: tuple(Extent(entry.file.absolute(), entry.offset, entry.length) for entry in in_order(source, name))
        for name in part_names(source.config)
    }
    part = manifest.by_name[TOKENIZER_PART]
    hasher = ChunkHasher()
    hasher.update(tokenizer)
    PartFiles(cache).keep(part, hasher.finish(), tokenizer)
    ManifestStore(cache).save_index(manifest.hash, SourceIndex.of(extents))

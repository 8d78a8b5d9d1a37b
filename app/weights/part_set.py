"""A set of parts in the cache of this machine, by name and by root: what the exchange of chunks needs to know.

`Download` and `ChunkServer` work on any such set. The parts of a model are one (`library`), with the model's own files
as a second place where they may lie.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from app.manifest.manifest import Part
from app.manifest.merkle import CHUNK_BYTES, leaf_hash
from app.weights.extents import WeightsError, chunk_length, read_at_hand, read_range
from app.weights.part_store import NewPart, PartFiles
from engine.sources.base import Extent

log = logging.getLogger("shoal.weights")


class PartSet:
    """Finds and reads parts, those that are being downloaded too; methods may be called from any thread."""

    def __init__(self, cache: Path, parts: Iterable[Part], owner: str) -> None:
        self.by_name = {part.name: part for part in parts}
        self.files = PartFiles(cache)
        self._owner = owner  # what the parts belong to, for errors
        self._by_root = {part.root: part for part in self.by_name.values()}
        self._leaves: dict[bytes, tuple[bytes, ...]] = {}
        self._new: dict[bytes, NewPart] = {}  # by root: parts being downloaded
        self._sound: defaultdict[bytes, set[int]] = defaultdict(set)  # by root: chunks that were checked when read

    def add(self, part: Part) -> None:
        """Make one more part known; it need not be here yet."""
        self.by_name[part.name] = self._by_root[part.root] = part

    def drop(self, root: bytes) -> None:
        """Forget a part; its files stay."""
        part = self._by_root.pop(root, None)
        if part is not None:
            del self.by_name[part.name]
            self._leaves.pop(root, None)
            self._sound.pop(root, None)

    def held(self) -> frozenset[str]:
        """Names of the parts that are here, judged by file sizes and stamps without reading them."""
        return frozenset(name for name, part in list(self.by_name.items()) if self.files.holds(part))

    def missing(self, names: Iterable[str]) -> list[str]:
        """Names of those parts that are not here, in the given order."""
        held = self.held()
        return [name for name in names if name not in held]

    def present_bytes(self, part: Part) -> int:
        """Return how many bytes of a part are here, about: those of a download that is under way included."""
        if self.files.holds(part):
            return part.size_bytes
        new = self._new.get(part.root)
        return 0 if new is None else min(part.size_bytes, len(new.have) * CHUNK_BYTES)

    def part(self, root: bytes) -> Part | None:
        """Return the part of this set with this root, or None."""
        return self._by_root.get(root)

    def leaves(self, part: Part) -> tuple[bytes, ...] | None:
        """Return the hashes of a part's chunks; None if they are not known here."""
        known = self._leaves.get(part.root)
        if known is None and (known := self.files.leaves(part)) is not None:
            self._leaves[part.root] = known  # checked against the root just once, since peers ask for them often
        return known

    # --- its bytes ----------------------------------------------------------------------------------------------------

    def chunk(self, part: Part, index: int) -> bytes | None:
        """Read one chunk of a complete part, or of one being downloaded that has it already; None if it is not here.

        It is checked the first time, since a bit may have flipped on the disk under a file that looks unchanged: a
        part that is wrong counts as missing from then on.
        """
        data = self._read_chunk(part, index)
        if data is None or self._is_sound(part, index):
            return data
        leaves = self.leaves(part)
        if leaves is not None and leaf_hash(data) != leaves[index]:
            log.warning("%s of %s is damaged on this machine: it counts as missing", part.name, self._owner)
            self.distrust(part)
            return None
        self._sound[part.root].add(index)
        return data

    def _read_chunk(self, part: Part, index: int) -> bytes | None:
        start, length = index * CHUNK_BYTES, chunk_length(part.size_bytes, index)
        try:
            try:
                return read_range(self._extents_of_chunk(part, index), start, length)
            except FileNotFoundError:  # `finish` has just given the file its final name
                return read_range(self._extents(part), start, length)
        except (OSError, WeightsError):
            return None

    def chunk_at_hand(self, part: Part, index: int) -> bytearray | None:
        """Read a chunk like `chunk`, but only from the page cache; None if a disk would have to be read, or checked."""
        if not self._is_sound(part, index):
            return None
        try:
            extents = self._extents_of_chunk(part, index)
        except WeightsError:
            return None
        return read_at_hand(extents, index * CHUNK_BYTES, chunk_length(part.size_bytes, index))

    def _is_sound(self, part: Part, index: int) -> bool:
        """True if a chunk was checked in this process, when it was given the first time or when it arrived."""
        new = self._new.get(part.root)
        return index in self._sound[part.root] or (new is not None and index in new.have)

    def distrust(self, part: Part) -> None:
        """Count a part with a wrong chunk as missing; a download of it repeats the wrong chunks."""
        self._sound.pop(part.root, None)
        self.files.distrust(part)

    def whole(self, part: Part, some: range | None = None) -> bytes:
        """Read all bytes of a part, or some; raises `WeightsError` if it is not here or cannot be read."""
        wanted = range(part.size_bytes) if some is None else some
        try:
            return read_range(self._extents(part), wanted.start, len(wanted))
        except OSError as error:
            raise WeightsError(f"{part.name} of {self._owner} cannot be read: {error}") from error

    def _extents_of_chunk(self, part: Part, index: int) -> Sequence[Extent]:
        new = self._new.get(part.root)
        return self._extents(part) if new is None or index not in new.have else new.extents(index)

    def _extents(self, part: Part) -> Sequence[Extent]:
        if not self.files.holds(part):
            raise WeightsError(f"{part.name} of {self._owner} is not on this machine")
        return self.files.extents(part)

    # --- downloads ----------------------------------------------------------------------------------------------------

    def open_new(self, part: Part, leaves: Sequence[bytes]) -> NewPart:
        """Start or resume the download of a part."""
        new = self._new[part.root] = self.files.open_new(part, leaves)
        return new

    def finish(self, new: NewPart) -> None:
        """Turn a completely downloaded part into a held one; raises `WeightsError` if the disk cannot be written."""
        try:
            self.files.finish(new)
        finally:
            self.abandon(new)

    def abandon(self, new: NewPart) -> None:
        """Close a part whose download stopped; its chunks stay on disk for the next attempt."""
        self._new.pop(new.part.root, None)
        new.close()

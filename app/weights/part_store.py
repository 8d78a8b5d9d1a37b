"""Downloaded parts in the cache, one file each, named by root hash: `parts/` in the cache folder.

    ROOT          a complete part: every chunk was checked before the file got this name
    ROOT.new      a part being downloaded; after a restart its finished chunks are found by their hashes
    ROOT.leaves   the hashes of its chunks
    ROOT.ok       size and mtime of ROOT at its last full check; its own mtime is the time of last use

Several processes may share the folder and even download the same part: chunks are checked before they are written, so
two of them write the same bytes to the same place.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from app.core.errors import RecordError
from app.manifest.manifest import Part
from app.manifest.merkle import CHUNK_BYTES, HASH_BYTES, leaf_hash, leaves_from
from app.weights.extents import Stamp, WeightsError, chunk_length, matching_chunks
from engine.errors import is_disk_full
from engine.sources.base import Extent
from p2p.platform import replace_file, write_private

_MAX_LEAVES_BYTES = 4 * 2**20
_ROOT = re.compile(rf"[0-9a-f]{{{2 * HASH_BYTES}}}")


@dataclass(frozen=True)
class PartFiles:
    """Reads, checks and writes the parts under one cache folder."""

    cache: Path

    @property
    def folder(self) -> Path:
        """The folder `parts/`, which may not exist yet."""
        return self.cache / "parts"

    def path(self, root: bytes) -> Path:
        """Path of a complete part."""
        return self.folder / root.hex()

    def holds(self, part: Part) -> bool:
        """True if a complete part is here; only its size is checked."""
        stamp = Stamp.of(self.path(part.root))
        return stamp is not None and stamp.size == part.size_bytes

    def extents(self, part: Part) -> tuple[Extent, ...]:
        """Byte ranges of a complete part: one, the whole file."""
        return (Extent(self.path(part.root), 0, part.size_bytes),)

    def leaves(self, part: Part) -> tuple[bytes, ...] | None:
        """Return the hashes of a part's chunks; None if they are missing or do not match its root."""
        try:
            with open(self._beside(part.root, "leaves"), "rb") as file:
                return leaves_from(file.read(_MAX_LEAVES_BYTES), size_bytes=part.size_bytes, root=part.root)
        except (OSError, RecordError):
            return None

    def keep_leaves(self, part: Part, leaves: Sequence[bytes]) -> None:
        """Write the already checked hashes of a part's chunks."""
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_private(self._beside(part.root, "leaves"), b"".join(leaves), durable=False)

    def keep(self, part: Part, leaves: Sequence[bytes], data: bytes) -> None:
        """Write a complete, already checked part from memory, without waiting for the disk."""
        assert len(data) == part.size_bytes
        self.keep_leaves(part, leaves)
        with writing(self.folder):
            write_private(self.path(part.root), data, durable=False)
        self._stamp(part)

    def is_checked(self, part: Part) -> bool:
        """True if the file is unchanged since its last full check."""
        try:
            size, mtime_ns = json.loads(self._beside(part.root, "ok").read_bytes()[:256])
        except (OSError, ValueError, TypeError):
            return False
        return Stamp.of(self.path(part.root)) == Stamp(size, mtime_ns)

    def check(self, part: Part, on_bytes: Callable[[int], None] = lambda count: None) -> bool:
        """Read and verify a complete part; False if it is missing or wrong. A wrong one counts as incomplete again."""
        leaves = self.leaves(part)
        if leaves is None or not self.holds(part):
            return False
        for index, right in enumerate(matching_chunks(self.extents(part), part.size_bytes, leaves)):
            on_bytes(chunk_length(part.size_bytes, index))
            if not right:
                self.distrust(part)
                return False
        with contextlib.suppress(WeightsError):  # such as a full disk: then it is read again the next time
            self._stamp(part)
        return True

    def distrust(self, part: Part) -> None:
        """Mark a complete part as incomplete, so that a download repeats only its wrong chunks."""
        with contextlib.suppress(OSError):
            replace_file(self.path(part.root), self._beside(part.root, "new"))

    def open_new(self, part: Part, leaves: Sequence[bytes]) -> NewPart:
        """Open a part for download and find the chunks that are here already; raises `WeightsError`."""
        self.keep_leaves(part, leaves)
        path = self._beside(part.root, "new")
        with writing(self.folder):
            # No truncation: another process may be writing chunks to the same file. No symlinks: they could lead to a
            # file that is not ours.
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)
            descriptor = os.open(path, flags, 0o600)
        new = NewPart(part, leaves, path, os.fdopen(descriptor, "r+b", buffering=0))
        there = matching_chunks((Extent(path, 0, part.size_bytes),), part.size_bytes, leaves)
        new.have.update(index for index, right in enumerate(there) if right)
        return new

    def finish(self, new: NewPart) -> None:
        """Sync a part that has all its chunks and rename it to its final name; raises `WeightsError` if that fails."""
        assert not new.missing(), "only a complete part gets its final name"
        part = new.part
        with writing(self.folder):
            os.fsync(new.file.fileno())
            new.close()
            try:
                replace_file(self._beside(part.root, "new"), self.path(part.root))
            except PermissionError:
                if not self.holds(part):  # another process may have finished the same part and have it open (Windows)
                    raise
            except FileNotFoundError:
                pass  # another process may have finished the same part a moment ago
        if not self.holds(part):
            raise WeightsError(f"{self.folder} was emptied while part {part.name} was downloaded: try again")
        self._stamp(part)

    def names(self) -> list[tuple[str, int]]:
        """List (root in hex, disk bytes) of every complete or incomplete part, sorted."""
        sizes: dict[str, int] = {}
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.folder):
                with contextlib.suppress(OSError):
                    root = entry.name.partition(".")[0]
                    sizes[root] = sizes.get(root, 0) + _on_disk(entry.stat(follow_symlinks=False))
        return sorted((root, size) for root, size in sizes.items() if _ROOT.fullmatch(root))

    def touch(self, part: Part) -> None:
        """Record that a part is used now, for eviction."""
        with contextlib.suppress(OSError):
            os.utime(self._beside(part.root, "ok"))

    def last_used(self, root: str) -> int:
        """Time a part was last used or written, in ns; 0 if unknown."""
        times = [stamp.mtime_ns for kind in ("", ".ok", ".new") if (stamp := Stamp.of(self.folder / f"{root}{kind}"))]
        return max(times, default=0)

    def remove(self, roots: Iterable[str]) -> None:
        """Delete parts by root in hex, complete or not; files that cannot be deleted are skipped."""
        for root in roots:
            for name in (root, *(f"{root}.{kind}" for kind in ("new", "leaves", "ok"))):
                with contextlib.suppress(OSError):
                    os.unlink(self.folder / name)

    def _beside(self, root: bytes, kind: str) -> Path:
        return self.folder / f"{root.hex()}.{kind}"

    def _stamp(self, part: Part) -> None:
        stamp = Stamp.of(self.path(part.root))
        if stamp is not None:
            with writing(self.folder):
                data = json.dumps([stamp.size, stamp.mtime_ns]).encode()
                write_private(self._beside(part.root, "ok"), data, durable=False)


class NewPart:
    """A part being downloaded; any thread may write to it."""

    def __init__(self, part: Part, leaves: Sequence[bytes], path: Path, file: IO[bytes]) -> None:
        self.part, self.leaves, self._path, self.file = part, tuple(leaves), path, file
        self.have: set[int] = set()
        self._lock = threading.Lock()

    def missing(self) -> list[int]:
        """Indexes of the chunks that are not here yet."""
        return [index for index in range(len(self.leaves)) if index not in self.have]

    def is_right(self, index: int, chunk: bytes | memoryview) -> bool:
        """True if these are the bytes of chunk `index`, by length and hash."""
        return len(chunk) == chunk_length(self.part.size_bytes, index) and leaf_hash(chunk) == self.leaves[index]

    def take(self, index: int, chunk: bytes | memoryview) -> bool:
        """Write a chunk if its hash is right; False if it is wrong."""
        right = self.is_right(index, chunk)
        if right and index not in self.have:
            self.write(index, chunk)
        return right

    def write(self, index: int, chunk: bytes | memoryview) -> None:
        """Write a chunk whose hash was checked; raises `WeightsError` if the disk refuses."""
        with self._lock, writing(self.part.name):
            self.file.seek(index * CHUNK_BYTES)
            left = memoryview(chunk)
            while left:  # a write may be partial just before the disk is full
                left = left[self.file.write(left) :]
        self.have.add(index)

    def extents(self, index: int) -> tuple[Extent, ...]:
        """Byte ranges of the part for reading chunk `index`; raises `WeightsError` if that has not arrived."""
        if index not in self.have:
            raise WeightsError(f"chunk {index} of {self.part.name} has not arrived yet")
        return (Extent(self._path, 0, self.part.size_bytes),)

    def close(self) -> None:
        """Close the file; its chunks stay on disk."""
        with self._lock:
            self.file.close()


@contextlib.contextmanager
def writing(what: object) -> Iterator[None]:
    """Translate `OSError` into a `WeightsError` that names `what` and the remedy."""
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            raise WeightsError(
                f"the disk is full, {what} cannot be written: free space, or move the cache with SHOAL_CACHE",
                code="disk_full",
            ) from error
        raise WeightsError(f"{what} cannot be written: {error.strerror or error}") from error


def _on_disk(status: os.stat_result) -> int:
    """Bytes that a file occupies on disk; an incomplete part may be sparse."""
    blocks: int | None = getattr(status, "st_blocks", None)  # not on Windows
    return status.st_size if blocks is None else blocks * 512

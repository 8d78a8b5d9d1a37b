"""Parts under the cache folder, each in a file named by its hash: `parts/` in `SHOAL_CACHE`.

    ROOT          a whole part: every chunk was checked before the file got this name
    ROOT.new      a part that is being fetched; chunks that are there are found again by their hashes
    ROOT.leaves   the hashes of its chunks
    ROOT.ok       size and time of the whole file when it was last checked in full

Several processes may work on one folder, and on one part: what is written is checked before, so two who fetch the
same chunk write the same bytes to the same place.
"""

from __future__ import annotations

import contextlib
import errno
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
from app.weights.extents import Extent, Stamp, WeightsError, chunk_length, matching_chunks
from p2p.platform import write_private

_MAX_LEAVES_BYTES = 4 * 2**20
_ROOT = re.compile(rf"[0-9a-f]{{{2 * HASH_BYTES}}}")


@dataclass(frozen=True)
class PartFiles:
    """The parts under one cache folder."""

    cache: Path

    @property
    def folder(self) -> Path:
        """Where they lie."""
        return self.cache / "parts"

    def path(self, root: bytes) -> Path:
        """The file of a whole part."""
        return self.folder / root.hex()

    def holds(self, part: Part) -> bool:
        """Whether a whole part is here."""
        stamp = Stamp.of(self.path(part.root))
        return stamp is not None and stamp.size == part.size_bytes

    def extents(self, part: Part) -> tuple[Extent, ...]:
        """Where a whole part's bytes lie."""
        return (Extent(self.path(part.root), 0, part.size_bytes),)

    def leaves(self, part: Part) -> tuple[bytes, ...] | None:
        """The hashes of a part's chunks, where they are known."""
        try:
            with open(self._beside(part.root, "leaves"), "rb") as file:
                return leaves_from(file.read(_MAX_LEAVES_BYTES), size_bytes=part.size_bytes, root=part.root)
        except (OSError, RecordError):
            return None

    def keep_leaves(self, part: Part, leaves: Sequence[bytes]) -> None:
        """Keep the (checked) hashes of a part's chunks."""
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_private(self._beside(part.root, "leaves"), b"".join(leaves), durable=False)

    def keep(self, part: Part, leaves: Sequence[bytes], data: bytes) -> None:
        """Keep a small part whose bytes are at hand."""
        assert len(data) == part.size_bytes
        self.keep_leaves(part, leaves)
        with writing(self.folder):
            write_private(self.path(part.root), data)
        self._stamp(part)

    def is_checked(self, part: Part) -> bool:
        """Whether the file is the one that was checked in full."""
        try:
            size, mtime_ns = json.loads(self._beside(part.root, "ok").read_bytes()[:256])
        except (OSError, ValueError, TypeError):
            return False
        return Stamp.of(self.path(part.root)) == Stamp(size, mtime_ns)

    def check(self, part: Part, on_bytes: Callable[[int], None] = lambda count: None) -> bool:
        """Read a whole part; one with wrong bytes is put back among those being fetched, and False returned."""
        leaves = self.leaves(part)
        if leaves is None or not self.holds(part):
            return False
        for index, right in enumerate(matching_chunks(self.extents(part), part.size_bytes, leaves)):
            on_bytes(chunk_length(part.size_bytes, index))
            if not right:
                self.distrust(part)
                return False
        self._stamp(part)
        return True

    def distrust(self, part: Part) -> None:
        """A whole part is not right: it counts as half fetched again, so that only the wrong chunks come anew."""
        with contextlib.suppress(OSError):
            os.replace(self.path(part.root), self._beside(part.root, "new"))

    def open_new(self, part: Part, leaves: Sequence[bytes]) -> NewPart:
        """A part that is to be fetched, with the chunks of it that are here already."""
        self.keep_leaves(part, leaves)
        path = self._beside(part.root, "new")
        with writing(self.folder):
            # Written at any offset; a file that another process fills is joined, not emptied.
            # What lies behind a link is somebody else's.
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)
            descriptor = os.open(path, flags, 0o600)
        new = NewPart(part, leaves, path, os.fdopen(descriptor, "r+b", buffering=0))
        there = matching_chunks((Extent(path, 0, part.size_bytes),), part.size_bytes, leaves)
        new.have.update(index for index, right in enumerate(there) if right)
        return new

    def finish(self, new: NewPart) -> None:
        """Give a part that has every chunk its name."""
        assert not new.missing(), "only whole parts have a name"
        part = new.part
        with writing(self.folder):
            os.fsync(new.file.fileno())
            new.close()
            with contextlib.suppress(FileNotFoundError):
                # Another process may have finished the same part a moment ago.
                os.replace(self._beside(part.root, "new"), self.path(part.root))
        if not self.holds(part):
            raise WeightsError(f"{self.folder} was emptied while part {part.name} was fetched: try again")
        self._stamp(part)

    def names(self) -> list[tuple[str, int]]:
        """Every whole or half part by its hash, with the disk space that it takes."""
        sizes: dict[str, int] = {}
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.folder):
                with contextlib.suppress(OSError):
                    root = entry.name.partition(".")[0]
                    sizes[root] = sizes.get(root, 0) + _on_disk(entry.stat(follow_symlinks=False))
        return sorted((root, size) for root, size in sizes.items() if _ROOT.fullmatch(root))

    def touch(self, part: Part) -> None:
        """A part is used now."""
        with contextlib.suppress(OSError):
            os.utime(self._beside(part.root, "ok"))

    def last_used(self, root: str) -> int:
        """When a part was last used or fetched; larger is later."""
        times = [stamp.mtime_ns for kind in ("", ".ok", ".new") if (stamp := Stamp.of(self.folder / f"{root}{kind}"))]
        return max(times, default=0)

    def remove(self, roots: Iterable[str]) -> None:
        """Delete parts, whole or half."""
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
    """A part that is being fetched; any thread may write to it."""

    def __init__(self, part: Part, leaves: Sequence[bytes], path: Path, file: IO[bytes]) -> None:
        self.part, self.leaves, self._path, self.file = part, tuple(leaves), path, file
        self.have: set[int] = set()
        self._lock = threading.Lock()

    def missing(self) -> list[int]:
        """The chunks that are not here yet."""
        return [index for index in range(len(self.leaves)) if index not in self.have]

    def is_right(self, index: int, chunk: bytes | memoryview) -> bool:
        """Whether these are the bytes of that chunk."""
        return len(chunk) == chunk_length(self.part.size_bytes, index) and leaf_hash(chunk) == self.leaves[index]

    def take(self, index: int, chunk: bytes | memoryview) -> bool:
        """Write a chunk if it is right; whether it is."""
        right = self.is_right(index, chunk)
        if right and index not in self.have:
            self.write(index, chunk)
        return right

    def write(self, index: int, chunk: bytes | memoryview) -> None:
        """Write a chunk that is right."""
        with self._lock, writing(self.part.name):
            self.file.seek(index * CHUNK_BYTES)
            left = memoryview(chunk)
            while left:  # a write may take less than it was given, just before the disk is full
                left = left[self.file.write(left) :]
        self.have.add(index)

    def extents(self, index: int) -> tuple[Extent, ...]:
        """Where a chunk lies that is here already, for others who fetch the same part."""
        if index not in self.have:
            raise WeightsError(f"chunk {index} of {self.part.name} has not come yet")
        return (Extent(self._path, 0, self.part.size_bytes),)

    def close(self) -> None:
        """Leave it for later."""
        with self._lock:
            self.file.close()


@contextlib.contextmanager
def writing(what: object) -> Iterator[None]:
    """Turn the disk's refusals into words."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise WeightsError(
                f"the disk is full, {what} cannot be kept: make room, or move the cache with SHOAL_CACHE"
            ) from error
        raise WeightsError(f"{what} cannot be written: {error.strerror or error}") from error


def _on_disk(status: os.stat_result) -> int:
    """What a file really takes: a half-fetched part may have holes."""
    blocks: int | None = getattr(status, "st_blocks", None)  # Windows has none
    return status.st_size if blocks is None else blocks * 512

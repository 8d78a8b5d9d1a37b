"""A part's bytes as byte ranges of files (`Extent`), and a cheap check that a file is unchanged (`Stamp`).

Used for parts in the cache (`part_store`) and in a model's own files (`source_index`) alike.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.core.errors import AppError
from app.manifest.merkle import CHUNK_BYTES, chunk_count, leaf_hash
from engine.sources.base import Extent

_NOWAIT: int | None = getattr(os, "RWF_NOWAIT", None)  # Linux only: read from the page cache or fail


class WeightsError(AppError):
    """A model's bytes cannot be read or written, are missing, or do not match the manifest."""

    code = "weights_missing"


@dataclass(frozen=True)
class Stamp:
    """A file's size and modification time; while both are the same, its bytes count as unchanged."""

    size: int
    mtime_ns: int

    @classmethod
    def of(cls, file: Path) -> Stamp | None:
        """Return the file's present stamp; None if it cannot be accessed."""
        try:
            status = file.stat()
        except OSError:
            return None
        return cls(status.st_size, status.st_mtime_ns)


def read_range(extents: Sequence[Extent], start: int, length: int) -> bytes:
    """Read bytes [start, start + length) of the concatenated extents; raises `OSError` if a file is too short."""
    pieces = []
    for run in _runs(extents, start, length):
        with open(run.file, "rb") as file:
            file.seek(run.offset)
            pieces.append(file.read(run.length))
        if len(pieces[-1]) != run.length:
            raise OSError(f"{run.file} is shorter than expected")
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def read_at_hand(extents: Sequence[Extent], start: int, length: int) -> bytearray | None:
    """Read like `read_range`, but only from the page cache; None if that would wait for a disk or is unsupported."""
    if _NOWAIT is None:
        return None
    data, at = bytearray(length), 0
    try:
        for run in _runs(extents, start, length):
            descriptor = os.open(run.file, os.O_RDONLY)
            try:
                took = os.preadv(descriptor, [memoryview(data)[at : at + run.length]], run.offset, _NOWAIT)
            finally:
                os.close(descriptor)
            if took != run.length:
                return None
            at += took
    except OSError:
        return None
    return data


def _runs(extents: Sequence[Extent], start: int, length: int) -> Iterator[Extent]:
    """Yield the file ranges that make up bytes [start, start + length) of the concatenated extents."""
    for extent in extents:
        if start >= extent.length:
            start -= extent.length
            continue
        take = min(length, extent.length - start)
        yield Extent(extent.file, extent.offset + start, take)
        length -= take
        start = 0
        if not length:
            return


def chunk_length(size_bytes: int, index: int) -> int:
    """Length of chunk `index` of a part of `size_bytes`; only the last is shorter than `CHUNK_BYTES`."""
    return min(CHUNK_BYTES, size_bytes - index * CHUNK_BYTES)


def matching_chunks(extents: Sequence[Extent], size_bytes: int, leaves: Sequence[bytes]) -> Iterator[bool]:
    """Yield for each chunk whether its bytes match its hash; an unreadable chunk does not."""
    for index in range(chunk_count(size_bytes)):
        try:
            chunk = read_range(extents, index * CHUNK_BYTES, chunk_length(size_bytes, index))
        except OSError:
            yield False
        else:
            yield leaf_hash(chunk) == leaves[index]

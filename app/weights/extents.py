"""A part's bytes as pieces of files, read by any range; and how a file is known to be the one it was."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.core.errors import AppError
from app.manifest.merkle import CHUNK_BYTES, chunk_count, leaf_hash

_NOWAIT: int | None = getattr(os, "RWF_NOWAIT", None)  # only Linux reads without ever waiting for a disk


class WeightsError(AppError):
    """A model's bytes cannot be read, written, fetched or trusted."""

    code = "weights_missing"


@dataclass(frozen=True)
class Extent:
    """A run of bytes in a file."""

    file: Path
    offset: int
    length: int


@dataclass(frozen=True)
class Stamp:
    """A file's size and time of change: while both are the same, its bytes are taken to be."""

    size: int
    mtime_ns: int

    @classmethod
    def of(cls, file: Path) -> Stamp | None:
        """The stamp of a file as it is now, or None where there is none."""
        try:
            status = file.stat()
        except OSError:
            return None
        return cls(status.st_size, status.st_mtime_ns)


def read_range(extents: Sequence[Extent], start: int, length: int) -> bytes:
    """The bytes [start, start + length) of the extents put together; raises `OSError` where files have shrunk."""
    pieces = []
    for run in _runs(extents, start, length):
        with open(run.file, "rb") as file:
            file.seek(run.offset)
            pieces.append(file.read(run.length))
        if len(pieces[-1]) != run.length:
            raise OSError(f"{run.file} has become shorter")
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def read_at_hand(extents: Sequence[Extent], start: int, length: int) -> bytearray | None:
    """As `read_range`, if the system has the bytes in memory; None where it would wait for a disk, or cannot tell."""
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
    """Where the bytes [start, start + length) of the extents lie."""
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
    """How many bytes chunk `index` of a part has."""
    return min(CHUNK_BYTES, size_bytes - index * CHUNK_BYTES)


def matching_chunks(extents: Sequence[Extent], size_bytes: int, leaves: Sequence[bytes]) -> Iterator[bool]:
    """For each chunk whether the bytes there are the right ones; what cannot be read is not."""
    for index in range(chunk_count(size_bytes)):
        try:
            chunk = read_range(extents, index * CHUNK_BYTES, chunk_length(size_bytes, index))
        except OSError:
            yield False
        else:
            yield leaf_hash(chunk) == leaves[index]

"""Eviction of downloaded parts: those a running node uses are kept, others only as long as there is room.

Every node on this machine lists the parts it hosts or downloads in `in_use/` under the cache folder, as `NAME.roots`,
and holds the lock `NAME.lock` while it runs; a list whose lock is free belongs to a dead node and is deleted. The
model's own files are never touched, and neither are the tokenizers of models that were imported here: each is in none
of those files, and perhaps on no other machine.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from app.core.units import format_size
from app.manifest.manifest import TOKENIZER_PART
from app.weights.extents import WeightsError
from app.weights.manifest_store import ManifestStore
from app.weights.part_store import PartFiles, writing
from p2p.platform import FileLock, is_locked, write_private

_MAX_ROOTS_BYTES = 2**20


@dataclass(frozen=True)
class DiskRoom:
    """Disk limits set by the user: most bytes for parts (None: no limit), and bytes of the disk to leave free."""

    limit_bytes: int | None = None
    floor_bytes: int = 0


class InUseMarker:
    """The list of parts that one running node uses, which `make_room` does not evict."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file = folder / f"{name}.roots"

    def replace(self, roots: Collection[bytes]) -> None:
        """Replace the list of parts in use; raises `WeightsError` if it cannot be written."""
        with writing(self._file):
            self._file.parent.mkdir(parents=True, exist_ok=True)  # somebody may have emptied the cache
            write_private(self._file, "\n".join(sorted(root.hex() for root in roots)).encode())


@contextlib.contextmanager
def claiming(cache: Path, name: str) -> Iterator[InUseMarker]:
    """Protect parts from eviction while the context is open; `name` must be unique on this machine."""
    folder = cache / "in_use"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock.acquire(folder / f"{name}.lock", timeout_s=5.0)
    with lock:
        try:
            yield InUseMarker(folder, name)
        finally:
            (folder / f"{name}.roots").unlink(missing_ok=True)


def users(cache: Path) -> list[str]:
    """Names of the running nodes that use a cache."""
    return [file.stem for file in sorted((cache / "in_use").glob("*.lock")) if is_locked(file)]


def in_use(cache: Path) -> set[str]:
    """Roots, in hex, of the parts that running nodes use; lists of dead nodes are deleted."""
    used: set[str] = set()
    for file in (cache / "in_use").glob("*.roots"):
        with contextlib.suppress(OSError):
            lock = FileLock.try_acquire(file.with_suffix(".lock"))
            if lock is None:
                used.update(file.read_bytes()[:_MAX_ROOTS_BYTES].decode("ascii", "replace").split())
                continue
            with lock:
                file.unlink(missing_ok=True)  # its node has ended
    return used


def make_room(cache: Path, wanted_bytes: int, room: DiskRoom) -> int:
    """Delete parts that are not in use, least recently used first, until `wanted_bytes` more fit; bytes deleted.

    Raises `WeightsError`, without deleting anything, if they would not fit even then.
    """
    files = PartFiles(cache)
    sizes = dict(files.names())
    disk, held = _disk(cache, wanted_bytes, room), sum(sizes.values())
    missing = max(_short_on_disk(disk.free, wanted_bytes, room), _over_limit(held, wanted_bytes, room))
    if missing <= 0:
        return 0
    used = in_use(cache) | _imported_tokenizers(cache)
    idle = sorted((root for root in sizes if root not in used), key=files.last_used)
    going: list[str] = []
    for root in idle:
        if missing <= 0:
            break
        going.append(root)
        missing -= sizes[root]
    freed = sum(sizes[root] for root in going)
    if missing > 0:
        why = _why_not(_Disk(disk.free + freed, disk.total), held - freed, wanted_bytes, room)
        raise WeightsError(f"{format_size(wanted_bytes)} of weights do not fit in {cache}: {why}", code="disk_full")
    files.remove(going)
    return freed


def room_beside_used(cache: Path, room: DiskRoom) -> int:
    """Return the bytes that `make_room` can make room for: those free, and those of parts that are not in use."""
    sizes = dict(PartFiles(cache).names())
    used = in_use(cache) | _imported_tokenizers(cache)
    idle = sum(size for root, size in sizes.items() if root not in used)
    free = _disk(cache, sys.maxsize, room).free - room.floor_bytes
    if room.limit_bytes is not None:
        free = min(free, room.limit_bytes - sum(sizes.values()))
    return max(0, free + idle)


def _imported_tokenizers(cache: Path) -> set[str]:
    store = ManifestStore(cache)
    imported = (store.load(model) for model in store.hashes() if store.source(model) is not None)
    return {manifest.by_name[TOKENIZER_PART].root.hex() for manifest in imported if manifest is not None}


class _Disk(NamedTuple):
    free: int
    total: int


def _disk(cache: Path, wanted: int, room: DiskRoom) -> _Disk:
    """Return the free and the total bytes of the cache's disk; one that does not say is taken to have room."""
    try:
        usage = shutil.disk_usage(cache)
    except OSError:
        return _Disk(wanted + room.floor_bytes, wanted + room.floor_bytes)
    return _Disk(usage.free, usage.total)


def _short_on_disk(free: int, wanted: int, room: DiskRoom) -> int:
    """Bytes that the disk lacks for `wanted` more, besides those to leave free."""
    return wanted + room.floor_bytes - free


def _over_limit(held: int, wanted: int, room: DiskRoom) -> int:
    """Bytes that the cache would have beyond its limit with `wanted` more."""
    return 0 if room.limit_bytes is None else held + wanted - room.limit_bytes


def _why_not(disk: _Disk, held: int, wanted: int, room: DiskRoom) -> str:
    """Say what keeps `wanted` bytes out once all that is not in use is deleted, and what to do: the cause first."""
    causes = []
    short, over, floor = _short_on_disk(disk.free, wanted, room), _over_limit(held, wanted, room), room.floor_bytes
    if 0 < short <= floor:
        causes.append(
            f"the setting disk_floor keeps {format_size(floor)} of its disk free, of which {format_size(disk.free)} "
            f"are: lower it by {format_size(short)}, or free as much disk space"
        )
    elif short > 0:
        keeps = f", and the setting disk_floor keeps {format_size(floor)} free" if floor else ""
        need = f"free {format_size(short - floor)} of it{' and set disk_floor to 0' if floor else ''}"
        if wanted > disk.total:
            need = "set SHOAL_CACHE to a folder on a larger disk"
        causes.append(f"{format_size(disk.free)} of its disk of {format_size(disk.total)} are free{keeps}: {need}")
    if over > 0:
        causes.append(
            f"the setting cache_limit allows it {format_size(room.limit_bytes or 0)}: raise it by {format_size(over)}"
        )
    return "; and ".join(causes)

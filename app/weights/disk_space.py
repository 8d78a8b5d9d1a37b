"""Eviction of downloaded parts: those a running node uses are kept, others only as long as there is room.

Every node on this machine lists the parts it hosts or downloads in `in_use/` under the cache folder, as `NAME.roots`,
and holds the lock `NAME.lock` while it runs; a list whose lock is free belongs to a dead node and is deleted. The
model's own files are never touched, and neither are the tokenizers of models that were imported here: each is in none
of those files, and perhaps on no other machine.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

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
    missing = _bytes_to_free(cache, sum(sizes.values()), wanted_bytes, room)
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
    if missing > 0:
        raise WeightsError(
            f"{format_size(wanted_bytes)} of weights do not fit in {cache}: free {format_size(missing)} of disk space, "
            "raise the setting cache_limit, or lower disk_floor",
            code="disk_full",
        )
    files.remove(going)
    return sum(sizes[root] for root in going)


def _imported_tokenizers(cache: Path) -> set[str]:
    store = ManifestStore(cache)
    imported = (store.load(model) for model in store.hashes() if store.source(model) is not None)
    return {manifest.by_name[TOKENIZER_PART].root.hex() for manifest in imported if manifest is not None}


def _bytes_to_free(cache: Path, held: int, wanted: int, room: DiskRoom) -> int:
    """Bytes that must be deleted before `wanted` more fit; 0 or less if they fit already."""
    try:
        free = shutil.disk_usage(cache).free
    except OSError:
        free = wanted + room.floor_bytes
    on_disk = wanted + room.floor_bytes - free
    return on_disk if room.limit_bytes is None else max(on_disk, held + wanted - room.limit_bytes)

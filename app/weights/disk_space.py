"""Which fetched parts stay on the disk: those that a running node uses always, others as long as there is room.

Every node on this machine says in `in_use/` under the cache folder which parts it hosts, and holds a lock while it
runs; what a dead node left there counts for nothing. A model's own files are never touched.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from app.core.units import format_size
from app.weights.extents import WeightsError
from app.weights.part_store import PartFiles, writing
from p2p.platform import FileLock, write_private

_MAX_CLAIM_BYTES = 2**20


@dataclass(frozen=True)
class DiskRoom:
    """What the person leaves to parts: so much in all, and so much of the disk stays free."""

    limit_bytes: int | None = None
    floor_bytes: int = 0


class InUseMarker:
    """What one running node uses."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file = folder / f"{name}.roots"

    def hold(self, roots: Collection[bytes]) -> None:
        """These parts and no others are in use now."""
        with writing(self._file):
            write_private(self._file, "\n".join(sorted(root.hex() for root in roots)).encode())


@contextlib.contextmanager
def claiming(cache: Path, name: str) -> Iterator[InUseMarker]:
    """Say what is in use for as long as this lasts; `name` is this node's own on this machine."""
    folder = cache / "in_use"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock.acquire(folder / f"{name}.lock", timeout_s=5.0)
    with lock:
        try:
            yield InUseMarker(folder, name)
        finally:
            (folder / f"{name}.roots").unlink(missing_ok=True)


def in_use(cache: Path) -> set[str]:
    """The parts that running nodes use, by their hash in hex."""
    used: set[str] = set()
    for file in (cache / "in_use").glob("*.roots"):
        with contextlib.suppress(OSError):
            lock = FileLock.try_acquire(file.with_suffix(".lock"))
            if lock is None:
                used.update(file.read_bytes()[:_MAX_CLAIM_BYTES].decode("ascii", "replace").split())
                continue
            with lock:
                file.unlink(missing_ok=True)  # its node is gone
    return used


def make_room(cache: Path, wanted_bytes: int, room: DiskRoom) -> int:
    """Delete parts nobody uses, the longest unused first, until `wanted_bytes` more fit; how many bytes went.

    Raises `WeightsError` where they do not fit even then, and deletes nothing.
    """
    files = PartFiles(cache)
    sizes = dict(files.names())
    used = in_use(cache)
    idle = sorted((root for root in sizes if root not in used), key=files.last_used)
    over = _lacking(cache, sum(sizes.values()), wanted_bytes, room)
    going: list[str] = []
    for root in idle:
        if over <= 0:
            break
        going.append(root)
        over -= sizes[root]
    if over > 0:
        raise WeightsError(
            f"{format_size(wanted_bytes)} of weights do not fit in {cache}, {format_size(over)} are lacking: make room "
            "on the disk, raise the setting cache_limit, or lower disk_floor"
        )
    files.remove(going)
    return sum(sizes[root] for root in going)


def _lacking(cache: Path, held: int, wanted: int, room: DiskRoom) -> int:
    """How many bytes have to go; 0 or less: none."""
    try:
        free = shutil.disk_usage(cache).free
    except OSError:
        free = wanted + room.floor_bytes
    on_disk = wanted + room.floor_bytes - free
    return on_disk if room.limit_bytes is None else max(on_disk, held + wanted - room.limit_bytes)

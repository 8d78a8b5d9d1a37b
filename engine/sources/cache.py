"""Writes models into the cache folder so that each is there completely or not at all.

Work happens in a scratch folder next to the models, named after the process that owns it. Scratch folders of processes
that no longer run are removed by the next one that works there.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from engine.errors import SourceError, is_disk_full

_PREFIX = ".partial-"


def models_dir(cache_dir: Path) -> Path:
    """Folder of downloaded models."""
    return cache_dir / "models"


@contextmanager
def staging(folder: Path) -> Iterator[Path]:
    """Provide a scratch folder inside `folder` and remove it when the block ends.

    Raises `SourceError` if the folder cannot be written or the disk is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        scratch = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=folder))
    except OSError as error:
        raise unwritable(folder, error) from error
    try:
        yield scratch
    except OSError as error:
        raise unwritable(folder, error) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def unwritable(folder: Path, error: OSError) -> SourceError:
    """Return the error for a cache folder that cannot be written."""
    if is_disk_full(error):
        return disk_full(folder)
    reason = error.strerror or str(error)
    return SourceError(
        f"{folder} cannot be written ({reason}): check its permissions, or set SHOAL_CACHE to another folder"
    )


def disk_full(folder: Path) -> SourceError:
    """Return the error for a full disk."""
    return SourceError(f"the disk that holds {folder} is full: free some space, or set SHOAL_CACHE to another disk")


def free_bytes(folder: Path) -> int:
    """Free bytes on the disk that holds `folder`."""
    try:
        return shutil.disk_usage(folder).free
    except OSError as error:
        raise unwritable(folder, error) from error


def publish(ready: Path, target: Path) -> None:
    """Move a finished file or folder to its place in one step; keeps what another process put there first."""
    try:
        os.replace(ready, target)
    except OSError:
        # A folder with content cannot be replaced, nor can an open file on Windows.
        if not target.exists():
            raise


def write_whole(path: Path, data: bytes | memoryview) -> None:
    """Write a file and flush it to the disk, so that a later rename never publishes a file without its content."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sweep(folder: Path) -> None:
    """Remove scratch folders whose process no longer runs."""
    for left in folder.glob(_PREFIX + "*"):
        owner = left.name.removeprefix(_PREFIX).partition("-")[0]
        if not owner.isdecimal() or not psutil.pid_exists(int(owner)):
            shutil.rmtree(left, ignore_errors=True)

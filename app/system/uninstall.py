"""Finds and removes the files that Shoal made in a home folder and in the cache.

Either folder may hold foreign files too. In a home only the files of the table `app.config.home.HOME_FILES` are
removed; a cache, whose sub-folders have common names, only if it contains nothing else. The folders themselves are
removed once empty. Stopping the node and removing its service is left to `app.cli.uninstall`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from app.config.home import HOME_FILES

CACHE_NAMES = frozenset({"models", "manifests", "parts", "in_use", "kernels"})


@dataclass(frozen=True)
class RemovableItem:
    """A file or folder to remove; a folder with `only_if_empty` stays if other files are left in it."""

    path: Path
    size_bytes: int
    only_if_empty: bool = False


def items_in_home(folder: Path) -> list[RemovableItem]:
    """List what Shoal made in a home folder, the contents of a sub-folder before the sub-folder itself."""
    found: dict[Path, bool] = {}  # path -> whether the table has it as a folder that may hold other files
    for entry in HOME_FILES if folder.is_dir() else ():
        for path in (path for pattern in entry.patterns for path in folder.glob(pattern)):
            # A folder with the name of a file, or the reverse, was not made by Shoal.
            if path.is_dir() if entry.is_folder else path.is_symlink() or not path.is_dir():
                found[path] = entry.is_folder and not entry.is_whole
    return [
        RemovableItem(path, 0 if found[path] else sum(_sizes(path)), only_if_empty=found[path])
        for path in sorted(found, key=lambda path: (-len(path.parts), path))
    ]


def items_in_cache(folder: Path) -> list[RemovableItem]:
    """List what Shoal made in a cache folder; nothing if it contains anything else."""
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    ours = [path for path in entries if path.name in CACHE_NAMES or path.suffix in (".lock", ".tmp")]
    return [RemovableItem(path, sum(_sizes(path))) for path in ours] if len(ours) == len(entries) else []


def remove(item: RemovableItem) -> None:
    """Remove one item; of a symlink the link, not its target."""
    if item.path.is_symlink() or not item.path.is_dir():
        item.path.unlink(missing_ok=True)
    elif item.only_if_empty:
        remove_if_empty(item.path)
    else:
        shutil.rmtree(item.path)


def remove_if_empty(folder: Path) -> bool:
    """Remove a folder if it is empty; True if it is gone."""
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _sizes(path: Path) -> Iterator[int]:
    if path.is_symlink() or not path.is_dir():
        yield path.lstat().st_size
        return
    for below in path.rglob("*"):
        if below.is_symlink() or below.is_file():
            yield below.lstat().st_size

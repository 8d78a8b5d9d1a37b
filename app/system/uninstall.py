"""Removing Shoal from a machine: what there is of it, and taking away exactly that.

A home or cache folder may be one that holds other things too. In a home only what Shoal makes is removed, by name; a
cache, whose folders have names that others use too, only where it holds nothing else. A folder goes when it is empty.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_HOME_FILES = (
    "config.toml",
    "identity.key",
    "token",
    "swarms.json",
    "peers.json",
    "sequence",
    "pause.json",
    "statistics.db",
    "node.json",
    "node.lock",
)
# A file, what lies beside it while it is changed, and what is left when the machine goes down in the middle of that.
_BESIDE = ("{}", "{}.lock", ".{}.*.tmp")
HOME_PATTERNS = (
    *(pattern.format(name) for name in _HOME_FILES for pattern in _BESIDE),
    "config.toml.v*.bak",
    "swarms.lock",
    "statistics.db-wal",
    "statistics.db-shm",
    "statistics.db.damaged-*",
    "logs/node.log*",
    "logs",
    "shoal*.xml",  # the task of Windows' scheduler
)
CACHE_NAMES = frozenset({"models", "manifests", "parts", "in_use"})


@dataclass(frozen=True)
class RemovableItem:
    """One thing that would be removed."""

    path: Path
    size_bytes: int


def items_in_home(folder: Path) -> list[RemovableItem]:
    """What Shoal made in a home folder."""
    found = {path for pattern in HOME_PATTERNS for path in folder.glob(pattern)} if folder.is_dir() else set()
    # What is below a folder comes before it.
    return [_item(path) for path in sorted(found, key=lambda path: (-len(path.parts), path))]


def items_in_cache(folder: Path) -> list[RemovableItem]:
    """What Shoal made in a cache; nothing where somebody else keeps things there too."""
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    ours = [path for path in entries if path.name in CACHE_NAMES or path.suffix in (".lock", ".tmp")]
    return [_item(path) for path in ours] if len(ours) == len(entries) else []


def _item(path: Path) -> RemovableItem:
    own = path.name != "logs"  # its files are items of their own
    return RemovableItem(path, sum(_sizes(path)) if own else 0)


def remove(item: RemovableItem) -> None:
    """Take one thing away; a link is removed, and not what it points to."""
    if item.path.is_symlink() or not item.path.is_dir():
        item.path.unlink(missing_ok=True)
    elif item.path.name == "logs":
        remove_if_empty(item.path)
    else:
        shutil.rmtree(item.path)


def remove_if_empty(folder: Path) -> bool:
    """Take a folder away if nothing is left in it; whether it is gone."""
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

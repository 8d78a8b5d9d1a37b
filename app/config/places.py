"""Where Shoal keeps things: the home folder of one node, and the cache of weights that all home folders share."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def home_folder(option: str | os.PathLike[str] | None = None) -> Path:
    """The node's home: `--home` where given, else `SHOAL_HOME`, else the user's data folder."""
    return _absolute(option or os.environ.get("SHOAL_HOME") or platformdirs.user_data_path("shoal", appauthor=False))


def cache_folder() -> Path:
    """Where weights live: `SHOAL_CACHE`, else the user's cache folder."""
    return _absolute(os.environ.get("SHOAL_CACHE") or platformdirs.user_cache_path("shoal", appauthor=False))


def _absolute(path: str | os.PathLike[str]) -> Path:
    return Path(path).expanduser().absolute()

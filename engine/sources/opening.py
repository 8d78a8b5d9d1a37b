"""Opens a model by the name or path that the user gives; lists what the cache holds."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.errors import SourceError
from engine.sources import hub, starter, tiny
from engine.sources.base import ModelSource
from engine.sources.cache import models_dir
from engine.sources.files import shown
from engine.sources.gguf import open_gguf
from engine.sources.huggingface import open_folder

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)
BUILT_IN = (starter.NAME, tiny.NAME)


@dataclass(frozen=True)
class CachedModel:
    """A model in the cache folder."""

    name: str  # as `open_source` takes it
    path: Path
    size_bytes: int


def open_source(name: str | Path, cache_dir: Path, progress: Progress | None = None) -> ModelSource:
    """Open `starter`, `tiny-random`, a model folder, a GGUF file or a downloaded model; weights are not read yet.

    Only `starter` is downloaded if it is missing. Raises `SourceError` for an unknown or damaged model.
    """
    text = str(name)
    if text == starter.NAME:
        return starter.open_starter(cache_dir, progress)
    if text == tiny.NAME:
        return tiny.open_tiny(cache_dir)
    if "\0" in text:
        raise SourceError(f"{shown(text)} is not a path")
    path = Path(text).expanduser()
    if path.is_dir():
        return _open_dir(path)
    if path.is_file():
        return _open_file(path)
    if hub.is_hub_name(text):
        source = hub.open_hub(text, cache_dir)
        if source is None:
            raise SourceError(f"{text} is not on this machine: download it with `shoal pull {text}`")
        return source
    raise SourceError(f"unknown model {shown(text)}: {_suggestion(text)}")


def fetch_source(name: str, cache_dir: Path, progress: Progress | None = None) -> ModelSource:
    """Download a built-in model, or one of the hub, into the cache."""
    if name not in BUILT_IN and hub.is_hub_name(name):
        return hub.fetch_hub(name, cache_dir, progress)
    return open_source(name, cache_dir, progress)


def list_cached(cache_dir: Path) -> list[CachedModel]:
    """Models in the cache, sorted by name."""
    found = []
    places = {starter.NAME: starter.starter_file(cache_dir), tiny.NAME: models_dir(cache_dir) / tiny.NAME}
    places |= {name: hub.hub_folder(name, cache_dir) for name in hub.list_hub(cache_dir)}
    for name, path in places.items():
        try:
            files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
            found.append(CachedModel(name, path, sum(file.stat().st_size for file in files)))
        except OSError:  # not downloaded yet
            continue
    return sorted(found, key=lambda model: model.name)


def _open_dir(path: Path) -> ModelSource:
    if not (path / "config.json").exists():
        models = sorted(path.glob("*.gguf"))
        if len(models) == 1:
            return open_gguf(models[0])
        if models:
            names = ", ".join(model.name for model in models[:4])
            raise SourceError(f"{path} has {len(models)} GGUF files ({names}): name one of them")
    return open_folder(path)


def _open_file(path: Path) -> ModelSource:
    if path.suffix.lower() == ".safetensors" or path.name == "config.json":
        raise SourceError(f"{path} is one file of a model folder: give the folder {path.parent} instead")
    return open_gguf(path)


def _suggestion(text: str) -> str:
    close = difflib.get_close_matches(text.lower(), BUILT_IN, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]}?"
    parent = Path(text).expanduser().parent
    if parent.is_dir():
        near = difflib.get_close_matches(Path(text).name, [entry.name for entry in parent.iterdir()], n=1, cutoff=0.7)
        if near:
            found = parent / near[0]
            return f"did you mean the {'folder' if found.is_dir() else 'file'} {os.path.join('.', found)}?"
    files = "a folder with config.json and safetensors, a GGUF file"
    return f"give {', '.join(BUILT_IN)}, {files}, or ORG/NAME of the Hugging Face Hub"

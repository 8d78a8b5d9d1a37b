"""From what a person calls a model to the source of it."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.errors import SourceError
from engine.sources import starter, tiny
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

    name: str  # what `open_source` takes
    path: Path
    size_bytes: int


def open_source(name: str | Path, cache_dir: Path, progress: Progress | None = None) -> ModelSource:
    """Open `starter`, `tiny-random`, a model folder or a GGUF file; weights are not read yet."""
    text = str(name)
    if text == starter.NAME:
        return starter.open_starter(cache_dir, progress)
    if text == tiny.NAME:
        return tiny.open_tiny(cache_dir)
    if "\0" in text:
        raise SourceError(f"{shown(text)} is no path")
    path = Path(text).expanduser()
    if path.is_dir():
        return _open_dir(path)
    if path.is_file():
        return _open_file(path)
    raise SourceError(f"there is no model {shown(text)}: {_suggestion(text)}")


def list_cached(cache_dir: Path) -> list[CachedModel]:
    """The models that need no download, by name."""
    found = []
    places = {starter.NAME: starter.starter_file(cache_dir), tiny.NAME: models_dir(cache_dir) / tiny.NAME}
    for name, path in places.items():
        try:
            files = [path] if path.is_file() else list(path.iterdir())
            found.append(CachedModel(name, path, sum(file.stat().st_size for file in files)))
        except OSError:  # not fetched yet
            continue
    return sorted(found, key=lambda model: model.name)


def _open_dir(path: Path) -> ModelSource:
    if not (path / "config.json").exists():
        models = sorted(path.glob("*.gguf"))
        if len(models) == 1:
            return open_gguf(models[0])
        if models:
            names = ", ".join(model.name for model in models[:4])
            raise SourceError(f"{path} holds {len(models)} GGUF files ({names}): name one of them")
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
            return f"did you mean {parent / near[0]}?"
    return f"give {', '.join(BUILT_IN)}, a folder with config.json and safetensors, or a GGUF file"

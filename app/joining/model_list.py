"""The models that a swarm could be created of: built in, downloaded, in the folders where programs keep models, or on
the Hugging Face Hub; and what one of them needs of this machine.

Listing reads only names and sizes; `preview_model` opens one model's header. `app.joining.create` makes the swarm.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from app.core.errors import UsageError
from app.joining.offers import Machine, shape_words
from app.snapshot.views import ModelView, OfferView
from engine.sources import hub, starter, tiny
from engine.sources.base import ModelSource
from engine.sources.opening import list_cached, open_source
from engine.stored_form import source_form, starter_form

_USUAL_FOLDERS = ("~/models", "~/Models", "~/.lmstudio/models", "~/.cache/lm-studio/models", "~/.cache/huggingface/hub")
_TINY_TITLE = f"{tiny.NAME} (for trying Shoal offline: its replies are nonsense)"
_DEPTH = 5  # of folders below those
_MAX_MODELS = 200
_MAX_ENTRIES = 20_000


def list_models(cache: Path, folder: str | None = None) -> list[ModelView]:
    """Return the models on this machine, the built-in ones first; with `folder`, those below it alone.

    Raises `UsageError` if the folder cannot be read.
    """
    if folder is not None:
        top = Path(folder).expanduser()
        if not top.is_dir():
            raise UsageError(f"{folder[:200]} is not a folder on the node's machine")
        return list(_below([top]))
    known = [ModelView(starter.NAME, starter.LABEL, starter.FILE_BYTES, "GGUF", starter.starter_file(cache).exists())]
    known.append(ModelView(tiny.NAME, _TINY_TITLE, None, "", True))
    for cached in list_cached(cache):
        if cached.name not in (starter.NAME, tiny.NAME):
            known.append(ModelView(cached.name, cached.name, cached.size_bytes, _format(cached.path), True))
    seen = {model.name for model in known}
    found = _below([Path(text).expanduser() for text in _USUAL_FOLDERS])
    return [*known, *(model for model in found if model.name not in seen)]


def search_models(words: str) -> list[ModelView]:
    """Return the models of the hub that match some words, the most downloaded first; raises `SourceError`."""
    return [ModelView(name, name, None, "", False) for name in hub.search_hub(words)]


def preview_model(machine: Machine, cache: Path, model: str) -> OfferView:
    """Return what is known of a model before its swarm is created; raises `SourceError` if it cannot be used.

    The starter model is not downloaded for that.
    """
    if model == starter.NAME and not starter.starter_file(cache).exists():
        fit = machine.keeping(starter_form()).fit(starter.SHAPE)
        size, context = starter.FILE_BYTES, starter.SHAPE.context_length
        return OfferView(model, starter.LABEL, fit, starter.WHEEL_BYTES, size_bytes=size, context_length=context)
    source = open_source(model, cache)
    machine = machine.keeping(source_form(source))
    return OfferView(
        model,
        source.label or shape_words(source.config),
        machine.fit(source.config),
        0,
        alone_tokens_per_s=machine.alone_tokens_per_s(source.config),
        size_bytes=_size_of(source),
        context_length=source.config.context_length,
    )


def _size_of(source: ModelSource) -> int:
    return sum(entry.length for entries in source.parts.values() for entry in entries)


def _below(tops: list[Path]) -> Iterator[ModelView]:
    """Yield the models below some folders, within bounds on depth and number."""
    entries, models = 0, 0
    for top in tops:
        for place, folders, files in os.walk(top):
            entries += len(files) + len(folders)
            path = Path(place)
            if entries > _MAX_ENTRIES:
                return
            if len(path.relative_to(top).parts) >= _DEPTH:
                folders.clear()
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for found in _models_in(path, files):
                if models == _MAX_MODELS:
                    return
                models += 1
                yield found


def _models_in(folder: Path, files: list[str]) -> Iterator[ModelView]:
    """Yield the GGUF files of one folder, and the folder itself if it is a model."""
    for name in sorted(files):
        if name.endswith(".gguf"):
            yield ModelView(str(folder / name), name.removesuffix(".gguf"), _bytes_of(folder / name), "GGUF", True)
    weights = [name for name in files if name.endswith(".safetensors")]
    if weights and "config.json" in files:
        size = sum(_bytes_of(folder / name) or 0 for name in weights)
        yield ModelView(str(folder), _folder_name(folder), size, "safetensors", True)


def _folder_name(folder: Path) -> str:
    """A folder's name; for a snapshot in the Hub's own cache, the name of its model."""
    parts = folder.parts
    models = [part for part in parts if part.startswith("models--")]
    return models[-1].removeprefix("models--").replace("--", "/") if models else folder.name


def _bytes_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:  # a broken link, or gone meanwhile
        return None


def _format(path: Path) -> str:
    is_gguf = path.suffix == ".gguf" or (path.is_dir() and any(path.glob("*.gguf")))
    return "GGUF" if is_gguf else "safetensors"

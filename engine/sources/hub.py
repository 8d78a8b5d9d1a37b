"""Downloads models of the Hugging Face Hub: `org/name`, or `org/name/FILE.gguf` if a repository has several.

`huggingface_hub` does the transfer: it resumes, takes the token from its usual place, and uses the server in
`HF_ENDPOINT`. The result is an ordinary model folder; `shoal-hub.json` is written into it last and markers it as
complete.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.errors import SourceError
from engine.sources.base import ModelSource
from engine.sources.cache import disk_full, free_bytes, models_dir, unwritable, write_whole
from engine.sources.gguf import open_gguf
from engine.sources.huggingface import open_folder

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)

_NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}(/[\w./-]{1,200}\.gguf)?", re.ASCII)
_MARKER = "shoal-hub.json"
_WANTED = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map)\.json"
    r"|chat_template\.(json|jinja)|[\w.-]+\.safetensors(\.index\.json)?|LICEN[SC]E[\w.]*",
    re.ASCII,
)
_NUMBER = re.compile(r"\[(Errno|WinError) -?\d+\] ?")
_POLL_S = 0.2


@dataclass(frozen=True)
class HubFiles:
    """The files to download from one repository, at one revision."""

    repository: str
    revision: str
    names: tuple[str, ...]
    size_bytes: int
    licence: str | None


def is_hub_name(text: str) -> bool:
    """True if a text has the form of a model's name on the hub."""
    return _NAME.fullmatch(text) is not None and ".." not in text


def hub_folder(name: str, cache_dir: Path) -> Path:
    """Folder of a model of the hub in the cache."""
    return models_dir(cache_dir) / "hub" / "--".join(name.split("/"))


def open_hub(name: str, cache_dir: Path) -> ModelSource | None:
    """Open a completely downloaded model; None if there is none."""
    folder = hub_folder(name, cache_dir)
    try:
        marker = json.loads((folder / _MARKER).read_text("utf-8")[:65536])
        files, licence = [str(file) for file in marker["files"]], marker["licence"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    models = [file for file in files if file.endswith(".gguf")]
    source = open_gguf(folder / models[0]) if models else open_folder(folder)
    return replace(source, label=name, licence=source.licence or licence)


def list_hub(cache_dir: Path) -> list[str]:
    """Names of the completely downloaded models."""
    markers = sorted((models_dir(cache_dir) / "hub").glob(f"*/{_MARKER}"))
    return [marker.parent.name.replace("--", "/") for marker in markers]


def fetch_hub(name: str, cache_dir: Path, progress: Progress | None = None) -> ModelSource:
    """Download a model of the hub into the cache, resuming an interrupted download.

    Raises `SourceError` if the model is not found, needs a login, or the network or the disk fails.
    """
    report = progress or (lambda done, total: None)
    folder = hub_folder(name, cache_dir)
    with _translated_errors(name, folder):
        files = _choose(name)
        if free_bytes(_existing(folder)) < files.size_bytes - _bytes_under(folder):
            raise disk_full(folder)
        with _reporting(folder, lambda done: report(min(done, files.size_bytes), files.size_bytes)):
            _download(files, folder)
        marker = {"files": files.names, "licence": files.licence, "revision": files.revision}
        write_whole(folder / _MARKER, json.dumps(marker).encode())
    report(files.size_bytes, files.size_bytes)
    source = open_hub(name, cache_dir)
    assert source is not None, "it was downloaded just now"
    return source


def search_hub(words: str, most: int = 20) -> list[str]:
    """Names of text models on the hub that match some words, the most downloaded first; raises `SourceError`."""
    from huggingface_hub import HfApi

    try:
        found = HfApi().list_models(search=words, filter="text-generation", sort="downloads", limit=most)
        return [model.id for model in found if is_hub_name(model.id)]
    except Exception as error:
        if not (isinstance(error, OSError) or _is_of_hub(error)):
            raise
        raise SourceError(
            f"the Hugging Face Hub could not be searched ({_first_line(error)}): check the network, then try again"
        ) from error


def _choose(name: str) -> HubFiles:
    """Ask the hub which files the repository has and select those of the model."""
    from huggingface_hub import HfApi

    owner, _, rest = name.partition("/")
    model, _, wanted = rest.partition("/")
    repository = f"{owner}/{model}"
    info = HfApi().model_info(repository, files_metadata=True)
    sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or ()}
    names = _names(name, wanted, sorted(sizes))
    card: Any = getattr(info, "card_data", None)
    licence = getattr(card, "license", None)
    shown = "".join(c for c in str(licence) if c.isprintable())[:200] if licence else None
    return HubFiles(repository, str(info.sha), names, sum(sizes[file] for file in names), shown)


def _names(name: str, wanted: str, there: list[str]) -> tuple[str, ...]:
    """Select the files of a repository that make up the model."""
    models = [file for file in there if file.endswith(".gguf")]
    if wanted:
        if wanted not in models:
            raise SourceError(f"{name}: no such file; the repository has {', '.join(models[:8]) or 'no GGUF files'}")
        return (wanted,)
    names = tuple(file for file in there if _WANTED.fullmatch(file))
    if any(file.endswith(".safetensors") for file in names):
        return names
    if len(models) == 1:
        return (models[0],)
    if models:
        raise SourceError(f"{name} has {len(models)} GGUF files: name one, for example {name}/{models[0]}")
    raise SourceError(f"{name} has neither safetensors nor GGUF files: choose another model")


def _download(files: HubFiles, folder: Path) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    snapshot_download(
        files.repository,
        revision=files.revision,
        allow_patterns=list(files.names),
        local_dir=folder,
        max_workers=4,
    )


@contextmanager
def _reporting(folder: Path, report: Callable[[int], None]) -> Iterator[None]:
    """Report every `_POLL_S` seconds how many bytes have arrived."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_POLL_S):
            report(_bytes_under(folder))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


@contextmanager
def _translated_errors(name: str, folder: Path) -> Iterator[None]:
    """Translate errors of `huggingface_hub`, the network and the disk into `SourceError`s that name the fix."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        yield
    except GatedRepoError as error:
        raise SourceError(
            f"{name} requires accepting its terms: accept them on its page on the hub, then log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise SourceError(f"{name} is not on the hub, or it is private: check the name, or log in") from error
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise SourceError(
            f"{name} could not be downloaded ({_first_line(error)}): try again, the download resumes"
        ) from error
    except OSError as error:
        if getattr(error, "errno", None) is None:  # an error of the network, not of the disk
            raise SourceError(f"{name} could not be downloaded ({_first_line(error)}): check the network") from error
        raise unwritable(folder, error) from error
    except Exception as error:
        if not _is_of_hub(error):
            raise
        cure = "check the network and try again, the download resumes"
        raise SourceError(f"{name} could not be downloaded ({_first_line(error)}): {cure}") from error


def _is_of_hub(error: Exception) -> bool:
    """True if `huggingface_hub` or the HTTP library below it has raised an error."""
    return type(error).__module__.partition(".")[0].rstrip("0123456789") in ("httpx", "huggingface_hub")


def _first_line(error: Exception) -> str:
    """The first line of an error without the number that the system gives it."""
    text = _NUMBER.sub("", str(error)).strip().splitlines() or [type(error).__name__]
    return "".join(c for c in text[0] if c.isprintable())[:160]


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder


def _bytes_under(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except OSError:  # renamed in the meantime
            continue
    return total

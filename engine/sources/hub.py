"""Models of the Hugging Face Hub: `org/name`, or `org/name/FILE.gguf` where a repository holds several.

The files are fetched by `huggingface_hub`, which resumes what broke off, takes the token from its usual place, and asks
the server that `HF_ENDPOINT` names. What was fetched is a model folder like any other; `shoal-hub.json` is written into
it last and says that it is whole.
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
_MARK = "shoal-hub.json"
_WANTED = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map)\.json"
    r"|chat_template\.(json|jinja)|[\w.-]+\.safetensors(\.index\.json)?|LICEN[SC]E[\w.]*",
    re.ASCII,
)
_POLL_S = 0.2


@dataclass(frozen=True)
class HubFiles:
    """What is to be fetched of one repository, at one revision."""

    repository: str
    revision: str
    names: tuple[str, ...]
    size_bytes: int
    licence: str | None


def is_hub_name(text: str) -> bool:
    """Whether a text has the form of a model's name on the hub."""
    return _NAME.fullmatch(text) is not None and ".." not in text


def hub_folder(name: str, cache_dir: Path) -> Path:
    """Where a model of the hub lies once it is fetched."""
    return models_dir(cache_dir) / "hub" / "--".join(name.split("/"))


def open_hub(name: str, cache_dir: Path) -> ModelSource | None:
    """A model that was fetched whole, or None."""
    folder = hub_folder(name, cache_dir)
    try:
        told = json.loads((folder / _MARK).read_text("utf-8")[:65536])
        files, licence = [str(file) for file in told["files"]], told["licence"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    models = [file for file in files if file.endswith(".gguf")]
    source = open_gguf(folder / models[0]) if models else open_folder(folder)
    return replace(source, label=name, licence=source.licence or licence)


def list_hub(cache_dir: Path) -> list[str]:
    """The names of the models that were fetched whole."""
    marks = sorted((models_dir(cache_dir) / "hub").glob(f"*/{_MARK}"))
    return [mark.parent.name.replace("--", "/") for mark in marks]


def fetch_hub(name: str, cache_dir: Path, progress: Progress | None = None) -> ModelSource:
    """Have a model of the hub in the cache; what broke off earlier goes on where it was."""
    report = progress or (lambda done, total: None)
    folder = hub_folder(name, cache_dir)
    with _plain_errors(name, folder):
        files = _choose(name)
        if free_bytes(_existing(folder)) < files.size_bytes - _bytes_under(folder):
            raise disk_full(folder)
        with _watching(folder, lambda done: report(min(done, files.size_bytes), files.size_bytes)):
            _download(files, folder)
        told = {"files": files.names, "licence": files.licence, "revision": files.revision}
        write_whole(folder / _MARK, json.dumps(told).encode())
    report(files.size_bytes, files.size_bytes)
    source = open_hub(name, cache_dir)
    assert source is not None, "what was just fetched is there"
    return source


def _choose(name: str) -> HubFiles:
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
    """Which of a repository's files make the model."""
    models = [file for file in there if file.endswith(".gguf")]
    if wanted:
        if wanted not in models:
            raise SourceError(f"{name}: there is no such file; the repository has {', '.join(models[:8]) or 'no GGUF'}")
        return (wanted,)
    names = tuple(file for file in there if _WANTED.fullmatch(file))
    if any(file.endswith(".safetensors") for file in names):
        return names
    if len(models) == 1:
        return (models[0],)
    if models:
        raise SourceError(f"{name} holds {len(models)} GGUF files: name one, like {name}/{models[0]}")
    raise SourceError(f"{name} holds neither safetensors nor GGUF files, which are what Shoal reads: choose another")


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
def _watching(folder: Path, report: Callable[[int], None]) -> Iterator[None]:
    """Report how many bytes have arrived, while they do."""
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
def _plain_errors(name: str, folder: Path) -> Iterator[None]:
    """What can go wrong with a hub, in words and with a mend."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        yield
    except GatedRepoError as error:
        raise SourceError(
            f"{name} is given only to those who accepted its terms: accept them on its page, "
            "then log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise SourceError(f"the hub knows no model {name}, or it is private: check the name, or log in") from error
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise SourceError(
            f"{name} could not be fetched ({_first_line(error)}): try again, it goes on where it was"
        ) from error
    except OSError as error:
        if getattr(error, "errno", None) is None:  # of the network, not of the disk
            raise SourceError(f"{name} could not be fetched ({_first_line(error)}): is there a network?") from error
        raise unwritable(folder, error) from error
    except Exception as error:
        if type(error).__module__.partition(".")[0].rstrip("0123456789") not in ("httpx", "huggingface_hub"):
            raise
        raise SourceError(
            f"{name} could not be fetched ({_first_line(error)}): try again, it goes on where it was"
        ) from error


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines() or [type(error).__name__]
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
        except OSError:  # renamed meanwhile
            continue
    return total

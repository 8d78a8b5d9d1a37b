"""Finished adapters of a home folder: `adapters/NAME/` with the two files of PEFT's format."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from app.config.home import Home
from app.core.errors import AppError, NoAdapter
from app.training.record import checked_name
from engine.config import ModelConfig
from engine.errors import EngineError
from engine.sources.files import read_json_object
from engine.sources.safetensors import read_metadata
from engine.training.peft_format import CONFIG_FILE, MODEL_KEY, WEIGHTS_FILE, Adapter, read_peft
from p2p.platform import private_directory, write_private

FILES = (CONFIG_FILE, WEIGHTS_FILE)


@dataclass(frozen=True)
class AdapterFacts:
    """An adapter as `shoal adapters` lists it; `error` says what is wrong with a damaged one."""

    name: str
    path: str
    size_bytes: int = 0
    rank: int | None = None
    targets: tuple[str, ...] = ()
    base: str | None = None  # the model's name
    model: str | None = None  # hash of the model
    error: str | None = None


class AdapterStore:
    """The adapters in a home folder."""

    def __init__(self, home: Home) -> None:
        self._folder = home.adapters_folder

    def folder(self, name: str) -> Path:
        """Folder of an adapter, which need not exist; raises `AppError` for a name that cannot be one."""
        return self._folder / checked_name(name)

    def names(self) -> list[str]:
        """Names of all adapters, sorted."""
        return sorted(path.parent.name for path in self._folder.glob(f"*/{CONFIG_FILE}"))

    def require_free(self, name: str) -> None:
        """Raise `AppError` if there is an adapter of this name."""
        if self.folder(name).exists():
            raise AppError(
                f"there is an adapter named {name} already: choose another name, or remove it with "
                f"`shoal adapters remove {name}`"
            )

    def require(self, name: str) -> Path:
        """Return the folder of an adapter; raises `NoAdapter` if there is none of this name."""
        try:
            folder = self.folder(name)
        except AppError as error:
            raise NoAdapter(str(error)) from None
        if not (folder / CONFIG_FILE).is_file():
            known = ", ".join(self.names()[:8])
            raise NoAdapter(f"no adapter is named {name}: {f'there are {known}' if known else 'there are none yet'}")
        return folder

    def facts(self, name: str) -> AdapterFacts:
        """Describe an adapter without reading its weights."""
        folder = self.folder(name)
        try:
            config = read_json_object(folder / CONFIG_FILE)
            size = sum((folder / file).stat().st_size for file in FILES)
            model = read_metadata(folder / WEIGHTS_FILE).get(MODEL_KEY)
        except (EngineError, OSError) as error:
            return AdapterFacts(name, str(folder), error=str(error))
        targets = config.get("target_modules")
        roles = tuple(str(each).removesuffix("_proj") for each in targets) if isinstance(targets, list) else ()
        base, rank = config.get("base_model_name_or_path"), config.get("r")
        return AdapterFacts(
            name,
            str(folder),
            size,
            rank if isinstance(rank, int) else None,
            roles,
            base if isinstance(base, str) else None,
            model,
        )

    def fitting(self, model: str) -> list[str]:
        """Names of the adapters that were trained for the model of this hash."""
        return [name for name in self.names() if self.facts(name).model == model]

    def load(self, name: str, config: ModelConfig, model: str) -> Adapter:
        """Read an adapter for the model of this hash; raises `EngineError` if it was trained for another one."""
        return read_peft(self.require(name), config, model)

    def save(self, name: str, files: Mapping[str, bytes]) -> Path:
        """Write a new adapter's files; nothing is left behind if the disk refuses.

        One that is the same was written already: by this job, whose process ended before it could note that.
        """
        folder = self.folder(name)
        if not _is_same(folder, files):
            self.require_free(name)
            _write(folder, files)
        return folder

    def export(self, name: str, target: Path) -> None:
        """Copy an adapter into a folder, which must be missing or empty."""
        source = self.require(name)
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise AppError(f"{target} exists and is not an empty folder: give the name of a new one")
        _write(target, {file: (source / file).read_bytes() for file in FILES})

    def remove(self, name: str) -> None:
        """Remove an adapter."""
        shutil.rmtree(self.require(name))


def _is_same(folder: Path, files: Mapping[str, bytes]) -> bool:
    """True if a folder has these files."""
    try:
        return all((folder / name).read_bytes() == data for name, data in files.items())
    except OSError:
        return False


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Make a folder with these files, or none at all."""
    private_directory(folder.parent)
    scratch = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        private_directory(scratch)
        for name, data in files.items():
            write_private(scratch / name, data)
        if folder.is_dir():
            folder.rmdir()  # it is empty
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)

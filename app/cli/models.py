"""`shoal models` and `shoal pull`: lists, verifies and downloads the models on this machine."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from app.cli.command import Command, print_json
from app.cli.progress import ProgressBar
from app.core.errors import UsageError
from app.core.terminal_text import without_controls
from app.core.units import format_size

if TYPE_CHECKING:
    from app.weights.verify import VerifiedPart
    from engine.sources.base import ModelSource


PULLED = (
    "starter (93 MB, a small chat model), tiny-random (for tests, no download), or ORG/NAME of the Hugging Face Hub "
    "(ORG/NAME/FILE.gguf if it holds several)"
)


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """A model on this machine as `--json` shows it; `error` says what is wrong with a damaged one."""

    name: str
    path: str
    size_bytes: int
    licence: str | None = None
    blocks: int | None = None
    error: str | None = None
    gone: bool = False  # the files that it was imported from are not where they were
    parts_held: int | None = None  # of a model that was downloaded from peers
    parts_total: int | None = None


def add_pull_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model to download."""
    parser.add_argument("model", metavar="MODEL", help=PULLED)


def add_models_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action verify."""
    parser.add_argument("action", nargs="?", choices=("verify",), help="read every model completely, and report damage")


def run_models(arguments: argparse.Namespace) -> int:
    """List the models on this machine, or verify them."""
    if arguments.action == "verify":
        return _verify(arguments)
    facts = [*(model for model, _ in cached_models()), *models_of_swarms()]
    if arguments.json:
        print_json([dataclasses.asdict(model) for model in facts])
        return 0
    for model in facts:
        print(describe(model))
    if not facts:
        print("No model is cached. `shoal pull starter` downloads a small chat model (93 MB).")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    found = verified_models()
    if arguments.json:
        print_json([dataclasses.asdict(model) for model in found])
    else:
        for model in found:
            print(describe(model) if model.error is None else f"{model.name}: {model.error}")
        if not found:
            print("No model is on this machine, so there is nothing to verify.")
    wrong = [model for model in found if model.error is not None]
    for what, names in (
        ("damaged", [model.name for model in wrong if not model.gone]),
        ("gone", [model.name for model in wrong if model.gone]),
    ):
        if names:
            print(f"shoal: {what}: {', '.join(names)}", file=sys.stderr)
    return 1 if wrong else 0


def verified_models() -> list[ModelFacts]:
    """Read all bytes of every model, and return the models; a damaged one has its `error` set."""
    from app.config.home import cache_folder
    from app.weights.verify import bytes_to_read, verify
    from engine.errors import EngineError
    from engine.sources.starter import NAME as STARTER
    from engine.sources.starter import verify_starter

    cache = cache_folder()
    found: list[ModelFacts] = []
    for model, _ in cached_models():
        try:
            if model.name == STARTER and model.error is None:
                verify_starter(cache)
            found.append(model)
        except EngineError as error:
            found.append(dataclasses.replace(model, error=str(error)))
    total, done = bytes_to_read(cache), 0
    with progress_on_stderr("reading") as progress:

        def on_bytes(count: int) -> None:
            nonlocal done
            done += count
            progress(done, total)

        found += [_from_manifest(model, str(cache / "parts")) for model in verify(cache, on_bytes)]
    return found


def models_of_swarms() -> list[ModelFacts]:
    """Return the models whose parts were downloaded from peers, and those whose own files are gone."""
    from app.config.home import cache_folder
    from app.weights.verify import models_by_manifest

    cache = cache_folder()
    found = [model for model in models_by_manifest(cache) if model.source is None or model.gone]
    return [_from_manifest(model, str(cache / "parts")) for model in found]


def _from_manifest(model: VerifiedPart, folder: str) -> ModelFacts:
    wrong = f"{', '.join(model.wrong[:4])}{', …' if len(model.wrong) > 4 else ''}"
    fix = "a node downloads them again" if model.source is None else f"check {model.source}, or pull it again"
    error = f"{len(model.wrong)} of {model.parts_total} parts are damaged ({wrong}): {fix}" if wrong else None
    if model.gone:
        error = f"{model.gone} is gone: put it back, or a node downloads its parts from members that have them"
    return ModelFacts(
        name=model.manifest[:8],
        path=model.source or folder,
        size_bytes=model.bytes_held,
        licence=model.licence,
        blocks=model.blocks,
        error=error,
        gone=bool(model.gone),
        parts_held=model.parts_held,
        parts_total=model.parts_total,
    )


def run_pull(arguments: argparse.Namespace) -> int:
    """Download a model into the cache unless it is there; raises `UsageError` for a path on this machine."""
    from app.config.home import cache_folder
    from engine.sources.opening import BUILT_IN, fetch_source

    name: str = arguments.model
    if name not in BUILT_IN and Path(name).expanduser().exists():
        raise UsageError(f"{name} is on this machine already: use it with --model {name}")
    with progress_on_stderr(name) as progress:
        fetch_source(name, cache_folder(), progress)
    pulled = next(model for model, _ in cached_models() if model.name == name)
    if arguments.json:
        print_json(dataclasses.asdict(pulled))
    else:
        print(describe(pulled))
    return 0


def cached_models() -> list[tuple[ModelFacts, ModelSource | None]]:
    """Return the models in the cache, each with its opened source, or None if it is damaged."""
    from app.config.home import cache_folder
    from engine.errors import EngineError
    from engine.sources.opening import list_cached, open_source
    from engine.sources.starter import NAME as STARTER

    cache = cache_folder()
    found: list[tuple[ModelFacts, ModelSource | None]] = []
    for cached in list_cached(cache):
        facts = ModelFacts(cached.name, str(cached.path), cached.size_bytes)
        try:
            # By its path, because opening the starter by name would download a damaged one again.
            source = open_source(cached.path if cached.name == STARTER else cached.name, cache)
        except EngineError as error:
            found.append((dataclasses.replace(facts, error=str(error)), None))
            continue
        licence, blocks = source.licence, source.config.n_blocks
        found.append((dataclasses.replace(facts, licence=licence, blocks=blocks), source))
    return found


def describe(model: ModelFacts) -> str:
    """Return a model as one line."""
    if model.error is not None:
        return f"{model.name}: {'' if model.gone else 'damaged: '}{model.error}"
    licence = without_controls(model.licence or "licence unknown")
    parts = "" if model.parts_total is None else f"{model.parts_held} of {model.parts_total} parts, "
    return f"{model.name}: {model.blocks} blocks, {parts}{format_size(model.size_bytes)}, {licence}, {model.path}"


@contextlib.contextmanager
def progress_on_stderr(label: str) -> Iterator[ProgressBar]:
    """Make a progress bar on stderr; its line is ended even after an error, which then starts on a new line."""
    progress = ProgressBar(label, sys.stderr)
    try:
        yield progress
    finally:
        progress.finish()


COMMANDS = (
    Command("models", "list or verify the models on this machine", run_models, add_models_arguments, prints_facts=True),
    Command("pull", "download a model", run_pull, add_pull_arguments, prints_facts=True),
)

"""`shoal models` and `shoal pull`: which models are on this machine, and how to get one."""

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
from app.cli.terminal import harmless
from app.errors import UsageError
from app.units import format_size

if TYPE_CHECKING:
    from engine.sources.base import ModelSource


PULLED = (
    "starter (98 MB, talks), tiny-random (for tests, no download), or ORG/NAME of the Hugging Face Hub "
    "(ORG/NAME/FILE.gguf where it holds several)"
)


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """What is said about a cached model; a damaged one has an `error` instead of a shape."""

    name: str
    path: str
    size_bytes: int
    licence: str | None = None
    blocks: int | None = None
    error: str | None = None


def add_pull_arguments(parser: argparse.ArgumentParser) -> None:
    """The model to fetch."""
    parser.add_argument("model", metavar="MODEL", help=PULLED)


def run_models(arguments: argparse.Namespace) -> int:
    """List the cached models."""
    facts = [model for model, _ in cached_models()]
    if arguments.json:
        print_json([dataclasses.asdict(model) for model in facts])
        return 0
    for model in facts:
        print(describe(model))
    if not facts:
        print("No model is cached. `shoal pull starter` fetches a small one that talks (98 MB).")
    return 0


def run_pull(arguments: argparse.Namespace) -> int:
    """Fetch a model into the cache, unless it is there."""
    from app.places import cache_folder
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
    """The models in the cache, with the opened source of each that is whole."""
    from app.places import cache_folder
    from engine.errors import EngineError
    from engine.sources.opening import list_cached, open_source
    from engine.sources.starter import NAME as STARTER

    cache = cache_folder()
    found: list[tuple[ModelFacts, ModelSource | None]] = []
    for cached in list_cached(cache):
        facts = ModelFacts(cached.name, str(cached.path), cached.size_bytes)
        try:
            # By its path, because opening the starter by name would fetch a damaged one again, unasked.
            source = open_source(cached.path if cached.name == STARTER else cached.name, cache)
        except EngineError as error:
            found.append((dataclasses.replace(facts, error=str(error)), None))
            continue
        licence, blocks = source.licence, source.config.n_blocks
        found.append((dataclasses.replace(facts, licence=licence, blocks=blocks), source))
    return found


def describe(model: ModelFacts) -> str:
    """A model in one line."""
    if model.error is not None:
        return f"{model.name}: damaged: {model.error}"
    licence = harmless(model.licence or "licence unknown")
    return f"{model.name}: {model.blocks} blocks, {format_size(model.size_bytes)}, {licence}, {model.path}"


@contextlib.contextmanager
def progress_on_stderr(label: str) -> Iterator[ProgressBar]:
    """A progress bar whose line is ended whatever happens, so that an error starts on a line of its own."""
    progress = ProgressBar(label, sys.stderr)
    try:
        yield progress
    finally:
        progress.finish()


COMMANDS = (
    Command("models", "list the models on this machine", run_models, prints_facts=True),
    Command("pull", "fetch a model", run_pull, add_pull_arguments, prints_facts=True),
)

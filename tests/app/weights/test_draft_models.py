"""Which model on this machine guesses for a swarm's model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from app.core.errors import UsageError
from app.weights.draft_models import AUTO, find_draft, tokenizer_hash, weight_count
from engine.errors import EngineError
from engine.sources.base import ModelSource
from engine.sources.hub import _MARKER, hub_folder
from engine.sources.opening import open_source


@pytest.fixture
def target(tmp_path: Path) -> ModelSource:
    return open_source("tiny-random", tmp_path)


def pulled(cache: Path, name: str, blocks: int, tokenizer: str = "") -> None:
    """A model in the cache with the first blocks of the tiny one; `tokenizer` is added to its vocabulary."""
    folder = hub_folder(name, cache)
    folder.mkdir(parents=True)
    tiny = cache / "models" / "tiny-random"
    for file in tiny.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": blocks}))
    if tokenizer:
        spec = json.loads((folder / "tokenizer.json").read_text())
        spec["model"]["vocab"][tokenizer] = 260
        (folder / "tokenizer.json").write_text(json.dumps(spec))
    files = [file.name for file in folder.iterdir()]
    (folder / _MARKER).write_text(json.dumps({"files": files, "licence": "MIT"}))


def larger(source: ModelSource, blocks: int) -> ModelSource:
    return replace(source, config=replace(source.config, n_blocks=blocks))


def test_the_model_itself_is_no_draft_of_itself(tmp_path: Path, target: ModelSource) -> None:
    assert find_draft(tmp_path, target, AUTO) is None


def test_a_much_smaller_model_with_the_same_tokenizer_is_found(tmp_path: Path, target: ModelSource) -> None:
    found = find_draft(tmp_path, larger(target, 32), AUTO)
    assert found is not None
    assert found.label == "tiny-random"


def test_of_several_the_smallest_with_the_same_tokenizer_is_taken(tmp_path: Path, target: ModelSource) -> None:
    pulled(tmp_path, "org/two", 2)
    pulled(tmp_path, "org/one-other", 1, tokenizer="zz")
    found = find_draft(tmp_path, larger(target, 32), AUTO)
    assert found is not None
    assert found.label == "org/two"


def test_a_damaged_model_is_passed_over(tmp_path: Path, target: ModelSource) -> None:
    pulled(tmp_path, "org/one", 1)
    (hub_folder("org/one", tmp_path) / "config.json").write_text("{")
    pulled(tmp_path, "org/odd", 1)
    (hub_folder("org/odd", tmp_path) / "tokenizer.json").write_text("[")
    found = find_draft(tmp_path, larger(target, 32), AUTO)
    assert found is not None
    assert found.label == "tiny-random"


def test_a_named_model_may_be_of_any_size(tmp_path: Path, target: ModelSource) -> None:
    found = find_draft(tmp_path, target, "tiny-random")
    assert found is not None
    assert weight_count(found.config) == weight_count(target.config)


def test_a_named_model_with_another_tokenizer_is_refused_by_name(tmp_path: Path, target: ModelSource) -> None:
    pulled(tmp_path, "org/other", 1, tokenizer="zz")
    with pytest.raises(UsageError, match=r"org/other cannot guess .* another tokenizer"):
        find_draft(tmp_path, target, "org/other")


def test_a_named_model_that_is_not_here_is_refused(tmp_path: Path, target: ModelSource) -> None:
    with pytest.raises(EngineError, match="org/none"):
        find_draft(tmp_path, target, "org/none")


def test_the_order_and_spacing_of_a_tokenizer_file_do_not_matter(tmp_path: Path, target: ModelSource) -> None:
    spec = json.loads(target.tokenizer.tokenizer_json)
    shuffled = json.dumps(dict(reversed(spec.items())), indent=3)
    same = replace(target, tokenizer=replace(target.tokenizer, tokenizer_json=shuffled))
    assert tokenizer_hash(same) == tokenizer_hash(target)

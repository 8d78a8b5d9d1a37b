"""One model in files of any number, names and order is one manifest; a changed byte is another."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.manifest.importing import hash_source
from engine.sources.huggingface import open_folder
from engine.sources.opening import open_source


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in one file."""
    cache = tmp_path_factory.mktemp("cache")
    source = open_source("tiny-random", cache)
    return next(iter(source.parts.values()))[0].file.parent


def in_files(folder: Path, target: Path, names: Sequence[str], *, backwards: bool) -> Path:
    """The same model in several files, its tensors dealt out in turn."""
    target.mkdir()
    for file in folder.iterdir():
        if not file.name.startswith("model.safetensors"):
            shutil.copy(file, target)
    tensors = load_file(folder / "model.safetensors")
    control_frame = sorted(tensors, reverse=backwards)
    where = {tensor: names[number % len(names)] for number, tensor in enumerate(control_frame)}
    for name in names:
        save_file({tensor: tensors[tensor] for tensor in control_frame if where[tensor] == name}, target / name)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return target


def manifest_hash(folder: Path) -> str:
    return hash_source(open_folder(folder)).manifest.hash


def test_the_hash_is_the_same_in_any_order_of_files(folder: Path, tmp_path: Path) -> None:
    one = manifest_hash(folder)
    forth = in_files(folder, tmp_path / "forth", ["a.safetensors", "b.safetensors"], backwards=False)
    back = in_files(folder, tmp_path / "back", ["z.safetensors", "m.safetensors", "a.safetensors"], backwards=True)
    assert manifest_hash(forth) == manifest_hash(back) == one


def test_a_changed_byte_in_any_file_changes_the_hash(folder: Path, tmp_path: Path) -> None:
    hashes = {manifest_hash(folder)}
    names = ["a.safetensors", "b.safetensors"]
    for number, name in enumerate(names, 1):
        changed = in_files(folder, tmp_path / name, names, backwards=False)
        tensors = load_file(changed / name)
        first = next(iter(sorted(tensors)))
        tensors[first].view(torch.uint8).view(-1)[0] ^= 1
        save_file(tensors, changed / name)
        hashes.add(manifest_hash(changed))
        assert len(hashes) == number + 1

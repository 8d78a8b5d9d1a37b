"""Models by name: the tiny random one, all kinds of paths, and hints for unknown names."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest

from engine.errors import SourceError
from engine.sources import tiny
from engine.sources.cache import models_dir
from engine.sources.opening import list_cached, open_source
from engine.text.tokenizer import Tokenizer
from tests.engine.models import VARIANT, write_folder

TINY_SHA256 = "8a8d9e20e3b134c324b8d1afe27719edc2a6660bbddca0c27c58a1624067b0f5"


def test_tiny_random_is_the_same_everywhere(tmp_path: Path) -> None:
    source = open_source("tiny-random", tmp_path)
    weights = models_dir(tmp_path) / "tiny-random" / "model.safetensors"
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == TINY_SHA256
    assert (source.label, source.licence, source.config.n_blocks) == ("tiny-random", "MIT", 8)
    assert [model.name for model in list_cached(tmp_path)] == ["tiny-random"]
    tokenizer = Tokenizer(source.tokenizer)
    for text in ("Hello", "日本 🎉\n", "<|im_start|>user"):
        assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text
    changed = weights.stat().st_mtime_ns
    open_source("tiny-random", tmp_path)
    assert weights.stat().st_mtime_ns == changed


def test_a_damaged_tiny_random_is_written_anew(tmp_path: Path) -> None:
    open_source("tiny-random", tmp_path)
    folder = models_dir(tmp_path) / "tiny-random"
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:1000])
    (folder / "config.json").unlink()
    open_source("tiny-random", tmp_path)
    assert (folder / "model.safetensors").read_bytes() == whole
    assert [path.name for path in models_dir(tmp_path).iterdir()] == ["tiny-random"]


def test_a_full_disk_leaves_nothing_of_tiny_random(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SourceError, match="is full: free some space"):
        tiny.open_tiny(tmp_path)
    assert list(models_dir(tmp_path).iterdir()) == []


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("startr", r"did you mean starter\?"),
        ("tiny", r"did you mean tiny-random\?"),
        ("nowhere/at/all", "give starter, tiny-random, a folder .* or ORG/NAME"),
        ("a\0b", "is not a path"),
        ("", "has no config.json|unknown model|is not a model folder"),
    ],
)
def test_an_unknown_name_gets_a_hint(name: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=complaint):
        open_source(name, tmp_path)


def test_paths_are_opened_by_what_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_folder(folder, VARIANT["llama"])
    assert open_source(folder, tmp_path).label == "model"
    with pytest.raises(SourceError, match="give the folder"):
        open_source(folder / "model.safetensors", tmp_path)
    with pytest.raises(SourceError, match=r"did you mean the folder .*model\?"):
        open_source(folder.with_name("modle"), tmp_path)
    with pytest.raises(SourceError, match=r"config.json is not a GGUF|give the folder"):
        open_source(folder / "config.json", tmp_path)
    with pytest.raises(SourceError, match="not a GGUF file"):
        open_source(folder / "tokenizer.json", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match=r"has no config\.json"):
        open_source(tmp_path / "empty", tmp_path)

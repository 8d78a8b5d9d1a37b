"""Manifests on disk: what comes back is what went in, or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.core.errors import HomeError
from app.manifest.importing import HashedSource, hash_source
from app.weights.manifest_store import ManifestStore
from tests.app.tiny_source import tiny_source


@pytest.fixture
def found(tmp_path: Path) -> HashedSource:
    return hash_source(tiny_source(tmp_path / "source"))


def test_a_survey_comes_back(tmp_path: Path, found: HashedSource) -> None:
    store = ManifestStore(tmp_path / "cache")
    assert store.hashes() == []
    assert store.load(found.manifest.hash) is None
    store.save_survey(found, "/models/tiny é")
    assert store.load(found.manifest.hash) == found.manifest
    assert store.leaves(found.manifest) == found.leaves
    assert store.source(found.manifest.hash) == "/models/tiny é"
    assert store.hashes() == [found.manifest.hash]


def test_a_manifest_that_was_only_heard_of_has_no_source(tmp_path: Path, found: HashedSource) -> None:
    store = ManifestStore(tmp_path / "cache")
    store.save(found.manifest)
    assert store.load(found.manifest.hash) == found.manifest
    assert store.leaves(found.manifest) is None
    assert store.source(found.manifest.hash) is None


@pytest.mark.parametrize("damage", [b"", b"{}", None])
def test_damaged_files_are_as_good_as_none(tmp_path: Path, found: HashedSource, damage: bytes | None) -> None:
    store = ManifestStore(tmp_path / "cache")
    store.save_survey(found, "x")
    for file in (tmp_path / "cache" / "manifests").iterdir():
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(bytes(content) if damage is None else damage)
    assert store.load(found.manifest.hash) is None
    assert store.leaves(found.manifest) is None


def test_another_models_manifest_is_not_taken_for_this_one(tmp_path: Path, found: HashedSource) -> None:
    store = ManifestStore(tmp_path / "cache")
    store.save(found.manifest)
    folder = tmp_path / "cache" / "manifests"
    (folder / f"{found.manifest.hash}.json").rename(folder / f"{'0' * 64}.json")
    assert store.load("0" * 64) is None


def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path, found: HashedSource) -> None:
    (tmp_path / "cache").write_bytes(b"")
    with pytest.raises(HomeError, match="cannot be written"):
        ManifestStore(tmp_path / "cache").save(found.manifest)

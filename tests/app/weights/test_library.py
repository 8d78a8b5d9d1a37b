"""Parts in a model's own files and in the cache: found, checked, refused when wrong, and read by the engine."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from app.manifest.importing import HashedSource
from app.manifest.merkle import CHUNK_BYTES
from app.weights.extents import WeightsError, read_range
from app.weights.library import ENDS, Library, span_parts
from app.weights.source_index import SourceIndex
from engine.sources.layout import part_names
from tests.app.weights.models import WIDE, empty_library, import_model


@pytest.fixture
def imported(tmp_path: Path) -> tuple[Library, HashedSource, Path]:
    studied = import_model(tmp_path / "model", tmp_path / "cache")
    return Library(tmp_path / "cache", studied.manifest), studied, tmp_path / "model" / "weights.bin"


def copy_part(source: Library, target: Library, name: str) -> None:
    """Bring a part chunk by chunk, as a fetch does."""
    part = source.manifest.by_name[name]
    leaves = source.leaves(part)
    assert leaves is not None
    new = target.open_new(part, leaves)
    for index in new.missing():
        chunk = source.chunk(part, index)
        assert chunk is not None
        assert new.is_right(index, chunk)
        new.write(index, chunk)
    target.finish(new)


def test_a_models_own_files_are_never_copied(imported: tuple[Library, HashedSource, Path], tmp_path: Path) -> None:
    library, studied, weights = imported
    assert library.held() == {part.name for part in studied.manifest.parts}
    assert [size for _, size in library.files.names()] != []  # the tokenizer's text alone
    assert sum(size for _, size in library.files.names()) < 64 * 1024
    entry = library.source(span_parts(1, 2)).parts["block.1"][0]
    assert entry.file == weights


def test_the_cache_gives_the_engine_the_same_bytes(
    imported: tuple[Library, HashedSource, Path], tmp_path: Path
) -> None:
    library, studied, _weights = imported
    other = empty_library(tmp_path / "other", studied)
    assert other.held() == frozenset()
    for name in ("tokenizer", "embedding", "head", "block.2"):
        copy_part(library, other, name)
    assert other.held() == {*ENDS, "block.2"}
    ours, theirs = (each.source([*ENDS, "block.2"]) for each in (library, other))
    assert ours.tokenizer == theirs.tokenizer
    for name in ("embedding", "head", "block.2"):
        for a, b in zip(ours.parts[name], theirs.parts[name], strict=True):
            assert (a.role, a.kind, a.shape, a.length) == (b.role, b.kind, b.shape, b.length)
            assert _bytes(a.file, a.offset, a.length) == _bytes(b.file, b.offset, b.length)


def test_a_part_that_is_not_here_is_named(imported: tuple[Library, HashedSource, Path], tmp_path: Path) -> None:
    other = empty_library(tmp_path / "other", imported[1])
    with pytest.raises(WeightsError, match=r"block\.0 of model .*: not on this machine, or damaged"):
        other.source(span_parts(0, 1))


def test_a_changed_file_is_read_again_and_only_right_parts_stay(imported: tuple[Library, HashedSource, Path]) -> None:
    library, _, weights = imported
    entry = library.source(span_parts(1, 2)).parts["block.1"][0]
    with weights.open("r+b") as file:
        file.seek(entry.offset)
        file.write(b"\xff" * 8)
    assert library.held() == {"tokenizer"}  # nothing of a changed file counts before it was read again
    assert library.check(part_names(WIDE)) == ["block.1"]
    assert library.held() == {*ENDS, "block.0", "block.2", "block.3"}
    with pytest.raises(WeightsError):
        library.source(span_parts(0, 2))


def test_a_touched_file_is_read_once_more(imported: tuple[Library, HashedSource, Path]) -> None:
    library, _studied, weights = imported
    os.utime(weights, ns=(1, 1))
    read: list[int] = []
    assert library.check(["block.0"], on_bytes=read.append) == []
    assert sum(read) == sum(library.manifest.by_name[name].size_bytes for name in part_names(WIDE))
    assert library.check(["block.0"], on_bytes=lambda count: pytest.fail("read again")) == []


def test_a_deleted_model_is_gone(imported: tuple[Library, HashedSource, Path]) -> None:
    library, _, weights = imported
    weights.unlink()
    part = library.manifest.by_name["block.0"]
    assert library.chunk(part, 0) is None
    assert library.check(["block.0"]) == ["block.0"]


def test_a_model_whose_disk_was_away_is_here_again_when_the_disk_is(
    imported: tuple[Library, HashedSource, Path], tmp_path: Path
) -> None:
    """As after a start before an external disk was there: the only member with the weights lost them for good."""
    library, studied, weights = imported
    away = weights.with_name("away")
    weights.rename(away)
    assert library.check(["block.0"]) == ["block.0"]
    assert library.held() == {"tokenizer"}
    away.rename(weights)
    for found in (library, Library(tmp_path / "cache", studied.manifest)):
        assert found.held() == set(part_names(WIDE)) | {"tokenizer"}
        assert found.check(["block.0"], on_bytes=lambda count: pytest.fail("it is as it was")) == []
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert library.check(part_names(WIDE)) != []


def test_wrong_bytes_in_the_cache_are_found_and_only_their_chunk_is_missing(
    imported: tuple[Library, HashedSource, Path], tmp_path: Path
) -> None:
    library, studied, _ = imported
    other = empty_library(tmp_path / "other", studied)
    copy_part(library, other, "block.0")
    part = other.manifest.by_name["block.0"]
    path = other.files.path(part.root)
    data = bytearray(path.read_bytes())
    data[CHUNK_BYTES + 5] ^= 1
    path.write_bytes(data)
    assert other.check(["block.0"]) == ["block.0"]
    leaves = library.leaves(part)
    assert leaves is not None
    new = other.open_new(part, leaves)
    assert new.missing() == [1]
    other.abandon(new)


def test_a_checked_part_is_not_read_again_unless_asked(
    imported: tuple[Library, HashedSource, Path], tmp_path: Path
) -> None:
    library, studied, _ = imported
    other = empty_library(tmp_path / "other", studied)
    copy_part(library, other, "block.0")
    assert other.check(["block.0"], on_bytes=lambda count: pytest.fail("it was checked on arrival")) == []
    read: list[int] = []
    assert other.check(["block.0"], again=True, on_bytes=read.append) == []
    assert sum(read) == other.manifest.by_name["block.0"].size_bytes


def test_a_half_fetched_part_goes_on_where_it_was(imported: tuple[Library, HashedSource, Path], tmp_path: Path) -> None:
    library, studied, _ = imported
    part = studied.manifest.by_name["block.0"]
    leaves = studied.leaves["block.0"]
    first = empty_library(tmp_path / "other", studied)
    new = first.open_new(part, leaves)
    chunk = library.chunk(part, 2)
    assert chunk is not None
    new.write(2, chunk)
    new.file.seek(0)
    new.file.write(b"torn write")
    new.close()  # killed here
    again = empty_library(tmp_path / "other", studied).open_new(part, leaves)
    assert again.have == {2}
    again.close()
    assert "block.0" not in first.held()


def test_two_processes_fetch_the_same_part(imported: tuple[Library, HashedSource, Path], tmp_path: Path) -> None:
    library, studied, _ = imported
    part, leaves = studied.manifest.by_name["block.0"], studied.leaves["block.0"]
    both = [empty_library(tmp_path / "other", studied) for _ in range(2)]
    news = [each.open_new(part, leaves) for each in both]
    for index in news[0].missing():
        chunk = library.chunk(part, index)
        assert chunk is not None
        for new in news:
            new.write(index, chunk)
    both[0].finish(news[0])
    both[1].finish(news[1])
    assert both[1].check(["block.0"], again=True) == []


def test_a_cache_emptied_meanwhile_is_a_clear_error_and_nothing_is_left(
    imported: tuple[Library, HashedSource, Path], tmp_path: Path
) -> None:
    library, studied, _ = imported
    part, leaves = studied.manifest.by_name["block.0"], studied.leaves["block.0"]
    other = empty_library(tmp_path / "other", studied)
    new = other.open_new(part, leaves)
    shutil.rmtree(tmp_path / "other")
    for index in new.missing():
        chunk = library.chunk(part, index)
        assert chunk is not None
        new.write(index, chunk)
    with pytest.raises(WeightsError, match="emptied while part"):
        other.finish(new)
    copy_part(library, other, "block.0")  # and it goes on


def test_a_damaged_index_is_as_good_as_none(imported: tuple[Library, HashedSource, Path], tmp_path: Path) -> None:
    _library, studied, _ = imported
    file = tmp_path / "cache" / "manifests" / f"{studied.manifest.hash}.index"
    for damage in (
        b"",
        b"{}",
        b'{"version":1,"files":[["x",1]],"parts":{}}',
        b'{"version":1,"files":[],"parts":{"a":[[0,0,1]]}}',
    ):
        file.write_bytes(damage)
        assert Library(tmp_path / "cache", studied.manifest).held() == {"tokenizer"}


def test_an_index_survives_its_own_writing(imported: tuple[Library, HashedSource, Path], tmp_path: Path) -> None:
    file = tmp_path / "cache" / "manifests" / f"{imported[1].manifest.hash}.index"
    index = SourceIndex.decode(file.read_bytes())
    assert SourceIndex.decode(index.encode()) == index


def test_ranges_across_pieces(tmp_path: Path, imported: tuple[Library, HashedSource, Path]) -> None:
    _library, studied, _weights = imported
    index = SourceIndex.decode((tmp_path / "cache" / "manifests" / f"{studied.manifest.hash}.index").read_bytes())
    pieces = index.extents["block.1"]
    whole = b"".join(_bytes(e.file, e.offset, e.length) for e in pieces)
    for start, length in ((0, len(whole)), (0, 1), (len(whole) - 1, 1), (pieces[0].length - 1, 2), (5, 2**20)):
        assert read_range(pieces, start, length) == whole[start : start + length]


def _bytes(file: Path, offset: int, length: int) -> bytes:
    with file.open("rb") as opened:
        opened.seek(offset)
        return opened.read(length)

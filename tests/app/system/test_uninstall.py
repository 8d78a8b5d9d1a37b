"""Uninstalling removes every file of the table of home files, whatever belongs to one, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.cli import dashboard
from app.config.home import HOME_FILES, Home, HomeFile
from app.system import logs
from app.system.uninstall import items_in_cache, items_in_home, remove, remove_if_empty
from p2p.identity import Identity
from ui.state import conversations


def create(home: Path, entry: HomeFile) -> list[Path]:
    """Create an entry of the table, with one file for each of its patterns."""
    if entry.is_folder:
        (home / entry.name).mkdir(exist_ok=True)
        return [home / entry.name]
    paths = [home / pattern.replace("*", "1").replace("?", "1") for pattern in entry.patterns]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"12345")
    return paths


def test_every_entry_is_listed_and_removed_and_a_foreign_file_is_kept(tmp_path: Path) -> None:
    made = {path for entry in HOME_FILES for path in create(tmp_path, entry)}
    (tmp_path / "holiday.jpg").write_bytes(b"mine")
    items = items_in_home(tmp_path)
    assert {item.path for item in items} == made
    assert sum(item.size_bytes for item in items) == 5 * sum(path.is_file() for path in made)
    for item in items:
        remove(item)
    assert list(tmp_path.rglob("*")) == [tmp_path / "holiday.jpg"]
    assert not remove_if_empty(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "trust.json",
        "conversations.db",
        "conversations.db-journal",
        "statistics.db-wal",
        "statistics.db-shm",
        "statistics.db.damaged-1800000000",
        "config.toml.v1.bak",
        "config.toml.lock",
        "swarms.lock",
        f"identity-{Identity(bytes(32)).peer_id}.key",
        ".token.x1y2z3.tmp",
        "logs/start.log",
        "logs/node.log.4",
        "shoal-0a1b2c3d.xml",
    ],
)
def test_files_that_come_with_others_are_removed(tmp_path: Path, name: str) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / name).touch()
    assert {item.path for item in items_in_home(tmp_path)} == {tmp_path / name, tmp_path / "logs"}
    for item in items_in_home(tmp_path):
        remove(item)
    assert remove_if_empty(tmp_path)


def test_the_table_has_the_names_that_the_writers_use(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert home.conversations_file == tmp_path / conversations.FILE
    assert home.start_log_file == home.log_folder / dashboard.START_LOG
    assert home.log_file == home.log_folder / logs.FILE


def test_names_that_only_look_like_shoals_are_left(tmp_path: Path) -> None:
    for name in ("tokens.txt", "token", "config.toml.old", "sequence.fasta", "logs.zip", "identity-card.key"):
        (tmp_path / name).touch()
    (tmp_path / "sequence").mkdir()  # a folder, where Shoal writes a file
    assert [item.path.name for item in items_in_home(tmp_path)] == ["token"]


def test_a_log_folder_with_foreign_files_stays(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for name in ("logs/node.log", "logs/captain.log"):
        (tmp_path / name).touch()
    for item in items_in_home(tmp_path):
        remove(item)
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "logs", tmp_path / "logs" / "captain.log"]


def test_a_link_is_removed_and_its_target_kept(tmp_path: Path) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    (home / "token").symlink_to(elsewhere)
    for item in items_in_home(home):
        remove(item)
    assert not (home / "token").is_symlink()
    assert elsewhere.is_dir()


def test_a_cache_that_others_use_too_is_left(tmp_path: Path) -> None:
    for name in ("models", "manifests", "parts", "kernels"):
        (tmp_path / name).mkdir()
    assert [item.path.name for item in items_in_cache(tmp_path)] == ["kernels", "manifests", "models", "parts"]
    (tmp_path / "thesis").mkdir()
    assert items_in_cache(tmp_path) == []

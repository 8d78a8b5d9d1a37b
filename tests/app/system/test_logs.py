"""The log: one line a record whatever it says, rotated, private, and never the node's undoing."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.system import logs
from app.system.logs import start_logging


@pytest.fixture(autouse=True)
def clean_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, raising = root.handlers[:], root.level, logging.raiseExceptions
    root.handlers = []
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers, logging.raiseExceptions = handlers, raising
    root.setLevel(level)


log = logging.getLogger("shoal.test")


def test_one_line_a_record_and_nothing_that_a_terminal_obeys(tmp_path: Path) -> None:
    path = start_logging(tmp_path, None)
    log.info("peer says %s", "\x1b[2J\r\n2026-01-01 ERROR forged\x9b\u2028é")
    [line] = path.read_text("utf-8").splitlines()
    assert line.endswith(r"INFO    shoal.test: peer says \x1b[2J\x0d\x0a2026-01-01 ERROR forged\x9b\u2028é")


def test_a_traceback_is_set_in(tmp_path: Path) -> None:
    path = start_logging(tmp_path, None)
    try:
        raise ValueError("a\x1bb")
    except ValueError:
        log.exception("it broke")
    first, *more = path.read_text("utf-8").splitlines()
    assert first.endswith("it broke")
    assert all(line.startswith("    ") for line in more)
    assert more[-1] == r"    ValueError: a\x1bb"


def test_json_is_an_object_a_line(tmp_path: Path) -> None:
    path = start_logging(tmp_path, "debug", as_json=True)
    log.debug("two\nlines %s", {"a": 1})
    try:
        raise ValueError("no")
    except ValueError:
        log.exception("it broke")
    first, second = (json.loads(line) for line in path.read_text("utf-8").splitlines())
    assert first == {**first, "level": "debug", "area": "shoal.test", "message": "two\nlines {'a': 1}"}
    assert first["time"].endswith("Z")
    assert "ValueError: no" in second["traceback"]


def test_the_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_FILE_BYTES", 1000)
    start_logging(tmp_path, None)
    for number in range(200):
        log.info("record %d", number)
    log.info("x" * 10**6)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["node.log", *(f"node.log.{n}" for n in range(1, 5))]
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 30_000


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_lived_through_and_told_of_afterwards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "node.log").symlink_to("/dev/full")
    path = start_logging(tmp_path, None)
    log.info("one")
    log.info("two")
    path.unlink()
    log.info("three")
    lines = path.read_text("utf-8").splitlines()
    assert [line.partition(": ")[2] for line in lines] == ["2 lines could not be written here", "three"]
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(os.name == "nt", reason="an open file cannot be deleted there")
def test_a_folder_that_is_deleted_comes_back(tmp_path: Path) -> None:
    path = start_logging(tmp_path / "logs", None)
    log.info("one")
    shutil.rmtree(tmp_path / "logs")
    log.info("two")
    assert path.read_text("utf-8").endswith("two\n")


def test_the_level_decides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = start_logging(tmp_path, None)
    log.debug("quiet")
    log.info("said")
    log.warning("loud")
    assert [line.rpartition(" ")[2] for line in path.read_text().splitlines()] == ["said", "loud"]
    assert capsys.readouterr().err.count("\n") == 1

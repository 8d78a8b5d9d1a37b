"""`shoal logs`: the last lines, following through rotations, and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest

from app.cli import main
from app.cli.logs import line_facts, log_lines

LINE = "2026-01-02 03:04:05,678 WARNING shoal.node: this node is in no swarm: join one"


def write(folder: Path, *lines: str) -> Path:
    file = folder / "logs" / "node.log"
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "a", encoding="utf-8") as log:
        log.write("".join(f"{line}\n" for line in lines))
    return file


def test_the_last_lines_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, *(f"line {n}" for n in range(100)))
    assert main(["logs", "-n", "3", "--home", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == ["line 97", "line 98", "line 99"]
    assert main(["logs", "-n", "0", "--home", str(tmp_path)]) == 0
    assert capsys.readouterr().out == ""
    assert main(["logs", "--home", str(tmp_path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 50


def test_no_log_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "--home", str(tmp_path)]) == 1
    assert "there is no log in" in capsys.readouterr().err


def test_json_has_the_parts_of_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, LINE, "    Traceback (most recent call last):", '{"level": "info", "text": "x"}', "{broken", "[1]")
    assert main(["logs", "--json", "--home", str(tmp_path)]) == 0
    first, *others = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert first == {
        "time": "2026-01-02 03:04:05,678",
        "level": "warning",
        "source": "shoal.node",
        "text": "this node is in no swarm: join one",
    }
    traceback = {"text": "    Traceback (most recent call last):"}
    assert others == [traceback, {"level": "info", "text": "x"}, {"text": "{broken"}, {"text": "[1]"}]
    assert line_facts("{}") == {}


def test_following_goes_through_a_rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens to the file happens while the follower sleeps."""
    file = write(tmp_path, "one")
    events: Iterator[Callable[[], object]] = iter(
        [
            lambda: write(tmp_path, "two"),
            lambda: file.write_bytes(file.read_bytes() + b"half"),  # not yet a line
            lambda: write(tmp_path, " and half", "three"),
            lambda: file.rename(tmp_path / "logs" / "node.log.1"),
            lambda: write(tmp_path, "four"),
            lambda: file.write_text("5\n"),  # truncated in place
        ]
    )
    monkeypatch.setattr("app.cli.logs.time.sleep", lambda seconds: next(events)())
    assert list(islice(log_lines(file, 10, follow=True), 6)) == ["one", "two", "half and half", "three", "four", "5"]


def test_following_begins_before_there_is_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: Iterator[Callable[[], object]] = iter([lambda: None, lambda: write(tmp_path, "first")])
    monkeypatch.setattr("app.cli.logs.time.sleep", lambda seconds: next(events)())
    assert list(islice(log_lines(tmp_path / "logs" / "node.log", 10, follow=True), 1)) == ["first"]

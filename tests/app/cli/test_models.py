"""`shoal models`, `shoal pull` and the sizing in `shoal doctor`, on a cache of their own; no network is touched."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

import app.cli
from app.api.client import Client
from app.cli import swarms
from app.cli.progress import ProgressBar
from app.snapshot.views import Snapshot, StepView
from app.weights.library import Library
from engine.sources.starter import starter_file
from tests.app.weights.models import empty_library, import_model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("SHOAL_CACHE", str(folder))
    monkeypatch.delenv("SHOAL_DEBUG", raising=False)
    return folder


@pytest.mark.usefixtures("cache")
def test_an_empty_cache_says_how_to_fill_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.cli.main(["models"]) == 0
    assert "shoal pull starter" in capsys.readouterr().out
    assert app.cli.main(["models", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_pulled_models_are_listed(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.cli.main(["pull", "tiny-random", "--json"]) == 0
    pulled = json.loads(capsys.readouterr().out)
    assert (pulled["name"], pulled["licence"], pulled["blocks"]) == ("tiny-random", "MIT", 8)
    assert Path(pulled["path"]).is_relative_to(cache)
    assert app.cli.main(["models", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [pulled]
    assert app.cli.main(["models"]) == 0
    assert capsys.readouterr().out.startswith("tiny-random: 8 blocks, 1.7 MB, MIT, ")


def test_a_damaged_model_is_shown_and_hides_no_other(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.cli.main(["pull", "tiny-random"]) == 0
    starter_file(cache).write_bytes(b"GGUF, but cut short")
    capsys.readouterr()
    assert app.cli.main(["models", "--json"]) == 0
    starter, tiny = json.loads(capsys.readouterr().out)
    assert (starter["name"], starter["blocks"], tiny["error"]) == ("starter", None, None)
    assert str(starter_file(cache)) in starter["error"]
    assert app.cli.main(["models"]) == 0
    assert capsys.readouterr().out.startswith("starter: damaged: ")


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("arguments", "status", "line"),
    [
        (["pull", "startr"], 1, "shoal: unknown model 'startr': did you mean starter?"),
        (["pull", "."], 2, "shoal: . is on this machine already: use it with --model ."),
        (["doctor", "--model", "starter"], 1, "shoal: starter is not in the cache: `shoal pull starter` downloads it"),
    ],
)
def test_refusals(arguments: list[str], status: int, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.cli.main(arguments) == status
    assert capsys.readouterr().err == line + "\n"


@pytest.mark.usefixtures("cache")
def test_the_doctor_sizes_the_devices_for_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.cli.main(["pull", "tiny-random"]) == 0
    capsys.readouterr()
    for options in ([], ["--model", "tiny-random"]):
        assert app.cli.main(["doctor", *options]) == 0
        assert "8 of 8 blocks of tiny-random" in capsys.readouterr().out
    assert app.cli.main(["doctor", "--max-vram", "0", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    hosts = [check for check in report["checks"] if check["name"] == "cpu hosts"]
    assert [check["status"] for check in hosts] == ["warn"]
    assert "the memory cap is 0" in hosts[0]["detail"]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("columns", "last"),
    [
        (100, f"starter [{'#' * 30}] 100%  100.0 MB of 100.0 MB, 20.0 MB/s"),
        (78, f"starter [{'#' * 29}] 100%  100.0 MB of 100.0 MB, 20.0 MB/s"),
        (50, "starter 100%  100.0 MB of 100.0 MB, 20.0 MB/s"),
        (42, "sta 100%  100.0 MB of 100.0 MB, 20.0 MB/s"),
        (20, " 100%  100.0 MB of "),
    ],
)
def test_a_terminal_gets_one_line_that_is_redrawn(columns: int, last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line as long as the terminal is wide would wrap, and each redraw would leave a row behind."""
    monkeypatch.setenv("COLUMNS", str(columns))
    now = [0.0]
    stream = Terminal()
    bar = ProgressBar("starter", stream, lambda: now[0])
    for step in range(101):
        now[0] = step * 0.05
        bar(step * 10**6, 10**8)
    bar.finish()
    bar.finish()
    drawn = stream.getvalue()
    assert drawn.count("\n") == 1
    assert 40 <= drawn.count("\r") <= 55  # ten times a second at most, for five seconds
    rows = drawn.removesuffix("\n").split("\x1b[K")
    assert max(len(row.removeprefix("\r")) for row in rows) < columns
    assert rows[-2:] == [f"\r{last}", ""]


def test_a_log_gets_a_few_lines() -> None:
    stream = io.StringIO()
    bar = ProgressBar("starter", stream, lambda: 0.0)
    for step in range(101):
        bar(step * 10**6, 10**8)
    bar.finish()
    assert stream.getvalue().splitlines() == [
        "starter: 0%, 0 B of 100.0 MB",
        "starter: 25%, 25.0 MB of 100.0 MB",
        "starter: 50%, 50.0 MB of 100.0 MB",
        "starter: 75%, 75.0 MB of 100.0 MB",
        "starter: 100%, 100.0 MB of 100.0 MB",
    ]


def test_verify_reads_everything_again_and_names_what_is_wrong(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    studied = import_model(tmp_path / "model", cache)
    name = studied.manifest.hash[:8]
    assert app.cli.main(["models", "verify"]) == 0
    heard = capsys.readouterr()
    assert heard.out.startswith(f"{name}: 4 blocks, 7 of 7 parts, ")
    assert "reading: 100%" in heard.err
    file = tmp_path / "model" / "weights.bin"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    assert app.cli.main(["models", "verify", "--json"]) == 1
    heard = capsys.readouterr()
    (model,) = json.loads(heard.out)
    assert (model["parts_held"], model["parts_total"]) == (6, 7)
    assert "1 of 7 parts are damaged (block." in model["error"]
    assert heard.err.endswith(f"shoal: damaged: {name}\n")


def test_a_model_whose_folder_is_gone_is_not_called_damaged(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was not listed at all, and `verify` said that its parts are damaged."""
    studied = import_model(tmp_path / "model", cache)
    name = studied.manifest.hash[:8]
    (tmp_path / "model").rename(tmp_path / "away")
    line = f"{name}: the model's folder {tmp_path / 'model'} is gone: put it back, or a node downloads its parts"
    assert app.cli.main(["models"]) == 0
    assert capsys.readouterr().out.startswith(line)
    assert app.cli.main(["models", "verify"]) == 1
    heard = capsys.readouterr()
    assert heard.out.startswith(line)
    assert heard.err.endswith(f"shoal: gone: {name}\n")
    (tmp_path / "away").rename(tmp_path / "model")
    assert app.cli.main(["models", "verify"]) == 0
    assert app.cli.main(["models"]) == 0
    assert "No model is cached" in capsys.readouterr().out


def test_a_model_that_came_from_peers_is_listed_and_verified(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    studied = import_model(tmp_path / "model", tmp_path / "seed")
    seed, here = Library(tmp_path / "seed", studied.manifest), empty_library(cache, studied)
    for name in ("block.1", "block.2"):
        part = studied.manifest.by_name[name]
        new = here.open_new(part, studied.leaves[name])
        for index in new.missing():
            assert new.take(index, seed.chunk(part, index) or b"")
        here.finish(new)
    assert app.cli.main(["models", "--json"]) == 0
    (model,) = json.loads(capsys.readouterr().out)
    assert (model["name"], model["parts_held"], model["parts_total"]) == (studied.manifest.hash[:8], 2, 7)
    assert app.cli.main(["models", "verify"]) == 0
    path = here.files.path(studied.manifest.by_name["block.2"].root)
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    assert app.cli.main(["models", "verify"]) == 1
    assert "1 of 7 parts are damaged (block.2): a node downloads them again" in capsys.readouterr().out
    assert here.held() == {"block.1"}


def test_joining_shows_how_far_the_weights_are(capsys: pytest.CaptureFixture[str]) -> None:
    step = StepView("weights", "the model's files", "running", total=10**6)
    seen = Snapshot("12D3", "fetching", "blocks 0:4", "http://127.0.0.1:1")
    ahead = [replace(seen, steps=(replace(step, done=done),)) for done in (0, 500_000)]
    looks = iter([*ahead, replace(seen, state="serving", reason="a hole")])

    class Node:
        def snapshot(self) -> Snapshot:
            return next(looks)

    outcome = {"state": "fetching", "reason": "", "swarm": {"pinned": "home#1a2b3c4d1a2b3c4d1a2b"}}
    assert swarms.while_fetching(cast(Client, Node()), outcome)["state"] == "serving"
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in lines] == ["weights from members: 0%", "weights from members: 50%"]


def test_joining_as_a_client_shows_how_far_the_ends_are(capsys: pytest.CaptureFixture[str]) -> None:
    step = StepView("ends", "tokenizer, embedding and head", "running", total=10**6)
    seen = Snapshot("12D3", "client", "it hosts nothing", "http://127.0.0.1:1")
    ahead = [replace(seen, steps=(replace(step, done=done),)) for done in (0, 500_000)]
    looks = iter([*ahead, replace(seen, steps=(replace(step, state="done"),))])

    class Node:
        def snapshot(self) -> Snapshot:
            return next(looks)

    outcome = {"state": "client", "reason": "", "swarm": {"pinned": "home#1a2b3c4d1a2b3c4d1a2b"}}
    assert swarms.while_fetching(cast(Client, Node()), outcome)["state"] == "client"
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in lines] == ["weights from members: 0%", "weights from members: 50%"]
    assert next(looks, None) is None

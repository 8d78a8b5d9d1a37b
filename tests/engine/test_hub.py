"""`shoal pull org/name` against a local hub server, run in a process of its own as a user would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.sources.hub import is_hub_name, list_hub
from engine.sources.opening import open_source
from tests.engine.hub_server import Hub, serving

NAME = "fish/minnow"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A hub that has the tiny model, in a repository with files that nobody needs."""
    open_source("tiny-random", tmp_path / "origin")
    folder = tmp_path / "origin" / "models" / "tiny-random"
    files = {file.name: file for file in folder.iterdir()}
    (tmp_path / "model.onnx").write_bytes(bytes(2**20))
    with serving(NAME, {**files, "onnx/model.onnx": tmp_path / "model.onnx"}) as served:
        yield served


def pull(hub: Hub, cache: Path, *arguments: str, token: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(cache / "hf"),
        "SHOAL_CACHE": str(cache),
        "HF_HUB_DOWNLOAD_TIMEOUT": "5",
    }
    environment.pop("HF_HUB_OFFLINE", None)
    environment.pop("HF_TOKEN", None)
    if token is not None:
        environment["HF_TOKEN"] = token
    command = [sys.executable, "-m", "app.cli", "pull", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_a_model_is_fetched_with_its_licence_and_opens_like_any_other(hub: Hub, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    done = pull(hub, cache, NAME, "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["name"], facts["licence"], facts["blocks"]) == (NAME, "apache-2.0", 8)
    assert "onnx/model.onnx" not in hub.sent
    assert list_hub(cache) == [NAME]
    assert open_source(NAME, cache).config == open_source("tiny-random", tmp_path / "origin").config


def test_what_broke_off_goes_on_where_it_was(hub: Hub, tmp_path: Path) -> None:
    large = "LICENSE.txt"  # the library writes in pieces of 10 MB
    (tmp_path / large).write_bytes(os.urandom(25_000_000))
    hub.files = {**hub.files, large: tmp_path / large}
    hub.break_after = 15_000_000
    for _ in range(3):  # the library itself may resume after the cut
        if pull(hub, tmp_path / "cache", NAME).returncode == 0:
            break
    assert hub.break_after is None
    assert hub.ranges
    assert hub.sent[large] < 1.5 * 25_000_000
    assert open_source(NAME, tmp_path / "cache").config.n_blocks == 8


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"gated": True}, "accept them on its page"),
        ({"token": "secret"}, "fish/minnow is not on the hub, or it is private"),
        ({"repository": "fish/other"}, "fish/minnow is not on the hub"),
        ({"files": {}}, "has neither safetensors nor GGUF"),
    ],
)
def test_what_cannot_be_had_is_one_line(hub: Hub, tmp_path: Path, change: dict[str, object], says: str) -> None:
    for name, value in change.items():
        setattr(hub, name, value)
    done = pull(hub, tmp_path / "cache", NAME)
    assert done.returncode == 1
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert list_hub(tmp_path / "cache") == []


def test_the_token_comes_from_the_usual_place(hub: Hub, tmp_path: Path) -> None:
    hub.token = "secret"
    assert pull(hub, tmp_path / "cache", NAME, token="secret").returncode == 0


def test_a_hub_that_is_away_is_one_line(hub: Hub, tmp_path: Path) -> None:
    hub.url = "http://127.0.0.1:9"
    done = pull(hub, tmp_path / "cache", NAME)
    assert done.returncode == 1
    assert "could not be downloaded" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_model_that_was_not_pulled_says_how(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="shoal pull fish/minnow"):
        open_source(NAME, tmp_path)


@pytest.mark.parametrize("text", ["a/../b", "a", "/a/b", "a/b/c", "a b/c", "a/b\n", "a/" + "b" * 100])
def test_what_is_no_name(text: str) -> None:
    assert not is_hub_name(text)

"""Uninstalling removes what a node left, and nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import app
from app.cli import main
from tests.process.node_process import Place, Serving


def test_uninstall_lists_then_removes_what_a_node_left_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = Place(tmp_path / "home", tmp_path / "cache")
    for name, value in {**place.environment(), "XDG_CONFIG_HOME": str(tmp_path / "config")}.items():
        monkeypatch.setenv(name, value)
    assert main(["create", "reef", "--model", "tiny-random", "--private"]) == 0
    with Serving(place) as node:
        node.ready()
        assert node.end() == 0
    (place.home / "holiday.jpg").write_bytes(b"mine")
    before = sorted(tmp_path.rglob("*"))
    capsys.readouterr()
    assert main(["uninstall", "--json"]) == 0
    dry = json.loads(capsys.readouterr().out)
    assert sorted(tmp_path.rglob("*")) == before
    assert not dry["removed"]
    listed = {Path(item["path"]).name for item in dry["items"]}
    assert listed >= {"identity.key", "token", "swarms.json", "config.toml", "models", "manifests", "statistics.db"}
    checkout = Path(app.__file__).parents[1]
    monkeypatch.setattr(sys, "prefix", str(checkout / ".venv"))
    assert main(["uninstall"]) == 0
    assert f"To remove the program itself: delete the folder {checkout}\n" in capsys.readouterr().out
    monkeypatch.setattr(sys, "prefix", str(tmp_path))  # installed as a package
    assert main(["uninstall", "--yes"]) == 0
    assert "pip uninstall shoal" in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == [place.home, place.home / "holiday.jpg"]


def test_uninstall_of_a_running_node_prints_nothing_but_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = Place(tmp_path / "home", tmp_path / "cache")
    for name, value in {**place.environment(), "XDG_CONFIG_HOME": str(tmp_path / "config")}.items():
        monkeypatch.setenv(name, value)
    assert main(["create", "reef", "--model", "tiny-random"]) == 0
    with Serving(place) as node:
        node.ready()
        capsys.readouterr()
        assert main(["uninstall"]) == 0
        assert "The node that runs now would be stopped first\n" in capsys.readouterr().out
        assert main(["uninstall", "--yes", "--json"]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert printed["running"]
        assert node.ended() == 0
    assert printed["removed"]
    assert printed["left"] == []
    assert not place.home.exists()


def test_a_cache_that_another_node_uses_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    place, other = Place(tmp_path / "home", cache), Place(tmp_path / "other", cache)
    assert other.shoal("create", "reef", "--model", "tiny-random").status == 0
    for name, value in {**place.environment(), "XDG_CONFIG_HOME": str(tmp_path / "config")}.items():
        monkeypatch.setenv(name, value)
    assert main(["create", "cove", "--model", "tiny-random"]) == 0
    with Serving(other, max_vram="8MB") as node:
        node.ready()
        before = sorted(path for path in cache.rglob("*") if path.is_file())
        capsys.readouterr()
        assert main(["uninstall"]) == 0
        assert f"{cache} stays, because another node of this machine uses its models" in capsys.readouterr().out
        assert main(["uninstall", "--yes", "--json"]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert printed["used_by_others"] == str(cache)
        assert not [item for item in printed["items"] if Path(item["path"]).is_relative_to(cache)]
        assert not place.home.exists()
        assert sorted(path for path in cache.rglob("*") if path.is_file()) == before
        assert node.end() == 0
    assert other.shoal("uninstall", "--yes").status == 0
    assert not cache.exists()

"""`shoal config` on a home folder where no node runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import app.cli
from app.config.settings import SETTINGS


def shoal(home: Path, *arguments: str) -> int:
    return app.cli.main(["--home", str(home), *arguments])


def test_every_setting_is_listed_and_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHOAL_MAP_PORT", raising=False)  # which tests set, so that none asks a router
    assert shoal(tmp_path, "config", "list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [setting["name"] for setting in listed] == list(SETTINGS)
    assert all(setting["help"] and setting["origin"] == "default" for setting in listed)
    assert shoal(tmp_path, "config") == 0
    assert "api_port = 7465" in capsys.readouterr().out


def test_set_get_and_unset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal(tmp_path, "config", "set", "api-port", "8000") == 0
    assert "api_port = 8000" in capsys.readouterr().out
    assert shoal(tmp_path, "config", "get", "api_port") == 0
    assert capsys.readouterr().out == "8000\n"
    assert shoal(tmp_path, "config", "--json", "get", "api_port") == 0
    assert json.loads(capsys.readouterr().out)["origin"] == "file"
    assert shoal(tmp_path, "config", "unset", "api_port") == 0
    capsys.readouterr()
    assert shoal(tmp_path, "config", "get", "api_port") == 0
    assert capsys.readouterr().out == "7465\n"


def test_a_size_is_also_shown_in_its_unit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal(tmp_path, "config", "set", "max_vram", "450MB") == 0
    assert capsys.readouterr().out == "max_vram = 450000000, 450.0 MB\n"
    assert shoal(tmp_path, "config", "get", "max_vram") == 0
    assert capsys.readouterr().out == "450000000\n", "programs read this"
    assert shoal(tmp_path, "config", "set", "max_vram", "0") == 0
    assert capsys.readouterr().out == "max_vram = 0\n"


def test_the_environment_goes_before_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_NAME", "attic")
    assert shoal(tmp_path, "config", "set", "name", "cellar") == 0
    assert "name = attic  (the file is changed, but the environment overrides it)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["set", "api_port", "70000"], 2, "0 to 65535"),
        (["set", "listen", "here"], 2, "the setting listen cannot be"),
        (["get", "api_prot"], 2, "did you mean api_port?"),
        (["unset", "nothing"], 2, "unknown setting 'nothing'"),
    ],
)
def test_what_is_wrong_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, words: str
) -> None:
    assert shoal(tmp_path, "config", *arguments) == status
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1

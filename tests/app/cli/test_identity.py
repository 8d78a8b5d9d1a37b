"""`shoal id`: showing, exporting and importing the identity of a home folder."""

from __future__ import annotations

import io
import json
import stat
from pathlib import Path

import pytest

import app.cli
from app.config.home import Home, hold
from p2p.identity import load


@pytest.fixture(autouse=True)
def _with_passphrase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_PASSPHRASE", "a long one")


def shoal(home: Path, *arguments: str) -> int:
    return app.cli.main(["--home", str(home), *arguments])


def peer_id_of(home: Path, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert shoal(home, "id", "--json") == 0
    return str(json.loads(capsys.readouterr().out)["peer_id"])


def test_a_home_has_one_identity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = peer_id_of(tmp_path, capsys)
    assert first.startswith("12D3Koo")
    assert shoal(tmp_path, "id", "show") == 0
    assert capsys.readouterr().out.strip() == first
    assert stat.S_IMODE((tmp_path / "identity.key").stat().st_mode) == 0o600


def test_export_and_import_move_the_identity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new, file = tmp_path / "old", tmp_path / "new", tmp_path / "backup.json"
    peer_id = peer_id_of(old, capsys)
    assert shoal(old, "id", "export", str(file)) == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert load(old / "identity.key").seed.hex() not in file.read_text()
    assert shoal(new, "id", "import", str(file)) == 0
    assert peer_id_of(new, capsys) == peer_id
    assert shoal(new, "id", "import", str(file)) == 0  # once more changes nothing


def test_an_identity_is_replaced_only_when_asked_and_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new, file = tmp_path / "old", tmp_path / "new", tmp_path / "backup.json"
    wanted, present = peer_id_of(old, capsys), peer_id_of(new, capsys)
    assert shoal(old, "id", "export", str(file)) == 0
    assert shoal(new, "id", "import", str(file)) == 1
    assert "--replace" in capsys.readouterr().err
    assert peer_id_of(new, capsys) == present
    assert shoal(new, "id", "import", str(file), "--replace") == 0
    assert peer_id_of(new, capsys) == wanted
    assert load(new / f"identity-{present}.key").peer_id == present


def test_a_wrong_passphrase_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "backup.json"
    assert shoal(tmp_path / "old", "id", "export", str(file)) == 0
    monkeypatch.setenv("SHOAL_PASSPHRASE", "another one")
    capsys.readouterr()
    assert shoal(tmp_path / "new", "id", "import", str(file)) == 1
    error = capsys.readouterr().err
    assert "wrong passphrase" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "new" / "identity.key").exists()


def test_the_passphrase_can_come_from_the_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SHOAL_PASSPHRASE")
    file = tmp_path / "backup.json"
    for home, action in (("old", "export"), ("new", "import")):
        monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
        assert shoal(tmp_path / home, "id", action, str(file)) == 0
    assert peer_id_of(tmp_path / "old", capsys) == peer_id_of(tmp_path / "new", capsys)


def test_no_passphrase_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHOAL_PASSPHRASE", "")
    assert shoal(tmp_path, "id", "export", str(tmp_path / "backup.json")) == 1
    assert "passphrase is empty" in capsys.readouterr().err


def test_an_export_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "precious"
    file.write_text("mine")
    assert shoal(tmp_path, "id", "export", str(file)) == 1
    assert file.read_text() == "mine"
    assert "exists already" in capsys.readouterr().err


def test_a_running_node_keeps_its_identity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new, file = tmp_path / "old", tmp_path / "new", tmp_path / "backup.json"
    assert shoal(old, "id", "export", str(file)) == 0
    with hold(Home.open(new)):
        assert shoal(new, "id", "import", str(file)) == 1
    assert "a node already runs" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["export"], ["import"], ["rename"]])
def test_bad_usage_exits_2(tmp_path: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        shoal(tmp_path, "id", *arguments)
    assert stop.value.code == 2

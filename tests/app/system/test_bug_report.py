"""The zip for a bug report: all that helps, and no secret in any form."""

from __future__ import annotations

import base64
import json
import zipfile
from pathlib import Path

import pytest

from app.cli import main
from app.config.home import Home, api_token
from app.core.errors import AppError
from app.snapshot.views import RuleView
from app.swarm.saved import load
from app.system.bug_report import LOG_BYTES, RECORDING, log_tail, without_secrets, write_bundle
from app.system.doctor import check_driver, check_sensor, check_settings
from p2p.identity import load_or_create


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """A home with a key, a token and a private swarm."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    folder = str(tmp_path / "home")
    assert main(["--home", folder, "create", "reef", "--model", "tiny-random", "--private"]) == 0
    home = Home.open(folder)
    load_or_create(home.key_file)
    api_token(home)
    home.log_folder.mkdir()
    return home


def secrets_in(home: Home, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Each secret in each form that a program might print, and the invite that holds one."""
    capsys.readouterr()
    assert main(["--home", str(home.folder), "invite"]) == 0
    [swarm] = load(home).swarms
    assert swarm.secret is not None
    seed = load_or_create(home.key_file).seed
    found = {"token": api_token(home), "invite": capsys.readouterr().out.strip().splitlines()[-1]}
    for name, secret in (("secret", swarm.secret), ("key", seed)):
        found |= {
            f"{name} in hex": secret.hex(),
            f"{name} in capital hex": secret.hex().upper(),
            f"{name} as Python writes it": repr(secret)[2:-1],
            f"{name} in base64": base64.b64encode(secret).decode().rstrip("="),
            f"{name} in urls": base64.urlsafe_b64encode(secret).decode().rstrip("="),
            f"{name} in base32": base64.b32encode(secret).decode().rstrip("=").lower(),
        }
    assert found["invite"].startswith("shoal:")
    return found


def test_no_secret_is_in_it_whoever_wrote_it_down(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_TEST_VARIABLE", "of the environment")
    told = secrets_in(home, capsys)
    (home.log_folder / "node.log").write_text("".join(f"{name}: {text}.\n" for name, text in told.items()))
    facts = {"snapshot": {name: f"<{text}>" for name, text in told.items()}, "settings": [], "doctor": []}
    recording = [{"t": number, "note": {"text": text}} for number, text in enumerate(told.values())]
    listed = write_bundle(tmp_path / "bug.zip", home, facts, recording)
    with zipfile.ZipFile(tmp_path / "bug.zip") as archive:
        names = archive.namelist()
        whole = "\n".join(archive.read(name).decode() for name in names)
    assert [line.split()[0] for line in listed] == names == [*(f"{name}.json" for name in facts), "log.txt", RECORDING]
    assert [name for name, text in told.items() if text.lower() in whole.lower()] == []
    assert whole.count("[removed]") == 3 * len(told)
    assert "of the environment" not in whole


@pytest.mark.parametrize("own", [r"C:\Users\Jané Doe", "/home/jané"])
def test_the_users_name_is_in_no_form_of_a_path(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: own)
    said = f"weights in {own}: full"
    for text in (said, json.dumps(said), json.dumps(said, ensure_ascii=False)):
        assert without_secrets(text, ()).strip('"') == "weights in ~: full"


def test_the_command_says_what_is_in_it(home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home.log_folder / "node.log").write_text("a line\n")
    file = tmp_path / "bug.zip"
    capsys.readouterr()
    command = ["--home", str(home.folder), "doctor", "--json", "--bundle", str(file)]
    assert main(command) == 0
    facts = json.loads(capsys.readouterr().out)
    with zipfile.ZipFile(file) as archive:
        assert [line.split()[0] for line in facts["bundle"]] == archive.namelist()
        assert json.loads(archive.read("doctor.json")) == facts["checks"]
        assert {setting["name"] for setting in json.loads(archive.read("settings.json"))} > {"pause_busy", "max_vram"}
        assert archive.read("log.txt") == b"a line\n"
    assert {"disk", "driver", "settings", "torch", "clock", "peers", "rule pause_on_battery"} <= {
        check["name"] for check in facts["checks"]
    }
    before = file.read_bytes()
    assert main(command) == 1
    assert "exists already" in capsys.readouterr().err
    assert file.read_bytes() == before


def test_a_file_that_cannot_be_written_is_said(home: Home, tmp_path: Path) -> None:
    with pytest.raises(AppError, match="cannot be written"):
        write_bundle(tmp_path / "missing" / "bug.zip", home, {})


def test_the_tail_of_a_long_log_begins_with_a_whole_line(tmp_path: Path) -> None:
    log = tmp_path / "node.log"
    log.write_text("".join(f"line {number}\n" for number in range(100_000)))
    tail = log_tail(log)
    assert len(tail) <= LOG_BYTES
    assert tail.startswith("line ")
    assert tail.endswith("line 99999\n")
    assert log_tail(tmp_path / "missing") == ""


def test_rules_without_their_sensors_are_warned_of_where_somebody_counts_on_them() -> None:
    lacking = RuleView(
        "pause_heat", "too hot", enabled=True, available=False, text="this system reports no temperature"
    )
    assert check_sensor(lacking, "pause_above").status == "warn"
    assert "config unset pause_above" in check_sensor(lacking, "pause_above").mend
    assert check_sensor(lacking, "pause_on_battery").status == "skip"
    assert "on, and applies now; 90" in check_sensor(RuleView("x", "", True, True, text="90 °C"), "pause_above").detail


def test_settings_and_driver(tmp_path: Path) -> None:
    assert check_settings(tmp_path, ["colour"]).status == "warn"
    assert check_settings(tmp_path, [], "it is no TOML").status == "fail"
    assert check_settings(tmp_path / "none", []).status == "ok"
    assert check_driver("570.1", 2).detail == "NVIDIA 570.1, 2 cards"
    assert check_driver(None, 0).status == "skip"

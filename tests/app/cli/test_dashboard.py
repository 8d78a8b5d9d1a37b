"""The dashboard's way to the node of a home folder: which node it reaches, and what it says of one that has ended."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import app.api.client
from app.api.client import Client
from app.cli.dashboard import START_LOG, HomeConnector
from app.core.errors import NotRunning


def failed_child(folder: Path) -> subprocess.Popen[bytes]:
    """A process that has ended as a node does that finds another one in its home folder, with its log."""
    (folder / "logs").mkdir()
    (folder / "logs" / START_LOG).write_text("shoal: a node already runs here: stop it with `shoal stop`\n")
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    process.wait(30)
    return process


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Sets if a node is found in the home folder."""

    def found(is_there: bool) -> None:
        def client_of(folder: Path) -> Client:
            if not is_there:
                raise NotRunning("no node runs here")
            return Client("http://127.0.0.1:1", "token")

        monkeypatch.setattr(app.api.client, "client_of", client_of)

    return found


def test_a_node_that_is_stopped_is_not_taken_for_an_earlier_one_that_did_not_start(
    tmp_path: Path, running: Callable[[bool], None]
) -> None:
    """Somebody else started a node at the same moment, so the dashboard's own ended; the other one was reached."""
    connector = HomeConnector(tmp_path)
    connector.process = failed_child(tmp_path)
    running(True)
    connector.client()
    running(False)
    with pytest.raises(NotRunning):
        connector.client()
    assert connector.ended() is None


def test_a_node_that_did_not_start_says_why(tmp_path: Path, running: Callable[[bool], None]) -> None:
    connector = HomeConnector(tmp_path)
    connector.process = failed_child(tmp_path)
    running(False)
    with pytest.raises(NotRunning):
        connector.client()
    assert connector.ended() == "the node did not start: a node already runs here: stop it with `shoal stop`"

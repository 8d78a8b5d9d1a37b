"""`shoal` alone: the dashboard of the node in the home folder, which is started if none runs, or of one elsewhere.

A node that is started here is a process of its own: it inherits nothing but its environment, and stays when the
dashboard goes.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from app.core.errors import HomeError, UsageError

if TYPE_CHECKING:
    from app.api.client import Client

START_LOG = "start.log"
_MAX_LAST_WORDS = 4096


def run_dashboard(arguments: argparse.Namespace) -> int:
    """Show the dashboard; without a terminal, serve."""
    elsewhere: str | None = arguments.node
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        if elsewhere is not None:
            raise UsageError("--node shows the dashboard, which needs a terminal")
        return _serve(arguments.home)
    from ui.app import Dashboard

    door = HomeConnector(arguments.home) if elsewhere is None else UrlConnector(elsewhere, arguments.home)
    dashboard = Dashboard(door, folder=arguments.home)
    gc.freeze()  # what is loaded stays: to look through it for garbage again and again would hold up keys
    dashboard.run()
    return dashboard.return_code or 0


def _serve(home: Path) -> int:
    from app.cli import serve

    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    chosen = parser.parse_args([])
    chosen.home = home
    return serve.run_serve(chosen)


class HomeConnector:
    """The node of a home folder; satisfies `ui.state.follower.NodeConnector`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None
        self._was_reached = False

    def client(self) -> Client:
        """The running node's client."""
        from app.api.client import client_of

        client = client_of(self.folder)
        self._was_reached = True
        return client

    def coming_up(self) -> bool:
        """Whether the node that was started here has not been reached yet."""
        return self.process is not None and not self._was_reached and self.process.poll() is None

    def ended(self) -> str | None:
        """How the node that was started here failed, in its own last words."""
        status = None if self.process is None else self.process.poll()
        if not status:
            return None
        if status < 0:  # what it said last has nothing to do with it
            return f"the node was ended by signal {-status}"
        try:
            raw = self._log_path().read_bytes()[-_MAX_LAST_WORDS:]
        except OSError:
            raw = b""
        lines = [line for line in raw.decode("utf-8", "replace").splitlines() if line.strip()]
        return f"the node ended with status {status}: {lines[-1] if lines else 'it said nothing'}"

    def start(self) -> None:
        """Start a node unless one runs."""
        from app.api.client import running_client
        from app.config.home import Home

        if running_client(self.folder) is not None or (self.process is not None and self.process.poll() is None):
            return
        home = Home.open(self.folder)
        self._was_reached = False
        try:
            home.log_folder.mkdir(mode=0o700, exist_ok=True)
            with open(self._log_path(), "wb") as log:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "app.cli", "serve", "--home", str(self.folder)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    start_new_session=True,  # ctrl+c in this terminal is not for the node
                    creationflags=getattr(subprocess, "DETACHED_PROCESS", 0),
                )
        except OSError as error:
            raise HomeError(f"no node could be started in {self.folder}: {error.strerror or error}") from error

    def _log_path(self) -> Path:
        return self.folder / "logs" / START_LOG


class UrlConnector:
    """A node elsewhere; satisfies `ui.state.follower.NodeConnector`."""

    def __init__(self, url: str, home: Path) -> None:
        self._url, self._home = url, home

    def client(self) -> Client:
        """Its client, with the token of `SHOAL_TOKEN` or of the home folder."""
        from app.api.client import Client
        from app.config.home import Home, api_token

        return Client(self._url, os.environ.get("SHOAL_TOKEN") or api_token(Home(self._home)))

    def coming_up(self) -> bool:
        """It is not for us to start."""
        return False

    def ended(self) -> str | None:
        """Nor to see end."""
        return None

    def start(self) -> None:
        """Nothing."""

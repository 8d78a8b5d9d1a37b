"""`shoal` without a command: the dashboard of the home folder's node, started if none runs, or of the node at a URL.

A node started here is a detached process: it inherits only the environment, and keeps running after the dashboard ends.
The dashboard itself is `ui.app`.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from app.core.errors import HomeError, NotRunning, UsageError
from p2p.platform import apart_from_terminal, module_command

if TYPE_CHECKING:
    from app.api.client import Client

START_LOG = "start.log"
_LOG_TAIL_BYTES = 4096


def run_dashboard(arguments: argparse.Namespace) -> int:
    """Show the dashboard; without a terminal, run the node in the foreground as `shoal serve` does."""
    url: str | None = arguments.node
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        if url is not None:
            raise UsageError("--node shows the dashboard, which needs a terminal")
        return _serve(arguments.home)
    from ui.app import Dashboard

    connector = HomeConnector(arguments.home) if url is None else UrlConnector(url, arguments.home)
    dashboard = Dashboard(connector, folder=arguments.home)
    gc.freeze()  # what is imported stays loaded; scanning it again and again would delay key presses
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
    """Connects to the node of a home folder, and can start it; satisfies `ui.state.follower.NodeConnector`."""

    can_start = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None
        self._was_reached = False

    def client(self) -> Client:
        """Return a client for the running node; raises `NotRunning` if none runs."""
        from app.api.client import client_of

        client = client_of(self.folder)
        self._was_reached = True
        if self.process is not None and self.process.poll() is not None:
            self.process = None  # another one runs: how this one ended says nothing about it
        return client

    def coming_up(self) -> bool:
        """True while a node that was started here runs but has not been reached yet."""
        return self.process is not None and not self._was_reached and self.process.poll() is None

    def ended(self) -> str | None:
        """Return how the node that was started here failed, with the last line of its stderr; None if it did not."""
        status = None if self.process is None else self.process.poll()
        if not status:
            return None
        if status < 0:  # killed by a signal, so the last line of its log is not the cause
            return f"the node was killed (signal {-status})"
        try:
            raw = self._log_path().read_bytes()[-_LOG_TAIL_BYTES:]
        except OSError:
            raw = b""
        lines = [line for line in raw.decode("utf-8", "replace").splitlines() if line.strip()]
        cause = lines[-1].removeprefix("shoal: ") if lines else "it printed nothing"
        return f"the node {'ended' if self._was_reached else 'did not start'}: {cause}"

    def settings(self) -> list[dict[str, Any]]:
        """Return all settings of the home folder's file, as `/control/config` does; raises `ConfigError`."""
        from app.config.file import load_config
        from app.config.home import Home
        from app.config.settings import SETTINGS

        config = load_config(Home(self.folder).config_file, os.environ)
        return [config.facts(name) for name in SETTINGS]

    def set_setting(self, name: str, text: str | None) -> None:
        """Write one setting to the file, or reset it; raises `ConfigError`."""
        from app.config.file import set_value, unset
        from app.config.home import Home

        path = Home.open(self.folder).config_file
        if text is None:
            unset(path, name)
        else:
            set_value(path, name, text)

    def start(self) -> None:
        """Start a node unless one runs; raises `HomeError` if that fails."""
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
                    module_command("app.cli", "serve", "--home", str(self.folder)),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    **apart_from_terminal(),
                )
        except OSError as error:
            raise HomeError(f"cannot start a node in {self.folder}: {error.strerror or error}") from error

    def _log_path(self) -> Path:
        return self.folder / "logs" / START_LOG


class WatchConnector(HomeConnector):
    """Connects to the node of a home folder, but never starts one or changes its settings."""

    can_start = False

    def client(self) -> Client:
        """Return a client for the running node; raises `NotRunning` without naming the folder, for strangers' eyes."""
        try:
            return super().client()
        except NotRunning:
            raise NotRunning("no node runs here now") from None

    def start(self) -> None:
        """Do nothing: whoever only looks starts no node."""

    def set_setting(self, name: str, text: str | None) -> None:
        """Raise `NotRunning`: whoever only looks changes nothing."""
        raise NotRunning("this view is read-only")


def _is_same_place(url: str, node_url: str) -> bool:
    """True if a URL leads to the API at `node_url` of this machine."""
    asked, node = urlsplit(url), urlsplit(node_url)
    return asked.port == node.port and asked.hostname in ("localhost", node.hostname)


class UrlConnector:
    """Connects to a node by URL, and never starts one; satisfies `ui.state.follower.NodeConnector`."""

    can_start = False

    def __init__(self, url: str, home: Path) -> None:
        self._url, self._home = url, home

    def client(self) -> Client:
        """Return a client with the token from `SHOAL_TOKEN`, or with that of the home if its node runs at this URL.

        Raises `NotRunning` otherwise: any program may have the port of a node that has ended, and whoever is sent the
        token controls the node.
        """
        from app.api.client import Client, running_client

        if token := os.environ.get("SHOAL_TOKEN"):
            return Client(self._url, token)
        client = running_client(self._home)
        if client is None or not _is_same_place(self._url, client.url):
            raise NotRunning(
                f"the node of {self._home} does not run at {self._url[:80]}: start it, or set SHOAL_TOKEN to the token "
                "of the node there"
            )
        return client

    def coming_up(self) -> bool:
        """Return False: this class starts no node."""
        return False

    def ended(self) -> str | None:
        """Return None: this class does not watch the node's process."""
        return None

    def settings(self) -> list[dict[str, Any]]:
        """Raise `NotRunning`: the settings file of a node given by URL is not here."""
        raise NotRunning("the settings of a node elsewhere are known only while it answers")

    def set_setting(self, name: str, text: str | None) -> None:
        """Raise `NotRunning`, as `settings` does."""
        self.settings()

    def start(self) -> None:
        """Do nothing: a node given by URL is started by its own user."""

"""Real `shoal` processes for tests: nodes that serve until they are ended, and commands that answer."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

PATIENCE_S = 60.0  # for a machine that is busy; nothing waits this long when all is well
LOOPBACK = "/ip4/127.0.0.1/tcp/0"


@dataclass(frozen=True)
class Answer:
    """What a command said, and how long it took."""

    status: int
    out: str
    err: str
    seconds: float

    @property
    def facts(self) -> Any:
        assert self.status == 0, self.err
        return json.loads(self.out)


@dataclass(frozen=True)
class Place:
    """A home folder and the environment of every process that uses it."""

    home: Path
    cache: Path

    def environment(self, more: Mapping[str, str] = {}) -> dict[str, str]:
        """No variable of the person's own reaches a test."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
        return {**kept, "SHOAL_HOME": str(self.home), "SHOAL_CACHE": str(self.cache), **more}

    def shoal(self, *arguments: str, text: str = "", patience_s: float = PATIENCE_S, **variables: str) -> Answer:
        """Run a command to its end."""
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "app.cli", *arguments],
            input=text,
            env=self.environment(variables),
            capture_output=True,
            text=True,
            timeout=patience_s,
            check=False,
        )
        return Answer(done.returncode, done.stdout, done.stderr, time.monotonic() - began)

    def facts(self, *arguments: str) -> Any:
        """What a command says with --json."""
        return self.shoal(*arguments, "--json").facts

    def node_file(self) -> dict[str, Any]:
        """What the running node says of itself."""
        content: dict[str, Any] = json.loads((self.home / "node.json").read_text())
        return content


class Serving:
    """A `shoal serve` process; it hosts nothing unless it is given memory."""

    def __init__(
        self,
        place: Place,
        *arguments: str,
        max_vram: str = "0",
        program: Sequence[str] = ("-m", "app.cli"),
        **variables: str,
    ) -> None:
        self.place = place
        flags = [f"--listen={LOOPBACK}", "--api-port=0", f"--max-vram={max_vram}", *arguments]
        self.process = subprocess.Popen(
            [sys.executable, *program, "serve", *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=place.environment(variables),
            text=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self.errors: list[str] = []
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._readers = [
            threading.Thread(target=_read, args=(self.process.stdout, self._lines.put), daemon=True),
            threading.Thread(target=_read, args=(self.process.stderr, self._heard_error), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _heard_error(self, line: str | None) -> None:
        if line is not None:
            self.errors.append(line)

    def ready(self, seconds: float = PATIENCE_S) -> str:
        """Wait for the `ready` line."""
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise AssertionError(f"not ready within {seconds:.0f} s: {self.errors}") from None
        assert line is not None, f"serve ended with {self.process.wait()}: {self.errors}"
        assert line.startswith("ready "), line
        return line

    def up(self) -> None:
        """Wait until the API can be reached, whatever the node's state."""
        deadline = time.monotonic() + PATIENCE_S
        while not (self.place.home / "node.json").exists():
            assert self.process.poll() is None, self.errors
            assert time.monotonic() < deadline, "the node did not come up"
            time.sleep(0.02)

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to end, and wait until it has."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        return self.ended()

    def ended(self) -> int:
        """Wait for its end; returns its exit status."""
        try:
            status = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        for reader in self._readers:
            reader.join()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
        return status

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.ended()


def _read(stream: IO[str], heard: Any) -> None:
    for line in stream:
        heard(line.rstrip("\n"))
    heard(None)


def wait_until(check: Any, what: str, seconds: float = PATIENCE_S) -> None:
    """Look again and again until something is so; for what another process must come to know by itself."""
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.05)

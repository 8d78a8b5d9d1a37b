"""Real `shoal` processes for tests: nodes that serve until they are ended, and commands that answer."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from app.api.client import client_of
from tests.process.fork_server import ForkedProcess, is_used

PATIENCE_S = 60.0  # for a machine that is busy; nothing waits this long when all is well
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
FRESH = ("-m", "app.cli")  # a program that a new interpreter runs, without what the fork server has imported


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
        own = {"SHOAL_HOME": str(self.home), "SHOAL_CACHE": str(self.cache), "SHOAL_MAP_PORT": "false"}
        return {**kept, **own, **more}

    def shoal(self, *arguments: str, text: str = "", patience_s: float = PATIENCE_S, **variables: str) -> Answer:
        """Run a command to its end."""
        began = time.monotonic()
        with (
            tempfile.TemporaryFile("w+") as given,
            tempfile.TemporaryFile("w+") as out,
            tempfile.TemporaryFile("w+") as err,
        ):
            given.write(text)
            given.seek(0)
            process = start(arguments, self.environment(variables), (given, out, err))
            try:
                status = process.wait(patience_s)
            finally:
                process.kill()
            for stream in (out, err):
                stream.seek(0)
            return Answer(status, out.read(), err.read(), time.monotonic() - began)

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
        program: Sequence[str] = (),
        listen: str = LOOPBACK,
        **variables: str,
    ) -> None:
        self.place = place
        flags = [f"--listen={listen}", "--api-port=0", f"--max-vram={max_vram}", *arguments]
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        with open(os.devnull) as nothing, os.fdopen(out_end, "w") as output, os.fdopen(err_end, "w") as errors:
            streams = (nothing, output, errors)
            self.process = start(["serve", *flags], place.environment(variables), streams, program)
        self._lines: queue.Queue[str | None] = queue.Queue()
        self.errors: list[str] = []
        self._readers = [
            threading.Thread(target=_read, args=(out, self._lines.put), daemon=True),
            threading.Thread(target=_read, args=(err, self._heard_error), daemon=True),
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
        return status

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.ended()


def start(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    streams: tuple[IO[str], IO[str], IO[str]],
    program: Sequence[str] = (),
) -> subprocess.Popen[bytes] | ForkedProcess:
    """Start `shoal` with these arguments and streams; from a new interpreter where a program is named."""
    if is_used() and not program:
        return ForkedProcess(arguments, environment, [stream.fileno() for stream in streams])
    stdin, stdout, stderr = streams
    command = [sys.executable, *(program or FRESH), *arguments]
    return subprocess.Popen(command, env=environment, stdin=stdin, stdout=stdout, stderr=stderr)


def _read(descriptor: int, heard: Any) -> None:
    with os.fdopen(descriptor) as stream:
        for line in stream:
            heard(line.rstrip("\n"))
    heard(None)


def wait_until(check: Any, what: str, seconds: float = PATIENCE_S) -> None:
    """Look again and again until something is so; for what another process must come to know by itself."""
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.05)


def is_covered(place: Place) -> bool:
    """Whether a node knows a holder of every block; asks quicker than a command would."""
    return all(block["holders"] for block in client_of(place.home).get("/control/blocks"))

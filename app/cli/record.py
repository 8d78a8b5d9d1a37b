"""`shoal record` and `shoal replay`: a running node's snapshots in a file, and the dashboard of such a file.

The form of the file is in `app.snapshot.recording`; the dashboards are `ui.replay` and, for a cast, `ui.cast`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from app.cli.command import Command, print_json
from app.cli.parser import duration_argument, number_argument, size_argument
from app.core.errors import AppError, NotRunning, UsageError
from app.core.wall_clock import wall_ms
from app.snapshot.recording import MAX_FILE_BYTES, FrameEncoder, read_recording

if TYPE_CHECKING:
    from app.api.client import Event

FOR_S = 3600.0
SIZE_BYTES = 64 * 10**6
SMALLEST_BYTES = 100_000
CAST_SIZE = (120, 36)  # columns and rows


@dataclass(frozen=True)
class Recorded:
    """How a recording ended, and what is in it."""

    file: str
    frames: int
    bytes: int
    seconds: float
    ended: str  # why


def add_record_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the file, its limits, and the form of a cast."""
    parser.add_argument("file", metavar="FILE", type=Path, help="the new file; `shoal replay FILE` shows it")
    words = "stop after this time, like 10m (default: 1h)"
    parser.add_argument("--for", metavar="TIME", dest="for_s", type=duration_argument, default=FOR_S, help=words)
    words = "stop before the file is larger, like 20MB (default: 64MB)"
    parser.add_argument("--size", metavar="SIZE", type=size_argument, default=SIZE_BYTES, help=words)
    words = "write an asciicast of the dashboard instead, for a README: asciinema plays it, `shoal replay` does not"
    parser.add_argument("--cast", action="store_true", help=words)
    words = "the tab that a cast shows (default: overview)"
    parser.add_argument("--tab", choices=("overview", "swarm"), default="overview", help=words)


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the file and the speed."""
    parser.add_argument("file", metavar="FILE", type=Path, help="a file that `shoal record` wrote")
    words = "how many times faster than it happened, 0.25 to 64 (default: 1)"
    parser.add_argument("--speed", type=number_argument(float, 0.25, 64.0), default=1.0, metavar="N", help=words)


def run_record(arguments: argparse.Namespace) -> int:
    """Record the node of this home until Ctrl-C, a limit, or the node's end; then say what was written."""
    if not SMALLEST_BYTES <= arguments.size <= MAX_FILE_BYTES:
        raise UsageError(f"--size must be from 100kB to {MAX_FILE_BYTES // 2**20}MiB")
    result = _record_cast(arguments) if arguments.cast else _record_node(arguments)
    if arguments.json:
        print_json(asdict(result))
    else:
        frames = "" if arguments.cast else f"{result.frames} frames, "
        print(f"{result.file}: {frames}{result.bytes} bytes, {result.seconds:.0f} s; {result.ended}")
    return 0


def _record_node(arguments: argparse.Namespace) -> Recorded:
    from app.api.client import Hangup, client_of
    from app.config.home import Home
    from app.system.bug_report import secrets_of, without_secrets

    client, hangup = client_of(arguments.home), Hangup()
    hidden = secrets_of(Home(arguments.home))
    recorder = Recorder(arguments.size, lambda text: without_secrets(text, hidden))
    timer = threading.Timer(arguments.for_s, hangup.hang_up)
    timer.daemon = True
    timer.start()
    with new_file(arguments.file) as write:
        _say_begun(arguments)
        try:
            ended = recorder.run(client.events(hangup=hangup), write)
        except KeyboardInterrupt:
            ended = "stopped by hand"
        except NotRunning:
            if not recorder.frames:
                raise
            ended = "the node has ended"
    ended = "the time is over" if hangup.is_over else ended
    timer.cancel()
    return Recorded(str(arguments.file), recorder.frames, recorder.bytes, recorder.seconds, ended)


def _record_cast(arguments: argparse.Namespace) -> Recorded:
    from app.api.client import client_of
    from app.cli.dashboard import WatchConnector

    os.environ["TEXTUAL_COLOR_SYSTEM"] = "truecolor"  # Textual reads it when it is imported
    from ui.cast import CastDashboard

    client_of(arguments.home)  # raises if no node runs, before a file is made
    with new_file(arguments.file) as write:
        _say_begun(arguments)
        app = CastDashboard(
            WatchConnector(arguments.home),
            write,
            tab=arguments.tab,
            most_bytes=arguments.size,
            most_s=arguments.for_s,
            size=CAST_SIZE,
        )
        app.run(size=CAST_SIZE)
        if app.trouble is not None:
            raise app.trouble
    return Recorded(str(arguments.file), app.outputs, app.bytes, app.seconds, app.ended)


def _say_begun(arguments: argparse.Namespace) -> None:
    if not arguments.json:
        print(f"recording to {arguments.file}; Ctrl-C stops", flush=True)


class Recorder:
    """Writes the events of a node as a recording of at most `most_bytes`; `clean` removes secrets from a text."""

    def __init__(
        self,
        most_bytes: int,
        clean: Callable[[str], str],
        now_ms: Callable[[], int] = wall_ms,
    ) -> None:
        self._most_bytes, self._clean, self._now_ms = most_bytes, clean, now_ms
        self._began_ms = self._last_ms = now_ms()
        self._encoder, self._early = FrameEncoder(self._began_ms), list[bytes]()
        self.frames = self.bytes = 0

    @property
    def seconds(self) -> float:
        """Time from the begin to the last line."""
        return (self._last_ms - self._began_ms) / 1000

    def run(self, events: Iterable[Event], write: Callable[[bytes], None]) -> str:
        """Write lines until the events end or the size is reached; return why it ended."""
        for event in events:
            self._last_ms = self._now_ms()
            lines = self._lines_of(event)
            if self.bytes + len(lines) > self._most_bytes:
                return "the file has the size that --size allows"
            if lines:
                write(lines)
                self.bytes += len(lines)
                self.frames += event.name == "snapshot"
        return "the node has ended"

    def _lines_of(self, event: Event) -> bytes:
        """Return the lines of one event; notes from before the first snapshot wait for it, as the header does."""
        data: dict[str, Any] = json.loads(self._clean(event.text))
        if event.name == "note":
            line = self._encoder.note(self._last_ms, data)
            if self.frames:
                return line
            self._early.append(line)
        if event.name != "snapshot":
            return b""
        line = self._encoder.frame(self._last_ms, data)
        if self.frames:
            return line
        return b"".join([self._encoder.header(str(data.get("version", ""))), *self._early, line])


@contextmanager
def new_file(path: Path) -> Iterator[Callable[[bytes], None]]:
    """Create a file that only its owner may read, and yield a function that appends to it; raises `AppError`.

    Each piece is handed to the system at once, so that a crash loses nothing of what was written before.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags, 0o600)

    try:
        file: IO[bytes] = open(path, "xb", opener=opener)
    except FileExistsError:
        raise AppError(f"{path} exists already: name another file, or remove it") from None
    except OSError as error:
        raise AppError(f"{path} cannot be written: {error.strerror or error}") from error

    def write(piece: bytes) -> None:
        file.write(piece)
        file.flush()

    try:
        with file:
            yield write
    except OSError as error:
        words = f"{path} cannot be written any more: {error.strerror or error}"
        raise AppError(f"{words}; what was recorded until then can be shown") from error


def run_replay(arguments: argparse.Namespace) -> int:
    """Show a recording in the dashboard."""
    try:
        with open(arguments.file, "rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise AppError(f"{arguments.file} cannot be read: {error.strerror or error}") from error
    if len(raw) > MAX_FILE_BYTES:
        raise AppError(f"{arguments.file} is larger than {MAX_FILE_BYTES // 2**20} MiB: no recording of Shoal is")
    recording = read_recording(raw, str(arguments.file))
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("replay shows the dashboard, which needs a terminal")
    from ui.replay import Replay

    replay = Replay(recording, arguments.speed)
    replay.run()
    return replay.return_code or 0


COMMANDS = (
    Command("record", "write what the node does to a file, for `shoal replay`", run_record, add_record_arguments, True),
    Command("replay", "show a recording in the dashboard", run_replay, add_replay_arguments),
)

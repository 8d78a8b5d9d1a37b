"""The dashboard in a real terminal: crashes, a terminal that goes away, and the clipboard."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path

import pytest

pty = pytest.importorskip("pty", reason="a terminal of this kind is POSIX's")

CRASHING = """
import sys
from ui.app import Dashboard
from ui.state.store import Store

class Crashing(Dashboard):
    def on_ready(self):
        print("a stray word")
        self.copy_to_clipboard("sea")
        self.set_interval(0.05, self.fail)

    def fail(self):
        if [row.text for row in self.store.logs] == ["a stray word"]:
            raise RuntimeError("the hull is broken")

app = Crashing(None, store=Store())
app.run()
sys.exit(app.return_code)
"""
MODES = (1049, 1000, 1003, 2004)  # the other screen, the mouse, pasting
PATIENCE_S = 60.0


def in_terminal(code: str) -> tuple[int, bytes, bool]:
    """Run Python in a terminal of its own: how it ended, what it wrote, and whether the terminal is as it was."""
    import termios

    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 80)) if hasattr(termios, "tcsetwinsize") else None
    before = termios.tcgetattr(slave)
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=root,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"},
        start_new_session=True,
    )
    written = bytearray()
    os.set_blocking(master, False)
    try:
        while process.poll() is None:
            written += _read(master)
        written += _read(master)
        return process.returncode, bytes(written), termios.tcgetattr(slave) == before
    finally:
        process.kill()
        process.wait()
        os.close(slave)
        os.close(master)


def _read(master: int) -> bytes:
    import select

    ready, _, _ = select.select([master], [], [], 0.2)
    return os.read(master, 65536) if ready else b""


@pytest.mark.timeout(PATIENCE_S)
def test_a_crash_leaves_the_terminal_as_it_was_and_says_what_happened() -> None:
    status, written, is_restored = in_terminal(CRASHING)
    assert status != 0
    assert is_restored
    for mode in MODES:
        assert written.rfind(b"\x1b[?%dl" % mode) > written.rfind(b"\x1b[?%dh" % mode), mode
    assert written.rfind(b"\x1b[?25h") > written.rfind(b"\x1b[?25l")
    assert b"the hull is broken" in written[written.rfind(b"\x1b[?1049l") :]
    assert b"a stray word" not in written[: written.rfind(b"\x1b[?1049l")]
    assert b"\x1b]52;c;c2Vh\x07" in written  # `sea` in base64


LEAVING = """
import sys
from pathlib import Path
from ui.app import Dashboard
from ui.state.store import Store

class Leaving(Dashboard):
    def on_ready(self):
        print("ready", file=sys.__stdout__, flush=True)

    def on_unmount(self):
        super().on_unmount()
        Path(sys.argv[1]).write_text("left")

Leaving(None, store=Store()).run()
"""


@pytest.mark.timeout(PATIENCE_S)
@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda process, terminal: terminal.close(), id="the window is closed"),
        pytest.param(lambda process, terminal: process.send_signal(signal.SIGHUP), id="SIGHUP"),
        pytest.param(lambda process, terminal: process.send_signal(signal.SIGTERM), id="SIGTERM"),
    ],
)
def test_a_dashboard_whose_terminal_goes_away_ends_and_keeps_what_it_has(
    end: Callable[[subprocess.Popen[bytes], FileIO], None], tmp_path: Path
) -> None:
    master, slave = pty.openpty()
    terminal, mark = FileIO(master, "r+"), tmp_path / "mark"
    # Without a session of its own the terminal does not control the process, so that no SIGHUP comes when it goes.
    process = subprocess.Popen(
        [sys.executable, "-c", LEAVING, str(mark)],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"},
    )
    os.close(slave)
    try:
        written = b""
        while b"ready" not in written:
            written += terminal.read(65536) or b""
        end(process, terminal)
        with suppress(OSError, ValueError):  # nobody has the other side any more, or this one
            while terminal.read(65536):
                pass  # what it writes at its end
        process.wait()
        assert mark.read_text() == "left"
    finally:
        process.kill()
        process.wait()
        terminal.close()

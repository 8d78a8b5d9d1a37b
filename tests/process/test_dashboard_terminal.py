"""The dashboard in a real terminal: what it leaves behind when it crashes, and what it sends to the clipboard."""

from __future__ import annotations

import os
import subprocess
import sys
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
        self.set_timer(0.2, self.fail)

    def fail(self):
        assert [row.text for row in self.store.logs] == ["a stray word"]
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

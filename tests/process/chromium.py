"""Chromium without a window, driven over its debugging pipe: pages, keys, scripts, pictures."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE_S = 60.0
# Chromium reads commands from descriptor 3 and writes answers to 4.
_TRAMPOLINE = "import os, sys; a = sys.argv; os.dup2(int(a[1]), 3); os.dup2(int(a[2]), 4); os.execv(a[3], a[3:])"
_TEXT = "(window.shoalScreen ? shoalScreen() : '') + '\\n' + document.getElementById('notice')?.innerText"
_PASTE = """(() => {
  const data = new DataTransfer();
  data.setData('text', TEXT);
  const event = new ClipboardEvent('paste', {clipboardData: data, bubbles: true});
  document.getElementById('input').dispatchEvent(event);
})()"""
_CODES = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowDown": 40, "ArrowUp": 38}


class BrowserError(Exception):
    """Chromium could not carry out a command, such as a script in a page that is not loaded yet."""


class Chromium:
    """A browser with a profile of its own; its pages are closed with it."""

    def __init__(self, profile: Path, size: tuple[int, int] = (1280, 800)) -> None:
        assert PROGRAM is not None
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--remote-debugging-pipe", f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}"]
        (their_in, self._out), (self._in, their_out) = (_high_pipe(), _high_pipe())
        command = [sys.executable, "-I", "-c", _TRAMPOLINE, str(their_in), str(their_out), PROGRAM, *flags]
        self._process = subprocess.Popen(
            command, pass_fds=(their_in, their_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(their_in)
        os.close(their_out)
        self._numbers = itertools.count(1)
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        buffer = b""
        while data := os.read(self._in, 1 << 16):
            *messages, buffer = (buffer + data).split(b"\0")
            for message in messages:
                decoded = json.loads(message)
                if "id" in decoded:  # the rest are events, which nobody asked for
                    self._answers.put(decoded)

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Give a command and wait for its answer."""
        number = next(self._numbers)
        command = {"id": number, "method": method, "params": parameters}
        if session is not None:
            command["sessionId"] = session
        os.write(self._out, json.dumps(command).encode() + b"\0")
        while True:
            answer = self._answers.get(timeout=PATIENCE_S)
            if answer["id"] == number:
                if "error" in answer:
                    raise BrowserError(answer["error"])
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, url: str) -> Page:
        """Open a page."""
        target = self.call("Target.createTarget", url=url)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return Page(self, str(session))

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        os.close(self._in)
        os.close(self._out)


class Page:
    """One page."""

    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser, self._session = browser, session

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def text(self) -> str:
        """What the terminal shows, and what the page says."""
        try:
            return str(self.run(_TEXT))
        except BrowserError:
            return ""  # between two documents

    def until(self, words: str, seconds: float = PATIENCE_S) -> str:
        """Wait until the page shows these words; returns all that it shows."""
        deadline = time.monotonic() + seconds
        while words not in (shown := self.text()):
            assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {words!r} in\n{shown}"
            time.sleep(0.05)
        return shown

    def type(self, text: str) -> None:
        """Type text, as an input method does."""
        self._call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press a key that is not text."""
        code = _CODES.get(key, ord(key[0].upper()))
        for kind in ("rawKeyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def paste(self, text: str) -> None:
        """Paste a text."""
        self.run(_PASTE.replace("TEXT", json.dumps(text)))

    def click(self, x: float, y: float) -> None:
        """Click at a place."""
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def reload(self) -> None:
        """Load the page again."""
        self._call("Page.reload")

    def picture(self) -> bytes:
        """A PNG of the page."""
        return base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"])


def _high_pipe() -> tuple[int, int]:
    """A pipe whose descriptors are none of those that Chromium uses."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]

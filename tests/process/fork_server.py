"""A process that has imported what nodes need, and forks a `shoal` process for each request.

Starting a node costs seconds of a core, nearly all of them for imports. Here they are paid once for each worker of the
tests. What is forked is a process like any other, with an environment, streams, signals and an end of its own; only its
modules were read before. Only tests of `tests/process` use it, and only on Linux: what benches and long tests measure
are processes as users start them.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import logging
import os
import pkgutil
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from app.cli import main

PACKAGES = ("app", "p2p")
# Imported when they are first used; without a card nothing imports Triton, which is why `engine` is not imported whole.
LATER = ("torch", "engine.hosting", "engine.local_model", "engine.sources.opening", "engine.device.probe")
REQUEST_LIMIT = 1 << 17
STREAMS = 3


_is_used = False


@contextlib.contextmanager
def used() -> Iterator[None]:
    """Let processes be forked within this context, where the system can do it."""
    global _is_used
    _is_used = sys.platform == "linux"
    try:
        yield
    finally:
        _is_used = False


def is_used() -> bool:
    """Whether processes are to be forked."""
    return _is_used


class ForkedProcess:
    """A `shoal` process that the fork server started; offers what tests use of `subprocess.Popen`."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        streams: Sequence[int],
        *,
        in_terminal: bool = False,
    ) -> None:
        """Ask for it; `in_terminal` gives it a session of its own, with the terminal that its streams are."""
        self._link, theirs = socket.socketpair()
        request = json.dumps(
            {
                "arguments": arguments,
                "environment": dict(environment),
                "folder": os.getcwd(),
                "in_terminal": in_terminal,
            }
        )
        with theirs:
            socket.send_fds(_server(), [request.encode()], [*streams, theirs.fileno()])
        self.pid = int(self._link.recv(16))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; returns its exit status."""
        if self.returncode is None:
            self._link.settimeout(timeout)
            try:
                told = self._link.recv(16)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0) from None
            self.returncode = int(told or -signal.SIGKILL)
            self._link.close()
        return self.returncode

    def send_signal(self, what: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, what)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


@functools.cache
def _server() -> socket.socket:
    """The socket of this worker's fork server, which ends with the worker."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.process.fork_server", str(theirs.fileno())]
    with theirs:
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def serve(requests: socket.socket) -> None:
    """Fork a process for each request until nobody can ask."""
    for name in LATER:
        importlib.import_module(name)
    for package in PACKAGES:
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    gc.freeze()  # what all have in common is not touched, and so not copied
    links: dict[int, socket.socket] = {}  # by process
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is woken:
                    woken.recv(4096)
                    _tell_ends(links)
                    continue
                message, descriptors, _, _ = socket.recv_fds(requests, REQUEST_LIMIT, STREAMS + 1)
                if not message:
                    for process in links:
                        os.kill(process, signal.SIGKILL)
                    return
                link = socket.socket(fileno=descriptors[STREAMS])
                process = os.fork()
                if process == 0:
                    for other in (*links.values(), link, requests, woken, wake):
                        other.close()
                    _become(json.loads(message), descriptors[:STREAMS])
                for stream in descriptors[:STREAMS]:
                    os.close(stream)
                links[process] = link
                link.send(str(process).encode())


def _tell_ends(links: dict[int, socket.socket]) -> None:
    """Tell who asked for a process that it has ended, and how."""
    while links:
        process, status = os.waitpid(-1, os.WNOHANG)
        if not process:
            return
        with links.pop(process) as link:
            with contextlib.suppress(BrokenPipeError):  # nobody waits for it
                link.send(str(os.waitstatus_to_exitcode(status)).encode())


def _become(request: dict[str, Any], streams: Sequence[int]) -> NoReturn:
    """Be the process that was asked for, to its end."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    if request["in_terminal"]:
        import fcntl
        import termios

        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv[1:] = request["arguments"]
    try:
        status = main()
    except SystemExit as exit_:
        status = int(exit_.code or 0)
    for thread in threading.enumerate():
        if not (thread.daemon or thread is threading.main_thread()):
            thread.join()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)  # taking torch's modules apart would take longer than most commands


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))

"""Keeps the node's API alive: tests it with a request every `EVERY_S`, and restarts it after a crash or a failed test.

The listening socket stays open throughout, so the port does not change, and clients that connect during a restart wait
in the socket's queue. `app.api.server` does the serving.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from socket import socket
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import trio

from app.api import server
from app.api.guard import Application
from app.core.reasons import Reason, because
from app.core.signal import Signal
from p2p.supervise import supervise

if TYPE_CHECKING:
    from trio_typing import TaskStatus

EVERY_S = 30.0
TRY_AGAIN_S = 1.0  # between tests after a failed one, until one succeeds
PATIENCE_S = 20.0  # a machine under full load answers slowly

log = logging.getLogger("shoal.api")


class ApiHealth:
    """Result of the API's latest test; other parts of the node stop hosting while `trouble` is set."""

    def __init__(self) -> None:
        self.trouble: Reason | None = None
        self._changed = Signal()

    async def wait_change(self) -> None:
        """Wait until the API starts to fail, or works again."""
        await self._changed.wait()

    def note(self, trouble: Reason | None) -> None:
        """Record the result of a test; None means that the API answered."""
        if (trouble is None) != (self.trouble is None):
            self.trouble = trouble
            self._changed.notify()


class ApiSupervisor:
    """Serves the API on loopback and, if `lan` is given, on other addresses; `run` returns after `end` was called."""

    def __init__(
        self,
        sock: socket,
        build: Callable[[], Application],
        health: ApiHealth,
        lan: server.LanListener | None = None,
    ) -> None:
        self._sock, self._build, self._health, self._lan = sock, build, health, lan
        self._crowd = server.Crowd()
        self.url = server.url_of(sock)
        self._stopping, self._ended = trio.Event(), trio.Event()
        self._serving = trio.CancelScope()

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve, and restart after a crash or a failed test."""
        task_status.started()  # the socket listens already, so clients that connect now are queued
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            try:
                while not self._stopping.is_set():
                    with trio.CancelScope() as self._serving:
                        await supervise("the API", self._serve)
            finally:
                self.close()
                self._ended.set()
            nursery.cancel_scope.cancel()

    def close(self) -> None:
        """Close the sockets."""
        self._sock.close()
        if self._lan is not None:
            self._lan.sock.close()

    async def end(self) -> None:
        """Stop serving; open responses get `server.GRACE_S` seconds to finish."""
        self._stopping.set()
        await self._ended.wait()

    async def _serve(self) -> None:
        await server.serve(self._build(), self._sock.dup(), self._stopping.wait, self._lan, self._crowd)

    async def _watch(self) -> None:
        while True:
            await trio.sleep(EVERY_S if self._health.trouble is None else TRY_AGAIN_S)
            began_at = trio.current_time()
            trouble = await api_trouble(self.url)
            if self._crowd.turned_away_at >= began_at:
                trouble = None  # the test itself may have been turned away, without a word: many replies are no fault
            self._health.note(trouble)
            if trouble is not None and not self._stopping.is_set():
                log.error("the API failed its own test and is restarted: %s", trouble.text)
                self._serving.cancel()


async def api_trouble(url: str) -> Reason | None:
    """Send the API a request, and return why it failed, or None if it answered."""
    parts = urlsplit(url)
    assert parts.hostname is not None, "`server.url_of` always names a host"
    trouble = "the API does not answer as it should"
    try:
        with trio.fail_after(PATIENCE_S):
            stream = await trio.open_tcp_stream(parts.hostname, parts.port or 80)
            async with stream:
                await stream.send_all(f"GET /healthz HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
                answer = await stream.receive_some(64)
    except trio.TooSlowError:
        trouble = f"the API did not answer within {PATIENCE_S:.0f} s"
    except (OSError, trio.BrokenResourceError) as error:
        trouble = f"the API cannot be reached: {error}"
    else:
        if b" 200 " in answer:
            return None
    return because("probe_api", f"this node failed its own test: {trouble}")

"""The node's API as a part that is kept alive: tried now and then as anybody would, and begun anew where it fails.

The port stays the same throughout: whoever connects while the API begins anew waits a moment in the socket's queue.
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
from p2p.supervise import supervise

if TYPE_CHECKING:
    from trio_typing import TaskStatus

TRY_AGAIN_S = 1.0  # after a failed try, until it works again

log = logging.getLogger("shoal.api")


class ApiHealth:
    """Whether the API answers, for those who offer something only while it does."""

    def __init__(self) -> None:
        self.trouble: Reason | None = None
        self._news = trio.Event()

    async def wait_change(self) -> None:
        """Return after the next change."""
        await self._news.wait()

    def note(self, trouble: Reason | None) -> None:
        """What the last try said."""
        if (trouble is None) != (self.trouble is None):
            self.trouble = trouble
            news, self._news = self._news, trio.Event()
            news.set()


class ApiSupervisor:
    """The API on one socket; `run` ends after `end`."""

    def __init__(self, sock: socket, build: Callable[[], Application], health: ApiHealth) -> None:
        self._sock, self._build, self._health = sock, build, health
        self.url = server.url_of(sock)
        self._over, self._ended = trio.Event(), trio.Event()
        self._serving = trio.CancelScope()

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve, and begin anew after a crash or a failed try."""
        task_status.started()  # the socket listens already, so that nobody who comes now is turned away
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            try:
                while not self._over.is_set():
                    with trio.CancelScope() as self._serving:
                        await supervise("the API", self._serve)
            finally:
                self._sock.close()
                self._ended.set()
            nursery.cancel_scope.cancel()

    async def end(self) -> None:
        """Let answers that are under way finish, a moment at most, then stop."""
        self._over.set()
        await self._ended.wait()

    async def _serve(self) -> None:
        await server.serve(self._build(), self._sock.dup(), self._over.wait)

    async def _watch(self) -> None:
        while True:
            await trio.sleep(EVERY_S if self._health.trouble is None else TRY_AGAIN_S)
            trouble = await api_trouble(self.url)
            self._health.note(trouble)
            if trouble is not None and not self._over.is_set():
                log.error("the API failed its own test and starts anew: %s", trouble.text)
                self._serving.cancel()


EVERY_S = 30.0
PATIENCE_S = 20.0  # a device under full load takes its time


async def api_trouble(url: str) -> Reason | None:
    """Why the node's own API does not answer, or None."""
    parts = urlsplit(url)
    assert parts.hostname is not None, "the API's address is our own"
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

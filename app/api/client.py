"""The control API's client, for the command line and the dashboard.

It uses only the standard library's HTTP, because the usual client libraries import an event loop or two, which would
take every command more time than its work. All calls block; the dashboard makes them from worker threads.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote, urlsplit

from app.config.home import Home, NodeInfo, find_node, kept_token, require_node
from app.core import errors
from app.core.errors import AppError, NotRunning, UsageError
from app.core.reasons import NEXT_STEPS
from app.snapshot.codec import snapshot_from
from app.snapshot.views import Snapshot

TIMEOUT_S = 10.0
PATIENT_S = 120.0  # for commands that may search for peers or read a whole model
QUIET_S = 10.0  # without a line of a stream, after which the node is asked for a sign of life
LIFE_S = 20.0  # for that: a machine under full load answers slowly
_MAX_ANSWER_BYTES = 64 * 2**20
_MAX_LINE_BYTES = 16 * 2**20


class ApiFailure(AppError):
    """The node refused or failed the request; the message is the node's own."""


class WrongToken(AppError):
    """The node does not accept the token: it belongs to another home folder."""

    code = "wrong_token"


class NotAnswering(NotRunning):
    """Something takes the requests for the node, but nothing comes back in time: its process hangs or is stopped."""

    code = "not_answering"


_OF_ERRORS = (value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, AppError))
_ERRORS: dict[str, type[AppError]] = {WrongToken.code: WrongToken} | {
    error.code: error for error in _OF_ERRORS if error is not AppError
}


@dataclass(frozen=True)
class Event:
    """One server-sent event: its name, and its data as undecoded JSON text."""

    name: str
    text: str

    @property
    def data(self) -> dict[str, Any]:
        """Decode the data: on demand, because a reader may skip events that arrive faster than it can show them."""
        decoded: dict[str, Any] = json.loads(self.text)
        return decoded


class Hangup:
    """Lets one thread end a stream that another thread is reading."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self.is_over = False

    def attach(self, connected: socket.socket | None) -> None:
        """Name the socket to shut down; shuts it down at once if `hang_up` was called before."""
        with self._lock:
            self._socket = connected
        if self.is_over:
            self.hang_up()

    def hang_up(self) -> None:
        """Shut the socket down: the reading thread then sees the end of the stream."""
        self.is_over = True
        with self._lock, contextlib.suppress(OSError):
            if self._socket is not None:
                self._socket.shutdown(socket.SHUT_RDWR)


class LivenessWatch:
    """Ends a stream whose node hangs: a reply may take minutes to begin, but a node that is asked for life answers."""

    def __init__(self, client: Client, connected: socket.socket) -> None:
        self._client, self._hangup = client, Hangup()
        self._hangup.attach(connected)
        self._heard, self._over = threading.Event(), threading.Event()
        self.is_silent = False

    def __enter__(self) -> LivenessWatch:
        threading.Thread(target=self._watch, name="liveness", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()

    def heard(self) -> None:
        """Note that the stream goes on."""
        self._heard.set()

    def _watch(self) -> None:
        while not self._over.wait(QUIET_S):
            if self._heard.is_set():
                self._heard.clear()
                continue
            try:
                self._client.get("/healthz", timeout_s=LIFE_S)
            except NotAnswering:
                self.is_silent = True
                self._hangup.hang_up()
                return
            except AppError:
                pass  # it has ended, which the stream tells by itself, or has no place left


@dataclass(frozen=True)
class Client:
    """Talks to a running node by its API's URL and token.

    Calls raise `NotRunning` if the node cannot be reached, and the node's own error if it answers with one.
    """

    url: str
    token: str
    timeout_s: float = TIMEOUT_S

    def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        """Send a GET request and return the decoded JSON answer."""
        return self._request("GET", path, None, self.timeout_s if timeout_s is None else timeout_s)

    def post(self, path: str, body: dict[str, Any], *, timeout_s: float = PATIENT_S) -> Any:
        """Send a POST request and return the decoded JSON answer."""
        return self._request("POST", path, body, timeout_s)

    def put(self, path: str, body: dict[str, Any]) -> Any:
        """Send a PUT request and return the decoded JSON answer."""
        return self._request("PUT", path, body, self.timeout_s)

    def snapshot(self) -> Snapshot:
        """Fetch the node's whole visible state."""
        return snapshot_from(self.get("/control/snapshot"))

    def set_config(self, name: str, value: str | None) -> Any:
        """Change one setting; None resets it to its default."""
        return self.put(f"/control/config/{quote(name, safe='')}", {"value": value})

    def chat(
        self, request: dict[str, Any], *, silence_s: float = PATIENT_S, hangup: Hangup | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield the pieces of a reply, `{"text": …}`, then `{"done": …}`; raises if the reply fails on the way.

        Before the first piece, `{"waiting": …}` says for which block the reply waits. Raises `NotAnswering` once the
        node has sent nothing for `QUIET_S` and does not say that it lives.
        """
        for line in self._lines("POST", "/control/chat", request, silence_s, hangup):
            piece: dict[str, Any] = json.loads(line)
            if "error" in piece:
                raise _failure(200, line)
            yield piece
            if "done" in piece:
                return
        raise ApiFailure("the reply was cut off: the node has stopped")

    def events(self, *, silence_s: float = 60.0, hangup: Hangup | None = None) -> Iterator[Event]:
        """Yield the node's events until it stops; raises `NotAnswering` once it hangs, or is silent for `silence_s`."""
        return _events(self._lines("GET", "/control/events", None, silence_s, hangup))

    def _lines(
        self, method: str, path: str, body: dict[str, Any] | None, silence_s: float, hangup: Hangup | None
    ) -> Iterator[bytes]:
        """Send a request and yield the lines of its answer as they arrive."""
        connection = self._connection(silence_s)
        try:
            connection.connect()
            if hangup is not None:
                hangup.attach(connection.sock)  # now, because `getresponse` detaches the socket from the connection
            with LivenessWatch(self, connection.sock) as watch:
                try:
                    answer = self._send(connection, method, path, body)
                    if answer.status != 200:
                        raise _failure(answer.status, answer.read(_MAX_ANSWER_BYTES))
                    while line := answer.readline(_MAX_LINE_BYTES):
                        watch.heard()
                        yield line
                except (OSError, http.client.HTTPException):
                    if not watch.is_silent:
                        raise
            if watch.is_silent:
                raise self._silent()
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        finally:
            connection.close()

    def _request(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> Any:
        connection = self._connection(timeout_s)
        try:
            answer = self._send(connection, method, path, body)
            raw = answer.read(_MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        finally:
            connection.close()
        if answer.status >= 300:
            raise _failure(answer.status, raw)
        try:
            return json.loads(raw)
        except ValueError:
            raise ApiFailure(f"{self.url} did not answer like a Shoal node: is another program on that port?") from None

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        if parts.scheme != "http" or not parts.hostname:
            raise UsageError(f"{self.url[:80]!r} is not the address of a node: write it like http://127.0.0.1:7465")
        return http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=timeout_s)

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: dict[str, Any] | None
    ) -> http.client.HTTPResponse:
        headers = {"Authorization": f"Bearer {self.token}", "Connection": "close"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        connection.request(method, path, None if body is None else json.dumps(body).encode(), headers)
        return connection.getresponse()

    def _unreachable(self, error: Exception) -> AppError:
        if isinstance(error, TimeoutError):
            return self._silent()
        why = error.strerror if isinstance(error, OSError) and error.strerror else "the connection broke"
        return NotRunning(f"the node at {self.url} cannot be reached ({why.lower()}): is it running?")

    def _silent(self) -> NotAnswering:
        return NotAnswering(f"the node at {self.url} did not answer in time: it hangs, or is out of reach; see its log")


def client_of(home_folder: Path) -> Client:
    """Return a client for the node that runs in a home folder; raises `NotRunning` if none does."""
    home = Home(home_folder)
    return _client(home, require_node(home))


def running_client(home_folder: Path) -> Client | None:
    """Return a client for the node that runs in a home folder, or None if none does."""
    home = Home(home_folder)
    node = find_node(home)
    return None if node is None else _client(home, node)


def _client(home: Home, node: NodeInfo) -> Client:
    token = os.environ.get("SHOAL_TOKEN") or kept_token(home)
    if token is None:  # a new one would not be that of the node
        raise WrongToken(
            f"the token file {home.token_file} is gone, and the running node wants the token that was in it: "
            "`shoal restart` makes a new one"
        )
    return Client(node.api_url, token)


def _failure(status: int, raw: bytes) -> AppError:
    """Rebuild the node's error by its code, so that the command exits with the status of that error."""
    try:
        error = json.loads(raw)["error"]
        code, message = str(error["code"]), str(error["message"])
        peers = tuple(str(peer) for peer in error.get("peers", ()))
    except (ValueError, KeyError, TypeError):
        return ApiFailure(f"the node answered with HTTP status {status} and no reason: look at its log")
    kind = _ERRORS.get(code, UsageError if status == 400 else ApiFailure)
    return kind(message, code=code if code in NEXT_STEPS else None, peers=peers)


def _events(lines: Iterator[bytes]) -> Iterator[Event]:
    name, data = "", ""
    for line in lines:
        text = line.decode("utf-8", "replace").rstrip("\r\n")
        if text.startswith("event:"):
            name = text[6:].strip()
        elif text.startswith("data:"):
            data += text[5:].strip()
        elif not text:
            if data:
                yield Event(name, data)
            name, data = "", ""

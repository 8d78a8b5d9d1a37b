"""Programs that reach the API's port without a token: they cost the node neither its file handles nor its end."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from app.api import server, supervisor
from app.api.guard import Receive, Scope, Send
from app.api.supervisor import ApiHealth, ApiSupervisor, api_trouble
from app.core.reasons import Reason

REQUEST = b"GET %s HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
# HTTP/2 with settings that grant no window, and a request for /
HTTP2 = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x04\x00\x00\x00\x00"
    b"\x00\x00\x0e\x01\x05\x00\x00\x00\x01\x82\x86\x84\x01\x09127.0.0.1"
)
UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\n"
    b"HTTP2-Settings: AAQAAAAA\r\n\r\n"
)
# WebSockets: one without a key, and one that sends something before it was accepted
WITHOUT_KEY = b"GET /slow HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
TOO_EARLY = (
    WITHOUT_KEY[:-2] + b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n" + b"early"
)
MORE_THAN_BUFFERS = 64 << 20  # without a token a client has as much from many small answers


class Asked:
    """An application that tells how many requests wait for it, and when a large answer is over."""

    def __init__(self) -> None:
        self.slow, self.large_is_over = trio.Semaphore(0), trio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/slow":
            self.slow.release()
            await trio.sleep_forever()
        body = b"x" * MORE_THAN_BUFFERS if scope["path"] == "/large" else b"{}"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})
        if scope["path"] == "/large":
            self.large_is_over.set()


@asynccontextmanager
async def served() -> AsyncIterator[tuple[str, Asked]]:
    sock, stop, application = server.open_socket(0, explicit=False), trio.Event(), Asked()
    url = server.url_of(sock)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, application, sock, stop.wait)
        yield url, application
        stop.set()


async def connected(url: str, receive_bytes: int | None = None) -> trio.SocketStream:
    raw = socket.socket()
    if receive_bytes is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    made = trio.socket.from_stdlib_socket(raw)
    await made.connect(("127.0.0.1", int(url.rsplit(":", 1)[1])))
    return trio.SocketStream(made)


async def unread_answer(url: str) -> trio.SocketStream:
    """Ask for an answer and read no more than its beginning: the server cannot send the rest."""
    stream = await connected(url, 1024)
    await stream.send_all(REQUEST % b"/large")
    await stream.receive_some(1)
    return stream


async def all_of(stream: trio.SocketStream) -> None:
    while await stream.receive_some(65536):
        pass
    raise trio.BrokenResourceError("the answer is not whole")


async def test_a_client_that_does_not_read_does_not_keep_the_api_from_ending() -> None:
    with trio.fail_after(30):
        async with served() as (url, _):
            stream = await unread_answer(url)
            assert await api_trouble(url) is None
    await stream.aclose()


async def test_a_client_that_does_not_read_does_not_keep_the_api_from_being_cancelled() -> None:
    with trio.fail_after(30):
        with trio.CancelScope() as scope:
            async with served() as (url, _):
                stream = await unread_answer(url)
                scope.cancel()
                await trio.sleep_forever()
    await stream.aclose()


async def test_a_client_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SEND_S", 0.1)
    with trio.fail_after(30):
        async with served() as (url, application):
            stream = await unread_answer(url)
            await application.large_is_over.wait()
            with pytest.raises(trio.BrokenResourceError):
                await all_of(stream)
    await stream.aclose()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [(HTTP2, b"200"), (UPGRADE, b"200"), (WITHOUT_KEY, b"400"), (TOO_EARLY, b"400")],
    ids=["http2", "upgrade", "without key", "too early"],
)
async def test_a_client_that_speaks_something_else_holds_no_place(request_bytes: bytes, status: bytes) -> None:
    """Its connection was neither idle nor closed, for ever, so that a few of them kept everybody else out."""
    with trio.fail_after(10):
        async with served() as (url, _):
            stream, answer = await connected(url), b""
            await stream.send_all(request_bytes)
            with contextlib.suppress(trio.BrokenResourceError):  # what it sent is not all read
                while some := await stream.receive_some(65536):
                    answer += some
            assert answer.startswith(b"HTTP/1.1 " + status)
    await stream.aclose()


async def waiting_request(url: str, application: Asked) -> trio.SocketStream:
    stream = await connected(url)
    await stream.send_all(REQUEST % b"/slow")
    await application.slow.acquire()
    return stream


async def test_idle_connections_give_way_and_those_with_a_request_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit, any program of the machine could take all file handles, and the node lost its peers."""
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 8)
    with trio.fail_after(30):
        async with served() as (url, application):
            busy = await waiting_request(url, application)
            idle = [await connected(url) for _ in range(40)]
            assert await idle[0].receive_some(1) == b""  # it made room
            assert await api_trouble(url) is None
            with trio.move_on_after(0.2) as waiting:
                await busy.receive_some(1)
            assert waiting.cancelled_caught  # it still waits for its answer
    for stream in (busy, *idle):
        await stream.aclose()


async def test_a_full_api_of_requests_refuses_further_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is no trouble: the API was restarted under all these replies, and the node stopped hosting."""
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 2)
    with trio.fail_after(30):
        async with served() as (url, application):
            busy = [await waiting_request(url, application) for _ in range(2)]
            refused = await connected(url)
            await refused.send_all(REQUEST % b"/")
            assert (await refused.receive_some(65536)).startswith(b"HTTP/1.1 503 ")
            assert await api_trouble(url) is None
            await refused.aclose()
    for stream in busy:
        await stream.aclose()


async def test_a_crowd_at_a_full_api_does_not_have_it_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own test was closed without a word like any other client, which cut all replies off every 30 s."""
    monkeypatch.setattr(supervisor, "EVERY_S", 0.01)
    monkeypatch.setattr(supervisor, "TRY_AGAIN_S", 0.01)
    tested = trio.Semaphore(0)

    async def counted(url: str) -> Reason | None:
        trouble = await api_trouble(url)
        tested.release()
        return trouble

    application, built, health = Asked(), 0, ApiHealth()

    def build() -> Asked:
        nonlocal built
        built += 1
        return application

    api = ApiSupervisor(server.open_socket(0, explicit=False), build, health)
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            await nursery.start(api.run)
            busy = [await waiting_request(api.url, application) for _ in range(2)]
            monkeypatch.setattr(server, "MAX_CONNECTIONS", 2)
            monkeypatch.setattr(server, "MAX_REFUSED", 0)  # as if so many others were being refused already
            monkeypatch.setattr(supervisor, "api_trouble", counted)
            for _ in range(4):
                await tested.acquire()
            assert (built, health.trouble) == (1, None)
            nursery.cancel_scope.cancel()
    for stream in busy:
        await stream.aclose()

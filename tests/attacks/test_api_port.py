"""Programs that reach the API's port, with a key or without: they take neither its places nor the node's end."""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import threading
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

import ui.cast
from app.api import places, server, supervisor
from app.api.guard import Receive, Scope, Send
from app.api.keys import KeyRing
from app.api.places import Place, Places, place_of
from app.api.supervisor import ApiHealth, ApiSupervisor, api_trouble
from app.asker.reply import ReplyEvent, ReplyText
from app.asker.reply_service import ReplyRequest
from app.cli import record
from app.cli.dashboard import UrlConnector
from app.config.home import Home, NodeInfo, api_token, hold, write_node_file
from app.config.keys import add_key
from app.core.errors import NotRunning
from app.core.reasons import Reason, because
from tests.app.api.api_double import TOKEN, DoubleNode, running_api
from ui.state.follower import Follower, Heard, NodeConnector
from ui.state.store import ConnectionState

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
            with place_of(scope).taken(None) as hold:
                if not hold.cancel_called:
                    self.slow.release()
                    await trio.sleep_forever()
        body = b"x" * MORE_THAN_BUFFERS if scope["path"] == "/large" else b"{}"
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": body})
        finally:
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


# --- WebSockets -------------------------------------------------------------------------------------------------------

ASK_SOCKET = (
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: %s\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Extensions: permessage-deflate\r\n\r\n"
)
CONTINUATION, TEXT, PING, PONG = 0, 1, 9, 10


class Page:
    """An application that accepts WebSockets; `is_reading` says if it takes messages, else it sends without an end."""

    def __init__(self, *, is_reading: bool = True) -> None:
        self.is_reading, self.is_over = is_reading, trio.Event()
        self.got: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "websocket"
        await receive()
        await send({"type": "websocket.accept"})
        try:
            while not self.is_reading:
                await send({"type": "websocket.send", "bytes": bytes(1 << 20)})
            while (message := await receive())["type"] == "websocket.receive":
                self.got.append(message["text"])
        finally:
            self.is_over.set()


def frame(opcode: int, payload: bytes = b"", *, is_last: bool = True, size: int | None = None) -> bytes:
    """A frame of a client, which may announce another size than it has."""
    length = len(payload) if size is None else size
    head = bytes([0x80 * is_last | opcode])
    if length < 126:
        head += bytes([0x80 | length])
    else:
        head += b"\xfe" + length.to_bytes(2, "big") if length < 65536 else b"\xff" + length.to_bytes(8, "big")
    return head + bytes(4) + payload


@asynccontextmanager
async def open_page(page: Page, upgrade: bytes = b"websocket", **options: int) -> AsyncIterator[trio.SocketStream]:
    """A WebSocket at the real server, once it is open."""
    sock, stop = server.open_socket(0, explicit=False), trio.Event()
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve, page, sock, stop.wait)
            async with await connected(server.url_of(sock), **options) as stream:
                await stream.send_all(ASK_SOCKET % upgrade)
                yield stream
            stop.set()


async def opened(stream: trio.SocketStream) -> bytes:
    """Read the answer to the opening of a WebSocket."""
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += await stream.receive_some(1)
    return answer


@pytest.mark.parametrize(
    ("first", "more"),
    [
        (b"", frame(TEXT, b"x" * 30_000, is_last=False) + frame(CONTINUATION, b"x" * 60_000)),
        (frame(TEXT, b"x", is_last=False), frame(CONTINUATION, b"x" * 1000, is_last=False) * 100),
        (frame(TEXT, size=1 << 40), b"x" * 100_000),
        (frame(TEXT, is_last=False), frame(CONTINUATION, is_last=False) * 5000),
        (b"", frame(PING) * 5000),
        (b"", frame(PONG, b"x" * 125) * 5000),
    ],
    ids=["two frames", "fragments", "one frame", "empty fragments", "pings", "answers to pings"],
)
async def test_a_web_socket_that_sends_too_much_is_closed(first: bytes, more: bytes) -> None:
    """What came of an endless message was kept: a guest filled 57 MB of memory a second."""
    page = Page()
    async with open_page(page) as stream:
        await opened(stream)
        with contextlib.suppress(trio.BrokenResourceError):
            await stream.send_all(first + more)
        with contextlib.suppress(trio.BrokenResourceError):
            while await stream.receive_some(65536):
                pass
        await page.is_over.wait()
    assert page.got == []


async def test_a_web_socket_has_no_extension() -> None:
    """A compressed message of 16 KB was 16 MB in memory before anybody knew its length."""
    page = Page()
    async with open_page(page) as stream:
        answer = await opened(stream)
        assert answer.startswith(b"HTTP/1.1 101 ")
        assert b"extensions" not in answer.lower()
        await stream.send_all(frame(TEXT, b"x" * server.MAX_MESSAGE_CHARS) + frame(TEXT, b"y"))
        await stream.send_eof()
        await page.is_over.wait()
    assert page.got == ["x" * server.MAX_MESSAGE_CHARS, "y"]


@pytest.mark.parametrize("upgrade", [b"websocket\xa0", b"\x85websocket"])
async def test_no_web_socket_gets_past_its_limits_by_how_its_request_is_written(upgrade: bytes) -> None:
    asked = Asked()
    sock, stop = server.open_socket(0, explicit=False), trio.Event()
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve, asked, sock, stop.wait)
            async with await connected(server.url_of(sock)) as stream:
                await stream.send_all(ASK_SOCKET % upgrade)
                assert (await opened(stream)).startswith(b"HTTP/1.1 200 ")
            stop.set()


async def test_a_page_that_sends_and_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its messages filled the room in which the application would have been told, which then waited for ever."""
    monkeypatch.setattr(server, "SEND_S", 0.1)
    page = Page(is_reading=False)
    async with open_page(page, receive_bytes=1024) as stream:
        await opened(stream)
        with contextlib.suppress(trio.BrokenResourceError):
            await stream.send_all(frame(TEXT, b"x") * 500)
        await page.is_over.wait()


async def waiting_request(url: str, application: Asked) -> trio.SocketStream:
    stream = await connected(url)
    await stream.send_all(REQUEST % b"/slow")
    await application.slow.acquire()
    return stream


async def test_idle_connections_give_way_and_those_with_a_request_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit, any program of the machine could take all file handles, and the node lost its peers."""
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 8)
    monkeypatch.setattr(places, "MAX_REQUESTS", 7)
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


async def test_a_crowd_at_a_full_api_does_not_have_it_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own test was closed without a word like any other client, which cut all replies off every 30 s."""
    monkeypatch.setattr(supervisor, "EVERY_S", 0.01)
    monkeypatch.setattr(supervisor, "TRY_AGAIN_S", 0.01)
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(places, "MAX_REQUESTS", 0)
    tested = trio.Semaphore(0)

    async def crowded(url: str) -> Reason | None:
        first, second = await connected(url), await connected(url)
        async with first, second:
            assert await first.receive_some(1) == b""  # as the test itself, had it come first
        tested.release()
        return because("probe_api", "the API cannot be reached")

    application, built, health = Asked(), 0, ApiHealth()

    def build() -> Asked:
        nonlocal built
        built += 1
        return application

    api = ApiSupervisor(server.open_socket(0, explicit=False), build, health)
    monkeypatch.setattr(supervisor, "api_trouble", crowded)
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            await nursery.start(api.run)
            for _ in range(4):
                await tested.acquire()
            assert (built, health.trouble) == (1, None)
            nursery.cancel_scope.cancel()


# --- programs with keys -----------------------------------------------------------------------------------------------


class WaitingNode(DoubleNode):
    """A node whose replies begin and never go on; a prompt `silent` has no first piece."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way = trio.Semaphore(0)

    async def reply(self, request: ReplyRequest) -> AsyncGenerator[ReplyEvent, None]:
        if request.messages[-1]["content"] != "silent":
            yield ReplyText("a")
        self.under_way.release()
        await trio.sleep_forever()


class Program:
    """Requests of one key over a socket each."""

    def __init__(self, url: str, key: str) -> None:
        self._url, self._key = url, key

    async def ask(self, text: str = "silent") -> trio.SocketStream:
        asked = {"model": "home", "stream": True, "messages": [{"role": "user", "content": text}]}
        body, stream = json.dumps(asked).encode(), await connected(self._url)
        await stream.send_all(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            + f"Authorization: Bearer {self._key}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        return stream


@pytest.fixture
def few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 10)
    monkeypatch.setattr(places, "MAX_REQUESTS", 6)
    monkeypatch.setattr(places, "OWN_REQUESTS", 2)


async def test_one_key_takes_neither_the_owners_places_nor_those_of_other_keys(
    few_places: None, tmp_path: Path
) -> None:
    """128 requests of one key that waited for their replies kept everybody out, and `shoal stop` too."""
    file, node = tmp_path / "keys.json", WaitingNode()
    keys = [add_key(file, name, None, None)[1] for name in ("greedy", "modest")]
    async with running_api(node, KeyRing(file)) as client:
        greedy, modest, owner = (Program(client.url, key) for key in (*keys, TOKEN))
        with trio.fail_after(30):
            held = []
            for _ in range(4):
                held.append(await greedy.ask())
                await node.under_way.acquire()
            for _ in range(3):
                refused = await greedy.ask()
                held.append(refused)
                assert (await refused.receive_some(65536)).startswith(b"HTTP/1.1 429 ")
            for _ in range(3):
                assert await trio.to_thread.run_sync(client.get, "/control/id") == {"peer_id": "12D3me"}
            for newest in (held[3], held[2]):
                held.append(await modest.ask())
                await node.under_way.acquire()
                assert (await newest.receive_some(65536)).startswith(b"HTTP/1.1 429 ")
            held.append(await modest.ask())  # it has its share
            assert (await held[-1].receive_some(65536)).startswith(b"HTTP/1.1 429 ")
            for _ in range(2):
                held.append(await owner.ask())
                await node.under_way.acquire()
            assert await api_trouble(client.url) is None
            for stream in held:
                await stream.aclose()


async def test_a_stream_that_gives_way_is_cut_off(few_places: None, tmp_path: Path) -> None:
    file, node = tmp_path / "keys.json", WaitingNode()
    keys = [add_key(file, name, None, None)[1] for name in ("greedy", "modest")]
    async with running_api(node, KeyRing(file)) as client:
        greedy, modest = (Program(client.url, key) for key in keys)
        with trio.fail_after(30):
            held = []
            for _ in range(4):
                held.append(await greedy.ask("begin"))
                await node.under_way.acquire()
            held.append(await modest.ask())
            await node.under_way.acquire()
            answer = b""
            while some := await held[3].receive_some(65536):
                answer += some
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert not answer.endswith(b"0\r\n\r\n")
            for stream in held:
                await stream.aclose()


async def test_keys_have_equal_shares_of_the_places_whatever_each_asks_for() -> None:
    all_places = Places()
    holds: list[tuple[str, trio.CancelScope]] = []

    def ask(owner: str | None, count: int) -> int:
        """Ask so often, and return how often a place was given."""
        given = 0
        for _ in range(count):
            hold = trio.CancelScope()
            if all_places.take(Place(all_places), owner, hold):
                given += 1
                holds.append((owner or "", hold))
        return given

    for_keys = places.MAX_REQUESTS - places.OWN_REQUESTS
    assert ask("a", 500) == for_keys
    assert ask("b", 500) == for_keys // 2
    assert ask("c", 1) == 1
    assert ask("c", 500) == for_keys // 3 - 1
    assert ask("a", 500) == 0
    assert ask(None, 500) == places.OWN_REQUESTS
    left = Counter(owner for owner, hold in holds if not hold.cancel_called)
    assert left == {"a": 32, "b": 32, "c": 32, "": 16}


# --- the port of a node that has ended --------------------------------------------------------------------------------


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Home, str, socket.socket]]:
    """A home whose node has ended, the URL that it had, and another program that listens there."""
    monkeypatch.delenv("SHOAL_TOKEN", raising=False)
    home = Home.open(tmp_path / "home")
    api_token(home)
    with server.open_socket(0, explicit=False) as port:
        with hold(home):
            write_node_file(home, NodeInfo(1, server.url_of(port), "12D3me"))
        port.setblocking(False)
        yield home, server.url_of(port), port


def door_of_recording(home: Home, url: str, monkeypatch: pytest.MonkeyPatch) -> NodeConnector:
    """How `shoal record --cast` reaches a node that runs when it begins."""
    used: list[NodeConnector] = []

    class Cast:
        outputs, bytes, seconds, ended, trouble = 0, 0, 0.0, "", None

        def __init__(self, door: NodeConnector, *_: object, **__: object) -> None:
            used.append(door)

        def run(self, size: tuple[int, int]) -> None:
            pass

    monkeypatch.setattr(ui.cast, "CastDashboard", Cast)
    monkeypatch.setenv("TEXTUAL_COLOR_SYSTEM", "truecolor")  # which the command sets
    file, limits = home.folder / "new.cast", {"tab": "overview", "size": 10**6, "for_s": 60.0}
    with hold(home):
        write_node_file(home, NodeInfo(1, url, "12D3me"))
        record._record_cast(argparse.Namespace(home=home.folder, file=file, json=True, **limits))
    return used[0]


@pytest.mark.parametrize("is_recording", [False, True], ids=["url", "recording"])
def test_a_program_at_the_port_of_a_node_that_has_ended_is_not_sent_the_token(
    ended: tuple[Home, str, socket.socket], is_recording: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dashboard with `--node`, and a recording, went on sending it once a second."""
    home, url, port = ended
    door = door_of_recording(home, url, monkeypatch) if is_recording else UrlConnector(url, home.folder)
    away = threading.Event()

    def tell(heard: Heard) -> None:
        assert isinstance(heard, ConnectionState)
        away.set()

    follower = Follower(door, tell)
    follower.start()
    assert away.wait(20)
    follower.close()
    with pytest.raises(BlockingIOError):
        port.accept()


def test_a_url_is_sent_the_token_of_this_home_only_if_its_node_runs_there(
    ended: tuple[Home, str, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    home, url, _ = ended
    with hold(home):
        write_node_file(home, NodeInfo(1, url, "12D3me"))
        for same in (url, f"{url}/", url.replace("127.0.0.1", "localhost")):
            assert UrlConnector(same, home.folder).client().token == api_token(home)
        for other in ("http://127.0.0.1:1", url.replace("127.0.0.1", "192.0.2.1")):
            with pytest.raises(NotRunning, match="set SHOAL_TOKEN to the token of the node there"):
                UrlConnector(other, home.folder).client()
    monkeypatch.setenv("SHOAL_TOKEN", "of-another-node")
    assert UrlConnector("http://127.0.0.1:1", home.folder).client().token == "of-another-node"

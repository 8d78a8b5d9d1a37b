"""The page's server on a real socket: who is let in, what is passed on, and what never is."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import pytest
import trio
from trio.testing import MockClock
from trio_websocket import ConnectionClosed, HandshakeError, WebSocketConnection, open_websocket_url

from app.api.server import MAX_MESSAGE_CHARS, open_socket, serve, url_of
from app.web.links import Links, Mode
from app.web.screen import GREETING, PacketReader, ScreenFailed, ScreenProcess, open_screen, packet
from app.web.server import CROWDED, ENDED, HELLO_S, MAX_SIZE, MOST_SCREENS, REFUSED, WebServer

# A program in place of the dashboard: it repeats what it gets, and ends when it is told to, or at the key q.
REPEATER = r"""
import os, sys
def put(kind, payload): os.write(1, kind + len(payload).to_bytes(4, "big") + payload)
os.write(1, b"a warning of some library\n__GANGLION__\n")
put(b"D", f"{os.environ['COLUMNS']}x{os.environ['ROWS']} {' '.join(sys.argv[1:])}".encode())
put(b"M", b'{"type": "something else"}')
while head := sys.stdin.buffer.read(5):
    payload = sys.stdin.buffer.read(int.from_bytes(head[1:], "big"))
    if payload in (b"q", b'{"type": "quit"}'):
        break
    put(b"D", head[:1] + payload)
"""
SIZE = {"width": 90, "height": 30}
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # of the client's library


class Served:
    """A server with its links, and the processes that it started."""

    def __init__(self, url: str, links: Links) -> None:
        self.url, self.links = url, links
        self.program = REPEATER
        self.started: list[tuple[Mode, str]] = []
        self.processes: list[ScreenProcess] = []

    @asynccontextmanager
    async def page(self, hello: dict[str, Any] | str, **headers: str) -> AsyncIterator[WebSocketConnection]:
        """A page that has said who it is."""
        more = [(name.encode(), value.encode()) for name, value in headers.items()]
        async with open_websocket_url(f"ws{self.url[4:]}/screen", extra_headers=more) as socket:
            await socket.send_message(hello if isinstance(hello, str) else json.dumps(hello))
            yield socket

    def own(self) -> dict[str, Any]:
        """What a page with a fresh link says."""
        return {"code": self.links.one_time_code(), **SIZE}

    async def all_ended(self) -> None:
        """Wait until no process is left."""
        for process in self.processes:
            with trio.fail_after(10):
                await process._process.wait()


@pytest.fixture
async def served(nursery: trio.Nursery) -> AsyncIterator[Served]:
    links, sock = Links(trio.current_time), open_socket(0, explicit=True)
    found = Served(url_of(sock), links)
    over = trio.Event()

    async def start(mode: Mode, tab: str, width: int, height: int) -> ScreenProcess:
        found.started.append((mode, tab))
        command = [sys.executable, "-I", "-c", found.program, mode, tab]
        found.processes.append(await open_screen(command, os.environ, width, height))
        return found.processes[-1]

    await nursery.start(serve, WebServer(links, start), sock, over.wait)
    yield found
    over.set()


async def close_code(socket: WebSocketConnection) -> int:
    """Read to the end of a socket; the code that it was closed with."""
    with trio.fail_after(10), suppress(ConnectionClosed):
        while True:
            await socket.get_message()
    assert socket.closed is not None
    return int(socket.closed.code)


async def read(socket: WebSocketConnection) -> Any:
    with trio.fail_after(10):
        return await socket.get_message()


async def test_keys_sizes_and_output_go_back_and_forth(served: Served) -> None:
    async with served.page(served.own()) as page:
        hello = json.loads(await read(page))
        assert hello["mode"] == "own"
        assert await read(page) == b"90x30 own overview"
        await page.send_message(json.dumps({"keys": "\x1b[Aü"}))
        assert await read(page) == "D\x1b[Aü".encode()
        await page.send_message(json.dumps({"width": 10**9, "height": -5}))
        size = json.loads((await read(page)).removeprefix(b"M"))
        assert size == {"type": "resize", "width": MAX_SIZE[0], "height": 8}
        await page.send_message(json.dumps({"keys": "q"}))
        assert await close_code(page) == ENDED
    async with served.page({"session": hello["session"], **SIZE}) as page:  # reloaded
        assert json.loads(await read(page)) == hello
    await served.all_ended()


async def test_a_view_sees_and_sends_nothing(served: Served) -> None:
    token = served.links.view_token()
    async with served.page({"view": token, **SIZE, "tab": "swarm"}) as page:
        assert json.loads(await read(page))["mode"] == "view"
        assert await read(page) == b"90x30 view swarm"
        await page.send_message(json.dumps({"width": 50, "height": 20}))
        assert (await read(page)).startswith(b"M")
        await page.send_message(json.dumps({"keys": "q"}))
        assert await close_code(page) == 1008  # and not `ENDED`: the key did not reach the program
    await served.all_ended()
    assert served.started == [("view", "swarm")]


@pytest.mark.parametrize("tab", ["chat", "settings", "../x", 5, None, ["swarm"]])
async def test_a_view_shows_the_overview_or_the_swarm(served: Served, tab: object) -> None:
    async with served.page({"view": served.links.view_token(), **SIZE, "tab": tab}) as page:
        await read(page)
        assert await read(page) == b"90x30 view overview"


@pytest.mark.parametrize(
    "hello", [{}, {"code": "guess"}, {"session": "guess"}, {"view": "guess"}, {"code": None, "view": 5}, {"token": "x"}]
)
async def test_without_a_secret_nothing_starts(served: Served, hello: dict[str, Any]) -> None:
    async with served.page({**hello, **SIZE}) as page:
        assert await close_code(page) == REFUSED
    assert served.started == []


async def test_a_code_opens_one_page(served: Served) -> None:
    hello = served.own()
    async with served.page(hello) as first, served.page(hello) as second:
        assert await close_code(second) == REFUSED
        assert json.loads(await read(first))["mode"] == "own"


@pytest.mark.parametrize(
    "nonsense",
    [
        "",
        "[]",
        "nonsense",
        "[" * 5000,
        '{"keys": 5}',
        '{"width": "a", "height": 5}',
        "{}",
        '{"width": true, "height": 1}',
    ],
)
async def test_nonsense_costs_the_page_its_socket(served: Served, nonsense: str) -> None:
    async with served.page(served.own()) as page:
        await read(page)
        await page.send_message(nonsense)
        assert await close_code(page) == 1008
    await served.all_ended()
    async with served.page(served.own()) as page:  # the server goes on
        assert json.loads(await read(page))["mode"] == "own"


async def test_a_message_is_bounded(served: Served) -> None:
    async with served.page(served.own()) as page:
        await read(page)
        await page.send_message(json.dumps({"keys": "x" * MAX_MESSAGE_CHARS}))
        assert await close_code(page) == 1009


async def test_pages_are_bounded(served: Served) -> None:
    async with trio.open_nursery() as nursery:

        async def stay(hello: dict[str, Any], *, task_status: Any) -> None:
            async with served.page(hello) as page:
                await read(page)
                task_status.started()
                await trio.sleep_forever()

        for _ in range(MOST_SCREENS["own"]):
            await nursery.start(stay, served.own())
        async with served.page(served.own()) as page:
            assert json.loads(await read(page))["session"]  # so that the link is not lost
            assert await close_code(page) == CROWDED
        async with served.page({"view": served.links.view_token(), **SIZE}) as page:
            assert json.loads(await read(page))["mode"] == "view"  # they are counted apart
        assert len(served.started) == MOST_SCREENS["own"] + 1
        nursery.cancel_scope.cancel()


async def test_a_program_that_speaks_nonsense_costs_its_page_only(served: Served) -> None:
    served.program = "import sys; sys.stdout.write('x' * 70_000); sys.stdout.flush(); sys.stdin.read()"
    async with served.page(served.own()) as page:
        assert await close_code(page) == ENDED
    await served.all_ended()
    served.program = REPEATER
    async with served.page(served.own()) as page:
        assert json.loads(await read(page))["mode"] == "own"


async def test_a_page_that_closes_ends_its_program(served: Served) -> None:
    async with served.page(served.own()) as page:
        await read(page)
        await read(page)
    await served.all_ended()
    async with served.page(served.own()) as page:
        assert json.loads(await read(page))["mode"] == "own"


@pytest.mark.parametrize(
    ("headers", "opens"),
    [
        ({"origin": "http://evil.example"}, False),
        ({"origin": "null"}, False),
        ({"origin": "https://127.0.0.1:1"}, False),
        ({"origin": "http://127.0.0.1:1"}, False),  # another program of this machine
        ({"origin": "{own}"}, True),
        ({}, True),
    ],
)
async def test_sockets_of_other_sites_are_refused(served: Served, headers: dict[str, str], opens: bool) -> None:
    headers = {name: served.url if value == "{own}" else value for name, value in headers.items()}
    try:
        async with served.page(served.own(), **headers) as page:
            assert json.loads(await read(page))["mode"] == "own"
            assert opens
    except HandshakeError:
        assert not opens
    assert bool(served.started) is opens


async def raw_handshake(served: Served, host: str, path: str = "/screen") -> bytes:
    """The first line of the answer to a WebSocket's request with any `Host`."""
    port = int(served.url.rpartition(":")[2])
    key = "dGhlIHNhbXBsZSBub25jZQ=="
    head = f"GET {path} HTTP/1.1\r\nHost: {host.format(port=port)}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(f"{head}Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode())
        with trio.fail_after(10):
            return (await stream.receive_some(4096)).split(b"\r\n")[0]


@pytest.mark.parametrize(
    ("host", "path", "status"),
    [
        ("127.0.0.1:{port}", "/screen", b"101"),
        ("localhost:{port}", "/screen", b"101"),
        ("evil.example:{port}", "/screen", b"403"),
        ("127.0.0.1.evil.example", "/screen", b"403"),
        ("192.168.1.7:{port}", "/screen", b"403"),
        ("127.0.0.1:{port}", "/other", b"403"),
    ],
)
async def test_names_that_dns_could_forge_are_refused(served: Served, host: str, path: str, status: bytes) -> None:
    assert status in await raw_handshake(served, host, path)


async def test_files_are_served_with_a_strict_policy_and_nothing_else_is(served: Served) -> None:
    async with httpx.AsyncClient(base_url=served.url) as client:
        for path, kind in (("/", "text/html"), ("/terminal.js", "text/javascript"), ("/style.css", "text/css")):
            answer = await client.get(path)
            assert (answer.status_code, answer.headers["content-type"].split(";")[0]) == (200, kind)
            assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
            assert answer.headers["cache-control"] == "no-store"
            assert "http://" not in answer.text.replace("http://www.w3.org", "")
            assert "https://" not in answer.text  # nothing is loaded from elsewhere
        for path in ("/screen", "/page/index.html", "/../links.py", "/%2e%2e/links.py", "/token", "/control/snapshot"):
            assert (await client.get(path)).status_code == 404
        assert (await client.post("/")).status_code == 405
        for headers in ({"host": "evil.example"}, {"origin": "http://evil.example"}):
            assert (await client.get("/", headers=headers)).status_code == 403


async def test_a_page_that_says_nothing_is_closed(autojump_clock: MockClock) -> None:
    """Without a socket: only time passes."""
    sent: list[dict[str, Any]] = []

    async def start(mode: Mode, tab: str, width: int, height: int) -> ScreenProcess:
        raise AssertionError("nothing may start")

    messages = iter([{"type": "websocket.connect"}])

    async def receive() -> Any:
        try:
            return next(messages)
        except StopIteration:
            await trio.sleep_forever()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/screen", "headers": [(b"host", b"127.0.0.1:7466")]}
    begin = trio.current_time()
    await WebServer(Links(trio.current_time), start)(scope, receive, send)
    assert trio.current_time() - begin == HELLO_S
    assert [message.get("code") for message in sent] == [None, REFUSED]


# --- packets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_packets_come_whole_however_their_bytes_are_cut(size: int) -> None:
    stream = (
        b"noise" + GREETING + packet(b"D", b"one") + packet(b"M", b"{}") + packet(b"D", b"") + packet(b"D", b"x" * 99)
    )
    reader = PacketReader()
    got = [one for at in range(0, len(stream), size) for one in reader.feed(stream[at : at + size])]
    assert got == [(b"D", b"one"), (b"M", b"{}"), (b"D", b""), (b"D", b"x" * 99)]


@pytest.mark.parametrize("stream", [b"x" * 70_000, GREETING + b"D\xff\xff\xff\xff"])
def test_what_is_no_packet_ends_it(stream: bytes) -> None:
    with pytest.raises(ScreenFailed):
        PacketReader().feed(stream)


async def test_a_program_that_cannot_be_started_is_said() -> None:
    with pytest.raises(ScreenFailed, match="cannot be started"):
        await open_screen(["/nonexistent/program"], os.environ, 80, 24)

"""Streamed responses: the source runs ahead of a slow client within bounds, and is closed when the client leaves."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import pairwise
from typing import Any

import pytest
import trio
import trio.testing
from starlette.responses import PlainTextResponse
from starlette.types import Message

from app.api.routes import build_application
from app.api.streaming import AHEAD, BEGINS_S, SILENCE_S, EventStream, StreamForm
from app.asker.reply import ReplyEvent, ReplyText
from app.asker.reply_service import ReplyRequest
from app.core.errors import AppError
from tests.app.api.api_double import TOKEN, DoubleNode, post_scope


class Source:
    """Yields numbers, as fast as they are taken; fails before number `fails_at`."""

    def __init__(self, count: int, fails_at: int | None = None) -> None:
        self.count, self.fails_at = count, fails_at
        self.made = 0
        self.closed = False

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        try:
            for number in range(self.count):
                if number == self.fails_at:
                    raise AppError("no more")
                await trio.lowlevel.checkpoint()
                self.made += 1
                yield b"%d," % number
        finally:
            self.closed = True


class Client:
    """The other end of an ASGI application."""

    def __init__(self) -> None:
        self.heard: list[Message] = []
        self.heard_at: list[float] = []
        self.left = trio.Event()
        self.reads = trio.Event()
        self.reads.set()

    async def send(self, message: Message) -> None:
        await self.reads.wait()
        self.heard.append(message)
        self.heard_at.append(trio.current_time())

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.heard)

    async def read(self, source: Source, form: StreamForm | None = None) -> None:
        def error_response(error: Exception) -> PlainTextResponse:
            return PlainTextResponse(str(error), 503)

        scope: Any = {"type": "http"}
        stream = EventStream(source.chunks(), "text/plain", error_response, form=form)
        await stream(scope, self.receive, self.send)


async def test_all_pieces_arrive_in_order_and_the_stream_ends() -> None:
    client, source = Client(), Source(100)
    await client.read(source)
    assert client.body == b"".join(b"%d," % number for number in range(100))
    assert [message["type"] for message in client.heard].count("http.response.start") == 1
    assert client.heard[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
    assert source.closed


async def test_a_client_that_does_not_read_holds_the_source_back_after_a_few_pieces() -> None:
    client, source = Client(), Source(10 * AHEAD)
    client.reads = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.read, source)
        await trio.testing.wait_all_tasks_blocked()
        assert AHEAD <= source.made <= AHEAD + 2
        client.reads.set()
    assert source.made == 10 * AHEAD


async def test_a_client_that_leaves_closes_the_source() -> None:
    client, source = Client(), Source(10 * AHEAD)
    client.reads = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.read, source)
        await trio.testing.wait_all_tasks_blocked()
        client.left.set()
    assert source.closed
    assert source.made < 10 * AHEAD


@pytest.mark.parametrize("fails_at", [0, 3])
async def test_an_error_has_a_status_of_its_own_only_before_the_first_piece(fails_at: int) -> None:
    client, source = Client(), Source(10, fails_at)
    if fails_at:
        with pytest.RaisesGroup(AppError, flatten_subgroups=True):
            await client.read(source)
        assert client.body == b"0,1,2,"
    else:
        await client.read(source)
        assert client.heard[0]["status"] == 503
        assert client.body == b"no more"
    assert source.closed


async def test_a_source_without_pieces_is_an_empty_answer() -> None:
    client = Client()
    await client.read(Source(0))
    assert client.heard[0]["status"] == 200
    assert client.body == b""


# --- while nothing comes ----------------------------------------------------------------------------------------------

FORM = StreamForm(alive=lambda: b"(alive)", error=lambda error: b"(%s)" % str(error).encode())


class SlowSource(Source):
    """Yields a number only after so many seconds, and each of the others after as many again."""

    def __init__(self, seconds: float, count: int = 1, fails_at: int | None = None) -> None:
        super().__init__(count, fails_at)
        self.seconds = seconds

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(super().chunks()) as chunks:
            await trio.sleep(self.seconds)
            async for chunk in chunks:
                yield chunk
                await trio.sleep(self.seconds)


async def test_a_stream_without_a_piece_begins_and_stays_alive(autojump_clock: trio.testing.MockClock) -> None:
    client, begin = Client(), trio.current_time()
    await client.read(SlowSource(100.0, 2), FORM)
    times = [at - begin for at in client.heard_at]
    assert client.heard[0]["type"] == "http.response.start"
    assert times[0] == BEGINS_S
    assert client.heard[1]["body"] == b"(alive)"
    assert all(later - earlier <= SILENCE_S for earlier, later in pairwise(times))
    assert client.body.replace(b"(alive)", b"") == b"0,1,"
    assert client.body.count(b"(alive)") == 90 // SILENCE_S + 2 * (100 // SILENCE_S)


async def test_a_piece_that_comes_in_time_is_the_first_thing_that_is_sent(
    autojump_clock: trio.testing.MockClock,
) -> None:
    client = Client()
    await client.read(SlowSource(BEGINS_S - 1), FORM)
    assert client.body == b"0,"


@pytest.mark.parametrize(
    ("seconds", "fails_at", "status", "body"),
    [
        (BEGINS_S - 1, 0, 503, b"no more"),
        (BEGINS_S + 1, 0, 200, b"(no more)"),
        (BEGINS_S + SILENCE_S + 1, 0, 200, b"(alive)(no more)"),
        (1.0, 1, 200, b"0,(no more)"),
    ],
)
async def test_an_error_after_the_beginning_is_the_last_piece(
    autojump_clock: trio.testing.MockClock, seconds: float, fails_at: int, status: int, body: bytes
) -> None:
    client = Client()
    await client.read(SlowSource(seconds, 2, fails_at), FORM)
    assert (client.heard[0]["status"], client.body) == (status, body)
    assert not client.heard[-1].get("more_body", False)


async def test_a_whole_answer_says_nothing_before_it_is_there(autojump_clock: trio.testing.MockClock) -> None:
    client, begin = Client(), trio.current_time()
    await client.read(SlowSource(1000.0, 1, 0))
    assert client.heard[0]["status"] == 503
    assert client.heard_at[0] - begin == 1000.0


async def test_no_signs_of_life_pile_up_for_a_client_that_does_not_read(autojump_clock: trio.testing.MockClock) -> None:
    client = Client()
    client.reads = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.read, SlowSource(1000.0), FORM)
        await trio.sleep(900)
        assert not client.heard
        client.reads.set()
        await trio.sleep(10)
        assert client.body.count(b"(alive)") <= 1
        client.left.set()


class Quiet(DoubleNode):
    """A node whose replies take a minute to begin."""

    async def reply(self, request: ReplyRequest) -> AsyncGenerator[ReplyEvent, None]:
        await trio.sleep(60)
        async with aclosing(super().reply(request)) as events:
            async for event in events:
                yield event


CONVERSATION = [{"role": "user", "content": "a b"}]
STREAMS: list[tuple[str, dict[str, Any], bytes, bytes]] = [
    ("/v1/chat/completions", {"messages": CONVERSATION, "stream": True}, b": still at it\n\n", b'data: {"error": '),
    ("/v1/completions", {"prompt": "a b", "stream": True}, b": still at it\n\n", b'data: {"error": '),
    (
        "/v1/responses",
        {"input": "a b", "stream": True, "store": False},
        b": still at it\n\n",
        b"event: response.created\n",
    ),
    (
        "/v1/messages",
        {"messages": CONVERSATION, "stream": True, "max_tokens": 50},
        b'event: ping\ndata: {"type": "ping"}\n\n',
        b'event: error\ndata: {"type": "error", "error": ',
    ),
    ("/api/chat", {"messages": CONVERSATION}, b'"message": {"role": "assistant", "content": ""}', b'{"error": '),
    ("/api/generate", {"prompt": "a b", "raw": True}, b'"response": ""', b'{"error": '),
    ("/control/chat", {"messages": CONVERSATION}, b" ", b'{"error": '),
]


async def ask(node: DoubleNode, path: str, body: dict[str, Any]) -> Client:
    """Send one request to a node's API, and wait for the end of the answer."""
    client = Client()
    pending: list[Message] = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Message:
        return pending.pop() if pending else await client.receive()

    await build_application(node, TOKEN, "0")(post_scope(path), receive, client.send)
    return client


@pytest.mark.parametrize(("path", "body", "alive", "error"), STREAMS)
async def test_every_stream_says_that_it_lives_in_words_of_its_family(
    autojump_clock: trio.testing.MockClock, path: str, body: dict[str, Any], alive: bytes, error: bytes
) -> None:
    model = {} if path.startswith("/control") else {"model": "home"}
    begin = trio.current_time()
    client = await ask(Quiet(), path, {**model, **body})
    assert client.heard[0]["status"] == 200
    assert client.heard_at[0] - begin == BEGINS_S
    signs = [message["body"] for message in client.heard[1:4]]
    assert all(alive in sign for sign in signs), signs
    said = client.body[sum(map(len, signs)) :]
    assert b'"a"' in said
    assert b'"b"' in said
    if not path.startswith("/v1"):
        assert all(json.loads(line) for line in client.body.splitlines())


@pytest.mark.parametrize(("path", "body", "alive", "error"), STREAMS)
async def test_every_stream_that_has_begun_ends_with_the_error_of_its_family(
    autojump_clock: trio.testing.MockClock, path: str, body: dict[str, Any], alive: bytes, error: bytes
) -> None:
    class Failing(DoubleNode):
        async def reply(self, request: ReplyRequest) -> AsyncGenerator[ReplyEvent, None]:
            await trio.sleep(12)
            raise AppError("block 3 was lost")
            yield ReplyText("")

    model = {} if path.startswith("/control") else {"model": "home"}
    client = await ask(Failing(), path, {**model, **body})
    assert client.heard[0]["status"] == 200
    assert client.body.startswith(error)
    assert b"block 3 was lost" in client.body
    assert (b"event: response.failed" in client.body) == (path == "/v1/responses")
    assert not client.heard[-1]["more_body"]

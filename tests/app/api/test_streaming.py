"""Streamed responses: the source runs ahead of a slow client within bounds, and is closed when the client leaves."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest
import trio
import trio.testing
from starlette.responses import PlainTextResponse
from starlette.types import Message

from app.api.streaming import AHEAD, EventStream
from app.core.errors import AppError


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
        self.left = trio.Event()
        self.reads = trio.Event()
        self.reads.set()

    async def send(self, message: Message) -> None:
        await self.reads.wait()
        self.heard.append(message)

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.heard)

    async def read(self, source: Source) -> None:
        def error_response(error: Exception) -> PlainTextResponse:
            return PlainTextResponse(str(error), 503)

        scope: Any = {"type": "http"}
        await EventStream(source.chunks(), "text/plain", error_response)(scope, self.receive, self.send)


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

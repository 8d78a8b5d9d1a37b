"""Streamed responses, whose source is closed as soon as the client disconnects.

A stream begins with its first piece, or after `BEGINS_S`: a long prompt may be read for many minutes, and clients hang
up on a server that says nothing for some of them. From then on it is never silent for longer than `SILENCE_S`. An error
before the beginning gets an HTTP status of its own; a later one is the last piece.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import trio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.api import failures
from app.asker.reply import ReplyEvent
from app.core.errors import AppError
from engine.errors import EngineError
from p2p.errors import P2PError

OUR_ERRORS = (AppError, P2PError, EngineError)
ErrorResponse = Callable[[Exception], Response]
AHEAD = 16  # pieces that may wait to be sent
BEGINS_S = 10.0  # without a piece, until which an error still has its status
SILENCE_S = 15.0  # afterwards
TURNS = 4  # of the loop before a piece is sent: the next token passes reader and step loop and is on the device then


@dataclass(frozen=True)
class StreamForm:
    """What the clients of a stream understand between two pieces: a sign of life, and the error that ends it."""

    alive: Callable[[], bytes]
    error: Callable[[Exception], bytes]


class EventStream(Response):
    """Sends what an async generator yields; the generator is always run to its end or closed.

    The generator runs ahead of what is sent, in a task of its own: writing a piece to the client takes a node about as
    long as the rest of its work for a token, and the next token need not wait for it.

    Without a `form` nothing but the pieces is sent: an answer of one piece may still turn out to be an error.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        media_type: str,
        error_response: ErrorResponse,
        headers: Mapping[str, str] | None = None,
        form: StreamForm | None = None,
    ) -> None:
        super().__init__(media_type=media_type, headers={"cache-control": "no-store", **(headers or {})})
        del self.headers["content-length"]
        self._chunks, self._error_response, self._form = chunks, error_response, form
        self._failure: Exception | None = None  # of the generator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the whole stream to one client, as an ASGI application."""
        made, ready = trio.open_memory_channel[bytes](AHEAD)
        async with trio.open_nursery() as nursery, ready:
            nursery.start_soon(_cancel_on_disconnect, receive, nursery.cancel_scope)
            nursery.start_soon(self._run_ahead, made)
            await self._send(ready, scope, receive, send)
            nursery.cancel_scope.cancel()

    async def _send(self, ready: trio.MemoryReceiveChannel[bytes], scope: Scope, receive: Receive, send: Send) -> None:
        begun, silence_s = False, math.inf if self._form is None else BEGINS_S
        while True:
            chunk: bytes | None = None
            try:
                with trio.move_on_after(silence_s):
                    chunk = await ready.receive()
            except trio.EndOfChannel:
                break
            if chunk is not None:
                for _ in range(TURNS):
                    await trio.lowlevel.checkpoint()
            elif begun and self._form is not None:
                chunk = self._form.alive()
            if not begun:
                await self._begin(send)
                begun = True
            if self._form is not None:
                silence_s = SILENCE_S
            if chunk is not None:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await self._end(begun, scope, receive, send)

    async def _begin(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

    async def _end(self, begun: bool, scope: Scope, receive: Receive, send: Send) -> None:
        last = b""
        if self._failure is not None:
            if not begun:
                await self._error_response(self._failure)(scope, receive, send)
                return
            if self._form is None:
                raise self._failure
            last = self._form.error(self._failure)
        if not begun:
            await self._begin(send)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _run_ahead(self, made: trio.MemorySendChannel[bytes]) -> None:
        async with made, aclosing(self._chunks) as chunks:
            try:
                async for chunk in chunks:
                    try:
                        made.send_nowait(chunk)
                    except trio.WouldBlock:  # the client reads slowly
                        await made.send(chunk)
            except OUR_ERRORS as error:
                self._failure = error


async def _cancel_on_disconnect(receive: Receive, scope: trio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def comment(text: str = "still at it") -> bytes:
    """Return a comment of server-sent events, which clients skip."""
    return f": {text}\n\n".encode()


async def json_lines(events: AsyncGenerator[ReplyEvent, None]) -> AsyncGenerator[bytes, None]:
    """Yield one JSON value per line."""
    async with aclosing(events):
        async for event in events:
            yield _line(event.as_json())


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, allow_nan=False).encode() + b"\n"


# White space before a value is part of its line: readers of lines see nothing of it.
JSON_LINES = StreamForm(alive=lambda: b" ", error=lambda error: _line(failures.body_of(error)))

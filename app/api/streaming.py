"""Streamed responses, whose source is closed as soon as the client disconnects.

An error before the first piece gets an HTTP status of its own; a later one is reported inside the stream.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
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
TURNS = 4  # of the loop before a piece is sent: the next token passes reader and step loop and is on the device then


class EventStream(Response):
    """Sends what an async generator yields; the generator is always run to its end or closed.

    The generator runs ahead of what is sent, in a task of its own: writing a piece to the client takes a node about as
    long as the rest of its work for a token, and the next token need not wait for it.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        media_type: str,
        error_response: ErrorResponse,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(media_type=media_type, headers={"cache-control": "no-store", **(headers or {})})
        del self.headers["content-length"]
        self._chunks, self._error_response = chunks, error_response
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
        started = False
        async for chunk in ready:
            if not started:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                started = True
            for _ in range(TURNS):
                await trio.lowlevel.checkpoint()
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        if self._failure is not None and started:
            raise self._failure
        if self._failure is not None:
            await self._error_response(self._failure)(scope, receive, send)
            return
        if not started:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

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


async def json_lines(events: AsyncGenerator[ReplyEvent, None]) -> AsyncGenerator[bytes, None]:
    """Yield one JSON value per line; an error after the first line is the last line."""
    began = False
    async with aclosing(events):
        try:
            async for event in events:
                yield _line(event.as_json())
                began = True
        except OUR_ERRORS as error:
            if not began:
                raise
            yield _line(failures.body_of(error))


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, allow_nan=False).encode() + b"\n"

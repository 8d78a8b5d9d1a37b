"""Streamed responses, whose source is closed as soon as the client disconnects.

An error before the first piece gets an HTTP status of its own; a later one is reported inside the stream.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
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


class EventStream(Response):
    """Sends what an async generator yields; the generator is always run to its end or closed."""

    def __init__(self, chunks: AsyncGenerator[bytes, None], media_type: str, error_response: ErrorResponse) -> None:
        super().__init__(media_type=media_type, headers={"cache-control": "no-store"})
        del self.headers["content-length"]
        self._chunks, self._error_response = chunks, error_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the whole stream to one client, as an ASGI application."""
        async with trio.open_nursery() as nursery, aclosing(self._chunks) as chunks:
            nursery.start_soon(_cancel_on_disconnect, receive, nursery.cancel_scope)
            try:
                chunk: bytes | None = await anext(chunks, None)
            except OUR_ERRORS as error:
                await self._error_response(error)(scope, receive, send)
                nursery.cancel_scope.cancel()
                return
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while chunk is not None:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                chunk = await anext(chunks, None)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            nursery.cancel_scope.cancel()


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

"""A response whose body comes piece by piece, and whose source is closed the moment the client is gone."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import trio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.errors import AppError
from engine.errors import EngineError
from p2p.errors import P2PError


class Streamed(Response):
    """Sends what an async generator yields; the generator is always run to its end or closed, whoever leaves first."""

    def __init__(self, chunks: AsyncGenerator[bytes, None], media_type: str) -> None:
        super().__init__(media_type=media_type, headers={"cache-control": "no-store"})
        del self.headers["content-length"]
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One client."""
        async with trio.open_nursery() as nursery, aclosing(self._chunks) as chunks:
            nursery.start_soon(_cancel_when_gone, receive, nursery.cancel_scope)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            nursery.cancel_scope.cancel()


async def _cancel_when_gone(receive: Receive, scope: trio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def json_lines(first: dict[str, Any], rest: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    """One JSON value a line; a failure in the middle is the last line."""
    async with aclosing(rest):
        yield _line(first)
        try:
            async for value in rest:
                yield _line(value)
        except (AppError, P2PError, EngineError) as error:
            yield _line({"error": {"type": type(error).__name__, "message": " ".join(str(error).split())}})


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, allow_nan=False).encode() + b"\n"

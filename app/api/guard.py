"""Who may speak with the API: the bearer of the token, from this machine, with a request of bounded size.

A page in the person's browser can send requests to loopback, and a hostile name can be made to point there: so the
`Host` and `Origin` that the browser reports must be this machine's own, besides the token that no page knows.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException

from app.api import openai_errors

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_BODY_BYTES = 2**20
OPEN_PATHS = frozenset({"/healthz"})
_LOCAL = frozenset({"127.0.0.1", "localhost", "::1"})


class Guard:
    """Refuses what may not pass, and hands the rest on."""

    def __init__(self, application: Application, token: str) -> None:
        self._application = application
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "lifespan":
            await self._application(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await _refuse(send, scope["path"], *refusal)
            return
        await self._application(scope, _bounded(receive), send)

    def _refusal(self, scope: Scope) -> tuple[int, str, str] | None:
        headers = {name.lower(): value for name, value in scope["headers"]}
        if _hostname(headers.get(b"host", b"")) not in _LOCAL:
            return 403, "Forbidden", "the API answers to 127.0.0.1 and localhost alone"
        if b"origin" in headers and _origin_host(headers[b"origin"]) not in _LOCAL:
            return 403, "Forbidden", "the API does not answer to pages of other sites"
        if scope["path"] in OPEN_PATHS:
            return None
        if not hmac.compare_digest(headers.get(b"authorization", b""), self._expected):
            return 401, "WrongToken", "the token is missing or wrong: it is in the file `token` of the home folder"
        return None


def _hostname(host: bytes) -> str | None:
    try:
        return urlsplit(f"//{host.decode('ascii')}").hostname
    except ValueError:
        return None


def _origin_host(origin: bytes) -> str | None:
    try:
        return urlsplit(origin.decode("ascii")).hostname
    except ValueError:
        return None


def _bounded(receive: Receive) -> Receive:
    taken = 0

    async def bounded() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > MAX_BODY_BYTES:
            raise HTTPException(413, f"the request is longer than {MAX_BODY_BYTES} bytes")
        return message

    return bounded


async def _refuse(send: Send, path: str, status: int, kind: str, message: str) -> None:
    told: dict[str, Any] = {"error": {"type": kind, "message": message}}
    if openai_errors.speaks(path):
        told = openai_errors.body(status, message, code="invalid_api_key" if status == 401 else None)
    body = json.dumps(told).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

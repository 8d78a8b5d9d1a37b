"""Access control of the API: checks the token, `Host` and `Origin`, and bounds the size of a request.

A web page in the user's browser can send requests to loopback, and an attacker's DNS name can point there (DNS
rebinding). So `Host` must be `localhost` or a literal IP address, which no DNS server controls: a loopback address,
unless the API listens on others too. `Origin`, which browsers add to requests of pages, must be the API's own.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException

from app.api import openai_errors
from app.core.reasons import Reason, because

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_BODY_BYTES = 2**20
OPEN_PATHS = frozenset({"/healthz"})


class Guard:
    """ASGI middleware that refuses requests that are not allowed, and passes the others on.

    `everywhere` accepts any IP address as `Host`, for an API that listens on more than loopback.
    """

    def __init__(self, application: Application, token: str, *, everywhere: bool = False) -> None:
        self._application, self._everywhere = application, everywhere
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection; WebSockets are refused."""
        if scope["type"] == "lifespan":
            await self._application(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await _refuse(send, *refusal)
            return
        await self._application(scope, _bounded(receive), send)

    def _refusal(self, scope: Scope) -> tuple[int, Reason] | None:
        headers = {name.lower(): value for name, value in scope["headers"]}
        host = headers.get(b"host", b"")
        if not _is_this_machine(host, everywhere=self._everywhere):
            return 403, because("foreign_host", "the API must be addressed as 127.0.0.1 or localhost")
        if b"origin" in headers and headers[b"origin"].lower() != b"http://" + host.lower():
            return 403, because("foreign_origin", "the API refuses requests from other sites' web pages")
        if scope["path"] in OPEN_PATHS:
            return None
        if not hmac.compare_digest(headers.get(b"authorization", b""), self._expected):
            text = "the token is missing or wrong: it is in the file `token` of the home folder"
            return 401, because("wrong_token", text)
        return None


def _is_this_machine(host: bytes, *, everywhere: bool) -> bool:
    """True if a `Host` header names this machine in a way that no DNS server can forge."""
    try:
        name = urlsplit(f"//{host.decode('ascii')}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback or everywhere
    except ValueError:
        return False


def _bounded(receive: Receive) -> Receive:
    received = 0

    async def bounded() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > MAX_BODY_BYTES:
            raise HTTPException(413, f"the request is longer than {MAX_BODY_BYTES} bytes")
        return message

    return bounded


async def _refuse(send: Send, status: int, why: Reason) -> None:
    body = json.dumps(openai_errors.body(status, why)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

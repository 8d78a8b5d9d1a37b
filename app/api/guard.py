"""Access control of the API: checks token or key, a key's limits (`app.api.keys`) and place, `Host`, `Origin` and size.

A web page in the user's browser can send requests to loopback, and an attacker's DNS name can point there (DNS
rebinding). So `Host` must be `localhost` or a literal IP address, which no DNS server controls: a loopback address,
unless the API listens on others too. `Origin`, which browsers add to requests of pages, must be the API's own or one of
the setting `api_origins`; only for the latter a browser's question before such a request (CORS preflight) is answered.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import trio
from starlette.exceptions import HTTPException

from app.api import error_forms
from app.api.keys import KeyRing, owned_by, using
from app.api.places import place_of
from app.asker.text_places import NODE_OWNER
from app.config.file import Config
from app.config.keys import ApiKey
from app.core.reasons import Reason, because

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_BODY_BYTES = 2**20
TOKEN_OWNER = NODE_OWNER
OPEN_OWNER = "open"  # all programs that `open_loopback` lets ask without a token
OPEN_PATHS = frozenset({"/", "/health", "/healthz"})
REPLY_PREFIXES = (
    "/v1/",
    "/api/",
    "/tokenize",
    "/detokenize",
)  # that `open_loopback` opens; none of them controls the node
_PREFLIGHT = (
    (b"access-control-allow-methods", b"GET, POST, PUT"),
    (b"access-control-allow-headers", b"authorization, content-type, x-api-key, anthropic-version, anthropic-beta"),
    (b"access-control-max-age", b"600"),
)


class Guard:
    """ASGI middleware that refuses requests that are not allowed, and passes the others on.

    `config` returns the settings in force: the origins whose web pages may use the API, with the token, and whether
    programs of this machine may ask for replies without it. `everywhere` accepts any IP address as `Host`, for an API
    that listens on more than loopback.
    """

    def __init__(
        self,
        application: Application,
        token: str,
        config: Callable[[], Config],
        *,
        everywhere: bool = False,
        keys: KeyRing | None = None,
    ) -> None:
        self._application, self._config, self._everywhere = application, config, everywhere
        self._token, self._keys = token.encode(), keys or KeyRing(None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection; WebSockets are refused."""
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        allowed = self._allowed_origin(headers)
        send = send if allowed is None else _with_origin(send, allowed)
        refusal = self._refusal(scope, headers, allowed)
        if allowed is not None and scope["method"] == "OPTIONS" and (refusal is None or refusal[0] == 401):
            private = [(b"access-control-allow-private-network", b"true")]  # for a page of a public site
            await send({"type": "http.response.start", "status": 204, "headers": [*_PREFLIGHT, *private]})
            await send({"type": "http.response.body", "body": b""})
        elif refusal is not None:
            await _refuse(send, scope["path"], *refusal)
        else:
            await self._pass_on(scope, _bounded(receive), send, headers)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send, headers: Mapping[bytes, bytes]) -> None:
        """Hand a request on; one with a key counts for it, and is refused if the key's limits are reached."""
        given = [key for key in _given(headers) if key and not hmac.compare_digest(key, self._token)]
        key = next(filter(None, map(self._keys.find, given)), None)
        has_token = any(hmac.compare_digest(one, self._token) for one in _given(headers))
        owner = key.digest if key is not None else TOKEN_OWNER if has_token else OPEN_OWNER
        with owned_by(owner):
            if scope["path"] in OPEN_PATHS:
                await self._application(scope, receive, send)
            else:
                await self._in_place(owner, key, scope, receive, send)

    async def _in_place(self, owner: str, key: ApiKey | None, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request in a place of its owner's; without one, or once it gives way, it is refused or cut off."""
        is_begun = False

        async def sending(message: Message) -> None:
            nonlocal is_begun
            is_begun = True
            await send(message)

        with place_of(scope).taken(None if owner == TOKEN_OWNER else owner) as hold:
            if not hold.cancel_called:
                await self._within_limits(key, scope, receive, sending)
        if hold.cancel_called and not is_begun:
            text = "this node takes no more requests now, and you have your share of them: wait until one has ended"
            why = because("rate_limited", text)
            await _refuse(send, scope["path"], 429, why, [(b"retry-after", b"1")])

    async def _within_limits(self, key: ApiKey | None, scope: Scope, receive: Receive, send: Send) -> None:
        if key is None or scope["method"] != "POST":
            await self._application(scope, receive, send)
            return
        meter = self._keys.meter(key)
        refusal = meter.refusal(key, trio.current_time())
        if refusal is not None:
            why, wait_s = refusal
            await _refuse(send, scope["path"], 429, why, [(b"retry-after", str(wait_s).encode())])
            return
        with using(meter):
            await self._application(scope, receive, send)

    def _allowed_origin(self, headers: Mapping[bytes, bytes]) -> bytes | None:
        """Return the request's origin if the setting `api_origins` has it."""
        origin = headers.get(b"origin", b"")
        origins = self._config().settings.api_origins
        return origin if origin.lower() in {one.encode() for one in origins} else None

    def _refusal(
        self, scope: Scope, headers: Mapping[bytes, bytes], allowed: bytes | None
    ) -> tuple[int, Reason] | None:
        path, host = scope["path"], headers.get(b"host", b"")
        if not is_this_machine(host, everywhere=self._everywhere):
            return 403, because("foreign_host", "the API must be addressed as 127.0.0.1 or localhost")
        if allowed is None and b"origin" in headers and headers[b"origin"].lower() != _own_origin(scope, host):
            return 403, because("foreign_origin", "the API refuses requests from other sites' web pages")
        if path in OPEN_PATHS:
            return None
        given = _given(headers)
        if any(hmac.compare_digest(key, self._token) for key in given):
            return None
        if any(key and self._keys.find(key) is not None for key in given):
            if path.startswith(REPLY_PREFIXES):
                return None
            return 403, because("key_not_allowed", "this key may ask for replies, but not control the node")
        if not self._is_open(path, scope.get("client")):
            text = "the token is missing or wrong: it is in the file `token` of the home folder"
            return 401, because("wrong_token", text)
        return None

    def _is_open(self, path: str, client: tuple[str, int] | None) -> bool:
        """True if a program of this machine asks for a reply, and the setting `open_loopback` lets it."""
        if not self._config().settings.open_loopback or not path.startswith(REPLY_PREFIXES) or client is None:
            return False
        try:
            return ipaddress.ip_address(client[0]).is_loopback
        except ValueError:
            return False


def _own_origin(scope: Scope, host: bytes) -> bytes:
    return str(scope.get("scheme", "http")).encode() + b"://" + host.lower()


def _given(headers: Mapping[bytes, bytes]) -> tuple[bytes, bytes]:
    """Return the keys or tokens of a request."""
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    return given if scheme.lower() == b"bearer" else b"", headers.get(b"x-api-key", b"")


def _with_origin(send: Send, origin: bytes) -> Send:
    """Return a `send` that lets pages of this origin read the response."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [(b"access-control-allow-origin", origin), (b"vary", b"Origin")]
            message = {**message, "headers": [*message.get("headers", ()), *headers]}
        await send(message)

    return sending


def is_this_machine(host: bytes, *, everywhere: bool) -> bool:
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


async def _refuse(send: Send, path: str, status: int, why: Reason, more: Sequence[tuple[bytes, bytes]] = ()) -> None:
    body = json.dumps(error_forms.body_for(path, status, why)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *more]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

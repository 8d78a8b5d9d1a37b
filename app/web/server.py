"""The page and its WebSocket: an ASGI application for loopback that refuses requests of other sites.

`Host` and `Origin` are checked as `app.api.guard` does, because a web page elsewhere can open WebSockets to loopback.
The page itself is the same for everybody and holds no secret: a link carries its secret behind `#`, which a browser
never sends, and the page hands it over inside the socket. There is no cookie, which programs on other ports of this
machine would be sent too.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from importlib import resources
from typing import Any

import trio

from app.api.guard import Message, Receive, Scope, Send, is_this_machine
from app.api.places import place_of
from app.web.links import Links, Mode
from app.web.screen import ScreenFailed, ScreenProcess

MOST_SCREENS: dict[Mode, int] = {"own": 4, "view": 8}
HELLO_S = 10.0  # for a page to say who it is
MIN_SIZE, MAX_SIZE = (20, 8), (400, 160)
TABS = ("overview", "swarm")  # that a view may show: no conversation, log or setting

REFUSED, CROWDED, ENDED = 4001, 4002, 4003  # reasons why a socket is closed, for the page
_FILES = {
    "/": ("index.html", b"text/html; charset=utf-8"),
    "/terminal.js": ("terminal.js", b"text/javascript; charset=utf-8"),
    "/style.css": ("style.css", b"text/css; charset=utf-8"),
}
_HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)

log = logging.getLogger("shoal.web")

# Starts a dashboard: its mode, the tab it begins with, its width and height.
OpenScreen = Callable[[Mode, str, int, int], Awaitable[ScreenProcess]]


class BadMessage(Exception):
    """A page sent something that it may not."""


class WebServer:
    """The ASGI application."""

    def __init__(self, links: Links, open_screen: OpenScreen) -> None:
        self._links, self._open_screen = links, open_screen
        self._count: dict[Mode, int] = {"own": 0, "view": 0}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] == "http":
            await _serve_file(scope, send)
        elif _is_foreign(scope) or scope["path"] != "/screen":
            await send({"type": "websocket.close", "code": 1008})  # before it is accepted: an answer with status 403
        else:
            await receive()  # websocket.connect
            await send({"type": "websocket.accept"})
            code: int | None = CROWDED
            with place_of(scope).taken(None) as hold:
                if not hold.cancel_called:
                    code = await self._handle(receive, send)
            if code is not None:
                await send({"type": "websocket.close", "code": code})

    async def _handle(self, receive: Receive, send: Send) -> int | None:
        """Let a page in and show it its dashboard; return why the socket is to be closed, None if the page did."""
        try:
            hello: dict[str, Any] = {}
            with trio.move_on_after(HELLO_S):
                hello = _object(await receive())
            admitted = self._links.admit(**{name: hello.get(name) for name in ("code", "session", "view")})
            if admitted is None:
                return REFUSED
            # Before anything else can fail: a code is used up now, and with the session the page can be loaded again.
            await send(_text({"session": admitted.session, "mode": admitted.mode}))
            if self._count[admitted.mode] >= MOST_SCREENS[admitted.mode]:
                return CROWDED
            self._count[admitted.mode] += 1
            try:
                width, height = _size(hello)
                tab = hello.get("tab") if admitted.mode == "view" else None
                screen = await self._open_screen(admitted.mode, tab if tab in TABS else TABS[0], width, height)
                return await self._show(admitted.mode, screen, receive, send)
            finally:
                self._count[admitted.mode] -= 1
        except BadMessage as error:
            log.warning("a page was closed: %s", error)
            return 1008
        except ScreenFailed as error:
            log.warning("%s", error)
            return ENDED
        except _Gone:
            return None

    async def _show(self, mode: Mode, screen: ScreenProcess, receive: Receive, send: Send) -> int:
        """Carry output to the page and input to the dashboard until one of them ends."""
        problem: list[Exception] = []
        try:
            async with trio.open_nursery() as nursery:

                async def listen() -> None:
                    try:
                        await _listen(mode, screen, receive)
                    except (BadMessage, _Gone) as error:
                        problem.append(error)
                    nursery.cancel_scope.cancel()

                nursery.start_soon(listen)
                try:
                    async with aclosing(screen.packets()) as packets:
                        async for kind, payload in packets:
                            if kind == b"D":
                                await send({"type": "websocket.send", "bytes": payload})
                except ScreenFailed as error:  # outside, the nursery would have wrapped it in a group
                    problem.append(error)
                nursery.cancel_scope.cancel()
        finally:
            await screen.close()
        if problem:
            raise problem[0]
        return ENDED


async def _listen(mode: Mode, screen: ScreenProcess, receive: Receive) -> None:
    """Pass a page's input on; a view's only if it is a size. Raises `BadMessage` or `_Gone`."""
    while True:
        message = _object(await receive())
        if "keys" in message:
            if mode == "view":
                raise BadMessage("a read-only view sent input")
            if not isinstance(message["keys"], str):
                raise BadMessage("input that is no text")
            await screen.keys(message["keys"])
        else:
            await screen.resize(*_size(message))


class _Gone(Exception):
    """The page has closed its socket."""


def _object(message: Message) -> dict[str, Any]:
    """Return the JSON object of a message; raises `BadMessage` or `_Gone`."""
    if message["type"] != "websocket.receive":
        raise _Gone
    text = message.get("text")
    if not isinstance(text, str):
        raise BadMessage("a message that is no text")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise BadMessage("a message that is no JSON") from None
    if not isinstance(value, dict):
        raise BadMessage("a message that is no object")
    return value


def _size(message: dict[str, Any]) -> tuple[int, int]:
    """Return width and height within bounds; raises `BadMessage`."""
    width, height = message.get("width"), message.get("height")
    if type(width) is not int or type(height) is not int:
        raise BadMessage("a size that is no number")
    (low, lower), (high, higher) = MIN_SIZE, MAX_SIZE
    return max(low, min(high, width)), max(lower, min(higher, height))


def _text(value: dict[str, Any]) -> Message:
    return {"type": "websocket.send", "text": json.dumps(value)}


def _is_foreign(scope: Scope) -> bool:
    """True if a request names this machine by a name that DNS could forge, or comes from another site's page."""
    headers = {name.lower(): value for name, value in scope["headers"]}
    host = headers.get(b"host", b"")
    origin = headers.get(b"origin")
    return not is_this_machine(host, everywhere=False) or (
        origin is not None and origin.lower() != b"http://" + host.lower()
    )


async def _serve_file(scope: Scope, send: Send) -> None:
    found = _FILES.get(scope["path"])
    if _is_foreign(scope):
        await _answer(send, 403, b"text/plain", b"address this page as 127.0.0.1 or localhost\n")
    elif found is None:
        await _answer(send, 404, b"text/plain", b"not found\n")
    elif scope["method"] not in ("GET", "HEAD"):
        await _answer(send, 405, b"text/plain", b"only GET\n", [(b"allow", b"GET, HEAD")])
    else:
        name, kind = found
        await _answer(send, 200, kind, (resources.files("app.web") / "page" / name).read_bytes())


async def _answer(send: Send, status: int, kind: bytes, body: bytes, more: Sequence[tuple[bytes, bytes]] = ()) -> None:
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), *_HEADERS, *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

"""The bodies of requests: how many objects one may have, and how a long one is read while the node goes on.

A long body is read in a thread, a few at once and one of each key at a time: to read a megabyte of small objects takes
as long as hundreds of tokens. `BodyRoute` reads the bodies of its routes; what a route makes of one then, it calls by
`aside`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import trio
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from app.api.keys import current_owner

# Objects and lists of a body. The largest that programs send have about one for each 60 bytes: schemas of many tools.
MAX_PARTS = 20_000
LONG_BYTES = 16_384  # a body of so many small objects takes about 15 ms
AT_ONCE = 2  # threads

T = TypeVar("T")


class WrongBody(HTTPException):
    """A body that is JSON, but not what its route takes."""

    def __init__(self, wrong: ValidationError) -> None:
        super().__init__(400, "the body is wrong")
        self._wrong = wrong

    def errors(self) -> list[Any]:
        """What is wrong, as pydantic tells it."""
        return list(self._wrong.errors(include_url=False))


class BodyTurns:
    """Whose long body is read now."""

    def __init__(self) -> None:
        self._short = trio.Lock()
        self._threads = trio.CapacityLimiter(AT_ONCE)
        self._owners: defaultdict[str, trio.Lock] = defaultdict(trio.Lock)

    async def read(self, body: bytes, model: type[BaseModel]) -> BaseModel:
        """Return a body as its model; for a long one, `aside` then uses the same threads."""
        is_long = len(body) > LONG_BYTES
        _threads.set(self._threads if is_long else None)
        # Of short ones one in each turn of the loop, however many have come.
        async with self._owners[current_owner()] if is_long else self._short:
            return await aside(_read, body, model)


_threads: ContextVar[trio.CapacityLimiter | None] = ContextVar("_threads", default=None)


async def aside(function: Callable[..., T], *args: Any) -> T:
    """Call what takes as long as the present request's body is: in a thread if that is long.

    It does not wait for its key's turn again. Otherwise all bodies of a key would be read before the first one is used,
    and Python's search for circular garbage would stop everything while it looks through them.
    """
    threads = _threads.get()
    if threads is None:
        return function(*args)
    return await trio.to_thread.run_sync(partial(function, *args), limiter=threads)


class BodyRoute(APIRoute):
    """A route whose body is read by the `BodyTurns` of its application, `state.body_turns`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of FastAPI, which takes the body as it is read here."""
        handle = super().get_route_handler()
        model: Any = None if self.body_field is None else self.body_field.field_info.annotation
        if model is None:
            return handle
        assert issubclass(model, BaseModel), "a body has fields"

        async def handle_body(request: Request) -> Response:
            return await handle(_BodyRequest(model, request))

        return handle_body


class _BodyRequest(Request):
    def __init__(self, model: type[BaseModel], request: Request) -> None:
        super().__init__(request.scope, request.receive)
        self._model = model

    async def json(self) -> Any:
        turns: BodyTurns = self.app.state.body_turns
        return await turns.read(await self.body(), self._model)


def _read(body: bytes, model: type[BaseModel]) -> BaseModel:
    """Return a body as its model. Raises `ValueError` if it is no JSON, `WrongBody`, `HTTPException` if too large."""
    text = body.decode("utf-8-sig")
    if has_too_many_parts(text):
        raise HTTPException(413, f"the request has more than {MAX_PARTS} objects and lists")
    try:
        return model.model_validate(json.loads(text))
    except ValidationError as error:
        raise WrongBody(error) from None


def has_too_many_parts(text: str) -> bool:
    """True if a JSON text has more objects and lists than a body may have."""
    return _parts(text) > MAX_PARTS and _parts(_without_strings(text)) > MAX_PARTS


def _without_strings(text: str) -> str:
    """Return a JSON text without its strings."""
    plain = text.replace("\\\\", "").replace('\\"', "")  # in strings alone: each quote that is left begins or ends one
    return "".join(plain.split('"')[::2])


def _parts(text: str) -> int:
    """Count the objects and lists of a JSON text, with what looks like them in its strings."""
    return text.count("{") + text.count("[")

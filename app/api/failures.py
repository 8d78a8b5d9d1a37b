"""Errors as HTTP responses: a status, the error's type name, and the one line that the command line prints.

Under `/v1` they have the form that OpenAI's clients expect, which `app.api.openai_errors` makes.
"""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from app.api import openai_errors
from app.core.errors import (
    AlreadyRunning,
    AppError,
    NameConflict,
    NotRunning,
    RecordError,
    UnknownSwarm,
    UsageError,
    reason_of,
)
from app.core.reasons import Reason, because
from engine.errors import EngineError
from p2p.errors import P2PError

log = logging.getLogger("shoal.api")

# The first match counts, so a subclass stands before its base.
_STATUS: tuple[tuple[type[Exception], int], ...] = (
    (UsageError, 400),
    (RecordError, 400),
    (UnknownSwarm, 404),
    (NameConflict, 409),
    (AlreadyRunning, 409),
    (NotRunning, 503),
    (AppError, 409),
    (P2PError, 502),
    (EngineError, 409),
)


def install(application: FastAPI) -> None:
    """Register handlers that answer every exception of a route in this form."""
    for base in (AppError, P2PError, EngineError):
        application.add_exception_handler(base, _ours)
    application.add_exception_handler(RequestValidationError, _invalid)
    application.add_exception_handler(HTTPException, _http)
    application.add_exception_handler(Exception, _internal)


def body(kind: str, why: Reason) -> dict[str, Any]:
    """Return the JSON body of a failure: the error's type name and its reason."""
    message = " ".join(why.text.split())
    error = {"type": kind, "message": message, "code": why.code, "next_step": why.next_step, "peers": list(why.peers)}
    return {"error": error}


def failure(status: int, kind: str, why: Reason) -> JSONResponse:
    """Return a failure as a response."""
    return JSONResponse(body(kind, why), status)


def response_to(error: Exception) -> JSONResponse:
    """Return the response for an `AppError`, `P2PError` or `EngineError`."""
    status = next(status for kind, status in _STATUS if isinstance(error, kind))
    return failure(status, type(error).__name__, reason_of(error))


async def _ours(request: Request, error: Exception) -> JSONResponse:
    return openai_errors.response_to(error) if openai_errors.is_openai(request.url.path) else response_to(error)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    if openai_errors.is_openai(request.url.path):
        return openai_errors.invalid(error.errors())
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    why = because("bad_request", f"the request's {where or 'body'} is wrong: {first['msg']}")
    return failure(400, "UsageError", why)


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    why = because("bad_request", f"{request.method} {request.url.path}: {error.detail}")
    if openai_errors.is_openai(request.url.path):
        return openai_errors.failure(error.status_code, why)
    return failure(error.status_code, "HTTPException", why)


async def _internal(request: Request, error: Exception) -> JSONResponse:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    why = because("internal", f"internal error: {type(error).__name__}; the node's log says more")
    if openai_errors.is_openai(request.url.path):
        return openai_errors.failure(500, why)
    return failure(500, "InternalError", why)

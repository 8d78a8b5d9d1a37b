"""Errors as HTTP responses: a status, and a body in the form of the path's family (`app.api.error_forms`).

The body's `code` is the stable name of the error, and `message` the one line that the command line prints. Some errors
have other statuses under `/control` than elsewhere, where clients retry by status.
"""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from app.api import error_forms, openai_errors
from app.api.bodies import WrongBody
from app.core.errors import (
    AlreadyRunning,
    AppError,
    NameConflict,
    NoAdapter,
    NotRunning,
    RecordError,
    UnknownSwarm,
    UsageError,
    reason_of,
)
from app.core.reasons import because
from engine.errors import EngineError
from p2p.errors import P2PError

log = logging.getLogger("shoal.api")

CONTROL_PREFIX = "/control"
# The first match counts, so a subclass stands before its base.
_STATUS: tuple[tuple[type[Exception], int], ...] = (
    (UsageError, 400),
    (RecordError, 400),
    (UnknownSwarm, 404),
    (NoAdapter, 404),
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
    for wrong in (RequestValidationError, WrongBody):
        application.add_exception_handler(wrong, _invalid)
    application.add_exception_handler(HTTPException, _http)
    application.add_exception_handler(Exception, _internal)


def status_of(error: Exception) -> int:
    """Return the HTTP status for an `AppError`, `P2PError` or `EngineError` under `/control`."""
    return next(status for kind, status in _STATUS if isinstance(error, kind))


def body_of(error: Exception) -> dict[str, Any]:
    """Return the JSON body for an `AppError`, `P2PError` or `EngineError` under `/control`."""
    return openai_errors.body(status_of(error), reason_of(error))


def response_to(error: Exception) -> JSONResponse:
    """Return the response for an `AppError`, `P2PError` or `EngineError` under `/control`."""
    return JSONResponse(body_of(error), status_of(error))


async def _ours(request: Request, error: Exception) -> JSONResponse:
    path = request.url.path
    return response_to(error) if path.startswith(CONTROL_PREFIX) else error_forms.response_for(path, error)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError | WrongBody)
    why, param = openai_errors.invalid_reason(error.errors())
    return error_forms.failure_for(request.url.path, 400, why, param=param)


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    code = "not_found" if error.status_code in (404, 405) else "bad_request"
    text = f"{request.method} {request.url.path}: {error.detail}"
    return error_forms.failure_for(request.url.path, error.status_code, because(code, text))


async def _internal(request: Request, error: Exception) -> JSONResponse:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    why = because("internal", f"internal error: {type(error).__name__}; the node's log says more")
    return error_forms.failure_for(request.url.path, 500, why)

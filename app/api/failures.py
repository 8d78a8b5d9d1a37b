"""Failures as the API tells them: a status, a type by name, and the one line that the command line prints.

Under `/v1` they have the form that OpenAI's clients know (`app.api.openai_errors`).
"""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from app.api import openai_errors
from app.errors import AlreadyRunning, AppError, NameConflict, NotRunning, RecordError, UnknownSwarm, UsageError
from engine.errors import EngineError
from p2p.errors import P2PError

log = logging.getLogger("shoal.api")

# The first that fits counts.
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
    """Answer every failure of a route in one form."""
    for base in (AppError, P2PError, EngineError):
        application.add_exception_handler(base, _ours)
    application.add_exception_handler(RequestValidationError, _invalid)
    application.add_exception_handler(HTTPException, _http)
    application.add_exception_handler(Exception, _internal)


def failure(status: int, kind: str, message: str) -> JSONResponse:
    """One failure."""
    return JSONResponse({"error": {"type": kind, "message": " ".join(message.split())}}, status)


def told(error: Exception) -> JSONResponse:
    """An error of ours as the answer to a request."""
    status = next(status for kind, status in _STATUS if isinstance(error, kind))
    return failure(status, type(error).__name__, str(error) or type(error).__doc__ or "")


async def _ours(request: Request, error: Exception) -> JSONResponse:
    return openai_errors.told(error) if openai_errors.speaks(request.url.path) else told(error)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    if openai_errors.speaks(request.url.path):
        return openai_errors.invalid(error.errors())
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    return failure(400, "UsageError", f"the request's {where or 'body'} is wrong: {first['msg']}")


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path}: {error.detail}"
    if openai_errors.speaks(request.url.path):
        return openai_errors.failure(error.status_code, text)
    return failure(error.status_code, "HTTPException", text)


async def _internal(request: Request, error: Exception) -> JSONResponse:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    text = f"internal error: {type(error).__name__}; the node's log says more"
    if openai_errors.speaks(request.url.path):
        return openai_errors.failure(500, text)
    return failure(500, "InternalError", text)

"""Errors as HTTP responses: a status, and a body of the form that OpenAI's clients expect (`app.api.openai_errors`).

The body's `code` is the stable name of the error, and `message` the one line that the command line prints. Under `/api`
some errors have other statuses than under `/v1`, where clients retry by status.
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

# Where Ollama's clients ask; `/api/chat` exists in both, with other fields.
_OLLAMA_PATHS = frozenset({"/api/tags", "/api/generate", "/api/show", "/api/version", "/api/embed", "/api/embeddings"})

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
    application.add_exception_handler(RequestValidationError, _invalid)
    application.add_exception_handler(HTTPException, _http)
    application.add_exception_handler(Exception, _internal)


def status_of(error: Exception) -> int:
    """Return the HTTP status for an `AppError`, `P2PError` or `EngineError` under `/api`."""
    return next(status for kind, status in _STATUS if isinstance(error, kind))


def body_of(error: Exception) -> dict[str, Any]:
    """Return the JSON body for an `AppError`, `P2PError` or `EngineError` under `/api`."""
    return openai_errors.body(status_of(error), reason_of(error))


def response_to(error: Exception) -> JSONResponse:
    """Return the response for an `AppError`, `P2PError` or `EngineError` under `/api`."""
    return JSONResponse(body_of(error), status_of(error))


async def _ours(request: Request, error: Exception) -> JSONResponse:
    return openai_errors.response_to(error) if openai_errors.is_openai(request.url.path) else response_to(error)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    if openai_errors.is_openai(request.url.path):
        return openai_errors.invalid(error.errors())
    if request.url.path == "/api/chat" and isinstance(error.body, dict) and "model" in error.body:
        return openai_errors.failure(400, because("bad_request", _not_ollama(request)), param="model")
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    why = because("bad_request", f"the request's {where or 'body'} is wrong: {first['msg']}")
    return openai_errors.failure(400, why, param=where or None)


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    code = "not_found" if error.status_code in (404, 405) else "bad_request"
    text = f"{request.method} {request.url.path}: {error.detail}"
    if request.url.path in _OLLAMA_PATHS:
        text = f"{text}; {_not_ollama(request)}"
    return openai_errors.failure(error.status_code, because(code, text))


def _not_ollama(request: Request) -> str:
    return f"this is Shoal, not Ollama: choose OpenAI's API in your program, at http://{request.url.netloc}/v1"


async def _internal(request: Request, error: Exception) -> JSONResponse:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    why = because("internal", f"internal error: {type(error).__name__}; the node's log says more")
    return openai_errors.failure(500, why)

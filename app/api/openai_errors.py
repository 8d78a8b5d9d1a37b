"""Errors in the form of OpenAI's API, also under `/control`: `{"error": {"message", "type", "param", "code", …}}`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.responses import JSONResponse

from app.asker.asker import CutOff, PromptTooLong, ReplyTooLong
from app.core.errors import AppError, NoAdapter, RecordError, UsageError, reason_of
from app.core.reasons import Reason, because
from app.routing.route import NoRoute
from engine.errors import EngineError
from engine.text.output_form import FieldError
from p2p.errors import P2PError

PREFIX = "/v1"
_SHOULD = "Input should be "  # with which pydantic begins
_STATUS: tuple[tuple[type[Exception], int], ...] = (  # the first match counts
    (PromptTooLong, 400),
    (ReplyTooLong, 400),
    (UsageError, 400),
    (RecordError, 400),
    (EngineError, 400),
    (NoAdapter, 404),
    (CutOff, 429),
    (AppError, 503),
    (P2PError, 503),
)


class OpenAIError(AppError):
    """A well-formed request that the endpoint cannot serve, with the status, parameter and code for the client."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str = "bad_request") -> None:
        super().__init__(message, code=code)
        self.status, self.param = status, param


def body(status: int, why: Reason, *, param: str | None = None) -> dict[str, Any]:
    """Return the JSON body of a failure: OpenAI's fields, and `peers` and `next_step` as under `/control`."""
    kind = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    usual = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": " ".join(why.text.split()), "type": kind.get(status, usual), "param": param, "code": why.code}
    return {"error": {**error, "peers": list(why.peers), "next_step": why.next_step}}


def failure(status: int, why: Reason, *, param: str | None = None) -> JSONResponse:
    """Return a failure as a response."""
    return JSONResponse(body(status, why, param=param), status)


def status_and_reason(error: Exception) -> tuple[int, Reason, str | None]:
    """Return the HTTP status, the reason and the field for an `AppError`, `P2PError` or `EngineError`."""
    why = reason_of(error)
    if isinstance(error, OpenAIError):
        return error.status, why, error.param
    if isinstance(error, FieldError):
        return 400, why, error.field
    if isinstance(error, NoRoute) and (error.busy or error.is_too_large):
        return 429 if error.busy else 400, why, None
    return next(status for kind, status in _STATUS if isinstance(error, kind)), why, None


def status_and_body(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and JSON body for an `AppError`, `P2PError` or `EngineError`."""
    status, why, param = status_and_reason(error)
    return status, body(status, why, param=param)


def response_to(error: Exception) -> JSONResponse:
    """Return the response for an `AppError`, `P2PError` or `EngineError`."""
    status, content = status_and_body(error)
    return JSONResponse(content, status)


def invalid_reason(errors: Sequence[Any]) -> tuple[Reason, str | None]:
    """Return why a request failed validation, and its field; an unsupported field goes first and is named."""
    first = next((error for error in errors if error["type"] == "unsupported"), errors[0])
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    if first["type"] == "unsupported":
        param = first["ctx"].get("field") if not where else where
        text = first["msg"] if not where or first["msg"].startswith(where) else f"{where}: {first['msg']}"
        return because("unsupported_parameter", text), param
    said = str(first["msg"])
    wrong = f"must be {said.removeprefix(_SHOULD)}" if said.startswith(_SHOULD) else f"is wrong: {said}"
    return because("bad_request", f"the request's {where or 'body'} {wrong}"), where or None

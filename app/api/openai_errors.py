"""Failures in the form of OpenAI's API: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.responses import JSONResponse

from app.asker import PromptTooLong
from app.errors import AppError, RecordError, UsageError
from app.replying import NoModelHere
from app.route_session import SessionLost
from app.routing import NoRoute
from engine.errors import EngineError
from p2p.errors import P2PError

PREFIX = "/v1"
_OURS: tuple[tuple[type[Exception], int, str | None], ...] = (  # the first that fits counts
    (PromptTooLong, 400, "context_length_exceeded"),
    (UsageError, 400, None),
    (RecordError, 400, None),
    (EngineError, 400, None),
    (NoRoute, 503, "no_route"),
    (SessionLost, 503, "session_lost"),
    (NoModelHere, 503, "model_not_here"),
    (AppError, 503, "not_ready"),
    (P2PError, 503, "network"),
)


class Refusal(AppError):
    """A request that the endpoint understands and does not serve, with what OpenAI's clients look at."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


def speaks(path: str) -> bool:
    """Whether this part of the API has OpenAI's form."""
    return path == PREFIX or path.startswith(PREFIX + "/")


def body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """One failure as JSON has it."""
    kind = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    usual = "invalid_request_error" if status < 500 else "server_error"
    told = {"message": " ".join(message.split()), "type": kind.get(status, usual), "param": param, "code": code}
    return {"error": told}


def failure(status: int, message: str, *, param: str | None = None, code: str | None = None) -> JSONResponse:
    """One failure as an answer."""
    return JSONResponse(body(status, message, param=param, code=code), status)


def status_and_body(error: Exception) -> tuple[int, dict[str, Any]]:
    """An error of ours."""
    text = str(error) or type(error).__doc__ or ""
    if isinstance(error, Refusal):
        return error.status, body(error.status, text, param=error.param, code=error.code)
    if isinstance(error, NoRoute) and error.busy:
        return 429, body(429, text, code="busy")
    status, code = next((status, code) for kind, status, code in _OURS if isinstance(error, kind))
    return status, body(status, text, code=code)


def told(error: Exception) -> JSONResponse:
    """An error of ours as an answer."""
    status, content = status_and_body(error)
    return JSONResponse(content, status)


def invalid(errors: Sequence[Any]) -> JSONResponse:
    """What is wrong with a request's form; a field that is not served is named as such."""
    first = next((error for error in errors if error["type"] == "unsupported"), errors[0])
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    if first["type"] == "unsupported":
        param = first["ctx"]["field"] if not where else where
        text = first["msg"] if not where else f"{where}: {first['msg']}"
        return failure(400, text, param=param, code="unsupported_parameter")
    if first["type"] == "extra_forbidden":
        return failure(400, f"{where} is not supported here", param=where, code="unsupported_parameter")
    return failure(400, f"the request's {where or 'body'} is wrong: {first['msg']}", param=where or None)

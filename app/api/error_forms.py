"""Error bodies by path: each family of clients reads its own form. All state the same message."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse

from app.api import openai_errors
from app.core.reasons import Reason

ANTHROPIC_PATH = "/v1/messages"
OLLAMA_PREFIX = "/api/"
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


def status_for(path: str, status: int) -> int:
    """Return the status that a family uses: Anthropic's clients know 529 for a service that cannot answer now."""
    return 529 if status == 503 and path.startswith(ANTHROPIC_PATH) else status


def body_for(path: str, status: int, why: Reason, *, param: str | None = None) -> dict[str, Any]:
    """Return the JSON body of a failure in the form of the family that has this path."""
    message = " ".join(why.text.split())
    if path.startswith(ANTHROPIC_PATH):
        usual = "invalid_request_error" if status < 500 else "api_error"
        kind = _ANTHROPIC_TYPES.get(status_for(path, status), usual)
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}
    if path.startswith(OLLAMA_PREFIX):
        return {"error": message}
    return openai_errors.body(status, why, param=param)


def failure_for(path: str, status: int, why: Reason, *, param: str | None = None) -> JSONResponse:
    """Return a failure as a response."""
    return JSONResponse(body_for(path, status, why, param=param), status_for(path, status))


def response_for(path: str, error: Exception) -> JSONResponse:
    """Return the response for an `AppError`, `P2PError` or `EngineError`."""
    status, why, param = openai_errors.status_and_reason(error)
    return failure_for(path, status, why, param=param)

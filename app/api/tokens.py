"""`/tokenize` and `/detokenize`, as vLLM has them: what a text costs before it is sent."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from app.api.control import Control
from app.api.keys import current_owner
from app.api.model_names import check_active
from app.api.openai_fields import DetokenizeRequest, TokenizeRequest
from app.api.replies import ignored_fields, ignored_header, owned


def routes(control: Control) -> APIRouter:
    """Return both routes."""
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(asked: TokenizeRequest) -> JSONResponse:
        """The token ids of a text or a conversation."""
        check_active(control.snapshot(), asked.model)
        tokens = await control.tokenize(owned(asked.request()), add_special=asked.add_special_tokens)
        answer = {"count": len(tokens), "max_model_len": control.snapshot().context_length, "tokens": tokens}
        return JSONResponse(answer, headers=ignored_header(ignored_fields(asked)))

    @router.post("/detokenize")
    async def detokenize(asked: DetokenizeRequest) -> JSONResponse:
        """The text of token ids."""
        check_active(control.snapshot(), asked.model)
        answer = {"prompt": await control.detokenize(asked.tokens, current_owner())}
        return JSONResponse(answer, headers=ignored_header(ignored_fields(asked)))

    return router

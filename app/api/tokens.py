"""`/tokenize` and `/detokenize`, as vLLM has them: what a text costs before it is sent."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from app.api.bodies import BodyRoute, aside
from app.api.control import Control
from app.api.keys import current_owner
from app.api.model_names import check_active
from app.api.openai_fields import DetokenizeRequest, TokenizeRequest
from app.api.replies import converted, owned, unread_header


def routes(control: Control) -> APIRouter:
    """Return both routes."""
    router = APIRouter(route_class=BodyRoute)

    @router.post("/tokenize")
    async def tokenize(asked: TokenizeRequest) -> JSONResponse:
        """The token ids of a text or a conversation."""
        check_active(control.snapshot(), asked.model)
        request, headers = await converted(asked)
        tokens = await control.tokenize(owned(request), add_special=asked.add_special_tokens)
        answer = {"count": len(tokens), "max_model_len": control.snapshot().context_length, "tokens": tokens}
        return await aside(partial(JSONResponse, answer, headers=headers))

    @router.post("/detokenize")
    async def detokenize(asked: DetokenizeRequest) -> JSONResponse:
        """The text of token ids."""
        check_active(control.snapshot(), asked.model)
        answer = {"prompt": await control.detokenize(asked.tokens, current_owner())}
        return await aside(lambda: JSONResponse(answer, headers=unread_header(asked)))

    return router

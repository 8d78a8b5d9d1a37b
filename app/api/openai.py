"""OpenAI's endpoint: `/v1/models`, `/v1/chat/completions`, `/v1/completions`, for clients that know nothing of Shoal.

The only model is the active swarm's, under the swarm's name; `SWARM+NAME` is the same model with the adapter NAME of
this home. `app.api.openai_fields` checks the request's fields and `app.api.openai_errors` makes the error bodies. A
stream's events are `data: JSON`, the last one `data: [DONE]`; a client that disconnects in the middle ends its session.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Response

from app.api.control import Control
from app.api.openai_errors import PREFIX, OpenAIError, response_to, status_and_body
from app.api.openai_fields import ChatCompletion, TextCompletion
from app.api.streaming import OUR_ERRORS, EventStream
from app.asker.reply import ReplyDone, ReplyEvent, ReplyStats, ReplyText, ReplyWaiting
from app.asker.reply_service import ReplyRequest
from app.snapshot.views import Snapshot

Events = AsyncGenerator[ReplyEvent, None]


def routes(control: Control) -> APIRouter:
    """Return the routes under `/v1`."""
    router = APIRouter()

    @router.get("/models")
    async def models() -> dict[str, Any]:
        """The swarm's model, alone and with each adapter of this home that was trained for it."""
        snapshot = control.snapshot()
        if snapshot.swarm is None:
            return {"object": "list", "data": []}
        names = [None, *await control.adapters()]
        return {"object": "list", "data": [_model(snapshot, name) for name in names]}

    @router.get("/models/{model}")
    async def model(model: str) -> dict[str, Any]:
        """One model by name."""
        snapshot = control.snapshot()
        adapter = _adapter_of(snapshot, model)
        if adapter is not None and adapter not in await control.adapters():
            raise OpenAIError(
                f"unknown model {model[:80]!r}: no adapter of this name was trained for {snapshot.swarm!r}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return _model(snapshot, adapter)

    @router.post("/chat/completions", response_class=Response)
    async def chat_completions(asked: ChatCompletion) -> Response:
        """A reply to a conversation, in OpenAI's form."""
        return _answer(control, asked, asked.request())

    @router.post("/completions", response_class=Response)
    async def completions(asked: TextCompletion) -> Response:
        """The continuation of a text, in OpenAI's form."""
        return _answer(control, asked, asked.request())

    return router


def _answer(control: Control, asked: ChatCompletion | TextCompletion, request: ReplyRequest) -> Response:
    snapshot = control.snapshot()
    request = replace(request, adapter=_adapter_of(snapshot, asked.model))
    form = _Chat.begin(snapshot, asked) if isinstance(asked, ChatCompletion) else _Text.begin(snapshot, asked)
    events = control.reply(request)
    if asked.stream:
        return EventStream(_events(events, form, usage=asked.wants_usage), "text/event-stream", response_to)
    return EventStream(_whole(events, form), "application/json", response_to)


def _model(snapshot: Snapshot, adapter: str | None = None) -> dict[str, Any]:
    joined = next((swarm.joined_at_ms for swarm in snapshot.swarms if swarm.active), 0)
    return {
        "id": snapshot.swarm if adapter is None else f"{snapshot.swarm}+{adapter}",
        "object": "model",
        "created": joined // 1000,
        "owned_by": "shoal",
        "name": snapshot.model,
        "context_length": snapshot.context_length,
    }


def _adapter_of(snapshot: Snapshot, wanted: str) -> str | None:
    """Return the adapter that a model's name asks for, None for the swarm's model alone; raises `OpenAIError`."""
    if snapshot.swarm is None:
        why = "this node is in no swarm: join one with `shoal join`, or create one with `shoal create`"
        raise OpenAIError(why, status=503, code="no_swarm")
    names = {snapshot.swarm, snapshot.model, *(swarm.pinned for swarm in snapshot.swarms if swarm.active)} - {"", None}
    if wanted in names:
        return None
    name, plus, adapter = wanted.rpartition("+")  # an adapter's name has no plus
    if plus and adapter and name in names:
        return adapter
    why = f"unknown model {wanted[:80]!r}: this node serves {snapshot.swarm!r}, the model of its swarm"
    raise OpenAIError(why, status=404, param="model", code="model_not_found")


@dataclass(frozen=True)
class _ReplyFormat:
    """The JSON around one reply, as a whole and in pieces; `head` holds the fields that all events share."""

    head: dict[str, Any]
    kind: str
    chunk_kind: str

    def whole(self, text: str, reason: str | None) -> dict[str, Any]:
        raise NotImplementedError

    def piece(self, text: str | None, reason: str | None = None, *, first: bool = False) -> dict[str, Any]:
        raise NotImplementedError


def _head(prefix: str, snapshot: Snapshot, model: str) -> dict[str, Any]:
    fingerprint = f"shoal-{(snapshot.manifest or '')[:16]}"
    created = int(time.time())
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "created": created,
        "model": model,
        "system_fingerprint": fingerprint,
    }


class _Chat(_ReplyFormat):
    @classmethod
    def begin(cls, snapshot: Snapshot, asked: ChatCompletion) -> _ReplyFormat:
        return cls(_head("chatcmpl", snapshot, asked.model), "chat.completion", "chat.completion.chunk")

    def whole(self, text: str, reason: str | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}

    def piece(self, text: str | None, reason: str | None = None, *, first: bool = False) -> dict[str, Any]:
        delta = {**({"role": "assistant"} if first else {}), **({} if text is None else {"content": text})}
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}


class _Text(_ReplyFormat):
    @classmethod
    def begin(cls, snapshot: Snapshot, asked: TextCompletion) -> _ReplyFormat:
        return cls(_head("cmpl", snapshot, asked.model), "text_completion", "text_completion")

    def whole(self, text: str, reason: str | None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}

    def piece(self, text: str | None, reason: str | None = None, *, first: bool = False) -> dict[str, Any]:
        return {"index": 0, "text": text or "", "logprobs": None, "finish_reason": reason}


def _usage(stats: ReplyStats) -> dict[str, Any]:
    prompt, completion = stats.prompt_tokens, len(stats.token_ids)
    right = stats.accepted_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": stats.cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": right,
            "rejected_prediction_tokens": stats.guessed_tokens - right,
        },
    }


async def _whole(events: Events, form: _ReplyFormat) -> AsyncGenerator[bytes, None]:
    """Yield one JSON value once the reply is complete."""
    async with aclosing(events):
        async for event in events:
            if isinstance(event, ReplyDone):
                choice = form.whole(event.text, event.stats.finish_reason)
                answer = {**form.head, "object": form.kind, "choices": [choice], "usage": _usage(event.stats)}
                yield json.dumps(answer, allow_nan=False).encode()


async def _events(events: Events, form: _ReplyFormat, *, usage: bool) -> AsyncGenerator[bytes, None]:
    """Yield the reply as server-sent events; an error after the first one is the last.

    A wait for a block is a comment, which clients skip.
    """
    head = {**form.head, "object": form.chunk_kind, **({"usage": None} if usage else {})}
    began = told = False  # the first piece was sent; anything was
    async with aclosing(events):
        try:
            async for event in events:
                if isinstance(event, ReplyWaiting):
                    yield f": {event.text}\n\n".encode()
                    told = True
                    continue
                if isinstance(event, ReplyText):
                    if event.text or not began:
                        yield _event({**head, "choices": [form.piece(event.text, first=not began)]})
                    began = told = True
                    continue
                yield _event({**head, "choices": [form.piece(None, event.stats.finish_reason)]})
                if usage:
                    yield _event({**head, "choices": [], "usage": _usage(event.stats)})
                yield b"data: [DONE]\n\n"
        except OUR_ERRORS as error:
            if not told:
                raise
            yield _event(status_and_body(error)[1])


def _event(value: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(value, allow_nan=False)}\n\n".encode()


__all__ = ["PREFIX", "routes"]

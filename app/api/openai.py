"""OpenAI's endpoint: models, chat and text completions, embeddings, for clients that know nothing of Shoal.

A model's name is that of its swarm, the active one or another (`app.api.model_names`); `SWARM+NAME` is the same model
with the adapter NAME of this home. `app.api.openai_fields` checks the request's fields, `app.api.openai_errors` makes
the error bodies. A stream's events are `data: JSON`, the last one `data: [DONE]`; a client that disconnects in the
middle ends its session. Several replies to one request (`n`) are written side by side, but streamed one by one.
"""

from __future__ import annotations

import base64
import json
import secrets
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import Any

import trio
from fastapi import APIRouter, Response

from app.api.bodies import BodyRoute, aside
from app.api.control import Control
from app.api.keys import TOO_LONG, count_tokens, current_owner
from app.api.model_names import check_active, named_model, other_swarms
from app.api.openai_errors import PREFIX, OpenAIError, response_to, status_and_body
from app.api.openai_fields import (
    ChatCompletion,
    EmbeddingsRequest,
    TextCompletion,
)
from app.api.replies import WholeReply, converted, metered_reply, side_by_side, unread_header
from app.api.streaming import EventStream, StreamForm, comment
from app.asker.reply import ReplyStats, ReplyText, ReplyWaiting
from app.asker.reply_service import ReplyRequest, SharedPrompt
from app.snapshot.views import Snapshot, SwarmView
from engine.text.output_form import ReplyPart, SaidText, ThoughtText, TokenLogprob

Asked = ChatCompletion | TextCompletion
# What is written of an answer in one go, while the rest of the node waits.
PIECE_CHARS = 1 << 14
PIECE_ITEMS = 32  # of a list: the probabilities of so many tokens take 6 ms


def routes(control: Control) -> APIRouter:
    """Return the routes under `/v1`."""
    router = APIRouter(route_class=BodyRoute)

    @router.get("/models")
    async def models() -> dict[str, Any]:
        """The swarm's model, alone and with each adapter of this home that was trained for it; then other swarms'."""
        snapshot = control.snapshot()
        adapters = [] if snapshot.swarm is None else [None, *await control.adapters()]
        others = [_other_model(snapshot, name, swarm) for name, swarm in other_swarms(snapshot).items()]
        return {"object": "list", "data": [*(_model(snapshot, name) for name in adapters), *others]}

    @router.get("/models/{model}")
    async def model(model: str) -> dict[str, Any]:
        """One model by name."""
        snapshot = control.snapshot()
        named = named_model(snapshot, model)
        other = next((item for item in other_swarms(snapshot).items() if item[1].pinned == named.swarm), None)
        if other is not None:
            return _other_model(snapshot, *other)
        adapter = named.adapter
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
        return _answer(control, asked, *await converted(asked))

    @router.post("/completions", response_class=Response)
    async def completions(asked: TextCompletion) -> Response:
        """The continuation of a text, in OpenAI's form."""
        return _answer(control, asked, *await converted(asked))

    @router.post("/embeddings", response_class=Response)
    async def embeddings(asked: EmbeddingsRequest) -> Response:
        """Embeddings of texts: the mean of the last block's outputs, scaled to length 1."""
        check_active(control.snapshot(), asked.model)
        data, count = [], 0
        for index, prompt in enumerate(await aside(asked.prompts)):
            try:
                vector, tokens = await control.embed(prompt, current_owner())
            except TOO_LONG as error:
                count_tokens(error.tokens)
                raise
            count_tokens(tokens)
            count += tokens
            one = {"object": "embedding", "index": index, "embedding": _encoded(vector, asked.encoding_format)}
            data.append(json.dumps(one, allow_nan=False))  # all at once take seconds, in which no token would be sent
        rest = json.dumps({"model": asked.model, "usage": {"prompt_tokens": count, "total_tokens": count}})
        answer = f'{{"object": "list", "data": [{", ".join(data)}], {rest[1:]}'
        return Response(answer, media_type="application/json", headers=await aside(unread_header, asked))

    return router


def _encoded(vector: Sequence[float], form: str | None) -> list[float] | str:
    if form != "base64":
        return list(vector)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def _answer(control: Control, asked: Asked, request: ReplyRequest, headers: dict[str, str]) -> Response:
    snapshot = control.snapshot()
    request = named_model(snapshot, asked.model).asked_by(request)
    form = _Chat.begin(snapshot, asked) if isinstance(asked, ChatCompletion) else _Text.begin(snapshot, asked)
    if asked.stream:
        chunks = _events(control, request, form, asked)
        return EventStream(chunks, "text/event-stream", response_to, headers, _STREAM)
    return EventStream(_whole(control, request, form, asked), "application/json", response_to, headers)


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


def _other_model(snapshot: Snapshot, name: str, swarm: SwarmView) -> dict[str, Any]:
    """Describe the model of a swarm that is visited; what it is called is known while the visit lasts."""
    visit = snapshot.visit
    is_visited = visit is not None and (visit.swarm, visit.manifest) == (swarm.name, swarm.manifest)
    return {
        "id": name,
        "object": "model",
        "created": swarm.joined_at_ms // 1000,
        "owned_by": "shoal",
        "name": visit.model if visit is not None and is_visited else "",
        "context_length": None,
    }


@dataclass(frozen=True)
class _ReplyFormat(ABC):
    """The JSON around one reply, as a whole and in pieces; `head` holds the fields that all events share."""

    head: dict[str, Any]
    kind: str
    chunk_kind: str
    echo: str = ""  # text before the reply

    @abstractmethod
    def whole(self, index: int, reply: WholeReply) -> dict[str, Any]:
        """Return a whole reply; its probabilities are iterators, for `_json_pieces`."""

    @abstractmethod
    def pieces(self, index: int, parts: Sequence[ReplyPart], logprob: TokenLogprob | None) -> list[dict[str, Any]]: ...

    @abstractmethod
    def end(self, index: int, reason: str | None) -> dict[str, Any]: ...


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

    def whole(self, index: int, reply: WholeReply) -> dict[str, Any]:
        content = None if reply.calls and not reply.text else reply.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reply.thought:
            message["reasoning_content"] = reply.thought
        if reply.calls:
            message["tool_calls"] = [_call(call.id, call.name, call.arguments) for call in reply.calls]
        logprobs = {"content": map(_chat_logprob, reply.logprobs), "refusal": None} if reply.logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reply.finish_reason}

    def pieces(self, index: int, parts: Sequence[ReplyPart], logprob: TokenLogprob | None) -> list[dict[str, Any]]:
        told = None if logprob is None else {"content": [_chat_logprob(logprob)], "refusal": None}
        deltas = [_delta(part) for part in parts] or ([{"content": ""}] if told else [])
        return [
            {"index": index, "delta": delta, "logprobs": told if place == 0 else None, "finish_reason": None}
            for place, delta in enumerate(deltas)
        ]

    def end(self, index: int, reason: str | None) -> dict[str, Any]:
        return {"index": index, "delta": {}, "logprobs": None, "finish_reason": reason}


def _delta(part: ReplyPart) -> dict[str, Any]:
    if isinstance(part, SaidText):
        return {"content": part.text}
    if isinstance(part, ThoughtText):
        return {"reasoning_content": part.text}
    if part.name is not None:
        return {"tool_calls": [{"index": part.index, **_call(part.id, part.name, part.arguments)}]}
    return {"tool_calls": [{"index": part.index, "function": {"arguments": part.arguments}}]}


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _chat_logprob(one: TokenLogprob) -> dict[str, Any]:
    told = {"token": _text_of(one), "logprob": one.logprob, "bytes": list(one.data)}
    return {
        **told,
        "top_logprobs": [{k: v for k, v in _chat_logprob(t).items() if k != "top_logprobs"} for t in one.top],
    }


class _Text(_ReplyFormat):
    @classmethod
    def begin(cls, snapshot: Snapshot, asked: TextCompletion) -> _ReplyFormat:
        return cls(_head("cmpl", snapshot, asked.model), "text_completion", "text_completion")

    def whole(self, index: int, reply: WholeReply) -> dict[str, Any]:
        told = _text_logprobs(reply.logprobs) if reply.logprobs else None
        return self._choice(index, self.echo + reply.text, told, reply.finish_reason)

    def pieces(self, index: int, parts: Sequence[ReplyPart], logprob: TokenLogprob | None) -> list[dict[str, Any]]:
        text = "".join(part.text for part in parts if isinstance(part, SaidText))
        told = None if logprob is None else {name: list(of) for name, of in _text_logprobs([logprob]).items()}
        return [self._choice(index, text, told, None)] if text or logprob else []

    def end(self, index: int, reason: str | None) -> dict[str, Any]:
        return self._choice(index, "", None, reason)

    @staticmethod
    def _choice(index: int, text: str, told: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": told, "finish_reason": reason}


def _text_logprobs(logprobs: Sequence[TokenLogprob]) -> dict[str, Iterator[Any]]:
    return {
        "tokens": map(_text_of, logprobs),
        "token_logprobs": (one.logprob for one in logprobs),
        "top_logprobs": ({_text_of(t): t.logprob for t in one.top} for one in logprobs),
        "text_offset": islice(accumulate((len(_text_of(one)) for one in logprobs), initial=0), len(logprobs)),
    }


def _text_of(one: TokenLogprob) -> str:
    return one.data.decode("utf-8", "replace")


def usage_of(all_stats: Sequence[ReplyStats]) -> dict[str, Any]:
    """Return the tokens of replies to one prompt."""
    prompt, completion = all_stats[0].prompt_tokens, sum(len(stats.token_ids) for stats in all_stats)
    right = sum(stats.accepted_tokens for stats in all_stats)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": all_stats[0].cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": right,
            "rejected_prediction_tokens": sum(stats.guessed_tokens for stats in all_stats) - right,
        },
    }


def _numbered(request: ReplyRequest, count: int) -> list[ReplyRequest]:
    """Return the requests of several replies to one prompt; each has a seed of its own."""
    shared = SharedPrompt()
    return [replace(request, seed=(request.seed + number) % 2**63, shared=shared) for number in range(count)]


async def _echo(control: Control, request: ReplyRequest, form: _ReplyFormat, asked: Asked) -> _ReplyFormat:
    """Return the form with the prompt's text, if the reply is to repeat it."""
    if not isinstance(asked, TextCompletion) or not asked.echo:
        return form
    prompt = request.prompt or ""
    return replace(form, echo=prompt if isinstance(prompt, str) else await control.detokenize(prompt, current_owner()))


async def _whole(
    control: Control, request: ReplyRequest, form: _ReplyFormat, asked: Asked
) -> AsyncGenerator[bytes, None]:
    """Yield one JSON value, in pieces, once all replies are complete; they are written side by side."""
    form = await _echo(control, request, form, asked)
    count = asked.n or 1
    drawn = max(count, asked.best_of or 1) if isinstance(asked, TextCompletion) else count
    replies = await side_by_side([metered_reply(control, one) for one in _numbered(request, drawn)])
    used = [reply.stats for reply in replies if reply.stats is not None]
    if drawn > count:
        replies = sorted(replies, key=lambda reply: reply.mean_logprob, reverse=True)[:count]
    if isinstance(asked, TextCompletion) and asked.logprobs is None:
        replies = [replace(reply, logprobs=[]) for reply in replies]
    choices = [form.whole(index, reply) for index, reply in enumerate(replies)]
    written, size = list[str](), 0
    for piece in _json_pieces({**form.head, "object": form.kind, "choices": choices, "usage": usage_of(used)}):
        written.append(piece)
        size += len(piece)
        if size >= PIECE_CHARS:
            await trio.lowlevel.checkpoint()
            yield "".join(written).encode()
            written, size = [], 0
    yield "".join(written).encode()


def _json_pieces(value: Any) -> Iterator[str]:
    """Yield a value as JSON; an iterator in it is written as a list, `PIECE_ITEMS` at a time as it is read."""
    if isinstance(value, dict) and value:
        for place, (name, one) in enumerate(value.items()):
            yield f"{', ' if place else '{'}{json.dumps(name)}: "
            yield from _json_pieces(one)
        yield "}"
    elif isinstance(value, list) and value:
        for place, one in enumerate(value):
            yield ", " if place else "["
            yield from _json_pieces(one)
        yield "]"
    elif isinstance(value, Iterator):
        yield "["
        between = ""
        while items := list(islice(value, PIECE_ITEMS)):
            yield between + json.dumps(items, allow_nan=False)[1:-1]
            between = ", "
        yield "]"
    else:
        yield json.dumps(value, allow_nan=False)


async def _events(
    control: Control, request: ReplyRequest, form: _ReplyFormat, asked: Asked
) -> AsyncGenerator[bytes, None]:
    """Yield replies as server-sent events, one reply after the other.

    A wait for a block is a comment, which clients skip.
    """
    usage = asked.wants_usage
    head = {**form.head, "object": form.chunk_kind, **({"usage": None} if usage else {})}
    used: list[ReplyStats] = []
    form = await _echo(control, request, form, asked)
    for index, one in enumerate(_numbered(request, asked.n or 1)):
        reply = WholeReply()
        events = metered_reply(control, one)
        async with aclosing(events):
            began = False
            async for event in events:
                if isinstance(event, ReplyWaiting):
                    yield comment(event.text)
                    continue
                if not began:
                    for choice in _first(form, index):
                        yield _event({**head, "choices": [choice]})
                    began = True
                if isinstance(event, ReplyText):
                    for choice in form.pieces(index, reply.add(event), event.logprob):
                        yield _event({**head, "choices": [choice]})
                    continue
                reply.stats = event.stats
                used.append(event.stats)
                yield _event({**head, "choices": [form.end(index, reply.finish_reason)]})
    if usage:
        yield _event({**head, "choices": [], "usage": usage_of(used)})
    yield b"data: [DONE]\n\n"


def _first(form: _ReplyFormat, index: int) -> list[dict[str, Any]]:
    """Return what stands before the first piece of a reply: the role, or the prompt that is repeated."""
    if isinstance(form, _Chat):
        role = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": role, "logprobs": None, "finish_reason": None}]
    return form.pieces(index, [SaidText(form.echo)], None)


def _event(value: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(value, allow_nan=False)}\n\n".encode()


_STREAM = StreamForm(alive=comment, error=lambda error: _event(status_and_body(error)[1]))


__all__ = ["PREFIX", "routes", "usage_of"]

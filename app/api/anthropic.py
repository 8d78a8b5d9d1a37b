"""Anthropic's endpoint: `/v1/messages` and `/v1/messages/count_tokens`, by the fields that its clients send.

The model is named as in OpenAI's endpoint. A stream's events have names; `app.api.error_forms` has the error bodies.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from app.api.bodies import BodyRoute
from app.api.control import Control
from app.api.error_forms import ANTHROPIC_PATH, body_for, response_for
from app.api.model_names import named_model
from app.api.openai_errors import status_and_reason
from app.api.openai_fields import MAX_TOOLS, Listed, seed_of, tool_of, tool_use
from app.api.replies import WholeReply, converted, metered_reply, owned, whole_reply
from app.api.streaming import EventStream, StreamForm
from app.asker.reply import ReplyStats, ReplyText, ReplyWaiting
from app.asker.reply_service import ReplyRequest
from engine.text.output_form import Constraint, ReplyPart, SaidText, ThoughtText, ToolUse

_MAX_TEXT = 2**19
_DROPPED_BLOCKS = ("redacted_thinking",)  # nothing of them can be read


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow")


class Block(_Body):
    """One block of a message's content."""

    type: Literal["text", "thinking", "tool_use", "tool_result"]
    text: str = Field(default="", max_length=_MAX_TEXT)
    thinking: str = Field(default="", max_length=_MAX_TEXT)
    signature: str | None = None
    id: str | None = Field(default=None, max_length=256)
    name: str | None = Field(default=None, max_length=128)
    input: dict[str, Any] | None = None
    tool_use_id: str | None = Field(default=None, max_length=256)
    content: Content | None = None
    is_error: bool | None = None
    cache_control: dict[str, Any] | None = None  # prompts are cached without being asked

    @model_validator(mode="after")
    def _check_kind(self) -> Block:
        if self.type == "tool_use" and (self.id is None or self.name is None):
            raise PydanticCustomError("block", "a tool_use block needs id and name")
        if self.type == "tool_result" and self.tool_use_id is None:
            raise PydanticCustomError("block", "a tool_result block needs tool_use_id")
        return self


def _known_blocks(blocks: Any) -> Any:
    """Drop blocks that say nothing to a model, and refuse kinds that would be lost."""
    if not isinstance(blocks, list):
        return blocks
    kept = [one for one in blocks if not isinstance(one, dict) or one.get("type") not in _DROPPED_BLOCKS]
    for one in kept:
        kind = one.get("type") if isinstance(one, dict) else None
        if kind in ("image", "document", "search_result", "server_tool_use", "web_search_tool_result"):
            raise PydanticCustomError("unsupported", "content of type {kind} is not supported", {"kind": kind})
    return kept


Content = Annotated[
    Annotated[str, Field(max_length=_MAX_TEXT)] | Annotated[Listed[Block], Field(max_length=1000)],
    BeforeValidator(_known_blocks),
]
Block.model_rebuild()


class AnthropicMessage(_Body):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Content


class AnthropicTool(_Body):
    """A tool of the client's own."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")
    type: Literal["custom"] | None = None
    description: str | None = Field(default=None, max_length=_MAX_TEXT)
    input_schema: dict[str, Any] = Field(default={})
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None


class AnthropicToolChoice(_Body):
    """Whether tools may be called: freely, at least one, the one named, or none."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(default=None, max_length=128)
    disable_parallel_tool_use: bool = False


class OutputFormat(_Body):
    """A JSON schema for the reply's text."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(_Body):
    """Options of the reply's text."""

    format: OutputFormat | None = None


class CountTokensRequest(_Body):
    """Body of `POST /v1/messages/count_tokens`, and what it shares with `POST /v1/messages`."""

    model: str = Field(max_length=256)
    messages: Listed[AnthropicMessage] = Field(min_length=1, max_length=1000)
    system: Content | None = None
    tools: Listed[AnthropicTool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: AnthropicToolChoice | None = None

    @model_validator(mode="after")
    def _check_tools(self) -> CountTokensRequest:
        _ = self.tool_use
        return self

    @cached_property
    def tool_use(self) -> ToolUse | None:
        """Return the tools and how they may be called; None if there is nothing to call."""
        found = self.tools or ()
        tools = [tool_of(one.name, one.description, one.input_schema, strict=bool(one.strict)) for one in found]
        choice = self.tool_choice or AnthropicToolChoice(type="auto")
        words = {"auto": "auto", "any": "required", "none": "none", "tool": f"={choice.name}"}
        return tool_use(tools, words[choice.type], parallel=not choice.disable_parallel_tool_use)

    def conversation(self) -> tuple[dict[str, Any], ...]:
        """Return the messages as chat templates take them."""
        system = [] if self.system is None else [{"role": "system", "content": _text(self.system)}]
        return (*system, *(made for message in self.messages for made in _messages(message)))

    def request(self) -> ReplyRequest:
        """Convert to the node's own request."""
        return ReplyRequest(messages=self.conversation(), tools=self.tool_use, is_read=True)


class MessagesRequest(CountTokensRequest):
    """Body of `POST /v1/messages`."""

    max_tokens: int = Field(ge=1, le=10**6)
    stream: bool | None = False
    temperature: float | None = Field(default=1.0, ge=0, le=1)
    top_p: float | None = Field(default=1.0, gt=0, le=1)
    top_k: int | None = Field(default=0, ge=0, le=10**6)
    stop_sequences: list[Annotated[str, Field(min_length=1, max_length=1024)]] | None = Field(
        default=None, max_length=16
    )
    output_config: OutputConfig | None = None
    metadata: dict[str, Any] | None = None

    def request(self) -> ReplyRequest:
        """Convert to the node's own request."""
        form = None if self.output_config is None else self.output_config.format
        constraint = None if form is None else Constraint("json", json.dumps(form.schema_), "output_config.format")
        return replace(
            super().request(),
            constraint=constraint,
            max_tokens=self.max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=self.top_p or 1.0,
            top_k=self.top_k or 0,
            stop=tuple(self.stop_sequences or ()),
            seed=seed_of(None),
        )


def _text(content: str | list[Block]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content if block.type == "text")


def _messages(message: AnthropicMessage) -> Iterator[dict[str, Any]]:
    """Yield a message as chat templates take it: results of tools are messages of their own, before the text."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    blocks = message.content
    for block in blocks:
        if block.type == "tool_result":
            result = _text(block.content or "")
            text = f"error: {result}" if block.is_error else result
            yield {"role": "tool", "content": text, "tool_call_id": block.tool_use_id}
    text = "".join(block.text for block in blocks if block.type == "text")
    made: dict[str, Any] = {"role": message.role, "content": text}
    calls = [
        {"id": block.id, "name": block.name, "arguments": json.dumps(block.input or {})}
        for block in blocks
        if block.type == "tool_use"
    ]
    thought = "".join(block.thinking for block in blocks if block.type == "thinking")
    made |= ({"tool_calls": calls} if calls else {}) | ({"reasoning_content": thought} if thought else {})
    if text or calls or not any(block.type == "tool_result" for block in blocks):
        yield made


def routes(control: Control) -> APIRouter:
    """Return the routes under `/v1/messages`."""
    router = APIRouter(route_class=BodyRoute)

    @router.post("", response_class=Response)
    async def messages(asked: MessagesRequest) -> Response:
        """A reply to a conversation, in Anthropic's form."""
        request, headers = await converted(asked)
        request = named_model(control.snapshot(), asked.model).asked_by(request)
        if asked.stream:
            return EventStream(_events(control, asked, request), "text/event-stream", _failed, headers, _STREAM)
        return EventStream(_whole(control, asked, request), "application/json", _failed, headers)

    @router.post("/count_tokens")
    async def count_tokens(asked: CountTokensRequest) -> JSONResponse:
        """The number of tokens of a conversation, in Anthropic's form."""
        request, headers = await converted(asked)
        tokens = await control.tokenize(owned(named_model(control.snapshot(), asked.model).asked_by(request)))
        return JSONResponse({"input_tokens": len(tokens)}, headers=headers)

    return router


def _failed(error: Exception) -> Response:
    return response_for(ANTHROPIC_PATH, error)


def _head(asked: MessagesRequest) -> dict[str, Any]:
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": asked.model,
    }


def _usage(stats: ReplyStats) -> dict[str, Any]:
    return {
        "input_tokens": stats.prompt_tokens - stats.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": stats.cached_tokens,
        "output_tokens": len(stats.token_ids),
    }


def _stop(reply: WholeReply) -> dict[str, Any]:
    """Why a reply ended."""
    stop = None if reply.stats is None else reply.stats.stop_string
    reasons = {"tool_calls": "tool_use", "length": "max_tokens"}
    reason = "stop_sequence" if stop is not None else reasons.get(reply.finish_reason or "", "end_turn")
    return {"stop_reason": reason, "stop_sequence": stop}


async def _whole(control: Control, asked: MessagesRequest, request: ReplyRequest) -> AsyncGenerator[bytes, None]:
    """Yield one JSON value once the reply is complete."""
    reply = await whole_reply(metered_reply(control, request))
    assert reply.stats is not None, "a whole reply has its figures"
    content: list[dict[str, Any]] = []
    if reply.thought:
        content.append({"type": "thinking", "thinking": reply.thought, "signature": ""})
    if reply.text or not (reply.calls or reply.thought):
        content.append({"type": "text", "text": reply.text})
    for call in reply.calls:
        content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)})
    answer = {**_head(asked), "content": content, **_stop(reply), "usage": _usage(reply.stats)}
    yield json.dumps(answer, allow_nan=False).encode()


def _input(arguments: str) -> Any:
    """Return a call's arguments; a call that was cut off by `max_tokens` has none."""
    try:
        return json.loads(arguments)
    except ValueError:
        return {}


async def _events(control: Control, asked: MessagesRequest, request: ReplyRequest) -> AsyncGenerator[bytes, None]:
    """Yield the reply as server-sent events."""
    tokens = len(await control.tokenize(owned(request)))
    usage = {"input_tokens": tokens, "output_tokens": 0}
    begun = {**_head(asked), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    reply, blocks = WholeReply(), _Blocks()
    events = metered_reply(control, request)
    told = False
    async with aclosing(events):
        async for event in events:
            if not told:
                yield _event("message_start", {"message": begun})
                told = True
            if isinstance(event, ReplyWaiting):
                yield _event("ping", {})
            elif isinstance(event, ReplyText):
                for part in reply.add(event):
                    for name, value in blocks.add(part):
                        yield _event(name, value)
            else:
                reply.stats = event.stats
                for name, value in blocks.end():
                    yield _event(name, value)
                yield _event("message_delta", {"delta": _stop(reply), "usage": _usage(event.stats)})
                yield _event("message_stop", {})


def _error(error: Exception) -> bytes:
    status, why, param = status_and_reason(error)
    return _event("error", {"error": body_for(ANTHROPIC_PATH, status, why, param=param)["error"]})


class _Blocks:
    """The content blocks of a streamed message: a new one whenever the kind of part changes."""

    def __init__(self) -> None:
        self._index = -1
        self._kind = ""

    def add(self, part: ReplyPart) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the events of one part."""
        if isinstance(part, SaidText):
            yield from self._begin("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": part.text})
        elif isinstance(part, ThoughtText):
            yield from self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": part.text})
        else:
            yield from self._begin(part.id, {"type": "tool_use", "id": part.id, "name": part.name, "input": {}})
            if part.arguments:
                yield self._delta({"type": "input_json_delta", "partial_json": part.arguments})

    def end(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the events at the end; a message has at least one block."""
        if self._index < 0:
            yield from self._begin("text", {"type": "text", "text": ""})
        yield "content_block_stop", {"index": self._index}

    def _begin(self, kind: str, block: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        if kind == self._kind:
            return
        if self._index >= 0:
            yield "content_block_stop", {"index": self._index}
        self._index, self._kind = self._index + 1, kind
        yield "content_block_start", {"index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        return "content_block_delta", {"index": self._index, "delta": delta}


def _event(name: str, value: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **value}, allow_nan=False)}\n\n".encode()


_STREAM = StreamForm(alive=lambda: _event("ping", {}), error=_error)

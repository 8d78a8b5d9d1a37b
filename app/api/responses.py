"""OpenAI's `/v1/responses`: items in, items out, with the conversation kept for a day so that the next may continue it.

Only functions are tools here; tools that OpenAI runs itself (`web_search`, …) are left out and named in the response
header of fields without effect.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Annotated, Any, Literal

import trio
from fastapi import APIRouter, Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from app.api.bodies import BodyRoute, aside
from app.api.control import Control
from app.api.keys import current_owner
from app.api.model_names import named_model
from app.api.openai_errors import OpenAIError, response_to, status_and_body
from app.api.openai_fields import (
    MAX_TOOLS,
    FunctionCall,
    FunctionDefinition,
    Listed,
    Metadata,
    NamedFunction,
    seed_of,
    tool_of,
    tool_use,
)
from app.api.replies import WholeReply, ignored_fields, ignored_header, metered_reply, whole_reply
from app.api.response_store import ResponseStore
from app.api.streaming import EventStream, StreamForm, comment
from app.asker.asker import USUAL_TOKENS
from app.asker.reply import ReplyStats, ReplyText, ReplyWaiting
from app.asker.reply_service import ReplyRequest
from engine.text.output_form import CallPiece, Constraint, ReplyPart, SaidText, ToolUse

_MAX_TEXT = 2**19
_STORE_THREADS = trio.CapacityLimiter(2)  # of kept responses: other reading of files does not wait for them
_TEXT_KINDS = ("input_text", "output_text", "text", "refusal")


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow")


class ContentPart(_Body):
    """One part of an item's content."""

    type: str = Field(max_length=64)
    text: str = Field(default="", max_length=_MAX_TEXT)

    @model_validator(mode="after")
    def _check_kind(self) -> ContentPart:
        if self.type not in _TEXT_KINDS:
            raise PydanticCustomError("unsupported", "content of type {kind} is not supported", {"kind": self.type})
        return self


_Content = Annotated[str, Field(max_length=_MAX_TEXT)] | Annotated[Listed[ContentPart], Field(max_length=1000)]


class InputItem(_Body):
    """One item of the conversation: a message, a call, or its result; what the model thought is skipped."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: _Content | None = None
    call_id: str | None = Field(default=None, max_length=256)
    name: str | None = Field(default=None, max_length=128)
    arguments: str | None = Field(default=None, max_length=_MAX_TEXT)
    output: _Content | None = None

    @model_validator(mode="after")
    def _check_kind(self) -> InputItem:
        if self.type == "message" and self.role is None:
            raise PydanticCustomError("item", "a message needs a role")
        if self.type == "function_call_output" and self.call_id is None:
            raise PydanticCustomError("item", "a function_call_output needs call_id")
        if self.type == "function_call":
            if self.call_id is None or self.name is None:
                raise PydanticCustomError("item", "a function_call needs call_id and name")
            FunctionCall(name=self.name, arguments=self.arguments or "{}")
        return self


def _as_items(given: Any) -> Any:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class TextFormat(_Body):
    """The form of the reply's text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    name: str | None = None
    strict: bool | None = None


class TextOptions(_Body):
    """Options of the reply's text."""

    format: TextFormat = TextFormat()


class ResponseTool(FunctionDefinition):
    """A function that the model may call."""

    type: Literal["function"]


class OtherTool(_Body):
    """A tool of another kind, which the model cannot call here."""

    type: str = Field(max_length=64)

    @field_validator("type")
    @classmethod
    def _check_kind(cls, kind: str) -> str:
        if kind == "function":
            raise PydanticCustomError("tool", "a function needs a name and, if it has any, its parameters")
        return kind


class NamedResponseTool(NamedFunction):
    """The function that the model must call."""

    type: Literal["function"]


class ResponsesRequest(_Body):
    """Body of `POST /v1/responses`."""

    model: str = Field(max_length=256)
    input: Annotated[Listed[InputItem], Field(min_length=1, max_length=1000), BeforeValidator(_as_items)]
    instructions: str | None = Field(default=None, max_length=_MAX_TEXT)
    previous_response_id: str | None = Field(default=None, max_length=128)
    store: bool | None = True
    stream: bool | None = False
    max_output_tokens: int | None = Field(default=None, ge=1, le=10**6)
    temperature: float | None = Field(default=1.0, ge=0, le=2)
    top_p: float | None = Field(default=1.0, gt=0, le=1)
    tools: Listed[ResponseTool | OtherTool] = Field(default=[], max_length=MAX_TOOLS)
    tool_choice: Literal["auto", "none", "required"] | NamedResponseTool | None = None
    parallel_tool_calls: bool | None = True
    text: TextOptions | None = None
    metadata: Metadata | None = None
    # Accepted, without effect on a reply.
    user: str | None = Field(default=None, max_length=1024)
    prompt_cache_key: str | None = Field(default=None, max_length=1024)

    @model_validator(mode="before")
    @classmethod
    def _check_background(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("background"):
            raise PydanticCustomError("unsupported", "{field} is not supported", {"field": "background"})
        return values

    @model_validator(mode="after")
    def _check_tools(self) -> ResponsesRequest:
        _ = self.tool_use
        return self

    @cached_property
    def tool_use(self) -> ToolUse | None:
        """Return the tools and how they may be called; None if there is nothing to call."""
        found = [tool for tool in self.tools if isinstance(tool, ResponseTool)]
        tools = [tool_of(one.name, one.description, one.parameters, strict=bool(one.strict)) for one in found]
        choice = self.tool_choice or "auto"
        wanted = f"={choice.name}" if isinstance(choice, NamedResponseTool) else choice
        return tool_use(tools, wanted, parallel=self.parallel_tool_calls is not False)

    @cached_property
    def shown_tools(self) -> list[dict[str, Any]]:
        """The tools as the response repeats them."""
        return [tool.model_dump() for tool in self.tools]

    def left_out(self) -> list[str]:
        """Name the tools that the model cannot call."""
        return [f"tools.{tool.type}" for tool in self.tools if isinstance(tool, OtherTool)]

    def constraint(self) -> Constraint | None:
        """Return the form that the reply's text must have."""
        form = TextFormat() if self.text is None else self.text.format
        if form.type == "text":
            return None
        schema = {"type": "object"} if form.type == "json_object" else form.schema_ or {}
        return Constraint("json", json.dumps(schema), "text.format")

    def request(self, before: list[dict[str, Any]]) -> ReplyRequest:
        """Convert to the node's own request, which continues a conversation; instructions are not part of that."""
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        return ReplyRequest(
            messages=(*system, *before, *conversation(self.input)),
            max_tokens=self.max_output_tokens or USUAL_TOKENS,
            may_end_sooner=self.max_output_tokens is None,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=self.top_p or 1.0,
            seed=seed_of(None),
            constraint=self.constraint(),
            tools=self.tool_use,
            is_read=True,
        )


def conversation(items: list[InputItem]) -> list[dict[str, Any]]:
    """Return items as messages for a chat template; calls in a row belong to one message."""
    made: list[dict[str, Any]] = []
    for item in items:
        if item.type == "function_call":
            call = {"id": item.call_id, "name": item.name, "arguments": item.arguments or "{}"}
            if not made or made[-1]["role"] != "assistant":
                made.append({"role": "assistant", "content": ""})
            made[-1].setdefault("tool_calls", []).append(call)
        elif item.type == "function_call_output":
            made.append({"role": "tool", "content": _text(item.output), "tool_call_id": item.call_id})
        elif item.type == "message":
            role = "system" if item.role == "developer" else item.role
            made.append({"role": role, "content": _text(item.content)})
    return made


def _text(content: str | list[ContentPart] | None) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


def routes(control: Control, store: ResponseStore) -> APIRouter:
    """Return the routes under `/v1/responses`."""
    router = APIRouter(route_class=BodyRoute)

    @router.post("", response_class=Response)
    async def create(asked: ResponsesRequest) -> Response:
        """A reply to a conversation, as a response of items."""
        model = named_model(control.snapshot(), asked.model)
        owner = current_owner()
        before = await _kept(store, owner, asked.previous_response_id)
        converted, headers = await aside(_converted, asked, before)
        answer = _Answer(control, store, owner, asked, model.asked_by(converted), before)
        if asked.stream:
            stream = StreamForm(alive=comment, error=answer.failed)
            return EventStream(answer.events(), "text/event-stream", response_to, headers, stream)
        return EventStream(answer.whole(), "application/json", response_to, headers)

    @router.get("/{response_id}")
    async def retrieve(response_id: str) -> Response:
        """A response of the last day."""
        kept = await trio.to_thread.run_sync(store.body, current_owner(), response_id, limiter=_STORE_THREADS)
        if kept is None:
            raise _unknown(response_id)
        return Response(kept, media_type="application/json")

    @router.delete("/{response_id}")
    async def delete(response_id: str) -> dict[str, Any]:
        """Forget a response."""
        if not await trio.to_thread.run_sync(store.remove, current_owner(), response_id, limiter=_STORE_THREADS):
            raise _unknown(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    return router


def _converted(asked: ResponsesRequest, before: list[dict[str, Any]]) -> tuple[ReplyRequest, dict[str, str]]:
    """Return the node's own request, and the response header that names fields without effect."""
    _ = asked.shown_tools  # here, where it keeps nobody waiting
    return asked.request(before), ignored_header([*ignored_fields(asked), *asked.left_out()])


async def _kept(store: ResponseStore, owner: str, response_id: str | None) -> list[dict[str, Any]]:
    """Return the conversation that a response continues; raises `OpenAIError` if it is not kept."""
    if response_id is None:
        return []
    kept = await trio.to_thread.run_sync(store.messages, owner, response_id, limiter=_STORE_THREADS)
    if kept is None:
        raise _unknown(response_id, "previous_response_id")
    return kept


def _unknown(response_id: str, param: str | None = None) -> OpenAIError:
    why = f"unknown response {response_id[:80]!r}: responses are kept for a day, unless store is false"
    return OpenAIError(why, status=404, param=param, code="not_found")


@dataclass
class _Answer:
    """One response: its JSON as it grows, and the events that tell of it."""

    control: Control
    store: ResponseStore
    owner: str
    asked: ResponsesRequest
    request: ReplyRequest
    before: list[dict[str, Any]]
    id: str = field(default_factory=lambda: f"resp_{secrets.token_hex(16)}")
    at: int = field(default_factory=lambda: int(time.time()))
    _number: int = 0  # of the next event
    # Those that the events tell of:
    _reply: WholeReply = field(default_factory=WholeReply)
    _items: _Items = field(default_factory=lambda: _Items())

    def body(self, status: str, reply: WholeReply, output: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the response as JSON."""
        asked = self.asked
        text = {} if asked.text is None else asked.text.model_dump(by_alias=True, exclude_none=True)
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        choice = asked.tool_choice or "auto"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.at,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": asked.model,
            "output": output,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": asked.store is not False,
            "temperature": self.request.temperature,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": asked.shown_tools,
            "top_p": self.request.top_p,
            "truncation": "disabled",
            "usage": None if reply.stats is None else _usage(reply.stats),
            "user": asked.user,
        }

    async def whole(self) -> AsyncGenerator[bytes, None]:
        """Yield one JSON value once the reply is complete."""
        reply = await whole_reply(metered_reply(self.control, self.request))
        items = _Items()
        if reply.thought:
            items.open("reasoning", "").text = reply.thought
        if reply.text or not reply.calls:
            items.open("message", "").text = reply.text
        for call in reply.calls:
            item = items.open("function_call", call.id)
            item.name, item.text = call.name, call.arguments
        body = self.body(_status(reply), reply, items.output())
        await self._keep(body, reply)
        yield json.dumps(body, allow_nan=False).encode()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the response as server-sent events."""
        reply, items = self._reply, self._items
        events = metered_reply(self.control, self.request)
        async with aclosing(events):
            async for event in events:
                if not self._number:
                    yield self._begun()
                if isinstance(event, ReplyWaiting):
                    yield comment(event.text)
                elif isinstance(event, ReplyText):
                    for part in reply.add(event):
                        for name, value in items.add(part):
                            yield self._event(name, value)
                else:
                    reply.stats = event.stats
                    for name, value in items.close():
                        yield self._event(name, value)
                    status = _status(reply)
                    body = self.body(status, reply, items.output())
                    await self._keep(body, reply)
                    yield self._event(f"response.{status}", {"response": body})

    def failed(self, error: Exception) -> bytes:
        """Return the last events of a response that fails."""
        why = status_and_body(error)[1]["error"]
        failed = self.body("failed", self._reply, self._items.output())
        failed["error"] = {"code": "server_error", "message": why["message"]}
        begun = b"" if self._number else self._begun()
        return begun + self._event("response.failed", {"response": failed})

    def _begun(self) -> bytes:
        begun = {"response": self.body("in_progress", self._reply, [])}
        return self._event("response.created", begun) + self._event("response.in_progress", begun)

    async def _keep(self, body: dict[str, Any], reply: WholeReply) -> None:
        if self.asked.store is False:
            return
        said: dict[str, Any] = {"role": "assistant", "content": reply.text}
        calls = [{"id": one.id, "name": one.name, "arguments": one.arguments} for one in reply.calls]
        if calls and _status(reply) == "completed":
            said["tool_calls"] = calls
        messages = [*self.before, *conversation(self.asked.input), said]
        await trio.to_thread.run_sync(
            partial(self.store.add, self.owner, self.id, body, messages), limiter=_STORE_THREADS
        )

    def _event(self, name: str, value: dict[str, Any]) -> bytes:
        told = {"type": name, "sequence_number": self._number, **value}
        self._number += 1
        return f"event: {name}\ndata: {json.dumps(told, allow_nan=False)}\n\n".encode()


def _status(reply: WholeReply) -> str:
    return "incomplete" if reply.finish_reason == "length" else "completed"


def _usage(stats: ReplyStats) -> dict[str, Any]:
    made = len(stats.token_ids)
    return {
        "input_tokens": stats.prompt_tokens,
        "input_tokens_details": {"cached_tokens": stats.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": stats.prompt_tokens + made,
    }


@dataclass
class _Item:
    """An output item as far as it has come: `text` is what was said or thought, or the arguments of a call."""

    kind: str
    call_id: str
    id: str
    name: str = ""
    text: str = ""

    def as_json(self, status: str) -> dict[str, Any]:
        """The item as the API sends it."""
        if self.kind == "function_call":
            call = {"call_id": self.call_id, "name": self.name, "arguments": self.text}
            return {"type": self.kind, "id": self.id, **call, "status": status}
        empty = status == "in_progress"
        if self.kind == "reasoning":
            return {"type": self.kind, "id": self.id, "summary": [], "content": [] if empty else [self.part()]}
        content = [] if empty else [self.part()]
        return {"type": self.kind, "id": self.id, "role": "assistant", "content": content, "status": status}

    def part(self) -> dict[str, Any]:
        """The only part of the item's content."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}


_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class _Items:
    """The output items of a response: a new one whenever the kind of part changes."""

    def __init__(self) -> None:
        self._items: list[_Item] = []
        self._is_open = False

    def output(self) -> list[dict[str, Any]]:
        """All items as the API sends them."""
        return [item.as_json("completed") for item in self._items]

    def open(self, kind: str, call_id: str) -> _Item:
        """Begin a new item."""
        self._items.append(_Item(kind, call_id, f"{_PREFIXES[kind]}_{secrets.token_hex(12)}"))
        self._is_open = True
        return self._items[-1]

    def add(self, part: ReplyPart) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the events of one part."""
        if isinstance(part, CallPiece):
            kind, call_id, more = "function_call", part.id, part.arguments
        else:
            kind, call_id, more = "message" if isinstance(part, SaidText) else "reasoning", "", part.text
        last = self._items[-1] if self._is_open else None
        if last is None or (last.kind, last.call_id) != (kind, call_id):
            yield from self._close()
            last = self.open(kind, call_id)
            last.name = (part.name or "") if isinstance(part, CallPiece) else ""
            yield "response.output_item.added", {**self._place, "item": last.as_json("in_progress")}
            if kind == "message":
                yield "response.content_part.added", {**self._place_of_part, "part": last.part()}
        last.text += more
        if more:
            yield f"{_DELTAS[kind]}.delta", {**self._place_of(kind), "delta": more}

    def close(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the events at the end; a response has at least one item."""
        if not self._items:
            yield from self.add(SaidText(""))
        yield from self._close()

    def _close(self) -> Iterator[tuple[str, dict[str, Any]]]:
        if not self._is_open:
            return
        item, self._is_open = self._items[-1], False
        key = "arguments" if item.kind == "function_call" else "text"
        named = {"name": item.name} if item.kind == "function_call" else {}
        yield f"{_DELTAS[item.kind]}.done", {**self._place_of(item.kind), **named, key: item.text}
        if item.kind == "message":
            yield "response.content_part.done", {**self._place_of_part, "part": item.part()}
        yield "response.output_item.done", {**self._place, "item": item.as_json("completed")}

    @property
    def _place(self) -> dict[str, Any]:
        return {"output_index": len(self._items) - 1}

    @property
    def _place_of_part(self) -> dict[str, Any]:
        return {**self._place, "item_id": self._items[-1].id, "content_index": 0}

    def _place_of(self, kind: str) -> dict[str, Any]:
        if kind == "function_call":
            return {**self._place, "item_id": self._items[-1].id}
        logprobs: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        return {**self._place_of_part, **logprobs}


_DELTAS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}

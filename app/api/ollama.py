"""Ollama's API: `/api/chat`, `/api/generate`, `/api/tags`, `/api/show`, `/api/version`, for the fronts that speak it.

A stream is one JSON value a line, the last with `done: true`. The model is named as in OpenAI's endpoint, or with the
tag `:latest`. Fronts that send no key need the setting `open_loopback`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from app.api.bodies import BodyRoute
from app.api.control import Control
from app.api.error_forms import OLLAMA_PREFIX, body_for, response_for
from app.api.model_names import NamedModel, named_model, other_swarms
from app.api.openai_errors import status_and_reason
from app.api.openai_fields import MAX_TOOLS, Listed, ToolDefinition, seed_of, tool_of, tool_use
from app.api.replies import WholeReply, converted, metered_reply, whole_reply
from app.api.streaming import EventStream, StreamForm
from app.asker.asker import USUAL_TOKENS
from app.asker.reply import ReplyStats, ReplyText, ReplyWaiting
from app.asker.reply_service import ReplyRequest
from app.snapshot.views import Snapshot, SwarmView
from engine.text.output_form import Constraint, ReplyPart, SaidText, ThoughtText, ToolUse

_MAX_TEXT = 2**19
_TAG = ":latest"
OLLAMA_VERSION = "0.12.0"  # whose API this is; some fronts refuse servers that are older


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow")


class OllamaOptions(_Body):
    """Sampling settings, by Ollama's names."""

    num_predict: int | None = Field(default=None, ge=-2, le=10**6)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_k: int | None = Field(default=None, ge=0, le=10**6)
    top_p: float | None = Field(default=None, gt=0, le=1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repeat_penalty: float | None = Field(default=None, gt=0, le=10)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: (
        Annotated[list[Annotated[str, Field(max_length=1024)]], Field(max_length=16)]
        | Annotated[str, Field(max_length=1024)]
        | None
    ) = None


class OllamaFunctionCall(_Body):
    """The name and the arguments of a call that the assistant made."""

    name: str = Field(max_length=128)
    arguments: dict[str, Any] = Field(default={})


class OllamaCall(_Body):
    """A call that the assistant made."""

    function: OllamaFunctionCall


class OllamaMessage(_Body):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = Field(default="", max_length=_MAX_TEXT)
    thinking: str | None = Field(default=None, max_length=_MAX_TEXT)
    tool_calls: Listed[OllamaCall] | None = Field(default=None, max_length=128)
    tool_name: str | None = Field(default=None, max_length=128)
    images: list[Any] | None = None

    @model_validator(mode="after")
    def _check_images(self) -> OllamaMessage:
        if self.images:
            raise PydanticCustomError("unsupported", "{field} is not supported", {"field": "images"})
        return self


class _GenerateBody(_Body):
    """Fields that chats and texts share."""

    model: str = Field(max_length=256)
    stream: bool | None = True
    format: dict[str, Any] | Literal["json", ""] | None = None
    options: OllamaOptions | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    keep_alive: float | str | None = None  # the swarm keeps its model loaded

    def settings(self) -> dict[str, Any]:
        """Return the fields of `ReplyRequest` that options state; Ollama's defaults for the others."""
        o = self.options or OllamaOptions()
        stop = tuple(filter(None, (o.stop,) if isinstance(o.stop, str) else o.stop or ()))
        predict = o.num_predict if o.num_predict is not None and o.num_predict > 0 else None
        schema = {"type": "object"} if self.format == "json" else self.format or None
        return {
            "max_tokens": predict or (10**6 if o.num_predict is not None else USUAL_TOKENS),
            "may_end_sooner": predict is None,
            "temperature": 0.8 if o.temperature is None else o.temperature,
            "top_k": 40 if o.top_k is None else o.top_k,
            "top_p": o.top_p or 0.9,
            "min_p": o.min_p or 0.0,
            "repetition_penalty": o.repeat_penalty or 1.0,
            "frequency_penalty": o.frequency_penalty or 0.0,
            "presence_penalty": o.presence_penalty or 0.0,
            "seed": seed_of(o.seed),
            "stop": stop,
            "constraint": None if schema is None else Constraint("json", json.dumps(schema), "format"),
            "template_variables": {} if self.think is None else {"enable_thinking": bool(self.think)},
        }


class OllamaChat(_GenerateBody):
    """Body of `POST /api/chat`."""

    messages: Listed[OllamaMessage] = Field(default=[], max_length=1000)
    tools: Listed[ToolDefinition] | None = Field(default=None, max_length=MAX_TOOLS)

    @property
    def is_empty(self) -> bool:
        """True if it only asks for the model to be loaded, which a swarm's always is."""
        return not self.messages

    @model_validator(mode="after")
    def _check_tools(self) -> OllamaChat:
        _ = self.tool_use
        return self

    @cached_property
    def tool_use(self) -> ToolUse | None:
        """Return the tools, which the model may call as it likes; None if there are none."""
        found = [one.function for one in self.tools or ()]
        tools = [tool_of(one.name, one.description, one.parameters, strict=bool(one.strict)) for one in found]
        return tool_use(tools, "auto", parallel=True)

    def request(self) -> ReplyRequest:
        """Convert to the node's own request; results belong to the calls before them, in their order."""
        messages: list[dict[str, Any]] = []
        waiting: list[str] = []
        for number, message in enumerate(self.messages):
            made: dict[str, Any] = {"role": message.role, "content": message.content}
            if message.tool_calls:
                waiting = [f"call_{number}_{place}" for place in range(len(message.tool_calls))]
                made["tool_calls"] = [
                    {"id": i, "name": call.function.name, "arguments": json.dumps(call.function.arguments)}
                    for i, call in zip(waiting, message.tool_calls, strict=True)
                ]
            if message.role == "tool":
                made["tool_call_id"] = waiting.pop(0) if waiting else f"call_{number}"
            if message.thinking:
                made["reasoning_content"] = message.thinking
            messages.append(made)
        return ReplyRequest(messages=tuple(messages), tools=self.tool_use, is_read=True, **self.settings())


class OllamaGenerate(_GenerateBody):
    """Body of `POST /api/generate`."""

    prompt: str = Field(default="", max_length=_MAX_TEXT)
    system: str | None = Field(default=None, max_length=_MAX_TEXT)
    raw: bool | None = False
    suffix: str | None = Field(default=None, max_length=_MAX_TEXT)
    images: list[Any] | None = None

    @property
    def is_empty(self) -> bool:
        """True if it only asks for the model to be loaded, which a swarm's always is."""
        return not self.prompt

    @model_validator(mode="after")
    def _check_fields(self) -> OllamaGenerate:
        if self.images:
            raise PydanticCustomError("unsupported", "{field} is not supported", {"field": "images"})
        return self

    def request(self) -> ReplyRequest:
        """Convert to the node's own request: the prompt as a message, or as it is if it is `raw` or has a suffix."""
        settings = self.settings()
        if self.raw or self.suffix:
            plain = {**settings, "template_variables": {}}
            return ReplyRequest(prompt=self.prompt, suffix=self.suffix or None, **plain)
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return ReplyRequest(messages=(*system, {"role": "user", "content": self.prompt}), is_read=True, **settings)


class ShowRequest(_Body):
    """Body of `POST /api/show`."""

    model: str | None = Field(default=None, max_length=256)
    name: str | None = Field(default=None, max_length=256)  # the older name of the field

    @model_validator(mode="after")
    def _check_model(self) -> ShowRequest:
        if not (self.model or self.name):
            raise PydanticCustomError("model", "model is missing")
        return self


def routes(control: Control, version: str) -> APIRouter:
    """Return the routes under `/api`."""
    router = APIRouter(route_class=BodyRoute)

    @router.get("/version")
    async def ollama_version() -> dict[str, str]:
        """The version of Ollama whose API this is, and Shoal's own."""
        return {"version": OLLAMA_VERSION, "shoal": version}

    @router.get("/tags")
    async def tags() -> dict[str, Any]:
        """The swarm's model, alone and with each adapter of this home, then other swarms', in Ollama's form."""
        snapshot, made = control.snapshot(), []
        if snapshot.swarm is not None:
            names = [snapshot.swarm, *(f"{snapshot.swarm}+{name}" for name in await control.adapters())]
            made = [(name, _about(_active(snapshot))) for name in names]
        made += [(name, _about(swarm)) for name, swarm in other_swarms(snapshot).items()]
        return {"models": [{"name": name, "model": name, **about} for name, about in made]}

    @router.post("/show")
    async def show(asked: ShowRequest) -> dict[str, Any]:
        """Facts about a model, in Ollama's form."""
        snapshot = control.snapshot()
        named = _named(snapshot, asked.model or asked.name or "")
        other = next((swarm for swarm in snapshot.swarms if swarm.pinned == named.swarm), None)
        context_length = snapshot.context_length if other is None else None
        info = {"general.architecture": "shoal", "shoal.context_length": context_length}
        about = {**_about(other or _active(snapshot)), "model_info": info, "capabilities": ["completion", "tools"]}
        return {"modelfile": "", "parameters": "", "template": "", **about}

    @router.post("/chat", response_class=Response)
    async def chat(asked: OllamaChat) -> Response:
        """A reply to a conversation, in Ollama's form."""
        return await _answer(control, asked)

    @router.post("/generate", response_class=Response)
    async def generate(asked: OllamaGenerate) -> Response:
        """The continuation of a text, in Ollama's form."""
        return await _answer(control, asked)

    return router


def _named(snapshot: Snapshot, model: str) -> NamedModel:
    return named_model(snapshot, model.removesuffix(_TAG))


def _active(snapshot: Snapshot) -> SwarmView:
    usual = SwarmView(snapshot.swarm or "", snapshot.manifest or "", "")
    return next((swarm for swarm in snapshot.swarms if swarm.active), usual)


def _about(swarm: SwarmView) -> dict[str, Any]:
    details = {"format": "shoal", "family": "", "families": [], "parameter_size": "", "quantization_level": ""}
    at = datetime.fromtimestamp(swarm.joined_at_ms / 1000, UTC).isoformat()
    return {"modified_at": at, "size": 0, "digest": swarm.manifest, "details": details}


async def _answer(control: Control, asked: OllamaChat | OllamaGenerate) -> Response:
    request, headers = await converted(asked)
    request = _named(control.snapshot(), asked.model).asked_by(request)
    form = _Form(asked.model, isinstance(asked, OllamaChat))
    if asked.is_empty:
        return Response(form.loaded(), media_type="application/json", headers=headers)
    events = metered_reply(control, request)
    if asked.stream is False:
        return EventStream(_whole(events, form), "application/json", _failed, headers)
    # A line without a text: some clients take an empty line, or white space alone, for broken JSON.
    stream = StreamForm(alive=lambda: form.piece("", "", []), error=_error)
    return EventStream(_lines(events, form), "application/x-ndjson", _failed, headers, stream)


def _failed(error: Exception) -> Response:
    return response_for(OLLAMA_PREFIX, error)


def _error(error: Exception) -> bytes:
    status, why, _ = status_and_reason(error)
    return json.dumps(body_for(OLLAMA_PREFIX, status, why)).encode() + b"\n"


@dataclass(frozen=True)
class _Form:
    """The JSON around one reply."""

    model: str
    is_chat: bool

    def piece(self, said: str, thought: str, calls: list[dict[str, Any]], **more: Any) -> bytes:
        """Return one line."""
        thinking: dict[str, Any] = {"thinking": thought} if thought else {}
        value: dict[str, Any] = {"model": self.model, "created_at": datetime.now(UTC).isoformat()}
        if not self.is_chat:
            value |= {"response": said, **thinking}
        else:
            made = {"tool_calls": calls} if calls else {}
            value["message"] = {"role": "assistant", "content": said, **thinking, **made}
        return json.dumps({**value, "done": False, **more}, allow_nan=False).encode() + b"\n"

    def loaded(self) -> bytes:
        """Return the answer to a request without a text."""
        return self.piece("", "", [], done=True, done_reason="load")

    def end(self, stats: ReplyStats, *parts: Any) -> bytes:
        """Return the last line, with the figures in nanoseconds."""
        made, first_s = len(stats.token_ids), stats.ttft_s or 0.0
        rest_s = (made - 1) / stats.tokens_per_s if stats.tokens_per_s else 0.0
        said, thought, calls = parts or ("", "", [])
        return self.piece(
            said,
            thought,
            calls,
            done=True,
            done_reason="length" if stats.finish_reason == "length" else "stop",
            total_duration=int(1e9 * (first_s + rest_s)),
            load_duration=0,
            prompt_eval_count=stats.prompt_tokens,
            prompt_eval_duration=int(1e9 * first_s),
            eval_count=made,
            eval_duration=int(1e9 * rest_s),
        )


def _calls(reply: WholeReply, first: int = 0) -> list[dict[str, Any]]:
    """Return the complete calls from a number on."""
    made = []
    for call in reply.calls[first:]:
        try:
            made.append({"id": call.id, "function": {"name": call.name, "arguments": json.loads(call.arguments)}})
        except ValueError:  # cut off by the limit of tokens
            break
    return made


async def _whole(events: AsyncGenerator[Any, None], form: _Form) -> AsyncGenerator[bytes, None]:
    """Yield one JSON value once the reply is complete."""
    reply = await whole_reply(events)
    assert reply.stats is not None, "a whole reply has its figures"
    yield form.end(reply.stats, reply.text, reply.thought, _calls(reply))


async def _lines(events: AsyncGenerator[Any, None], form: _Form) -> AsyncGenerator[bytes, None]:
    """Yield the reply line by line; a call comes when it is complete."""
    reply = WholeReply()
    called = 0
    async with aclosing(events):
        async for event in events:
            if isinstance(event, ReplyWaiting):
                continue
            if isinstance(event, ReplyText):
                parts = reply.add(event)
                calls = _calls(reply, called)
                called += len(calls)
                said, thought = _texts(parts)
                if said or thought or calls:
                    yield form.piece(said, thought, calls)
                continue
            yield form.end(event.stats)


def _texts(parts: tuple[ReplyPart, ...]) -> tuple[str, str]:
    said = "".join(part.text for part in parts if isinstance(part, SaidText))
    return said, "".join(part.text for part in parts if isinstance(part, ThoughtText))

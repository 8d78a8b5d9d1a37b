"""The request bodies of OpenAI's endpoint: fields that take effect, and fields that are refused.

A field that would change the meaning of a reply, but is not supported, is refused by name, unless its value is the one
that switches it off. All other unknown fields are ignored; a response header names them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from app.api.bodies import has_too_many_parts
from app.asker.asker import USUAL_TOKENS
from app.asker.reply_service import ReplyRequest
from app.routing.route import MAX_PRIVATE_BLOCKS
from engine.text.output_form import Constraint, ConstraintKind, Tool, ToolUse

_MAX_TEXT = 2**19
_MAX_TOKENS = 10**6
_LEAST_TOP_P = 1e-9  # keeps only the most likely token
MAX_CHOICES = 16
MAX_TOOLS = 256
_TOOL_NAME = r"^[A-Za-z0-9_.:/-]{1,128}$"

T = TypeVar("T")
# Refused at the first mistake: to list a million of them takes seconds, in which the node does nothing else.
Listed = Annotated[list[T], Field(fail_fast=True)]
Named = Annotated[dict[str, T], Field(fail_fast=True)]
Metadata = Annotated[Named[str], Field(max_length=16)]  # as many as OpenAI takes

Unsupported = Mapping[str, tuple[Any, ...]]  # a field's name -> the values, besides null, that switch it off

_MESSAGE_UNSUPPORTED: Unsupported = {"audio": (), "function_call": ()}
_CHAT_UNSUPPORTED: Unsupported = {
    "store": (False,),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "web_search_options": (),
}


def _without_unsupported(values: Any, unsupported: Unsupported) -> Any:
    """Return the fields without the unsupported ones; raises if one of those would change the reply."""
    if not isinstance(values, dict):
        return values
    for name, off_values in unsupported.items():
        value = values.get(name)
        # True == 1 in Python, but not in the JSON of the client.
        same = (value == one and isinstance(value, bool) == isinstance(one, bool) for one in off_values)
        if value is not None and not any(same):
            raise PydanticCustomError("unsupported", "{field} is not supported", {"field": name})
    return {name: value for name, value in values.items() if name not in unsupported}


class _OpenAIBody(BaseModel):
    model_config = ConfigDict(extra="allow")


class TextPart(_OpenAIBody):
    """One text part of a message's content."""

    type: Literal["text"]
    text: str = Field(max_length=_MAX_TEXT)


def _only_text(parts: Any) -> Any:
    for part in parts if isinstance(parts, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise PydanticCustomError("unsupported", "content of type {kind} is not supported", {"kind": kind[:40]})
    return parts


class FunctionCall(_OpenAIBody):
    """The name and the arguments, as JSON, of a call that the assistant made."""

    name: str = Field(pattern=_TOOL_NAME)
    arguments: str = Field(default="{}", max_length=_MAX_TEXT)

    @field_validator("arguments")
    @classmethod
    def _check_json(cls, text: str) -> str:
        if has_too_many_parts(text):
            raise PydanticCustomError("arguments", "arguments have too many objects and lists")
        try:
            value = json.loads(text or "{}")
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise PydanticCustomError("arguments", "arguments must be a JSON object as text")
        return text or "{}"


class ToolCall(_OpenAIBody):
    """A call that the assistant made."""

    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: FunctionCall


class OpenAIMessage(_OpenAIBody):
    """One message of a conversation."""

    @model_validator(mode="before")
    @classmethod
    def _drop_unsupported(cls, values: Any) -> Any:
        return _without_unsupported(values, _MESSAGE_UNSUPPORTED)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Annotated[str, Field(max_length=_MAX_TEXT)] | Annotated[Listed[TextPart], Field(max_length=1000)] | None,
        BeforeValidator(_only_text),
    ] = None
    tool_calls: Listed[ToolCall] | None = Field(default=None, max_length=128)
    tool_call_id: str | None = Field(default=None, max_length=256)
    reasoning_content: str | None = Field(default=None, max_length=_MAX_TEXT)

    @model_validator(mode="after")
    def _check_role(self) -> OpenAIMessage:
        if self.role == "tool" and self.tool_call_id is None:
            raise PydanticCustomError("tool", "a message of the role tool needs tool_call_id")
        if self.role != "assistant" and self.tool_calls:
            raise PydanticCustomError("tool", "only a message of the role assistant can have tool_calls")
        return self

    def message(self) -> dict[str, Any]:
        """Convert to the form that chat templates take: one role, one text, and calls."""
        parts = self.content or ""
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        made: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.tool_calls:
            calls = ((call.id, call.function) for call in self.tool_calls)
            made["tool_calls"] = [{"id": i, "name": call.name, "arguments": call.arguments} for i, call in calls]
        if self.role == "tool":
            made["tool_call_id"] = self.tool_call_id
        if self.reasoning_content:
            made["reasoning_content"] = self.reasoning_content
        return made


class FunctionDefinition(_OpenAIBody):
    """A function that the model may call."""

    name: str = Field(pattern=_TOOL_NAME)
    description: str | None = Field(default=None, max_length=_MAX_TEXT)
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(_OpenAIBody):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(_OpenAIBody):
    """The name of a function."""

    name: str = Field(pattern=_TOOL_NAME)


class NamedToolChoice(_OpenAIBody):
    """The tool that the model must call."""

    type: Literal["function"]
    function: NamedFunction


def seed_of(seed: int | None) -> int:
    """Return a seed as the node takes it; without one the clock gives it, so replies differ."""
    return (time.time_ns() if seed is None else seed) % 2**63


def tool_of(name: str, description: str | None, parameters: dict[str, Any] | None, *, strict: bool = False) -> Tool:
    """Return a tool as the node takes it; without a schema it has no arguments."""
    schema = json.dumps(parameters or {"type": "object", "properties": {}})
    return Tool(name, description or "", schema, strict)


def tool_use(tools: list[Tool], choice: str, *, parallel: bool) -> ToolUse | None:
    """Return the use of tools by a choice: `auto`, `none`, `required`, or `=` and the name of one.

    Raises `PydanticCustomError` if a name is unknown, or given to two tools.
    """
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise PydanticCustomError("tools", "two tools have the same name")
    if choice.startswith("="):
        if choice[1:] not in names:
            raise PydanticCustomError("tools", "tool_choice names a tool that is not in tools")
        return ToolUse(tuple(tools), name=choice[1:], parallel=False)
    if choice == "required" and not tools:
        raise PydanticCustomError("tools", "tool_choice is required, but there are no tools")
    if choice == "none" or not tools:
        return None
    return ToolUse(tuple(tools), "required" if choice == "required" else "auto", parallel=parallel)


class StreamOptions(_OpenAIBody):
    """Options of a streamed reply."""

    include_usage: bool = False


class JsonSchemaFormat(_OpenAIBody):
    """A named JSON schema, as `response_format` states it; `strict` changes nothing, as every reply follows it."""

    name: str = Field(default="", max_length=256)
    description: str | None = Field(default=None, max_length=_MAX_TEXT)
    schema_: dict[str, Any] = Field(default={}, alias="schema")
    strict: bool | None = None


class ResponseFormat(_OpenAIBody):
    """The form of a reply: any text, a JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise PydanticCustomError("schema", "json_schema is missing")
        return self


class StructuredOutputs(_OpenAIBody):
    """vLLM's other way to write the fields `guided_…`."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Listed[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


_Bias = Annotated[
    dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], Annotated[float, Field(ge=-100, le=100)]], Field(fail_fast=True)
]


class _CompletionBody(_OpenAIBody):
    """Fields that chat and text completions share."""

    unsupported: ClassVar[Unsupported] = {}
    usual_tokens: ClassVar[int] = USUAL_TOKENS  # of a reply without a limit

    model: str = Field(max_length=256)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1, le=_MAX_TOKENS)
    temperature: float | None = Field(default=1.0, ge=0, le=2)
    top_p: float | None = Field(default=1.0, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: (
        Annotated[str, Field(min_length=1, max_length=1024)]
        | Annotated[list[Annotated[str, Field(min_length=1, max_length=1024)]], Field(max_length=16)]
        | None
    ) = None
    n: int | None = Field(default=1, ge=1, le=MAX_CHOICES)
    logit_bias: _Bias | None = Field(default=None, max_length=1024)
    frequency_penalty: float | None = Field(default=0.0, ge=-2, le=2)
    presence_penalty: float | None = Field(default=0.0, ge=-2, le=2)
    # Shoal's own fields; clients of OpenAI send them by `extra_body`.
    top_k: int | None = Field(default=0, ge=0, le=10**6)
    min_p: float | None = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float | None = Field(default=1.0, gt=0, le=10)
    private_blocks: int | None = Field(default=None, ge=0, le=MAX_PRIVATE_BLOCKS)
    # The form of the reply, as OpenAI and vLLM name it; one of these.
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Listed[str] | None = None
    guided_grammar: str | None = None
    # Accepted, without effect on a reply.
    user: str | None = Field(default=None, max_length=1024)

    @model_validator(mode="before")
    @classmethod
    def _drop_unsupported(cls, values: Any) -> Any:
        return _without_unsupported(values, cls.unsupported)

    @model_validator(mode="after")
    def _check_stream_options(self) -> _CompletionBody:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options needs stream to be true")
        return self

    @model_validator(mode="after")
    def _check_one_constraint(self) -> _CompletionBody:
        if len(fields := [one.field for one in self.constraints]) > 1:
            raise PydanticCustomError("constraints", "only one of {fields} can be used", {"fields": ", ".join(fields)})
        return self

    @cached_property
    def constraints(self) -> list[Constraint]:
        """Return what the fields about the reply's form ask for."""
        asked, other = self.response_format, self.structured_outputs
        found: list[tuple[ConstraintKind, Any, str]] = [
            ("json", self.guided_json, "guided_json"),
            ("regex", self.guided_regex, "guided_regex"),
            ("choice", self.guided_choice, "guided_choice"),
            ("grammar", self.guided_grammar, "guided_grammar"),
        ]
        if other is not None:
            schema = {"type": "object"} if other.json_object else other.json_
            found += [
                ("json", schema, "structured_outputs"),
                ("regex", other.regex, "structured_outputs"),
                ("choice", other.choice, "structured_outputs"),
                ("grammar", other.grammar, "structured_outputs"),
            ]
        if asked is not None and asked.type == "json_object":
            found.append(("json", {"type": "object"}, "response_format"))
        if asked is not None and asked.type == "json_schema" and asked.json_schema is not None:
            found.append(("json", asked.json_schema.schema_, "response_format"))
        texts = ((kind, value if isinstance(value, str) else json.dumps(value), name) for kind, value, name in found)
        return [Constraint(kind, text, name) for kind, text, name in texts if text != "null"]

    @property
    def token_limit(self) -> int | None:
        """Largest number of tokens of the reply; None if the client set none."""
        return self.max_tokens

    @property
    def wants_usage(self) -> bool:
        """True if the last event of a stream states the number of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def settings(self) -> dict[str, Any]:
        """Return the fields of `ReplyRequest` but the prompt."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return {
            "max_tokens": self.token_limit or self.usual_tokens,
            "may_end_sooner": self.token_limit is None,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": max(1.0 if self.top_p is None else self.top_p, _LEAST_TOP_P),
            "top_k": self.top_k or 0,
            "min_p": self.min_p or 0.0,
            "repetition_penalty": self.repetition_penalty or 1.0,
            "frequency_penalty": self.frequency_penalty or 0.0,
            "presence_penalty": self.presence_penalty or 0.0,
            "seed": seed_of(self.seed),
            "stop": tuple(stop),
            "private_blocks": self.private_blocks,
            "constraint": next(iter(self.constraints), None),
            "logprobs": self.top_count,
            "logit_bias": tuple((int(token), bias) for token, bias in (self.logit_bias or {}).items()),
        }

    @property
    def top_count(self) -> int | None:
        """Number of likeliest tokens to tell beside each token; None: no probabilities."""
        return None


class ChatCompletion(_CompletionBody):
    """Body of `POST /v1/chat/completions`."""

    unsupported = _CHAT_UNSUPPORTED

    messages: Listed[OpenAIMessage] = Field(min_length=1, max_length=1000)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=_MAX_TOKENS)
    tools: Listed[ToolDefinition] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Literal["auto", "none", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = True
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] | None = None
    # Accepted, without effect on a reply.
    metadata: Metadata | None = None
    safety_identifier: str | None = Field(default=None, max_length=1024)
    prompt_cache_key: str | None = Field(default=None, max_length=1024)

    @model_validator(mode="after")
    def _check_limits(self) -> ChatCompletion:
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise PydanticCustomError("limits", "max_tokens and max_completion_tokens contradict each other")
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("logprobs", "top_logprobs needs logprobs to be true")
        _ = self.tool_use
        return self

    @cached_property
    def tool_use(self) -> ToolUse | None:
        """Return the tools and how they may be called; None if there is nothing to call."""
        found = [one.function for one in self.tools or ()]
        tools = [tool_of(one.name, one.description, one.parameters, strict=bool(one.strict)) for one in found]
        choice = self.tool_choice or "auto"
        wanted = f"={choice.function.name}" if isinstance(choice, NamedToolChoice) else choice
        return tool_use(tools, wanted, parallel=self.parallel_tool_calls is not False)

    @property
    def token_limit(self) -> int | None:
        """Largest number of tokens of the reply, by either name of the field."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def top_count(self) -> int | None:
        """Number of likeliest tokens to tell beside each token; None: no probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def request(self) -> ReplyRequest:
        """Convert to the node's own request."""
        return ReplyRequest(
            messages=tuple(message.message() for message in self.messages),
            tools=self.tool_use,
            is_read=True,
            template_variables=self.chat_template_kwargs or {},
            **self.settings(),
        )


_Token = Annotated[int, Field(ge=0, lt=2**31)]
_Tokens = Annotated[Listed[_Token], Field(min_length=1, max_length=_MAX_TEXT)]


def _one_prompt(prompt: Any) -> Any:
    """Refuse a list of prompts, of which a client wants one reply each."""
    if isinstance(prompt, list) and len(prompt) > 1 and not all(isinstance(item, int) for item in prompt):
        words = "prompt must be one string or one list of token ids; a list of prompts is not supported"
        raise PydanticCustomError("unsupported", words, {"field": "prompt"})
    return prompt


class TextCompletion(_CompletionBody):
    """Body of `POST /v1/completions`."""

    usual_tokens = 16  # as OpenAI's

    prompt: Annotated[
        Annotated[str, Field(max_length=_MAX_TEXT)]
        | _Tokens
        | Annotated[list[Annotated[str, Field(max_length=_MAX_TEXT)]], Field(min_length=1, max_length=1)],
        BeforeValidator(_one_prompt),
    ]
    suffix: str | None = Field(default=None, max_length=_MAX_TEXT)
    best_of: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    echo: bool | None = False
    logprobs: int | None = Field(default=None, ge=0, le=20)

    @model_validator(mode="after")
    def _check_choices(self) -> TextCompletion:
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise PydanticCustomError("best_of", "best_of must be at least n")
        if self.best_of is not None and self.best_of > (self.n or 1) and self.stream:
            raise PydanticCustomError("best_of", "best_of above n cannot be streamed")
        if self.echo and self.logprobs is not None:
            raise PydanticCustomError("unsupported", "logprobs together with echo is not supported", {"field": "echo"})
        return self

    @property
    def top_count(self) -> int | None:
        """Number of likeliest tokens to tell beside each token; None: no probabilities."""
        return 0 if self.logprobs is None and (self.best_of or 1) > (self.n or 1) else self.logprobs

    def request(self) -> ReplyRequest:
        """Convert to the node's own request."""
        prompt = self.prompt[0] if isinstance(self.prompt, list) and isinstance(self.prompt[0], str) else self.prompt
        text = prompt if isinstance(prompt, str) else cast(tuple[int, ...], tuple(prompt))
        return ReplyRequest(prompt=text, suffix=self.suffix or None, **self.settings())


_Input = Annotated[str, Field(min_length=1, max_length=_MAX_TEXT)]


class EmbeddingsRequest(_OpenAIBody):
    """Body of `POST /v1/embeddings`."""

    model: str = Field(max_length=256)
    input: _Input | _Tokens | Annotated[Listed[_Input] | Listed[_Tokens], Field(min_length=1, max_length=256)]
    encoding_format: Literal["float", "base64"] | None = "float"

    @model_validator(mode="before")
    @classmethod
    def _drop_unsupported(cls, values: Any) -> Any:
        return _without_unsupported(values, {"dimensions": ()})

    def prompts(self) -> list[str | tuple[int, ...]]:
        """Return the texts, or their token ids."""
        given = self.input
        if isinstance(given, str):
            return [given]
        if isinstance(given[0], int):
            return [tuple(token for token in given if isinstance(token, int))]
        return [one if isinstance(one, str) else tuple(one) for one in given if not isinstance(one, int)]


class TokenizeRequest(_OpenAIBody):
    """Body of `POST /tokenize`: a text, or a conversation."""

    model: str | None = Field(default=None, max_length=256)
    prompt: str | None = Field(default=None, max_length=_MAX_TEXT)
    messages: Listed[OpenAIMessage] | None = Field(default=None, min_length=1, max_length=1000)
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("prompt", "send either prompt or messages")
        return self

    def request(self) -> ReplyRequest:
        """Convert to the node's own request."""
        if self.messages is None:
            return ReplyRequest(prompt=self.prompt)
        return ReplyRequest(messages=tuple(message.message() for message in self.messages))


class DetokenizeRequest(_OpenAIBody):
    """Body of `POST /detokenize`."""

    model: str | None = Field(default=None, max_length=256)
    tokens: Annotated[Listed[_Token], Field(max_length=_MAX_TEXT)]

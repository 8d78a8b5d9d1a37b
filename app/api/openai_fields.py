"""The request bodies of OpenAI's endpoint: fields that take effect, fields accepted without effect, fields refused.

An unsupported field that would change a reply is refused by name, unless its value is the one that switches it off.
`IGNORED` lists the only fields without effect: extensions of other servers that programs send without being asked to.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from app.asker.reply_service import ReplyRequest
from app.routing.route import MAX_PRIVATE_BLOCKS
from engine.text.output_form import Constraint, ConstraintKind

DEFAULT_MAX_TOKENS = 512
_MAX_TEXT = 2**19
_MAX_TOKENS = 10**6
_LEAST_TOP_P = 1e-9  # keeps only the most likely token
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


Unsupported = Mapping[str, tuple[Any, ...]]  # a field's name -> the values, besides null, that switch it off

_MESSAGE_UNSUPPORTED: Unsupported = {
    "name": (),
    "refusal": ("",),
    "audio": (),
    "annotations": ([],),
    "function_call": (),
    "tool_calls": ([],),
}
_COMMON_UNSUPPORTED: Unsupported = {"n": (1,), "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},)}
_CHAT_UNSUPPORTED: Unsupported = {
    **_COMMON_UNSUPPORTED,
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
_TEXT_UNSUPPORTED: Unsupported = {
    **_COMMON_UNSUPPORTED,
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (),
    "suffix": ("",),
}


# Ollama's, llama.cpp's, vLLM's, LM Studio's, Anthropic's and OpenRouter's.
IGNORED = frozenset(
    {
        *("keep_alive", "options", "think"),
        *("cache_prompt", "id_slot", "slot_id", "timings_per_token", "return_progress"),
        *("chat_template_kwargs", "add_generation_prompt", "continue_final_message", "skip_special_tokens"),
        *("ttl", "draft_model"),
        *("thinking", "enable_thinking"),
        *("provider", "transforms", "usage"),
    }
)
_HINTS = {"n": "n above 1 is not supported; send n=1"}


def _without_unsupported(values: Any, unsupported: Unsupported) -> Any:
    """Return the fields without the unsupported ones; raises if one of those would change the reply."""
    if not isinstance(values, dict):
        return values
    for name, off_values in unsupported.items():
        value = values.get(name)
        # True == 1 in Python, but not in the JSON of the client.
        same = (value == one and isinstance(value, bool) == isinstance(one, bool) for one in off_values)
        if value is not None and not any(same):
            text = _HINTS.get(name, "{field} is not supported")
            raise PydanticCustomError("unsupported", text, {"field": name})
    return {name: value for name, value in values.items() if name not in unsupported}


class _OpenAIBody(BaseModel):
    model_config = ConfigDict(extra="forbid", serialize_by_alias=True)


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


class OpenAIMessage(_OpenAIBody):
    """One message of a conversation."""

    @model_validator(mode="before")
    @classmethod
    def _drop_unsupported(cls, values: Any) -> Any:
        return _without_unsupported(values, _MESSAGE_UNSUPPORTED)

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[str, Field(max_length=_MAX_TEXT)] | Annotated[list[TextPart], Field(max_length=1000)] | None,
        BeforeValidator(_only_text),
    ] = None

    def message(self) -> dict[str, str]:
        """Convert to the form that chat templates take: one role and one text."""
        parts = self.content or ""
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": _ROLES[self.role], "content": text}


class StreamOptions(_OpenAIBody):
    """Options of a streamed reply."""

    include_usage: bool = False

    @model_validator(mode="before")
    @classmethod
    def _drop_unsupported(cls, values: Any) -> Any:
        return _without_unsupported(values, {"include_obfuscation": (False,)})


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
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class _CompletionBody(_OpenAIBody):
    """Fields that chat and text completions share."""

    unsupported: ClassVar[Unsupported] = {}

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
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # Accepted, without effect on a reply.
    user: str | None = Field(default=None, max_length=1024)

    @model_validator(mode="before")
    @classmethod
    def _drop_unsupported(cls, values: Any) -> Any:
        if isinstance(values, dict):
            values = {name: value for name, value in values.items() if name not in IGNORED}
        return _without_unsupported(values, cls.unsupported)

    @model_validator(mode="after")
    def _check_stream_options(self) -> _CompletionBody:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options needs stream to be true")
        return self

    @model_validator(mode="after")
    def _check_one_constraint(self) -> _CompletionBody:
        if len(fields := [one.field for one in self._constraints()]) > 1:
            raise PydanticCustomError("constraints", "only one of {fields} can be used", {"fields": ", ".join(fields)})
        return self

    def _constraints(self) -> list[Constraint]:
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
        """Return the fields of `ReplyRequest` but the prompt; without a seed the clock gives one, so replies differ."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return {
            "max_tokens": self.token_limit or DEFAULT_MAX_TOKENS,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": max(1.0 if self.top_p is None else self.top_p, _LEAST_TOP_P),
            "top_k": self.top_k or 0,
            "min_p": self.min_p or 0.0,
            "repetition_penalty": self.repetition_penalty or 1.0,
            "seed": (time.time_ns() if self.seed is None else self.seed) % 2**63,
            "stop": tuple(stop),
            "private_blocks": self.private_blocks,
            "constraint": next(iter(self._constraints()), None),
        }


class ChatCompletion(_CompletionBody):
    """Body of `POST /v1/chat/completions`."""

    unsupported = _CHAT_UNSUPPORTED

    messages: list[OpenAIMessage] = Field(min_length=1, max_length=1000)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=_MAX_TOKENS)
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = Field(default=None, max_length=1024)
    prompt_cache_key: str | None = Field(default=None, max_length=1024)

    @model_validator(mode="after")
    def _check_limits(self) -> ChatCompletion:
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise PydanticCustomError("limits", "max_tokens and max_completion_tokens contradict each other")
        return self

    @property
    def token_limit(self) -> int | None:
        """Largest number of tokens of the reply, by either name of the field."""
        return self.max_completion_tokens or self.max_tokens

    def request(self) -> ReplyRequest:
        """Convert to the node's own request."""
        return ReplyRequest(messages=tuple(message.message() for message in self.messages), **self.settings())


def _one_prompt(prompt: Any) -> Any:
    """Refuse a list of prompts, of which a client wants one reply each."""
    if isinstance(prompt, list) and len(prompt) > 1 and not all(isinstance(item, int) for item in prompt):
        words = "prompt must be one string or one list of token ids; a list of prompts is not supported"
        raise PydanticCustomError("unsupported", words, {"field": "prompt"})
    return prompt


class TextCompletion(_CompletionBody):
    """Body of `POST /v1/completions`."""

    unsupported = _TEXT_UNSUPPORTED

    prompt: Annotated[
        Annotated[str, Field(max_length=_MAX_TEXT)]
        | Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, max_length=_MAX_TEXT)]
        | Annotated[list[Annotated[str, Field(max_length=_MAX_TEXT)]], Field(min_length=1, max_length=1)],
        BeforeValidator(_one_prompt),
    ]

    @property
    def token_limit(self) -> int | None:
        """Largest number of tokens of the reply; 16 by default, as OpenAI's for text completions."""
        return self.max_tokens or 16

    def request(self) -> ReplyRequest:
        """Convert to the node's own request."""
        prompt = self.prompt[0] if isinstance(self.prompt, list) and isinstance(self.prompt[0], str) else self.prompt
        text = prompt if isinstance(prompt, str) else tuple(int(token_id) for token_id in prompt)
        return ReplyRequest(prompt=text, **self.settings())

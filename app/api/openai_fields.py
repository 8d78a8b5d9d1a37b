"""What OpenAI's clients may ask: which fields count, which may be there because they change nothing, which are refused.

Nothing is ignored in silence: a field that would change a reply and is not served is refused by its name, unless its
value is the one that means "without it".
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from app.asker.reply_service import ReplyRequest
from app.routing.route import MAX_PRIVATE_BLOCKS

DEFAULT_MAX_TOKENS = 512
_MAX_TEXT = 2**19
_MAX_TOKENS = 10**6
_LEAST_TOP_P = 1e-9  # keeps the best token alone
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


Unserved = Mapping[str, tuple[Any, ...]]  # a field's name to the values, besides null, that mean "without it"

_OF_A_MESSAGE: Unserved = {
    "name": (),
    "refusal": ("",),
    "audio": (),
    "annotations": ([],),
    "function_call": (),
    "tool_calls": ([],),
}
_OF_BOTH: Unserved = {"n": (1,), "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},)}
_OF_CHAT: Unserved = {
    **_OF_BOTH,
    "store": (False,),
    "service_tier": ("auto", "default"),
    "response_format": ({"type": "text"},),
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
_OF_TEXT: Unserved = {**_OF_BOTH, "best_of": (1,), "echo": (False,), "logprobs": (), "suffix": ("",)}


def _served(values: Any, unserved: Unserved) -> Any:
    """The fields that count; raises where one that is not served would change the reply."""
    if not isinstance(values, dict):
        return values
    for name, harmless in unserved.items():
        value = values.get(name)
        # True equals 1 in Python, and is something else to whoever sent it.
        same = (value == one and isinstance(value, bool) == isinstance(one, bool) for one in harmless)
        if value is not None and not any(same):
            raise PydanticCustomError("unsupported", "{field} is not supported here", {"field": name})
    return {name: value for name, value in values.items() if name not in unserved}


class _OpenAIBody(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TextPart(_OpenAIBody):
    """A piece of a message's text."""

    type: Literal["text"]
    text: str = Field(max_length=_MAX_TEXT)


def _only_text(parts: Any) -> Any:
    for part in parts if isinstance(parts, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise PydanticCustomError(
                "unsupported", "content of type {kind} is not supported here", {"kind": kind[:40]}
            )
    return parts


class OpenAIMessage(_OpenAIBody):
    """One message of a conversation."""

    @model_validator(mode="before")
    @classmethod
    def _without_unserved(cls, values: Any) -> Any:
        return _served(values, _OF_A_MESSAGE)

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[str, Field(max_length=_MAX_TEXT)] | Annotated[list[TextPart], Field(max_length=1000)] | None,
        BeforeValidator(_only_text),
    ] = None

    def message(self) -> dict[str, str]:
        """As chat templates take it."""
        parts = self.content or ""
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": _ROLES[self.role], "content": text}


class StreamOptions(_OpenAIBody):
    """What a stream holds besides the reply."""

    include_usage: bool = False

    @model_validator(mode="before")
    @classmethod
    def _without_unserved(cls, values: Any) -> Any:
        return _served(values, {"include_obfuscation": (False,)})


class _Asked(_OpenAIBody):
    """What both kinds of completion share."""

    unserved: ClassVar[Unserved] = {}

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
    # Shoal's own, by `extra_body`.
    top_k: int | None = Field(default=0, ge=0, le=10**6)
    min_p: float | None = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float | None = Field(default=1.0, gt=0, le=10)
    private_blocks: int | None = Field(default=None, ge=0, le=MAX_PRIVATE_BLOCKS)
    # Taken and of no effect on a reply.
    user: str | None = Field(default=None, max_length=1024)

    @model_validator(mode="before")
    @classmethod
    def _without_unserved(cls, values: Any) -> Any:
        return _served(values, cls.unserved)

    @model_validator(mode="after")
    def _options_belong_to_streams(self) -> _Asked:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options need stream to be true")
        return self

    @property
    def longest(self) -> int | None:
        """How many tokens the reply may have."""
        return self.max_tokens

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the number of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def settings(self) -> dict[str, Any]:
        """The reply's settings as the node takes them; without a seed each reply is another."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return {
            "max_tokens": self.longest or DEFAULT_MAX_TOKENS,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": max(1.0 if self.top_p is None else self.top_p, _LEAST_TOP_P),
            "top_k": self.top_k or 0,
            "min_p": self.min_p or 0.0,
            "repetition_penalty": self.repetition_penalty or 1.0,
            "seed": (time.time_ns() if self.seed is None else self.seed) % 2**63,
            "stop": tuple(stop),
            "private_blocks": self.private_blocks,
        }


class ChatCompletion(_Asked):
    """`/v1/chat/completions`."""

    unserved = _OF_CHAT

    messages: list[OpenAIMessage] = Field(min_length=1, max_length=1000)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=_MAX_TOKENS)
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = Field(default=None, max_length=1024)
    prompt_cache_key: str | None = Field(default=None, max_length=1024)

    @model_validator(mode="after")
    def _one_limit(self) -> ChatCompletion:
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise PydanticCustomError("limits", "max_tokens and max_completion_tokens contradict each other")
        return self

    @property
    def longest(self) -> int | None:
        """How many tokens the reply may have, by either name."""
        return self.max_completion_tokens or self.max_tokens

    def request(self) -> ReplyRequest:
        """As the node takes it."""
        return ReplyRequest(messages=tuple(message.message() for message in self.messages), **self.settings())


class TextCompletion(_Asked):
    """`/v1/completions`."""

    unserved = _OF_TEXT

    prompt: (
        Annotated[str, Field(max_length=_MAX_TEXT)]
        | Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, max_length=_MAX_TEXT)]
        | Annotated[list[Annotated[str, Field(max_length=_MAX_TEXT)]], Field(min_length=1, max_length=1)]
    )

    @property
    def longest(self) -> int | None:
        """OpenAI's own default for raw completions is 16."""
        return self.max_tokens or 16

    def request(self) -> ReplyRequest:
        """As the node takes it."""
        prompt = self.prompt[0] if isinstance(self.prompt, list) and isinstance(self.prompt[0], str) else self.prompt
        text = prompt if isinstance(prompt, str) else tuple(int(token_id) for token_id in prompt)
        return ReplyRequest(prompt=text, **self.settings())

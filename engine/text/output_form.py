"""The form that a request asks of a reply, and the parts of a reply: plain values, light to import.

`engine.text.constraint` and `engine.text.tool_calls` check and use them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from engine.errors import EngineError

ConstraintKind = Literal["json", "regex", "choice", "grammar", "lark"]


@dataclass(frozen=True)
class Constraint:
    """The form that a reply must have: a JSON schema, a regular expression, choices as JSON, or a grammar."""

    kind: ConstraintKind
    text: str
    field: str  # of the request, for errors


class FieldError(EngineError):
    """A field of the request cannot be followed with this model; `field` is its name."""

    reason_code = "unsupported_parameter"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class ConstraintError(FieldError):
    """The constraint is wrong, or too complex to follow; `field` is the request's field that states it."""

    reason_code = EngineError.reason_code


@dataclass(frozen=True)
class Tool:
    """A function that the model may call; `parameters` is the JSON schema of its arguments, as text."""

    name: str
    description: str = ""
    parameters: str = '{"type": "object", "properties": {}}'
    strict: bool = False  # the arguments must follow the schema, even if the model is free to call

    def as_json(self) -> dict[str, Any]:
        """The tool in the form that chat templates take, which is OpenAI's."""
        about = {"description": self.description} if self.description else {}
        return {
            "type": "function",
            "function": {"name": self.name, **about, "parameters": json.loads(self.parameters)},
        }


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request, and whether the model may call them, must call one, or must call the one named."""

    tools: tuple[Tool, ...]
    choice: Literal["auto", "required"] = "auto"
    name: str | None = None  # the only tool that may be called
    parallel: bool = True  # several calls in one reply

    @property
    def is_forced(self) -> bool:
        """True if the reply must be a call."""
        return self.choice == "required" or self.name is not None

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that the reply may call."""
        return tuple(tool for tool in self.tools if self.name in (None, tool.name))


@dataclass(frozen=True)
class SaidText:
    """A piece of a reply's text."""

    text: str


@dataclass(frozen=True)
class ThoughtText:
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class CallPiece:
    """A piece of a tool call: its name with the first piece, then parts of its arguments' JSON."""

    index: int
    id: str
    name: str | None
    arguments: str


@dataclass(frozen=True)
class TokenLogprob:
    """A token's natural log probability before any sampling setting, with the most likely tokens in its place."""

    token_id: int
    data: bytes  # the token's text, which may be a part of a character
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


ReplyPart = SaidText | ThoughtText | CallPiece

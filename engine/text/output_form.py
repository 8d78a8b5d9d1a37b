"""The form that a request asks of a reply: plain values, checked and used elsewhere, and light to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.errors import EngineError

ConstraintKind = Literal["json", "regex", "choice", "grammar", "lark"]


@dataclass(frozen=True)
class Constraint:
    """The form that a reply must have: a JSON schema, a regular expression, choices as JSON, or a grammar."""

    kind: ConstraintKind
    text: str
    field: str  # of the request, for errors


class ConstraintError(EngineError):
    """The constraint is wrong, or too complex to follow; `field` is the request's field that states it."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field

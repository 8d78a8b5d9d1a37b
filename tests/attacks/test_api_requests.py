"""Programs with a key whose requests are wrong in very many places: that costs nobody else a reply."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from app.api.anthropic import CountTokensRequest, MessagesRequest
from app.api.guard import MAX_BODY_BYTES
from app.api.ollama import OllamaChat, OllamaGenerate
from app.api.openai_fields import (
    ChatCompletion,
    DetokenizeRequest,
    EmbeddingsRequest,
    TextCompletion,
    TokenizeRequest,
)
from app.api.responses import ResponsesRequest

BODIES: tuple[type[BaseModel], ...] = (
    ChatCompletion,
    TextCompletion,
    EmbeddingsRequest,
    TokenizeRequest,
    DetokenizeRequest,
    MessagesRequest,
    CountTokensRequest,
    OllamaChat,
    OllamaGenerate,
    ResponsesRequest,
)
FEW = 16  # items of which each may be wrong in its own way
MOST_ERRORS = 64
MANY = 340_000  # numbers that a request has room for
HELLO: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize(
    ("body", "request_json"),
    [
        (DetokenizeRequest, {"tokens": [-1] * MANY}),
        (EmbeddingsRequest, {"model": "m", "input": [-1] * MANY}),
        (EmbeddingsRequest, {"model": "m", "input": [[-1] * 1000] * 255}),
        (TextCompletion, {"model": "m", "prompt": [-1] * MANY}),
        (ChatCompletion, {"model": "m", "messages": [{"role": "user", "content": [{}] * 300}] * 900}),
        (ChatCompletion, {**HELLO, "guided_choice": [1] * MANY}),
        (ChatCompletion, {**HELLO, "metadata": {str(number): 1 for number in range(90_000)}}),
        (ChatCompletion, {**HELLO, "logit_bias": {str(number): 1000 for number in range(80_000)}}),
        (MessagesRequest, {"model": "m", "max_tokens": 1, "messages": [{"content": [1] * 500}] * 980}),
        (ResponsesRequest, {"model": "m", "input": [{"content": [1] * 500}] * 980}),
    ],
)
def test_a_request_with_very_many_mistakes_is_refused_at_the_first(
    body: type[BaseModel], request_json: dict[str, Any]
) -> None:
    """All mistakes were listed, a million of those in a list of tokens: the node stood still for 8 s and took 2 GB."""
    assert len(json.dumps(request_json, separators=(",", ":"))) <= MAX_BODY_BYTES
    with pytest.raises(ValidationError) as refused:
        body.model_validate(request_json)
    assert refused.value.error_count() <= MOST_ERRORS


def unbounded(schema: Any) -> Iterator[dict[str, Any]]:
    """Lists and objects of pydantic's schema in which any number of values can be wrong."""
    if isinstance(schema, list | tuple):
        for one in schema:
            yield from unbounded(one)
    if not isinstance(schema, dict):
        return
    inner = schema.get("items_schema") or schema.get("values_schema") or {}
    if schema.get("type") in ("list", "dict") and inner.get("type", "any") != "any":
        limit = schema.get("max_length")
        if not schema.get("fail_fast") and (schema["type"] == "dict" or limit is None or limit > FEW):
            yield schema
    for one in schema.values():
        yield from unbounded(one)


@pytest.mark.parametrize("body", BODIES)
def test_every_list_of_a_request_stops_at_its_first_mistake(body: type[BaseModel]) -> None:
    assert list(unbounded(body.__pydantic_core_schema__)) == []

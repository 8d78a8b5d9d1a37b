"""Programs with a key whose requests are wrong in very many places, or ask for much: nobody else waits for them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest
import trio
from pydantic import BaseModel, ValidationError

from app.api.anthropic import CountTokensRequest, MessagesRequest
from app.api.guard import MAX_BODY_BYTES, Message
from app.api.ollama import OllamaChat, OllamaGenerate
from app.api.openai_fields import (
    MAX_CHOICES,
    ChatCompletion,
    DetokenizeRequest,
    EmbeddingsRequest,
    TextCompletion,
    TokenizeRequest,
)
from app.api.responses import ResponsesRequest
from app.api.routes import build_application
from app.asker.reply import ReplyDone, ReplyEvent, ReplyStats, ReplyText
from app.asker.reply_service import ReplyRequest
from engine.text.output_form import TokenLogprob
from tests.app.api.api_double import TOKEN, DoubleNode, post_scope

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


WIDTH = 4096
TEXTS = 256
TOKENS = 400


class WideNode(DoubleNode):
    """A node whose model has wide hidden states."""

    async def embed(self, prompt: str | tuple[int, ...], owner: str = "") -> tuple[list[float], int]:
        await trio.lowlevel.checkpoint()
        return [1 / (number + 3) for number in range(WIDTH)], 1


class StepSizes(trio.abc.Instrument):
    """Counts the JSON that tasks write without letting others run."""

    def __init__(self) -> None:
        self.written = self.most = 0

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.written, self.most = 0, max(self.most, self.written)

    def encode(self, encoder: json.JSONEncoder, value: Any) -> str:
        """Write a value and count it."""
        text = "".join(encoder.iterencode(value, _one_shot=True))
        self.written += len(text)
        return text


class TellingNode(DoubleNode):
    """A node whose replies have hundreds of tokens, with the probabilities of others in their places."""

    async def reply(self, request: ReplyRequest) -> AsyncGenerator[ReplyEvent, None]:
        others = tuple(TokenLogprob(number, b"ab", -1 / (number + 3)) for number in range(request.logprobs or 0))
        for _ in range(TOKENS):
            yield ReplyText("a", logprob=TokenLogprob(0, b"ab", -0.1, others))
        yield ReplyDone("a" * TOKENS, ReplyStats(1, [0] * TOKENS, "length"))


async def answered(
    node: DoubleNode, path: str, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Any], float]:
    """The answer to a request, and the largest share of it that was written while no other task could run."""
    body = bytearray()
    pending = [{"type": "http.request", "body": json.dumps(asked).encode(), "more_body": False}]

    async def receive() -> Message:
        if not pending:
            await trio.sleep_forever()
        return pending.pop()

    async def send(message: Message) -> None:
        body.extend(message.get("body", b""))
        await trio.lowlevel.checkpoint()  # the end of a step, which is measured then

    scope = post_scope(path)
    application, sizes = build_application(node, TOKEN, "0"), StepSizes()
    monkeypatch.setattr(json.JSONEncoder, "encode", lambda encoder, value: sizes.encode(encoder, value))
    trio.lowlevel.add_instrument(sizes)
    try:
        await application(scope, receive, send)
    finally:
        trio.lowlevel.remove_instrument(sizes)
    return json.loads(body), sizes.most / len(body)


async def test_the_answer_to_many_texts_does_not_stop_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embeddings of 256 texts were written as JSON in one go, which took 2 s for a model that is 4096 wide."""
    asked = {"model": "home", "input": ["a"] * TEXTS}
    answer, most = await answered(WideNode(), "/v1/embeddings", asked, monkeypatch)
    assert [len(one["embedding"]) for one in answer["data"]] == [WIDTH] * TEXTS
    assert answer["usage"]["total_tokens"] == TEXTS
    assert 0 < most < 2 / TEXTS


async def test_the_probabilities_of_many_replies_do_not_stop_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 16 replies of 8000 tokens were written in one go, which took 35 s."""
    asked = {"n": MAX_CHOICES, "logprobs": True, "top_logprobs": 20, "messages": HELLO["messages"], "model": "home"}
    answer, most = await answered(TellingNode(), "/v1/chat/completions", asked, monkeypatch)
    assert [len(one["logprobs"]["content"]) for one in answer["choices"]] == [TOKENS] * MAX_CHOICES
    assert answer["object"] == "chat.completion"
    assert 0 < most < 2 / MAX_CHOICES

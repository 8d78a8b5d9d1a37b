"""Programs with a key whose requests are wrong in very many places, or ask for much: nobody else waits for them."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from app.api import bodies
from app.api.anthropic import CountTokensRequest, MessagesRequest
from app.api.bodies import LONG_BYTES, MAX_PARTS
from app.api.guard import MAX_BODY_BYTES, Message
from app.api.keys import current_owner, owned_by
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
from app.asker import reply_service
from app.asker.reply import ReplyDone, ReplyEvent, ReplyStats, ReplyText
from app.asker.reply_service import ReplyRequest
from engine.sources.opening import open_source
from engine.text import grammar_trial
from engine.text.constraint import GrammarCompiler
from engine.text.output_form import Constraint, ConstraintError, ConstraintKind, TokenLogprob, Tool, ToolUse
from engine.text.tokenizer import Tokenizer
from engine.text.tool_calls import HERMES, call_constraint
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


def test_a_request_has_as_much_metadata_as_vendors_take() -> None:
    """A kept response had 95,000 values, which were read and written again each time that it was asked for."""
    for body, wanted in ((ChatCompletion, HELLO), (ResponsesRequest, {"model": "m", "input": "hello"})):
        body.model_validate({**wanted, "metadata": {str(number): "" for number in range(16)}})
        with pytest.raises(ValidationError):
            body.model_validate({**wanted, "metadata": {str(number): "" for number in range(17)}})


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


# --- bodies of very many small objects --------------------------------------------------------------------------------

LONG = '"padding": "%s"' % ("a" * LONG_BYTES)
CALLS: dict[str, str] = {
    "/api/chat": '{"model":"home","stream":false,"messages":[%s],%s}',
    "/v1/chat/completions": '{"model":"home","messages":[%s],%s}',
    "/v1/completions": '{"model":"home","prompt":"a","other":[%s],%s}',
    "/v1/messages": '{"model":"home","max_tokens":9,"messages":[%s],%s}',
    "/v1/messages/count_tokens": '{"model":"home","messages":[%s],%s}',
    "/v1/responses": '{"model":"home","store":false,"input":[%s],%s}',
    "/v1/embeddings": '{"model":"home","input":"a","other":[%s],%s}',
    "/tokenize": '{"messages":[%s],%s}',
    "/detokenize": '{"tokens":[1],"other":[%s],%s}',
    "/control/join": '{"target":"home","other":[%s],%s}',
}


def many(path: str, parts: int) -> bytes:
    """A long body with so many objects and lists; most of them are in a field that nothing reads."""
    message = '{"role":"user","content":"a"}'
    body = CALLS[path] % (message, f'{LONG},"more":[%s]')
    more = parts - body.count("{") - body.count("[")
    return (body % ",".join(["{}"] * more)).encode()


async def asked_once(node: DoubleNode, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
    """The status and the answer of a request."""
    status, answer = 0, bytearray()
    pending = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not pending:
            await trio.sleep_forever()
        return pending.pop()

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        answer.extend(message.get("body", b""))

    await build_application(node, TOKEN, "0")(post_scope(path), receive, send)
    return status, json.loads(answer)


@pytest.mark.parametrize("path", CALLS)
async def test_a_body_of_very_many_objects_is_refused_in_the_form_of_its_family(path: str) -> None:
    """One of 1 MiB stopped the node for more than a second, 32 at once for 40."""
    status, answer = await asked_once(DoubleNode(), path, many(path, 2 * MAX_PARTS))
    assert status == 413
    assert f"the request has more than {MAX_PARTS} objects and lists" in json.dumps(answer["error"])


@pytest.mark.parametrize("path", [path for path in CALLS if not path.startswith("/control")])
async def test_a_body_of_as_many_objects_as_it_may_have_is_answered(path: str) -> None:
    status, answer = await asked_once(DoubleNode(), path, many(path, MAX_PARTS))
    assert status in (200, 529), answer  # the double has no route for so few tokens
    status, _ = await asked_once(DoubleNode(), path, many(path, MAX_PARTS + 2))
    assert status == 413


@pytest.mark.parametrize(
    "text",
    ["{[" * 100_000, '\\"{[' * 50_000, "\\\\" * 10 + "[" * 100_000, "a, b: " * 50_000],
    ids=["braces", "quotes", "backslashes", "commas"],
)
async def test_a_text_may_have_any_number_of_braces(text: str) -> None:
    body = b'{"model":"home","prompt":"' + text.encode() + b'"}'
    status, answer = await asked_once(TellingNode(1), "/v1/completions", body)
    assert (status, answer["choices"][0]["text"]) == (200, "a")


async def test_lists_of_tokens_may_be_as_long_as_a_body() -> None:
    body = json.dumps({"model": "home", "prompt": [1] * MANY}, separators=(",", ":")).encode()
    assert (await asked_once(TellingNode(1), "/v1/completions", body))[0] == 200


@pytest.mark.parametrize("escape", ['"', "\\"])
async def test_braces_are_not_hidden_by_how_strings_are_written(escape: str) -> None:
    hidden = ",".join(["{}"] * (MAX_PARTS + 1))
    body = '{"model":"home","prompt":"a","a":"%s","b":[%s],"c":"%s"}'
    for encoding in ("utf-8", "utf-8-sig"):
        text = body % (f"\\{escape}", hidden, f"\\{escape}\\{escape}")
        assert (await asked_once(DoubleNode(), "/v1/completions", text.encode(encoding)))[0] == 413
    # In other encodings a letter could look like a quote.
    assert (await asked_once(DoubleNode(), "/v1/completions", text.encode("utf-16")))[0] == 400


async def test_objects_in_the_arguments_of_a_call_are_bounded() -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": json.dumps({"a": [[]] * (MAX_PARTS + 1)})}}
    asked = {"model": "home", "messages": [{"role": "assistant", "tool_calls": [call]}]}
    status, answer = await asked_once(DoubleNode(), "/v1/chat/completions", json.dumps(asked).encode())
    assert status == 400
    assert "arguments have too many objects and lists" in answer["error"]["message"]


async def test_every_route_reads_its_body_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that did not would read a megabyte while nothing else of the node goes on."""
    threads: list[str] = []

    def read(body: bytes, model: type[BaseModel]) -> BaseModel:
        threads.append(threading.current_thread().name)
        raise HTTPException(413, "read")

    monkeypatch.setattr(bodies, "_read", read)
    application: Any = build_application(DoubleNode(), TOKEN, "0")
    paths = [route["path"] for route in routes_with_bodies(application._application)]
    assert len(paths) > 25
    for path in paths:
        method = "PUT" if path.startswith("/control/config") else "POST"
        await asked_in(application, path.replace("{name}", "relay"), method, b" " * (LONG_BYTES + 1))
    assert len(threads) == len(paths)
    assert threading.current_thread().name not in threads


def routes_with_bodies(application: Any) -> list[dict[str, Any]]:
    """The routes of an application that read a body, by its description."""
    found = application.openapi()["paths"]
    return [{"path": path} for path, of in found.items() if any("requestBody" in one for one in of.values())]


async def asked_in(application: Any, path: str, method: str, body: bytes) -> None:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        pass

    await application({**post_scope(path), "method": method}, receive, send)


async def test_long_bodies_of_one_key_take_turns_and_the_node_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, begun = threading.Event(), trio.Semaphore(0)
    under_way: Counter[str] = Counter()
    most: Counter[str] = Counter()

    def read(body: bytes, model: type[BaseModel]) -> BaseModel:
        owner = current_owner()
        under_way[owner] += 1
        most[owner] = max(most[owner], under_way[owner])
        trio.from_thread.run_sync(begun.release)
        go_on.wait(10)
        under_way[owner] -= 1
        return Said(text="read")

    monkeypatch.setattr(bodies, "_read", read)
    turns, long, made = bodies.BodyTurns(), b" " * (LONG_BYTES + 1), list[BaseModel]()

    async def ask(owner: str) -> None:
        with owned_by(owner):
            made.append(await turns.read(long, Said))

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(ask, "one")
            await begun.acquire()
            nursery.start_soon(ask, "other")
            await begun.acquire()  # it does not wait for those of the first; and the loop turns
            assert under_way == {"one": 1, "other": 1}
            go_on.set()
    assert len(made) == 5
    assert most == {"one": 1, "other": 1}


async def test_short_bodies_that_come_together_are_read_in_turns_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, read_at = bodies.BodyTurns(), list[int]()
    loop_turn = 0

    def read(body: bytes, model: type[BaseModel]) -> BaseModel:
        read_at.append(loop_turn)
        return Said(text="read")

    monkeypatch.setattr(bodies, "_read", read)
    async with trio.open_nursery() as nursery:
        for _ in range(16):
            nursery.start_soon(turns.read, b"{}", Said)
        while len(read_at) < 16:
            await trio.lowlevel.checkpoint()
            loop_turn += 1
    assert max(Counter(read_at).values()) <= 2


class Said(BaseModel):
    """A body with a text."""

    text: str


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
    """A node whose replies have very many tokens, with the probabilities of others in their places."""

    def __init__(self, tokens: int = TOKENS) -> None:
        super().__init__()
        self._tokens = tokens

    async def reply(self, request: ReplyRequest) -> AsyncGenerator[ReplyEvent, None]:
        others = tuple(
            TokenLogprob(number, b"%d" % number, -1 / (number + 3)) for number in range(request.logprobs or 0)
        )
        for _ in range(self._tokens):
            yield ReplyText("a", logprob=TokenLogprob(0, b"ab", -0.1, others))
        yield ReplyDone("a" * self._tokens, ReplyStats(1, [0] * self._tokens, "length"))


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


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {**HELLO, "logprobs": True, "top_logprobs": 20}),
        ("/v1/completions", {"model": "home", "prompt": "hello", "logprobs": 20}),
    ],
)
async def test_the_probabilities_of_one_long_reply_do_not_stop_the_node(
    path: str, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one reply were written in one go, which took 1.4 s for 8000 tokens."""
    answer, most = await answered(TellingNode(), path, {**asked, "model": "home"}, monkeypatch)
    told = answer["choices"][0]["logprobs"]
    assert {len(one) for one in told.values() if one} == {TOKENS}
    assert 0 < most < 0.2


async def test_the_places_of_many_tokens_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens before each one were counted again: 35 s for 32,000 tokens."""
    tokens = 20_000
    asked = {"model": "home", "prompt": "hello", "logprobs": 0}
    began = time.thread_time()
    answer, _ = await answered(TellingNode(tokens), "/v1/completions", asked, monkeypatch)
    assert time.thread_time() - began < 2
    assert answer["choices"][0]["logprobs"]["text_offset"] == list(range(0, 2 * tokens, 2))


# --- the form of a reply ----------------------------------------------------------------------------------------------

DIVISOR = {"type": "integer", "multipleOf": 9973}  # with nine digits it takes gigabytes
OFFERED = json.dumps({"type": "object", "properties": {"number": DIVISOR}})
LARGE: dict[str, tuple[ConstraintKind, str]] = {
    "a divisor": ("json", json.dumps(DIVISOR)),
    "a divisor of items": ("json", json.dumps({"type": "array", "items": DIVISOR})),
    "a divisor of a field": ("json", OFFERED),
    "a divisor of a choice": ("json", json.dumps({"anyOf": [{"type": "null"}, DIVISOR]})),
    "a range": ("json", '{"type": "integer", "maximum": 99999989}'),
    "a length": ("json", '{"type": "string", "minLength": 1000000000}'),
    "a pattern": ("json", '{"type": "string", "pattern": "a{1000000000}"}'),
    "choices beside fields": ("json", '{"properties": {"a": {}}, "anyOf": [{"required": ["a"]}, {}]}'),
    "a keyword of the library": ("json", '{"x-guidance": {"whitespace_pattern": "a{1000000000}"}}'),
    "an expression": ("regex", "a{1000000000}"),
    "a grammar": ("grammar", "start: /a{1000000000}/"),
}
SMALL: dict[str, tuple[ConstraintKind, str]] = {
    "any object": ("json", '{"type": "object"}'),
    "choices": ("choice", '["yes", "no"]'),
    "fields": (
        "json",
        json.dumps(
            {
                "title": "Person",
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "tags": {"type": "array", "items": {"enum": ["a", 1, None]}},
                    "multipleOf": {"anyOf": [{"type": "number"}, {"type": "null"}], "default": None},
                },
                "required": ["name"],
                "additionalProperties": False,
            }
        ),
    ),
}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    source = open_source("tiny-random", tmp_path_factory.mktemp("model"))
    return GrammarCompiler(Tokenizer(source.tokenizer), source.config.vocab_size, source.config.eos_ids)


def never_tried(*_: object) -> str:
    """Stands in for the trial, and refuses everything."""
    return "it was tried"


@pytest.mark.parametrize("name", LARGE)
def test_what_can_be_larger_than_its_text_is_tried_in_another_process(
    name: str, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schema of 43 characters took gigabytes of the node, and computed without end."""
    monkeypatch.setattr(grammar_trial, "problem_of", never_tried)
    with pytest.raises(ConstraintError, match="it was tried"):
        compiler.compile(Constraint(*LARGE[name], "f"))


def test_the_schema_of_a_tool_is_tried_in_another_process(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_trial, "problem_of", never_tried)
    use = ToolUse((Tool("look", parameters=OFFERED, strict=True),), "required")
    with pytest.raises(ConstraintError, match="it was tried"):
        compiler.compile(call_constraint(HERMES, use, compiler._tokenizer, thinking=False))


def test_a_schema_that_cannot_be_read_is_no_harmless_one() -> None:
    assert not any(GrammarCompiler.is_harmless(Constraint("json", text, "f")) for text in ("[" * 4000, "{", "3"))


@pytest.mark.parametrize("name", SMALL)
def test_what_only_names_types_fields_and_values_needs_no_trial(
    name: str, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_trial, "problem_of", never_tried)
    compiler.compile(Constraint(*SMALL[name], "f"))


async def test_a_form_that_takes_long_to_compile_keeps_neither_the_node_from_ending_nor_others_from_replies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its thread could not be left: the node did not end while it computed, and each request began another one."""
    over, ended, begun = threading.Event(), list[str](), trio.Semaphore(0)
    slow, quick = Constraint("json", json.dumps(DIVISOR), "f"), Constraint("json", '{"type": "object"}', "f")

    def compiled(constraint: Constraint) -> None:
        if constraint is slow:
            trio.from_thread.run_sync(begun.release, trio_token=token)
            over.wait(10)
        ended.append(constraint.text)

    token = trio.lowlevel.current_trio_token()
    grammars = SimpleNamespace(compile=compiled, is_harmless=GrammarCompiler.is_harmless)
    ends: Any = SimpleNamespace(text=SimpleNamespace(grammars=grammars), check_ids=lambda ids: None)

    async def ready() -> Any:
        return ends, None

    def prepared(_: object, request: ReplyRequest) -> Any:
        return SimpleNamespace(prompt_ids=[1], constraint=request.constraint, shown=(), end_ids=frozenset())

    nobody: Any = SimpleNamespace(n_blocks=2)
    service = reply_service.ReplyService(nobody, nobody, nobody, lambda: "")
    monkeypatch.setattr(service, "_ready", ready)
    monkeypatch.setattr(reply_service, "_prepared", prepared)

    async def ask(request: ReplyRequest) -> None:
        async for _ in service.reply(request):
            pass

    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(ask, ReplyRequest(constraint=slow, owner="one"))
        await begun.acquire()
        nursery.start_soon(ask, ReplyRequest(constraint=slow, owner="other"))
        await begun.acquire()  # it does not wait for all those of the first
        with pytest.raises(AttributeError):  # the reply would begin: there is no asker here
            await ask(ReplyRequest(constraint=quick, owner="third"))
        assert (ended, begun.value) == ([quick.text], 0)  # and of the first one is compiled at a time
        nursery.cancel_scope.cancel()
    assert ended == [quick.text]  # nobody waited for them
    over.set()

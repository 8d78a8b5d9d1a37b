"""OpenAI's endpoint: forms, refusals by name and errors against a double; the unmodified client against three nodes."""

from __future__ import annotations

import base64
import json
import struct
from dataclasses import replace
from typing import Any

import httpx
import pytest
import trio

from app.api.client import Client
from app.api.openai_errors import status_and_body
from app.asker.reply_service import ReplyRequest
from engine.text.output_form import Constraint, FieldError, Tool, ToolUse
from tests.app.api.api_double import TOKEN, DoubleNode, running_api

CHAT: dict[str, Any] = {"model": "home", "messages": [{"role": "user", "content": "a b"}]}
TEXT: dict[str, Any] = {"model": "home", "prompt": "a b"}


async def post(client: Client, path: str, body: Any, token: str = TOKEN) -> httpx.Response:
    def ask() -> httpx.Response:
        headers = {"authorization": f"Bearer {token}"}
        return httpx.post(f"{client.url}{path}", json=body, headers=headers, timeout=10, verify=False)

    return await trio.to_thread.run_sync(ask)


def events(answer: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
async def test_private_blocks_are_asked_for_by_a_field_of_our_own(path: str, body: dict[str, Any]) -> None:
    node = DoubleNode()
    async with running_api(node) as client:
        assert (await post(client, path, {**body, "private_blocks": 3})).status_code == 200
        assert (await post(client, path, body)).status_code == 200
        asked = [request.private_blocks for _, request in node.asked if isinstance(request, ReplyRequest)]
        assert asked == [3, None]
        wrong = await post(client, path, {**body, "private_blocks": -1})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "private_blocks")


async def test_a_reply_at_once_and_in_pieces() -> None:
    node = DoubleNode()
    async with running_api(node) as client:
        whole = (await post(client, "/v1/chat/completions", CHAT)).json()
        assert whole["object"] == "chat.completion"
        assert whole["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "ab", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ]
        details = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
        assert whole["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 2},
            "completion_tokens_details": details,
        }
        told = events(await post(client, "/v1/chat/completions", {**CHAT, "stream": True}))
        assert told[-1] == "[DONE]"
        assert [piece["choices"][0]["delta"].get("content") for piece in told[:-1]] == ["", "a", "b", None]
        assert told[0]["choices"][0]["delta"]["role"] == "assistant"
        assert told[-2]["choices"][0]["finish_reason"] == "stop"
        assert len({piece["id"] for piece in told[:-1]}) == 1
        counted = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
        told = events(await post(client, "/v1/chat/completions", counted))
        assert (told[-2]["choices"], told[-2]["usage"]["total_tokens"]) == ([], 5)
        assert all(piece["usage"] is None for piece in told[:-2])
        text = (await post(client, "/v1/completions", TEXT)).json()
        assert (text["object"], text["choices"][0]["text"]) == ("text_completion", "ab")
        told = events(await post(client, "/v1/completions", {**TEXT, "stream": True}))
        assert [piece["choices"][0]["text"] for piece in told[:-1]] == ["a", "b", ""]


async def test_what_a_reply_waits_for_is_a_comment_of_the_stream() -> None:
    async with running_api(DoubleNode()) as client:
        late = {**CHAT, "messages": [{"role": "user", "content": "late a"}]}
        assert (await post(client, "/v1/chat/completions", late)).json()["choices"][0]["message"]["content"] == "a"
        answer = await post(client, "/v1/chat/completions", {**late, "stream": True})
        comment, rest = answer.text.split("\n\n", 1)
        assert comment == ": waiting up to 15 s for a member that serves block 3"
        assert json.loads(rest.splitlines()[0].removeprefix("data: "))["choices"][0]["delta"]["role"] == "assistant"
        never = {**CHAT, "messages": [{"role": "user", "content": "late never"}]}
        assert (await post(client, "/v1/chat/completions", never)).status_code == 503
        answer = await post(client, "/v1/chat/completions", {**never, "stream": True})
        assert answer.status_code == 200
        assert json.loads(answer.text.splitlines()[-2].removeprefix("data: "))["error"]["code"] == "no_route"


async def test_what_is_asked_reaches_the_node() -> None:
    node = DoubleNode()
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    asked = {
        "model": "home#abababababababababab",
        "messages": [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}],
        "max_completion_tokens": 9,
        "temperature": 0,
        "top_p": 0,
        "seed": 7,
        "stop": ["x", "y"],
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "n": 1,
        "tools": [],
        "logprobs": False,
        "response_format": {"type": "text"},
        "frequency_penalty": 0.5,
        "presence_penalty": -1,
    }
    async with running_api(node) as client:
        assert (await post(client, "/v1/chat/completions", asked)).status_code == 200
        more = {"prompt": [5, 6], "stop": "z", "suffix": "end", "repetition_penalty": 1.2}
        assert (await post(client, "/v1/completions", {**TEXT, **more})).status_code == 200
    chat, text = (request for _, request in node.asked)
    assert isinstance(chat, ReplyRequest)
    assert chat.messages == ({"role": "system", "content": "be brief"}, {"role": "user", "content": "a b"})
    assert (chat.max_tokens, chat.temperature, chat.seed, chat.stop) == (9, 0, 7, ("x", "y"))
    assert 0 < chat.top_p < 1e-6
    assert (chat.frequency_penalty, chat.presence_penalty, chat.repetition_penalty) == (0.5, -1, 1.0)
    assert isinstance(text, ReplyRequest)
    assert (text.prompt, text.max_tokens, text.temperature, text.stop) == ((5, 6), 16, 1.0, ("z",))
    assert (text.suffix, text.repetition_penalty, text.frequency_penalty) == ("end", 1.2, 0.0)


@pytest.mark.parametrize(
    ("path", "body", "tokens", "may_end_sooner"),
    [
        ("/v1/chat/completions", CHAT, 512, True),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 512}, 512, False),
        ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 600}, 600, False),
        ("/v1/completions", TEXT, 16, True),
        ("/v1/completions", {**TEXT, "max_tokens": 16}, 16, False),
        ("/v1/responses", {"model": "home", "input": "a"}, 512, True),
        ("/v1/responses", {"model": "home", "input": "a", "max_output_tokens": 512}, 512, False),
        ("/v1/messages", {**CHAT, "max_tokens": 512}, 512, False),
        ("/api/chat", CHAT, 512, True),
        ("/api/chat", {**CHAT, "options": {"num_predict": 512}}, 512, False),
        ("/api/chat", {**CHAT, "options": {"num_predict": -1}}, 10**6, True),
        ("/api/generate", {"model": "home", "prompt": "a", "options": {"num_predict": -2}}, 10**6, True),
        ("/control/chat", {"messages": CHAT["messages"]}, 512, True),
        ("/control/chat", {"messages": CHAT["messages"], "max_tokens": 512}, 512, True),
        ("/control/chat", {"messages": CHAT["messages"], "max_tokens": 513}, 513, False),
    ],
)
async def test_a_limit_that_nobody_named_may_be_lowered(
    path: str, body: Any, tokens: int, may_end_sooner: bool
) -> None:
    node = DoubleNode()
    async with running_api(node) as client:
        assert (await post(client, path, body)).status_code == 200
    ((_, request),) = node.asked
    assert isinstance(request, ReplyRequest)
    assert (request.max_tokens, request.may_end_sooner) == (tokens, may_end_sooner)


def test_a_field_that_the_model_cannot_follow_is_refused_by_name() -> None:
    status, body = status_and_body(FieldError("suffix", "is not supported: this model has no tokens to fill a gap"))
    assert (status, body["error"]["param"], body["error"]["code"]) == (400, "suffix", "unsupported_parameter")
    assert body["error"]["message"].startswith("suffix: is not supported")


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"store": True}, "store"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"web_search_options": {}}, "web_search_options"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(more: dict[str, Any], param: str) -> None:
    node = DoubleNode()
    async with running_api(node) as client:
        answer = await post(client, "/v1/chat/completions", {**CHAT, **more})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert (error["param"], error["code"]) == (param, "unsupported_parameter")
    assert param in error["message"]
    assert node.asked == []


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code", "words"),
    [
        ("/v1/chat/completions", {**CHAT, "model": "gpt-9"}, 404, "model", "model_not_found", "'home'"),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 1}, 503, None, "failed", "nobody serves block 3"),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 2}, 400, None, "context_length_exceeded", "context"),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 3}, 503, None, "no_route", "block 3"),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 4}, 429, None, "busy", "block 3"),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 70}, 400, None, "cache_exceeded", "9 + 70 > 12"),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 80}, 400, None, "cache_exceeded", "block 3"),
        ("/v1/chat/completions", {**CHAT, "temperature": -1}, 400, "temperature", "bad_request", "temperature"),
        (
            "/v1/chat/completions",
            {**CHAT, "max_tokens": 5, "max_completion_tokens": 6},
            400,
            None,
            "bad_request",
            "contradict",
        ),
        ("/v1/chat/completions", {**CHAT, "stream_options": {}}, 400, None, "bad_request", "stream"),
        ("/v1/chat/completions", {"model": "home", "messages": []}, 400, "messages", "bad_request", "messages"),
        ("/v1/chat/completions", [], 400, None, "bad_request", "must be"),
        ("/v1/completions", {**TEXT, "echo": True, "logprobs": 1}, 400, "echo", "unsupported_parameter", "echo"),
        ("/v1/completions", {**TEXT, "suffix": 5}, 400, "suffix", "bad_request", "suffix"),
        ("/v1/completions", {**TEXT, "frequency_penalty": 3}, 400, "frequency_penalty", "bad_request", "2"),
        ("/v1/completions", {**TEXT, "presence_penalty": -3}, 400, "presence_penalty", "bad_request", "-2"),
        ("/v1/completions", {**TEXT, "n": 3, "best_of": 2}, 400, None, "bad_request", "best_of"),
        ("/v1/completions", {**TEXT, "best_of": 2, "stream": True}, 400, None, "bad_request", "best_of"),
        ("/v1/completions", {**TEXT, "n": 17}, 400, "n", "bad_request", "n"),
        ("/v1/completions", {**TEXT, "logit_bias": {"x": 1}}, 400, None, "bad_request", "logit_bias"),
        ("/v1/chat/completions", {**CHAT, "top_logprobs": 2}, 400, None, "bad_request", "logprobs"),
        ("/v1/chat/completions", {**CHAT, "tool_choice": "required"}, 400, None, "bad_request", "no tools"),
        ("/v1/chat/completions", {**CHAT, "stop": ["a"] * 17}, 400, None, "bad_request", "stop"),
        ("/v1/embeddings", {"model": "home", "input": []}, 400, None, "bad_request", "input"),
        ("/v1/embeddings", {"model": "home", "input": "a", "dimensions": 3}, 400, None, "unsupported_parameter", "dim"),
        ("/v1/embeddings", {"model": "home+pond", "input": "a"}, 400, "model", "bad_request", "adapters"),
        ("/v1/embeddings", {"model": "gpt-9", "input": "a"}, 404, "model", "model_not_found", "gpt-9"),
        ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}, 400, None, "bad_request", "either"),
        ("/detokenize", {"tokens": [-1]}, 400, None, "bad_request", "tokens"),
        ("/v1/completions", {**TEXT, "prompt": ["a", "b"]}, 400, "prompt", "unsupported_parameter", "prompt"),
        ("/v1/nothing", {}, 404, None, "not_found", "/v1/nothing"),
    ],
)
async def test_errors_have_openais_form(
    path: str, body: Any, status: int, param: str | None, code: str | None, words: str
) -> None:
    async with running_api(DoubleNode()) as client:
        answer = await post(client, path, body)
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code", "peers", "next_step"}
    assert (answer.status_code, error["code"]) == (status, code)
    assert words in error["message"]
    assert error["param"] == param or param is None


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("more", "constraint"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ("json", '{"type": "object"}', "response_format")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            ("json", json.dumps(SCHEMA), "response_format"),
        ),
        ({"guided_json": SCHEMA}, ("json", json.dumps(SCHEMA), "guided_json")),
        ({"guided_json": "{}", "guided_regex": None}, ("json", "{}", "guided_json")),
        ({"guided_regex": "a+"}, ("regex", "a+", "guided_regex")),
        ({"guided_choice": ["a", "b"]}, ("choice", '["a", "b"]', "guided_choice")),
        ({"guided_grammar": 'root ::= "a"'}, ("grammar", 'root ::= "a"', "guided_grammar")),
        ({"structured_outputs": {"regex": "b"}}, ("regex", "b", "structured_outputs")),
    ],
)
async def test_the_form_of_a_reply_reaches_the_node(more: dict[str, Any], constraint: tuple[Any, ...] | None) -> None:
    node = DoubleNode()
    async with running_api(node) as client:
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
            assert (await post(client, path, {**body, **more})).status_code == 200
    for _, request in node.asked:
        assert isinstance(request, ReplyRequest)
        assert request.constraint == (None if constraint is None else Constraint(*constraint))


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "only one of"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"max_tokens": 6}, "guided_regex"),  # the double's compiler refuses
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_wrong_form_is_refused_by_name(more: dict[str, Any], word: str, stream: bool) -> None:
    async with running_api(DoubleNode()) as client:
        answer = await post(client, "/v1/chat/completions", {**CHAT, **more, "stream": stream})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert word in error["message"]
    assert error["param"] == "guided_regex" or "max_tokens" not in more


async def test_images_and_wrong_calls_are_refused_by_name() -> None:
    image = [{"type": "image_url", "image_url": {"url": "data:"}}]
    bad: list[tuple[dict[str, Any], str]] = [
        ({"role": "user", "content": image}, "image_url"),
        ({"role": "tool", "content": "4"}, "tool_call_id"),
        ({"role": "assistant", "content": None, "tool_calls": [{}]}, "tool_calls"),
        ({"role": "user", "content": "hi", "tool_calls": [MADE_CALL]}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [{**MADE_CALL, "function": {"name": "f", "arguments": "["}}]}, "JSON"),
    ]
    async with running_api(DoubleNode()) as client:
        for message, word in bad:
            answer = await post(client, "/v1/chat/completions", {**CHAT, "messages": [message]})
            assert answer.status_code == 400
            assert word in answer.text


async def test_a_reply_that_breaks_off_says_so_in_the_stream() -> None:
    asked = {**CHAT, "messages": [{"role": "user", "content": "a break b"}], "stream": True}
    async with running_api(DoubleNode()) as client:
        told = events(await post(client, "/v1/chat/completions", asked))
        assert "block 3 was lost" in told[-1]["error"]["message"]
        assert "[DONE]" not in told


async def test_the_token_is_asked_for_in_openais_form() -> None:
    async with running_api(DoubleNode()) as client:
        answer = await post(client, "/v1/chat/completions", CHAT, token="wrong")
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "wrong_token"


@pytest.mark.parametrize("stream", [True, False])
async def test_whoever_leaves_frees_the_session_even_before_the_first_piece(stream: bool) -> None:
    node = DoubleNode()
    asked = {**CHAT, "messages": [{"role": "user", "content": "wait"}], "stream": stream}
    async with running_api(node) as client:
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_ask_and_leave, client, asked, node)
            await node.freed.wait()


async def _ask_and_leave(client: Client, asked: dict[str, Any], node: DoubleNode) -> None:
    host, port = client.url.removeprefix("http://").split(":")
    body = json.dumps(asked).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {TOKEN}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    stream = await trio.open_tcp_stream(host, int(port))
    async with stream:
        await stream.send_all(head.encode() + body)
        await node.begun.wait()


@pytest.mark.parametrize(
    "more",
    [
        {"keep_alive": "5m", "options": {"num_ctx": 8192}, "think": False},
        {"cache_prompt": True, "id_slot": -1},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"thinking": {"type": "disabled"}, "provider": {"sort": "price"}},
    ],
)
async def test_extensions_that_programs_send_unasked_are_ignored(more: dict[str, Any]) -> None:
    node = DoubleNode()
    async with running_api(node) as client:
        assert (await post(client, "/v1/chat/completions", {**CHAT, "seed": 1, **more})).status_code == 200
        assert (await post(client, "/v1/chat/completions", {**CHAT, "seed": 1})).status_code == 200
        assert (await post(client, "/v1/completions", {**TEXT, **more})).status_code == 200
    first, second = (request for _, request in node.asked[:2])
    assert isinstance(first, ReplyRequest)
    assert replace(first, template_variables={}) == second


async def test_fields_without_effect_are_named_in_a_header() -> None:
    unheard: dict[str, Any] = {"unheard_of": 1, "service_tier": "flex", "bad\nname": 2}
    named = {"messages": [{"role": "user", "content": "a b", "name": "bob"}]}
    async with running_api(DoubleNode()) as client:
        for stream in (True, False):
            answer = await post(client, "/v1/chat/completions", {**CHAT, **unheard, **named, "stream": stream})
            assert answer.status_code == 200
            assert answer.headers["x-shoal-ignored-fields"] == "messages.name, service_tier, unheard_of"
        assert "x-shoal-ignored-fields" not in (await post(client, "/v1/chat/completions", CHAT)).headers


TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}, "strict": True}}
MADE_CALL = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}


async def test_tools_and_their_results_reach_the_node() -> None:
    node = DoubleNode()
    messages = [
        {"role": "user", "content": "time?"},
        {"role": "assistant", "content": None, "tool_calls": [MADE_CALL]},
        {"role": "tool", "content": [{"type": "text", "text": "noon"}], "tool_call_id": "call_1"},
    ]
    named = {"type": "function", "function": {"name": "clock"}}
    clock = Tool("clock", "", '{"type": "object"}', strict=True)
    choices: list[tuple[Any, ToolUse | None]] = [
        (None, ToolUse((clock,))),
        ("auto", ToolUse((clock,))),
        ("none", None),
        ("required", ToolUse((clock,), "required")),
        (named, ToolUse((clock,), name="clock", parallel=False)),
    ]
    async with running_api(node) as client:
        for choice, _ in choices:
            asked = {**CHAT, "messages": messages, "tools": [TOOL], "tool_choice": choice}
            assert (await post(client, "/v1/chat/completions", asked)).status_code == 200
        for wrong in (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            {"tools": [TOOL, TOOL]},
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
            {"tools": [{"type": "web_search"}]},
        ):
            assert (await post(client, "/v1/chat/completions", {**CHAT, **wrong})).status_code == 400
    for (_, request), (_, use) in zip(node.asked, choices, strict=True):
        assert isinstance(request, ReplyRequest)
        assert request.tools == use
        assert request.messages[1]["tool_calls"] == [{"id": "call_1", "name": "clock", "arguments": '{"zone": "UTC"}'}]
        assert request.messages[2] == {"role": "tool", "content": "noon", "tool_call_id": "call_1"}


async def test_calls_and_thoughts_come_at_once_and_in_pieces() -> None:
    asked = {**CHAT, "messages": [{"role": "user", "content": "hm call go again"}], "tools": [TOOL]}
    async with running_api(DoubleNode()) as client:
        choice = (await post(client, "/v1/chat/completions", asked)).json()["choices"][0]
        second = {"id": "call_2", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"] == {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "reasoning_content": "hm",
            "tool_calls": [MADE_CALL, second],
        }
        told = events(await post(client, "/v1/chat/completions", {**asked, "stream": True}))
    deltas = [piece["choices"][0]["delta"] for piece in told[:-1]]
    assert told[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert deltas[1] == {"reasoning_content": "hm"}
    first = deltas[2]["tool_calls"][0]
    assert (first["index"], first["id"], first["function"]) == (0, "call_1", {"name": "clock", "arguments": ""})
    pieces = [one["tool_calls"][0] for one in deltas if "tool_calls" in one]
    arguments = ["".join(p["function"]["arguments"] for p in pieces if p["index"] == index) for index in (0, 1)]
    assert arguments == ['{"zone": "UTC"}', "{}"]


async def test_several_replies_to_one_request() -> None:
    node = DoubleNode()
    async with running_api(node) as client:
        whole = (await post(client, "/v1/chat/completions", {**CHAT, "n": 3, "seed": 5})).json()
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
        assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (3, 6)
        seeds = {request.seed for _, request in node.asked if isinstance(request, ReplyRequest)}
        assert seeds == {5, 6, 7}
        told = events(await post(client, "/v1/chat/completions", {**CHAT, "n": 2, "stream": True}))
        indexes = [piece["choices"][0]["index"] for piece in told[:-1]]
        assert indexes == [0] * 4 + [1] * 4
        best = (await post(client, "/v1/completions", {**TEXT, "best_of": 3, "echo": True})).json()
        assert [choice["text"] for choice in best["choices"]] == ["a bab"]
        assert best["choices"][0]["logprobs"] is None
        assert best["usage"]["completion_tokens"] == 6
        ids = (await post(client, "/v1/completions", {**TEXT, "prompt": [5, 6], "echo": True, "stream": True})).text
        assert '"text": "5 6"' in ids
        failed = await post(client, "/v1/chat/completions", {**CHAT, "n": 2, "max_tokens": 4})
        assert (failed.status_code, failed.json()["error"]["code"]) == (429, "busy")


async def test_probabilities_are_told_in_either_form() -> None:
    async with running_api(DoubleNode()) as client:
        asked = {**CHAT, "logprobs": True, "top_logprobs": 2, "logit_bias": {"5": -100}}
        content = (await post(client, "/v1/chat/completions", asked)).json()["choices"][0]["logprobs"]["content"]
        assert [one["token"] for one in content] == ["a", "b"]
        assert content[0]["bytes"] == [97]
        assert [len(one["top_logprobs"]) for one in content] == [2, 2]
        told = events(await post(client, "/v1/chat/completions", {**asked, "stream": True}))
        assert [len(piece["choices"][0]["logprobs"]["content"]) for piece in told[1:3]] == [1, 1]
        text = (await post(client, "/v1/completions", {**TEXT, "logprobs": 1})).json()["choices"][0]["logprobs"]
        assert (text["tokens"], text["text_offset"]) == (["a", "b"], [0, 1])


async def test_embeddings_and_tokens() -> None:
    async with running_api(DoubleNode()) as client:
        asked: dict[str, Any] = {"model": "home", "input": ["ab", "abc"]}
        made = (await post(client, "/v1/embeddings", asked)).json()
        assert [one["embedding"] for one in made["data"]] == [[0.6, 0.8]] * 2
        assert made["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
        packed = (await post(client, "/v1/embeddings", {**asked, "input": [1, 2], "encoding_format": "base64"})).json()
        assert struct.unpack("<2f", base64.b64decode(packed["data"][0]["embedding"])) == pytest.approx((0.6, 0.8))
        several = (await post(client, "/v1/embeddings", {**asked, "input": [[1, 2], [3]]})).json()
        assert several["usage"]["total_tokens"] == 3
        tokens = (await post(client, "/tokenize", {"prompt": "to be"})).json()
        assert (tokens["count"], tokens["tokens"]) == (3, [1, 2, 2])
        plain = {"model": "home", "prompt": "to be", "add_special_tokens": False}
        assert (await post(client, "/tokenize", plain)).json()["tokens"] == [2, 2]
        assert (await post(client, "/tokenize", {"messages": CHAT["messages"]})).json()["count"] == 3
        assert (await post(client, "/detokenize", {"tokens": [5, 6]})).json() == {"prompt": "5 6"}


async def test_refusals_say_what_to_send_instead() -> None:
    async with running_api(DoubleNode()) as client:
        several = (await post(client, "/v1/completions", {**TEXT, "prompt": ["a", "b"]})).json()["error"]
        assert several["message"] == (
            "prompt must be one string or one list of token ids; a list of prompts is not supported"
        )
        assert (several["param"], several["code"]) == ("prompt", "unsupported_parameter")
        assert (await post(client, "/v1/completions", {**TEXT, "prompt": ["a"]})).status_code == 200
        assert (await post(client, "/v1/completions", {**TEXT, "prompt": [[1, 2], [3]]})).status_code == 400


async def test_a_reply_to_continue_reaches_the_node() -> None:
    node = DoubleNode()
    messages = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one two"}]
    async with running_api(node) as client:
        assert (await post(client, "/v1/chat/completions", {**CHAT, "messages": messages})).status_code == 200
    (_, request) = node.asked[0]
    assert isinstance(request, ReplyRequest)
    assert request.messages == tuple(messages)


async def test_adapters_are_models_of_their_own() -> None:
    node = DoubleNode()
    async with running_api(node) as client:
        listed = (await get(client, "/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["home", "home+pond"]
        assert (await get(client, "/v1/models/home+pond")).json() == listed[1]
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
            answer = await post(client, path, {**body, "model": "home+pond"})
            assert (answer.status_code, answer.json()["model"]) == (200, "home+pond")
            assert (await post(client, path, body)).status_code == 200
        asked = [request.adapter for _, request in node.asked if isinstance(request, ReplyRequest)]
        assert asked == ["pond", None, "pond", None]
        for model in ("home+", "+pond", "other+pond", "home+pond+", "home pond"):
            assert (await post(client, "/v1/chat/completions", {**CHAT, "model": model})).status_code == 404, model
        assert (await get(client, "/v1/models/home+lake")).json()["error"]["code"] == "model_not_found"
        for path, body in (("/v1/chat/completions", CHAT), ("/control/chat", {"messages": CHAT["messages"]})):
            missing = await post(client, path, {**body, "max_tokens": 5})
            assert missing.status_code == 404
            assert missing.json()["error"]["code"] == "adapter_not_found"
            assert missing.json()["error"]["next_step"]


async def get(client: Client, path: str, token: str = TOKEN) -> httpx.Response:
    headers = {"authorization": f"Bearer {token}"}
    return await trio.to_thread.run_sync(lambda: httpx.get(f"{client.url}{path}", headers=headers, verify=False))

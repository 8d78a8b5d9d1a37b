"""OpenAI's endpoint: forms, refusals by name and errors against a double; the unmodified client against three nodes."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import trio

from app.api.client import Client
from app.asker.reply_service import ReplyRequest
from engine.text.output_form import Constraint
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
        assert [piece["choices"][0]["delta"].get("content") for piece in told[:-1]] == ["a", "b", None]
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
        assert (await post(client, "/v1/chat/completions", late)).json()["choices"][0]["message"]["content"] == "latea"
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
        "model": "home#abababab",
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
    }
    async with running_api(node) as client:
        assert (await post(client, "/v1/chat/completions", asked)).status_code == 200
        assert (await post(client, "/v1/completions", {**TEXT, "prompt": [5, 6], "stop": "z"})).status_code == 200
    chat, text = (request for _, request in node.asked)
    assert isinstance(chat, ReplyRequest)
    assert chat.messages == ({"role": "system", "content": "be brief"}, {"role": "user", "content": "a b"})
    assert (chat.max_tokens, chat.temperature, chat.seed, chat.stop) == (9, 0, 7, ("x", "y"))
    assert 0 < chat.top_p < 1e-6
    assert isinstance(text, ReplyRequest)
    assert (text.prompt, text.max_tokens, text.temperature, text.stop) == ((5, 6), 16, 1.0, ("z",))


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"logprobs": True}, "logprobs"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"store": True}, "store"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"no_such_field": 1}, "no_such_field"),
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
        ("/v1/chat/completions", [], 400, None, "bad_request", "wrong"),
        ("/v1/completions", {**TEXT, "echo": True}, 400, "echo", "unsupported_parameter", "echo"),
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


async def test_images_and_tool_messages_are_refused_by_name() -> None:
    image = [{"type": "image_url", "image_url": {"url": "data:"}}]
    bad: list[tuple[dict[str, Any], str]] = [
        ({"role": "user", "content": image}, "image_url"),
        ({"role": "tool", "content": "4", "tool_call_id": "x"}, "role"),
        ({"role": "assistant", "content": None, "tool_calls": [{}]}, "tool_calls"),
        ({"role": "user", "content": "hi", "name": "bob"}, "name"),
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
        assert (await post(client, "/v1/chat/completions", {**CHAT, "unheard_of": 1})).status_code == 400
    assert node.asked[0] == node.asked[1]


async def test_refusals_say_what_to_send_instead() -> None:
    async with running_api(DoubleNode()) as client:
        several = (await post(client, "/v1/completions", {**TEXT, "prompt": ["a", "b"]})).json()["error"]
        assert several["message"] == (
            "prompt must be one string or one list of token ids; a list of prompts is not supported"
        )
        assert (several["param"], several["code"]) == ("prompt", "unsupported_parameter")
        assert (await post(client, "/v1/completions", {**TEXT, "prompt": ["a"]})).status_code == 200
        assert (await post(client, "/v1/completions", {**TEXT, "prompt": [[1, 2], [3]]})).status_code == 400
        two = (await post(client, "/v1/chat/completions", {**CHAT, "n": 2})).json()["error"]
        assert (two["message"], two["param"]) == ("n above 1 is not supported; send n=1", "n")


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
        for path, body in (("/v1/chat/completions", CHAT), ("/api/chat", {"messages": CHAT["messages"]})):
            missing = await post(client, path, {**body, "max_tokens": 5})
            assert missing.status_code == 404
            assert missing.json()["error"]["code"] == "adapter_not_found"
            assert missing.json()["error"]["next_step"]


async def get(client: Client, path: str) -> httpx.Response:
    headers = {"authorization": f"Bearer {TOKEN}"}
    return await trio.to_thread.run_sync(lambda: httpx.get(f"{client.url}{path}", headers=headers, verify=False))

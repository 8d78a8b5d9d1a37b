"""OpenAI's endpoint: forms, refusals by name and errors against a double; the unmodified client against three nodes."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import psutil
import pytest
import trio
from openai import OpenAI

from app.api.client import Client
from app.asker.reply_service import ReplyRequest
from app.config.home import Home, api_token
from tests.app.api_double import TOKEN, DoubleNode, running_api
from tests.app.node_process import Place, Serving, wait_until

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
        assert whole["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
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
        ({"response_format": {"type": "json_object"}}, "response_format"),
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
        ("/v1/completions", {**TEXT, "prompt": ["a", "b"]}, 400, None, "bad_request", "prompt"),
        ("/v1/nothing", {}, 404, None, "bad_request", "/v1/nothing"),
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


# --- three real nodes, and the client as it is on PyPI ---------------------------------------------------------------


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Serving]]:
    """Two nodes that hold the blocks between them, and one that holds none."""
    folder = tmp_path_factory.mktemp("nodes")
    places = [Place(folder / name, folder / "cache") for name in ("left", "right", "asker")]
    assert places[0].shoal("create", "home", "--model", "tiny-random").status == 0
    with Serving(places[0], "--discovery=invite", "--blocks=0:4", "--device=cpu", max_vram="1GB") as left:
        left.ready()
        invite = places[0].shoal("invite").out.strip()
        hosting = ("--discovery=invite", "--blocks=4:8", "--device=cpu")
        right = Serving(places[1], *hosting, max_vram="1GB", SHOAL_INVITE=invite)
        with right, Serving(places[2], "--discovery=invite", SHOAL_INVITE=invite) as asker:
            right.ready()
            asker.ready()
            wait_until(lambda: all(block["holders"] for block in asker.place.facts("blocks")), "all blocks are held")
            yield [left, right, asker]


@pytest.fixture(scope="module")
def client(swarm: list[Serving]) -> Iterator[OpenAI]:
    place = swarm[2].place
    url = f"{place.node_file()['api_url']}/v1"
    with OpenAI(base_url=url, api_key=api_token(Home(place.home)), max_retries=0) as client:
        yield client


def served_sessions(swarm: list[Serving]) -> int:
    return sum(len(node.place.facts("sessions")) for node in swarm)


def test_the_client_gets_the_swarms_reply(swarm: list[Serving], client: OpenAI) -> None:
    words = "Once upon a time"
    expected = swarm[2].place.facts("chat", words, "--temperature", "0", "--max-tokens", "24")
    assert [model.id for model in client.models.list()] == ["home"]
    assert client.models.retrieve("home").object == "model"
    asked: dict[str, Any] = {"model": "home", "messages": [{"role": "user", "content": words}]}
    asked |= {"temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == expected["text"]
    assert whole.choices[0].finish_reason == expected["finish_reason"]
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == expected["prompt_tokens"]
    assert whole.usage.completion_tokens == len(expected["token_ids"])
    pieces = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces[:-1]) == expected["text"]
    assert pieces[-1].usage is not None
    assert pieces[-1].usage == whole.usage
    seeded = {**asked, "temperature": 1.5, "seed": 11}
    texts = {client.chat.completions.create(**seeded).choices[0].message.content for _ in range(2)}
    assert len(texts) == 1
    raw = client.completions.create(model="home", prompt=words, temperature=0, max_tokens=8)
    assert raw.usage is not None
    assert raw.usage.completion_tokens == 8
    streamed = client.completions.create(model="home", prompt=words, temperature=0, max_tokens=8, stream=True)
    assert "".join(piece.choices[0].text for piece in streamed) == raw.choices[0].text
    assert served_sessions(swarm) == 0


def test_the_client_is_told_what_is_wrong(swarm: list[Serving], client: OpenAI) -> None:
    hello: Any = [{"role": "user", "content": "hello"}]
    with pytest.raises(openai.NotFoundError, match="not here"):
        client.chat.completions.create(model="gpt-9", messages=hello)
    with pytest.raises(openai.BadRequestError, match="shorten it") as caught:
        client.chat.completions.create(model="home", messages=[{"role": "user", "content": "word " * 5000}])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(model="home", messages=hello, tools=[{"type": "function"}])  # type: ignore[list-item]
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        client.completions.create(model="home", prompt=[10**8])
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_a_client_that_leaves_frees_the_hops(swarm: list[Serving], client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model="home", messages=[{"role": "user", "content": "hello"}], max_tokens=2000, stream=True
    )
    next(iter(stream))
    stream.close()
    wait_until(lambda: served_sessions(swarm) == 0, "no hop holds a session", 10)


def leave_sessions(asker: Serving, count: int) -> None:
    """Open chat sessions one after the other, and leave each after its first piece."""
    url = urlsplit(asker.place.node_file()["api_url"])
    assert url.hostname is not None
    body = json.dumps({**CHAT, "max_tokens": 500, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {api_token(Home(asker.place.home))}\r\nContent-Length: {len(body)}\r\n\r\n"
    for _ in range(count):
        with socket.create_connection((url.hostname, url.port or 80), timeout=30) as connection:
            connection.sendall(head.encode() + body)
            answer = b""
            while b"data:" not in answer:
                piece = connection.recv(65536)
                assert piece, answer
                answer += piece
            assert b" 200 " in answer, answer


def held(node: Serving) -> tuple[float, int, float]:
    """A node's leased cache in bytes, its open files, and its memory in MB."""
    place = node.place
    headers = {"authorization": f"Bearer {api_token(Home(place.home))}"}
    text = httpx.get(f"{place.node_file()['api_url']}/metrics", headers=headers, verify=False).text
    leased = [line.split()[1] for line in text.splitlines() if line.startswith("shoal_kv_used_bytes ")]
    process = psutil.Process(node.process.pid)
    return float(leased[0]) if leased else 0.0, process.num_fds(), process.memory_info().rss / 1e6


def check_nothing_leaks(swarm: list[Serving], count: int) -> None:
    leave_sessions(swarm[2], 10)  # caches and pools have their size after a few
    wait_until(lambda: served_sessions(swarm) == 0, "no hop holds a session", 20)
    before = [held(node) for node in swarm]
    leave_sessions(swarm[2], count)
    wait_until(lambda: served_sessions(swarm) == 0, "no hop holds a session", 20)
    wait_until(lambda: all(held(node)[0] == 0 for node in swarm), "no cache is leased", 20)
    for (_, files, memory), (_, files_after, memory_after) in zip(before, map(held, swarm), strict=True):
        assert files_after <= files + 10
        assert memory_after < memory + 15 + 0.01 * count


def test_sessions_that_are_left_leak_nothing(swarm: list[Serving]) -> None:
    check_nothing_leaks(swarm, 40)

"""The official `openai` client against a swarm of three real nodes."""

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
from openai import OpenAI

from app.config.home import Home, api_token
from tests.app.api.test_openai import CHAT
from tests.process.node_process import Place, Serving, wait_until


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
    assert pieces[-1].usage.total_tokens == whole.usage.total_tokens
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
    with pytest.raises(openai.NotFoundError, match="unknown model"):
        client.chat.completions.create(model="gpt-9", messages=hello)
    with pytest.raises(openai.BadRequestError, match="shorten it") as caught:
        client.chat.completions.create(model="home", messages=[{"role": "user", "content": "word " * 5000}])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(model="home", messages=hello, tools=[{"type": "function"}])  # type: ignore[list-item]
    with pytest.raises(openai.BadRequestError, match="out of range"):
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
    assert swarm[2].place.shoal("config", "set", "keep_sessions", "0").status == 0  # finished ones would rest otherwise
    leave_sessions(swarm[2], 10)  # caches and pools have their size after a few
    wait_until(lambda: served_sessions(swarm) == 0, "no hop holds a session", 20)
    before = [held(node) for node in swarm]
    leave_sessions(swarm[2], count)
    wait_until(lambda: served_sessions(swarm) == 0, "no hop holds a session", 20)
    wait_until(lambda: all(held(node)[0] == 0 for node in swarm), "no cache is leased", 60)  # swept every 30 s
    for node, (_, files, memory) in zip(swarm, before, strict=True):
        process = psutil.Process(node.process.pid)
        # The API closes connections of the looks above within seconds.
        wait_until(lambda process=process, files=files: process.num_fds() <= files + 10, "files are closed", 20)
        assert process.memory_info().rss / 1e6 < memory + 15 + 0.01 * count


def test_sessions_that_are_left_leak_nothing(swarm: list[Serving]) -> None:
    check_nothing_leaks(swarm, 40)

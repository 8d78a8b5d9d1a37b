"""Keys of programs: what they open, their limits, and how they come and go while the API runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
import trio.testing

from app.api.client import Client
from app.api.keys import WINDOW_S, KeyMeter, KeyRing
from app.config.keys import ApiKey, KeyFileError, add_key, read_keys, revoke_key
from app.core.errors import UsageError
from tests.app.api.api_double import TOKEN, DoubleNode, running_api
from tests.app.api.test_families import ASK, RESPOND
from tests.app.api.test_openai import CHAT, post


async def status(client: Client, path: str, key: str, header: str = "authorization") -> int:
    value = f"Bearer {key}" if header == "authorization" else key
    headers = {header: value}
    return await trio.to_thread.run_sync(
        lambda: httpx.get(f"{client.url}{path}", headers=headers, verify=False).status_code
    )


async def test_a_key_opens_replies_and_nothing_else_until_it_is_revoked(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    async with running_api(DoubleNode(), KeyRing(file)) as client:
        _, key = add_key(file, "editor", None, None)
        for header in ("authorization", "x-api-key"):
            assert await status(client, "/v1/models", key, header) == 200
            assert await status(client, "/api/tags", key, header) == 200
            assert await status(client, "/control/status", key, header) == 403
            assert await status(client, "/metrics", key, header) == 403
        assert (await post(client, "/v1/chat/completions", CHAT, token=key)).status_code == 200
        refused = await post(client, "/control/stop", {}, token=key)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "key_not_allowed")
        assert await status(client, "/v1/models", key[:-1]) == 401
        assert await status(client, "/v1/models", "x") == 401
        _, other = add_key(file, "other", None, None)
        assert await status(client, "/v1/models", other) == 200
        revoke_key(file, "editor")
        assert await status(client, "/v1/models", key) == 401
        assert await status(client, "/v1/models", other) == 200
        file.write_text("{}")
        assert await status(client, "/v1/models", other) == 401
        assert await status(client, "/v1/models", TOKEN) == 200


@pytest.mark.parametrize(
    ("path", "body", "find"),
    [
        ("/v1/chat/completions", CHAT, lambda answer: answer["error"]["type"] == "rate_limit_error"),
        ("/v1/messages", ASK, lambda answer: answer["error"]["type"] == "rate_limit_error"),
        ("/api/chat", {**CHAT, "stream": False}, lambda answer: "tokens of this minute" in answer["error"]),
    ],
)
async def test_a_key_that_has_used_its_tokens_waits(tmp_path: Path, path: str, body: Any, find: Any) -> None:
    file = tmp_path / "keys.json"
    _, key = add_key(file, "agent", 4, None)
    _, other = add_key(file, "other", None, None)
    async with running_api(DoubleNode(), KeyRing(file)) as client:
        for _ in range(2):  # 3 tokens each: two written, and one of the prompt that was not cached
            assert (await post(client, path, body, token=key)).status_code == 200
        refused = await post(client, path, body, token=key)
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= WINDOW_S
        assert find(refused.json())
        assert await status(client, "/v1/models", key) == 200
        assert (await post(client, path, body, token=other)).status_code == 200
        assert (await post(client, path, body)).status_code == 200


async def test_texts_for_embeddings_count_for_a_key(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    _, key = add_key(file, "agent", 10, None)
    asked = {"model": "home", "input": ["ab", "abc"]}  # 5 tokens
    async with running_api(DoubleNode(), KeyRing(file)) as client:
        codes = [(await post(client, "/v1/embeddings", asked, token=key)).status_code for _ in range(3)]
    assert codes == [200, 200, 429]


async def test_a_key_has_so_many_requests_at_once(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    made, key = add_key(file, "agent", None, 1)
    ring, node = KeyRing(file), DoubleNode()
    body = json.dumps({**CHAT, "messages": [{"role": "user", "content": "wait"}]}).encode()
    async with running_api(node, ring) as client:
        host, port = client.url.removeprefix("http://").split(":")
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        async with await trio.open_tcp_stream(host, int(port)) as stream:
            await stream.send_all(head.encode() + body)
            await node.begun.wait()
            refused = await post(client, "/v1/chat/completions", CHAT, token=key)
            assert (refused.status_code, "under way" in refused.text) == (429, True)
            assert (await post(client, "/v1/chat/completions", CHAT)).status_code == 200
    assert ring.meter(made).active == 0


async def test_a_response_of_one_key_is_no_other_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    _, mine = add_key(file, "mine", None, None)
    _, other = add_key(file, "other", None, None)
    asked = RESPOND
    async with running_api(DoubleNode(), KeyRing(file)) as client:
        for key, strangers in ((mine, (other, TOKEN)), (TOKEN, (mine, other))):
            made = (await post(client, "/v1/responses", asked, token=key)).json()["id"]
            path = f"/v1/responses/{made}"
            for stranger in strangers:
                assert await status(client, path, stranger) == 404
                more = {**asked, "previous_response_id": made}
                assert (await post(client, "/v1/responses", more, token=stranger)).status_code == 404
                assert await deleted(client, path, stranger) == 404
            assert await status(client, path, key) == 200
            assert (await post(client, "/v1/responses", {**asked, "previous_response_id": made}, token=key)).is_success
            assert await deleted(client, path, key) == 200


async def deleted(client: Client, path: str, key: str) -> int:
    headers = {"authorization": f"Bearer {key}"}
    return await trio.to_thread.run_sync(
        lambda: httpx.delete(f"{client.url}{path}", headers=headers, verify=False).status_code
    )


async def test_a_reply_that_is_broken_off_counts_its_prompt(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    _, key = add_key(file, "agent", 100, None)
    ring, node = KeyRing(file), DoubleNode()
    body = json.dumps({**CHAT, "messages": [{"role": "user", "content": "wait" + " and" * 200}]}).encode()
    async with running_api(node, ring) as client:
        host, port = client.url.removeprefix("http://").split(":")
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        async with await trio.open_tcp_stream(host, int(port)) as stream:
            await stream.send_all(head.encode() + body)
            await node.begun.wait()
        with trio.fail_after(10):
            await node.freed.wait()
        await trio.testing.wait_all_tasks_blocked(0.1)
        assert (await post(client, "/v1/chat/completions", CHAT, token=key)).status_code == 429


def test_the_limit_of_a_minute_slides() -> None:
    key, meter = ApiKey("k", "0" * 64, 0, tokens_per_minute=10), KeyMeter()
    meter.spend(6, 0.0)
    assert meter.refusal(key, 1.0) is None
    meter.spend(3, 30.0)
    meter.spend(3, 30.0)
    refusal = meter.refusal(key, 31.0)
    assert refusal is not None
    assert refusal[1] == 29
    assert meter.refusal(key, WINDOW_S) is None
    meter.spend(4, WINDOW_S)
    assert meter.refusal(key, WINDOW_S + 1) is not None


def test_the_file_of_keys_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    made, text = add_key(file, "a", 5, 2)
    assert text not in file.read_text()
    assert file.stat().st_mode & 0o077 == 0
    assert read_keys(file) == (made,)
    for name in ("a", "", "b c", "x" * 65, "-x"):
        with pytest.raises(UsageError):
            add_key(file, name, None, None)
    with pytest.raises(UsageError, match="unknown key"):
        revoke_key(file, "b")
    for damaged in ("", "[]", '{"keys": [{}]}', '{"keys": [{"name": "a", "digest": "x", "created_at": 0}]}'):
        file.write_text(damaged)
        with pytest.raises(KeyFileError, match="damaged"):
            read_keys(file)

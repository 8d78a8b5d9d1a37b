"""Anthropic's endpoint, `/v1/responses` and Ollama's API against a double: forms, streams, errors and keys."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from app.api.client import Client
from app.api.response_store import KEPT_S, MOST_BYTES, MOST_OWNER_BYTES, ResponseStore
from app.asker.reply_service import ReplyRequest
from app.config.file import Config
from app.config.settings import Settings
from engine.text.output_form import Constraint, Tool, ToolUse
from tests.app.api.api_double import TOKEN, DoubleNode, running_api
from tests.app.api.test_openai import TOOL, get, post

ASK: dict[str, Any] = {"model": "home", "max_tokens": 50, "messages": [{"role": "user", "content": "a b"}]}
CALLS = {**ASK, "messages": [{"role": "user", "content": "hm a call go again"}]}
RESPOND: dict[str, Any] = {"model": "home", "input": "a b"}
CHAT: dict[str, Any] = {"model": "home", "messages": [{"role": "user", "content": "a b"}]}


def named_events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The data of server-sent events, each of which has the name that its data says."""
    told = []
    for block in answer.text.strip().split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        told.append(value)
    return told


def requests(node: DoubleNode) -> list[ReplyRequest]:
    return [request for _, request in node.asked if isinstance(request, ReplyRequest)]


# --- Anthropic's ------------------------------------------------------------------------------------------------------


async def test_a_message_at_once_and_in_pieces() -> None:
    async with running_api(DoubleNode()) as client:
        whole = (await post(client, "/v1/messages", ASK)).json()
        assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", "home")
        assert whole["content"] == [{"type": "text", "text": "ab"}]
        assert (whole["stop_reason"], whole["stop_sequence"]) == ("end_turn", None)
        assert (whole["usage"]["input_tokens"], whole["usage"]["output_tokens"]) == (1, 2)
        assert whole["usage"]["cache_read_input_tokens"] == 2
        told = named_events(await post(client, "/v1/messages", {**ASK, "stream": True}))
    assert [event["type"] for event in told] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert "".join(event["delta"]["text"] for event in told if event["type"] == "content_block_delta") == "ab"
    assert told[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert told[-2]["usage"]["output_tokens"] == 2


async def test_a_message_with_thoughts_and_calls() -> None:
    async with running_api(DoubleNode()) as client:
        whole = (await post(client, "/v1/messages", CALLS)).json()
        assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
        assert whole["content"][2] == {"type": "tool_use", "id": "call_1", "name": "clock", "input": {"zone": "UTC"}}
        assert whole["stop_reason"] == "tool_use"
        told = named_events(await post(client, "/v1/messages", {**CALLS, "stream": True}))
    starts = [event["content_block"]["type"] for event in told if event["type"] == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use", "tool_use"]
    assert [event["index"] for event in told if event["type"] == "content_block_stop"] == [0, 1, 2, 3]
    parts = [event["delta"].get("partial_json", "") for event in told if event.get("index") == 2 and "delta" in event]
    assert json.loads("".join(parts)) == {"zone": "UTC"}
    assert told[-2]["delta"]["stop_reason"] == "tool_use"


async def test_what_anthropics_clients_send_reaches_the_node() -> None:
    node = DoubleNode()
    asked = {
        **ASK,
        "system": [{"type": "text", "text": "Be brief", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "time?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "redacted_thinking", "data": "?"},
                    {"type": "text", "text": "I look"},
                    {"type": "tool_use", "id": "t1", "name": "clock", "input": {"zone": "UTC"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "broken", "is_error": True},
                    {"type": "text", "text": "and now?"},
                ],
            },
        ],
        "tools": [{"name": "clock", "description": "Time", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "stop_sequences": ["END"],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "metadata": {"user_id": "me"},
    }
    async with running_api(node) as client:
        answer = await post(client, "/v1/messages", asked)
        assert answer.status_code == 200
        assert answer.headers["x-shoal-ignored-fields"] == "thinking"
        count = await post(client, "/v1/messages/count_tokens", {k: asked[k] for k in ("model", "messages", "tools")})
        assert count.json() == {"input_tokens": 8}
    (request,) = requests(node)
    assert request.messages == (
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "time?"},
        {
            "role": "assistant",
            "content": "I look",
            "tool_calls": [{"id": "t1", "name": "clock", "arguments": '{"zone": "UTC"}'}],
            "reasoning_content": "hm",
        },
        {"role": "tool", "content": "error: broken", "tool_call_id": "t1"},
        {"role": "user", "content": "and now?"},
    )
    clock = Tool("clock", "Time", '{"type": "object"}')
    assert (request.tools, request.stop) == (ToolUse((clock,), "required", parallel=False), ("END",))


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ({**ASK, "model": "gpt-9"}, 404, "not_found_error"),
        ({**ASK, "max_tokens": 1}, 529, "overloaded_error"),
        ({**ASK, "max_tokens": 2}, 400, "invalid_request_error"),
        ({**ASK, "max_tokens": 4}, 429, "rate_limit_error"),
        ({"model": "home", "messages": ASK["messages"]}, 400, "invalid_request_error"),
        ({**ASK, "messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error"),
        ({**ASK, "messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, 400, "invalid_request_error"),
        ({**ASK, "tool_choice": {"type": "tool", "name": "x"}}, 400, "invalid_request_error"),
        ([], 400, "invalid_request_error"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_errors_have_anthropics_form(body: Any, status: int, kind: str, stream: bool) -> None:
    async with running_api(DoubleNode()) as client:
        answer = await post(client, "/v1/messages", {**body, "stream": stream} if isinstance(body, dict) else body)
        assert answer.status_code == status
        error = answer.json()
        assert (error["type"], error["error"]["type"]) == ("error", kind)
        assert error["error"]["message"]
        refused = await post(client, "/v1/messages", body, token="wrong")
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")


async def test_a_message_that_breaks_off_says_so_in_the_stream() -> None:
    asked = {**ASK, "messages": [{"role": "user", "content": "a break b"}], "stream": True}
    async with running_api(DoubleNode()) as client:
        told = named_events(await post(client, "/v1/messages", asked))
    assert told[-1]["type"] == "error"
    assert "block 3 was lost" in told[-1]["error"]["message"]


# --- responses --------------------------------------------------------------------------------------------------------


async def test_a_response_at_once_and_in_pieces() -> None:
    async with running_api(DoubleNode()) as client:
        whole = (await post(client, "/v1/responses", RESPOND)).json()
        assert (whole["object"], whole["status"], whole["error"]) == ("response", "completed", None)
        assert [item["type"] for item in whole["output"]] == ["message"]
        assert whole["output"][0]["content"][0]["text"] == "ab"
        assert whole["usage"]["total_tokens"] == 5
        assert (await get(client, f"/v1/responses/{whole['id']}")).json() == whole
        told = named_events(await post(client, "/v1/responses", {**RESPOND, "stream": True}))
        assert [event["sequence_number"] for event in told] == list(range(len(told)))
        assert [event["type"].removeprefix("response.") for event in told] == [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "completed",
        ]
        assert told[-1]["response"]["output"][0] == told[-2]["item"]
        assert told[6]["text"] == "ab"


async def test_a_response_with_calls() -> None:
    async with running_api(DoubleNode()) as client:
        asked = {**RESPOND, "input": "hm a call go again"}
        whole = (await post(client, "/v1/responses", asked)).json()
        assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call", "function_call"]
        assert (whole["output"][2]["call_id"], whole["output"][2]["arguments"]) == ("call_1", '{"zone": "UTC"}')
        told = named_events(await post(client, "/v1/responses", {**asked, "stream": True}))
        done = [event["item"] for event in told if event["type"] == "response.output_item.done"]
        assert [item["type"] for item in done] == [item["type"] for item in whole["output"]]
        pieces = [e["delta"] for e in told if e["type"] == "response.function_call_arguments.delta"]
        assert "".join(pieces) == '{"zone": "UTC"}{}'
        broken = named_events(await post(client, "/v1/responses", {**RESPOND, "input": "a break", "stream": True}))
        assert broken[-1]["type"] == "response.failed"
        assert "block 3 was lost" in broken[-1]["response"]["error"]["message"]


async def test_a_response_continues_an_earlier_one() -> None:
    node = DoubleNode()
    schema = {"type": "object", "properties": {}}
    function = {"type": "function", "name": "clock", "parameters": schema}
    async with running_api(node) as client:
        first = (await post(client, "/v1/responses", {**RESPOND, "instructions": "Be brief"})).json()
        result = {"type": "function_call_output", "call_id": "c", "output": "noon"}
        made = {"type": "function_call", "call_id": "c", "name": "clock", "arguments": "{}"}
        more = {
            **RESPOND,
            "input": [{"role": "developer", "content": [{"type": "input_text", "text": "now"}]}, made, result],
            "previous_response_id": first["id"],
            "tools": [function, {"type": "web_search"}],
            "tool_choice": {"type": "function", "name": "clock"},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": schema}},
        }
        answer = await post(client, "/v1/responses", more)
        assert answer.headers["x-shoal-ignored-fields"] == "tools.web_search"
        second = answer.json()
        assert second["previous_response_id"] == first["id"]
        gone = await post(client, "/v1/responses", {**RESPOND, "previous_response_id": "resp_x"})
        assert (gone.status_code, gone.json()["error"]["param"]) == (404, "previous_response_id")
        unkept = (await post(client, "/v1/responses", {**RESPOND, "store": False})).json()
        assert (await get(client, f"/v1/responses/{unkept['id']}")).status_code == 404
        url, headers = f"{client.url}/v1/responses/{first['id']}", {"authorization": f"Bearer {TOKEN}"}
        for status in (200, 404):
            answer = await trio.to_thread.run_sync(lambda: httpx.delete(url, headers=headers, verify=False))
            assert answer.status_code == status
    asked = requests(node)
    assert asked[0].messages == ({"role": "system", "content": "Be brief"}, {"role": "user", "content": "a b"})
    call = {"id": "c", "name": "clock", "arguments": "{}"}
    assert asked[1].messages == (
        {"role": "user", "content": "a b"},
        {"role": "assistant", "content": "ab"},
        {"role": "system", "content": "now"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "noon", "tool_call_id": "c"},
    )
    assert asked[1].constraint == Constraint("json", json.dumps(schema), "text.format")
    assert asked[1].tools is not None
    assert asked[1].tools.name == "clock"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"input": []}, "input"),
        ({"input": [{"content": "no role"}]}, "role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "a b"}]}, "input"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "function", "parameters": {}}]}, "tools"),
        ({"tool_choice": "required"}, "no tools"),
        ({"max_output_tokens": 2}, "context"),
    ],
)
async def test_errors_of_responses_have_openais_form(more: dict[str, Any], words: str) -> None:
    async with running_api(DoubleNode()) as client:
        answer = await post(client, "/v1/responses", {**RESPOND, **more})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_responses_are_kept_for_a_day_and_survive_a_damaged_file(tmp_path: Path) -> None:
    now = 1000.0
    file = tmp_path / "responses.db"
    store = ResponseStore(file, lambda: now)
    store.add("me", "old", {"id": "old"}, [{"role": "user"}])
    assert file.stat().st_mode & 0o077 == 0
    now += KEPT_S / 2
    store.add("me", "new", {"id": "new"}, [])
    store.add("me", "huge", {"text": "x" * MOST_BYTES}, [])
    again = ResponseStore(file, lambda: now)
    assert again.body("me", "old") == '{"id": "old"}'
    assert again.messages("me", "old") == [{"role": "user"}]
    assert store.body("me", "huge") is None
    now += KEPT_S / 2 + 1
    assert store.body("me", "old") is None
    assert store.body("me", "new") is not None
    file.write_bytes(b"no database " * 100)
    assert store.body("me", "new") is None
    store.add("me", "again", {}, [])
    assert store.body("me", "again") is not None
    assert (store.remove("me", "again"), store.remove("me", "again")) == (True, False)


def test_an_owner_does_not_fill_the_disk_nor_push_out_others(tmp_path: Path) -> None:
    now = 1000.0
    store = ResponseStore(tmp_path / "responses.db", lambda: now)
    store.add("quiet", "first", {}, [])
    many = MOST_OWNER_BYTES // MOST_BYTES + 3
    for number in range(many):
        now += 1
        store.add("loud", f"r{number}", {"text": "x" * (MOST_BYTES - 100)}, [])
    assert store.body("quiet", "first") is not None
    assert store.body("loud", "r0") is None
    assert store.body("loud", f"r{many - 1}") is not None
    with sqlite3.connect(tmp_path / "responses.db") as database:
        assert database.execute("SELECT SUM(size) FROM owned_responses").fetchone()[0] <= MOST_OWNER_BYTES + MOST_BYTES


def test_responses_of_a_version_without_owners_are_dropped(tmp_path: Path) -> None:
    file = tmp_path / "responses.db"
    with sqlite3.connect(file) as database:
        database.execute("CREATE TABLE responses (id TEXT PRIMARY KEY, at REAL, body TEXT, messages TEXT)")
        database.execute("INSERT INTO responses VALUES ('old', 1, '{}', '[]')")
    store = ResponseStore(file, lambda: 2.0)
    assert store.body("me", "old") is None
    store.add("me", "new", {}, [])
    assert store.body("me", "new") is not None


def test_a_reply_that_cannot_be_kept_is_still_a_reply(tmp_path: Path) -> None:
    """A full disk, or a folder that is gone: the first reply of a home failed after all its tokens were written."""
    store = ResponseStore(tmp_path / "nowhere" / "responses.db")
    store.add("me", "new", {}, [])
    assert store.body("me", "new") is None
    assert not store.remove("me", "new")


# --- Ollama's ---------------------------------------------------------------------------------------------------------


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line) for line in answer.text.splitlines()]


async def test_ollamas_chat_at_once_and_in_pieces() -> None:
    node = DoubleNode()
    asked = {
        **CHAT,
        "model": "home:latest",
        "options": {"temperature": 0, "num_predict": 9, "seed": 4, "stop": ["x"], "num_ctx": 4096},
        "format": "json",
        "keep_alive": "5m",
        "think": False,
    }
    async with running_api(node) as client:
        told = await post(client, "/api/chat", asked)
        assert told.headers["content-type"] == "application/x-ndjson"
        assert told.headers["x-shoal-ignored-fields"] == "options.num_ctx"
        assert [line["message"]["content"] for line in lines(told)] == ["a", "b", ""]
        assert [line["done"] for line in lines(told)] == [False, False, True]
        assert lines(told)[-1]["eval_count"] == 2
        (whole,) = lines(await post(client, "/api/chat", {**CHAT, "stream": False}))
        assert (whole["message"], whole["done_reason"]) == ({"role": "assistant", "content": "ab"}, "stop")
        (loaded,) = lines(await post(client, "/api/chat", {"model": "home"}))
        assert (loaded["done"], loaded["done_reason"]) == (True, "load")
    request = requests(node)[0]
    assert (request.temperature, request.max_tokens, request.seed, request.stop) == (0, 9, 4, ("x",))
    assert request.constraint == Constraint("json", '{"type": "object"}', "format")
    assert request.template_variables == {"enable_thinking": False}


async def test_ollamas_calls_thoughts_and_texts() -> None:
    node = DoubleNode()
    talk = [
        {"role": "user", "content": "time?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "clock", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "noon", "tool_name": "clock"},
        {"role": "user", "content": "hm a call go again"},
    ]
    calls = [
        {"id": "call_1", "function": {"name": "clock", "arguments": {"zone": "UTC"}}},
        {"id": "call_2", "function": {"name": "clock", "arguments": {}}},
    ]
    async with running_api(node) as client:
        asked = {**CHAT, "messages": talk, "tools": [TOOL]}
        (whole,) = lines(await post(client, "/api/chat", {**asked, "stream": False}))
        assert (whole["message"]["thinking"], whole["message"]["content"]) == ("hm", "a")
        assert whole["message"]["tool_calls"] == calls
        told = lines(await post(client, "/api/chat", asked))
        assert [call for line in told for call in line["message"].get("tool_calls", ())] == calls
        text = lines(await post(client, "/api/generate", {"model": "home", "prompt": "a b", "system": "s"}))
        assert [line["response"] for line in text] == ["a", "b", ""]
        assert len(lines(await post(client, "/api/generate", {"model": "home", "prompt": "a", "raw": True}))) == 2
        (loaded,) = lines(await post(client, "/api/generate", {"model": "home"}))
        assert loaded["done_reason"] == "load"
    chat, _, text_request, raw = requests(node)
    assert chat.messages[1]["tool_calls"][0]["id"] == chat.messages[2]["tool_call_id"]
    assert [message["role"] for message in text_request.messages] == ["system", "user"]
    assert raw.prompt == "a"


async def test_ollamas_facts_and_errors() -> None:
    async with running_api(DoubleNode()) as client:
        tags = (await get(client, "/api/tags")).json()["models"]
        assert [model["name"] for model in tags] == ["home", "home+pond"]
        assert (await get(client, "/api/version")).json()["shoal"] == "0"
        shown = (await post(client, "/api/show", {"model": "home:latest"})).json()
        assert "tools" in shown["capabilities"]
        wrong: list[tuple[str, Any, int]] = [
            ("/api/show", {"model": "llama3"}, 404),
            ("/api/show", {}, 400),
            ("/api/chat", {**CHAT, "options": {"num_predict": 4}}, 429),
            ("/api/chat", {**CHAT, "options": {"temperature": -1}}, 400),
            ("/api/chat", {**CHAT, "options": {"stop": ["x"] * 17}}, 400),
            ("/api/chat", {**CHAT, "options": {"stop": "x" * 1025}}, 400),
            ("/api/chat", {**CHAT, "messages": [{"role": "user", "content": "", "images": ["x"]}]}, 400),
            ("/api/generate", {"model": "home", "prompt": "a", "suffix": 1}, 400),
            ("/api/generate", {"model": "home", "prompt": "a", "options": {"presence_penalty": 3}}, 400),
            ("/api/embed", {}, 404),
        ]
        for path, body, status in wrong:
            answer = await post(client, path, body)
            assert answer.status_code == status, path
            assert set(answer.json()) == {"error"}
            assert isinstance(answer.json()["error"], str)
        broken = lines(await post(client, "/api/chat", {**CHAT, "messages": [{"role": "user", "content": "a break"}]}))
        assert "block 3 was lost" in broken[-1]["error"]
        refused = await post(client, "/api/chat", CHAT, token="wrong")
        assert refused.status_code == 401
        assert isinstance(refused.json()["error"], str)


class OpenNode(DoubleNode):
    def config(self) -> Config:
        return Config(Settings(open_loopback=True), {})


async def ask(client: Client, path: str, headers: dict[str, str]) -> int:
    def send() -> int:
        return httpx.get(f"{client.url}{path}", headers=headers, verify=False).status_code

    return await trio.to_thread.run_sync(send)


async def test_programs_of_this_machine_need_no_token_only_where_the_setting_says_so() -> None:
    async with running_api(DoubleNode()) as client:
        assert await ask(client, "/api/tags", {}) == 401
    async with running_api(OpenNode()) as client:
        for path in ("/api/tags", "/v1/models", "/api/version"):
            assert await ask(client, path, {}) == 200
            assert await ask(client, path, {"host": "evil.example"}) == 403
            assert await ask(client, path, {"origin": "http://evil.example"}) == 403
        for path in ("/control/status", "/control/snapshot", "/metrics", "/docs", "/openapi.json"):
            assert await ask(client, path, {}) == 401, path

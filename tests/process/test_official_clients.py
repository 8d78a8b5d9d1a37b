"""The official clients of OpenAI, Anthropic and Ollama against a swarm of three real nodes.

Tests import them: every process that collects tests would take two seconds for it.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import jsonschema_rs
import psutil
import pytest

from app.config.home import Home, api_token
from tests.app.api.test_openai import CHAT
from tests.process.node_process import Place, Serving, is_covered, wait_until

if TYPE_CHECKING:
    import ollama
    from openai import OpenAI


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
            wait_until(lambda: is_covered(asker.place), "all blocks are held")
            yield [left, right, asker]


@pytest.fixture(scope="module")
def client(swarm: list[Serving]) -> Iterator[OpenAI]:
    from openai import OpenAI

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
    import openai

    hello: Any = [{"role": "user", "content": "hello"}]
    with pytest.raises(openai.NotFoundError, match="unknown model"):
        client.chat.completions.create(model="gpt-9", messages=hello)
    with pytest.raises(openai.BadRequestError, match="shorten it") as caught:
        client.chat.completions.create(model="home", messages=[{"role": "user", "content": "word " * 5000}])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(model="home", messages=hello, tools=[{"type": "function"}])  # type: ignore[list-item]
    bad: Any = {"type": "json_schema", "json_schema": {"name": "bad", "schema": {"type": "nope"}}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="nope") as caught:
            client.chat.completions.create(model="home", messages=hello, response_format=bad, stream=stream)
        assert caught.value.param == "response_format"
    with pytest.raises(openai.BadRequestError, match="guided_regex"):
        client.chat.completions.create(model="home", messages=hello, extra_body={"guided_regex": "(["})
    with pytest.raises(openai.BadRequestError, match="out of range"):
        client.completions.create(model="home", prompt=[10**8])
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


ASK: dict[str, Any] = {"model": "home", "messages": [{"role": "user", "content": "weather?"}]}
FORECAST: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def function(name: str, parameters: dict[str, Any]) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_the_client_gets_the_form_that_it_asks_for(client: OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "forecast", "schema": FORECAST, "strict": True}}
    for temperature in (0, 1):
        asked = {**ASK, "response_format": form, "temperature": temperature, "seed": 3, "max_tokens": 300}
        whole = client.chat.completions.create(**asked)
        assert whole.choices[0].finish_reason == "stop"
        text = whole.choices[0].message.content or ""
        jsonschema_rs.validate(FORECAST, json.loads(text))
        pieces = client.chat.completions.create(**asked, stream=True)
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == text
    chosen = client.chat.completions.create(**ASK, extra_body={"guided_choice": ["yes", "no"]})
    assert chosen.choices[0].message.content in ("yes", "no")
    matched = client.completions.create(model="home", prompt="a", extra_body={"guided_regex": "[ab]{3}"})
    assert set(matched.choices[0].text) <= {"a", "b"}
    assert len(matched.choices[0].text) == 3


def test_the_client_gets_calls_at_once_and_in_pieces(client: OpenAI) -> None:
    tools = [function("forecast", FORECAST), function("clock", {"type": "object", "properties": {}})]
    asked = {**ASK, "tools": tools, "tool_choice": "required", "temperature": 1, "seed": 1, "max_tokens": 1000}
    whole = client.chat.completions.create(**asked).choices[0]
    calls: Any = whole.message.tool_calls
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    with client.chat.completions.stream(**{**asked, "tools": tools}) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert [call.function.arguments for call in streamed.message.tool_calls or ()] == [
        call.function.arguments for call in calls
    ]
    named = {**asked, "tool_choice": {"type": "function", "function": {"name": "forecast"}}}
    only: Any = client.chat.completions.create(**named).choices[0].message.tool_calls
    assert [call.function.name for call in only] == ["forecast"]
    jsonschema_rs.validate(FORECAST, json.loads(only[0].function.arguments))
    free = client.chat.completions.create(**{**asked, "tool_choice": "auto", "max_tokens": 8}).choices[0]
    assert (free.finish_reason, free.message.tool_calls) == ("length", None)


def run_agent(client: OpenAI, seed: int) -> int:
    """An agent with three tools, of which one fails now and then; returns how many calls it made."""
    schemas: dict[str, dict[str, Any]] = {
        "add": {"a": {"enum": [1, 2, 3]}, "b": {"enum": [4, 5]}},
        "look_up": {"word": {"type": "string", "maxLength": 6}},
        "finish": {"answer": {"type": "string", "maxLength": 6}},
    }
    parameters = {
        name: {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
        for name, fields in schemas.items()
    }
    tools = [function(name, schema) for name, schema in parameters.items()]
    messages: list[Any] = [{"role": "user", "content": "go"}]
    count = 0
    for turn in range(4):
        named = {"type": "function", "function": {"name": "finish"}}
        choice: Any = "required" if turn < 3 else named
        reply = client.chat.completions.create(
            model="home", messages=messages, tools=tools, tool_choice=choice, seed=seed + turn, max_tokens=600,
            parallel_tool_calls=turn % 2 == 0, extra_body={"top_k": 40},
        )  # fmt: skip
        message: Any = reply.choices[0].message
        assert reply.choices[0].finish_reason == "tool_calls"
        messages.append({"role": "assistant", "content": message.content, "tool_calls": message.tool_calls})
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            jsonschema_rs.validate(parameters[call.function.name], arguments)
            result = "error: no such word" if call.function.name == "look_up" else "done"
            messages.append({"role": "tool", "content": result, "tool_call_id": call.id})
            count += 1
        if any(call.function.name == "finish" for call in message.tool_calls):
            return count
    raise AssertionError("the agent did not finish")


def test_the_loop_of_an_agent_ends(client: OpenAI) -> None:
    assert run_agent(client, 0) >= 1


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_loop_of_an_agent_ends_every_time(client: OpenAI) -> None:
    assert sum(run_agent(client, 100 * seed) for seed in range(20)) >= 20


def test_the_client_gets_probabilities_choices_and_embeddings(client: OpenAI) -> None:
    asked = {**ASK, "max_tokens": 6, "temperature": 0}
    told = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3).choices[0]
    assert told.logprobs is not None
    content = told.logprobs.content or []
    assert "".join(one.token for one in content) == told.message.content
    assert all(one.top_logprobs[0].logprob == one.logprob for one in content)  # greedy
    likeliest = content[0].top_logprobs[0].bytes or []
    barred = client.chat.completions.create(**asked, logit_bias={str(likeliest[0]): -100}).choices[0]
    assert barred.message.content != told.message.content
    several = client.chat.completions.create(**{**asked, "temperature": 1, "seed": 4}, n=3)
    assert len({choice.message.content for choice in several.choices}) == 3
    again = client.completions.create(model="home", prompt="sea", max_tokens=4, best_of=3, n=2, echo=True, seed=2)
    assert all(choice.text.startswith("sea") for choice in again.choices)
    made = client.embeddings.create(model="home", input=["a shoal of fish " * 4, "a shoal of fish " * 4, "x"])
    first, second, third = (one.embedding for one in made.data)
    assert first == pytest.approx(second, abs=1e-5)
    assert first != pytest.approx(third, abs=1e-2)
    assert sum(value * value for value in first) == pytest.approx(1, abs=1e-5)


def test_the_client_continues_a_response(client: OpenAI) -> None:
    import openai

    first = client.responses.create(model="home", input="Once", temperature=0, max_output_tokens=8)
    assert (first.status, first.usage is not None) == ("incomplete", True)
    again = client.responses.create(
        model="home", input="and", previous_response_id=first.id, temperature=0, max_output_tokens=8
    )
    talk: Any = [
        {"role": "user", "content": "Once"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "and"},
    ]
    same = client.chat.completions.create(model="home", messages=talk, temperature=0, max_tokens=8)
    assert again.output_text == same.choices[0].message.content
    assert client.responses.retrieve(first.id).output_text == first.output_text
    tools: Any = [{"type": "function", "name": "forecast", "parameters": FORECAST, "strict": True}]
    with client.responses.stream(model="home", input="weather?", tools=tools, tool_choice="required") as stream:
        kinds = {event.type for event in stream}
        made: list[Any] = [*stream.get_final_response().output]
    call = made[0]
    assert {"response.created", "response.function_call_arguments.delta", "response.completed"} <= kinds
    assert (call.type, call.name) == ("function_call", "forecast")
    jsonschema_rs.validate(FORECAST, json.loads(call.arguments))
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sun"}]
    after = client.responses.create(model="home", input=[*made, *result], tools=tools)
    assert after.output
    with pytest.raises(openai.NotFoundError, match="unknown response"):
        client.responses.create(model="home", input="x", previous_response_id="resp_none")


def test_anthropics_client_gets_messages_and_calls(swarm: list[Serving], client: OpenAI) -> None:
    import anthropic

    place = swarm[2].place
    url, key = place.node_file()["api_url"], api_token(Home(place.home))
    asked: dict[str, Any] = {"model": "home", "messages": [{"role": "user", "content": "Once"}], "max_tokens": 12}
    same = client.chat.completions.create(**asked, temperature=0).choices[0].message.content
    with anthropic.Anthropic(base_url=url, api_key=key, max_retries=0) as other:
        greedy: dict[str, Any] = {**asked, "extra_body": {"temperature": 0}}
        whole = other.messages.create(**greedy)
        assert [block.text for block in whole.content if block.type == "text"] == [same]
        assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 12)
        with other.messages.stream(**greedy) as stream:
            assert "".join(stream.text_stream) == same
            assert stream.get_final_message().usage.output_tokens == 12
        counted = other.messages.count_tokens(model="home", messages=asked["messages"])
        assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
        stopped = other.messages.create(**greedy, stop_sequences=[(same or "")[3:5]])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", (same or "")[3:5])
        form: Any = {"format": {"type": "json_schema", "schema": FORECAST}}
        formed: Any = other.messages.create(**{**asked, "max_tokens": 300}, output_config=form)
        jsonschema_rs.validate(FORECAST, json.loads(formed.content[0].text))
        tools = [{"name": "forecast", "input_schema": FORECAST}]
        calling = {**asked, "max_tokens": 1000, "tools": tools, "tool_choice": {"type": "any"}}
        made = other.messages.create(**calling)
        calls = [block for block in made.content if block.type == "tool_use"]
        assert made.stop_reason == "tool_use"
        for call in calls:
            jsonschema_rs.validate(FORECAST, call.input)
        with other.messages.stream(**calling) as stream:
            last = stream.get_final_message().content[-1]
        assert last.type == "tool_use"
        jsonschema_rs.validate(FORECAST, last.input)
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "sun"} for call in calls]
        talk = [
            *asked["messages"],
            {"role": "assistant", "content": made.content},
            {"role": "user", "content": results},
        ]
        assert other.messages.create(**{**asked, "messages": talk, "tools": tools}).stop_reason == "max_tokens"
        with pytest.raises(anthropic.NotFoundError, match="unknown model"):
            other.messages.create(**{**asked, "model": "claude-9"})
        with pytest.raises(anthropic.BadRequestError, match="shorten it"):
            other.messages.create(**{**asked, "messages": [{"role": "user", "content": "word " * 5000}]})
        with pytest.raises(anthropic.AuthenticationError):
            other.with_options(api_key="wrong").messages.create(**asked)


def test_ollamas_client_gets_chats_texts_and_calls(swarm: list[Serving], client: OpenAI) -> None:
    import ollama

    place = swarm[2].place
    url, key = place.node_file()["api_url"], api_token(Home(place.home))
    messages: Any = [{"role": "user", "content": "Once"}]
    same = client.chat.completions.create(model="home", messages=messages, temperature=0, max_tokens=12)
    with (
        ollama.Client(host=url, headers={"authorization": f"Bearer {key}"}) as other,
        ollama.Client(host=url) as bare,
    ):
        check_ollamas_client(place, other, bare, same.choices[0].message.content)


def check_ollamas_client(place: Place, other: ollama.Client, bare: ollama.Client, same: str | None) -> None:
    """Everything that Ollama's client can ask; `bare` sends no key."""
    import ollama

    messages = [{"role": "user", "content": "Once"}]
    options = {"temperature": 0, "num_predict": 12}
    whole = other.chat("home", messages, options=options)
    assert whole.message.content == same
    assert (whole.done, whole.done_reason, whole.eval_count) == (True, "length", 12)
    pieces = other.chat("home:latest", messages, options=options, stream=True)
    assert "".join(piece.message.content or "" for piece in pieces) == whole.message.content
    text = other.generate("home", "Once", options=options)
    assert text.response == whole.message.content
    formed = other.chat("home", messages, format=FORECAST, options={"num_predict": 300})
    jsonschema_rs.validate(FORECAST, json.loads(formed.message.content or ""))
    assert other.chat("home", messages, tools=[function("forecast", FORECAST)], options=options).done
    assert [model.model for model in other.list().models] == ["home"]
    assert "tools" in (other.show("home").capabilities or [])
    wrongs: list[tuple[dict[str, Any], int]] = [
        ({"model": "llama3"}, 404),
        ({"model": "home", "options": {"temperature": -1}}, 400),
    ]
    for wrong, status in wrongs:
        with pytest.raises(ollama.ResponseError) as caught:
            other.chat(messages=messages, **wrong)
        assert caught.value.status_code == status
    with pytest.raises(ollama.ResponseError) as caught:
        bare.list()
    assert caught.value.status_code == 401
    assert place.shoal("config", "set", "open_loopback", "on").status == 0
    try:
        assert bare.chat("home", messages, options=options).message.content == whole.message.content
    finally:
        assert place.shoal("config", "set", "open_loopback", "off").status == 0


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
        # The API keeps a connection of the looks above for half a minute at most.
        wait_until(lambda process=process, files=files: process.num_fds() <= files + 10, "files are closed", 60)
        assert process.memory_info().rss / 1e6 < memory + 15 + 0.01 * count


@pytest.mark.timeout(300)
def test_sessions_that_are_left_leak_nothing(swarm: list[Serving]) -> None:
    check_nothing_leaks(swarm, 40)

"""The API against whatever fits, or does not fit, its own OpenAPI document: never a 5xx, never a hang, never a leak."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import schemathesis
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.core.result import Ok

from app.api.client import Client
from app.api.guard import OPEN_PATHS
from tests.app.api.api_double import TOKEN, DoubleNode, running_api

ENDLESS = "/control/events"
EXAMPLES = 2  # of each operation; `tests/soak` tries more
SLOW_S = 10.0
LOOKING_S = 40.0  # a name that nobody knows is looked for twice, five seconds each


@contextmanager
def api_in_thread(node: Callable[[], DoubleNode] = DoubleNode) -> Iterator[Client]:
    """The real server beside this thread."""
    ready: list[tuple[Client, trio.Event, trio.lowlevel.TrioToken]] = []
    up = threading.Event()

    async def serve() -> None:
        over = trio.Event()
        async with running_api(node()) as client:
            ready.append((client, over, trio.lowlevel.current_trio_token()))
            up.set()
            await over.wait()

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    assert up.wait(30)
    client, over, token = ready[0]
    try:
        yield client
    finally:
        token.run_sync_soon(over.set)
        thread.join()


@pytest.fixture(scope="module")
def web() -> Iterator[httpx.Client]:
    """One client for all, because each makes its own store of certificates."""
    with httpx.Client(verify=False) as client:
        yield client


@pytest.fixture(scope="module")
def api() -> Iterator[Client]:
    with api_in_thread() as client:
        yield client


def document(client: Client) -> dict[str, Any]:
    described: dict[str, Any] = client.get("/openapi.json")
    return described


def operations(client: Client) -> list[tuple[str, str]]:
    return [(method.upper(), path) for path, ways in document(client)["paths"].items() for method in ways]


def test_no_route_but_the_probes_answers_without_the_token(api: Client, web: httpx.Client) -> None:
    found = operations(api)
    assert len(found) > 20
    for method, path in [*found, ("GET", "/openapi.json"), ("GET", "/docs"), ("GET", "/nothing")]:
        address = api.url + path.replace("{name}", "x").replace("{model}", "x")
        answer = web.request(method, address, timeout=SLOW_S)
        assert answer.status_code == (200 if path in OPEN_PATHS else 401), (method, path)


def test_a_page_of_another_origin_gets_nothing(api: Client, web: httpx.Client) -> None:
    headers = {"authorization": f"Bearer {TOKEN}", "origin": "http://evil.example"}
    for method, path in operations(api):
        address = api.url + path.replace("{name}", "x").replace("{model}", "x")
        asking = {"access-control-request-method": method, "access-control-request-headers": "authorization"}
        for way, more in ((method, {}), ("OPTIONS", asking)):
            answer = web.request(way, address, headers={**headers, **more}, timeout=SLOW_S)
            assert answer.status_code == 403, (way, path)
            assert not any(name.startswith("access-control") for name in answer.headers)


def fuzz(
    client: Client,
    examples: int,
    check: Callable[[Any, Any], None],
    skip: Collection[str] = (ENDLESS,),
    slow_s: float = SLOW_S,
) -> None:
    """Every operation with what fits it and, where it takes a body, with what does not."""
    schema = schemathesis.openapi.from_dict(document(client))
    headers = {"Authorization": f"Bearer {client.token}"}
    bounded = settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck), derandomize=True
    )
    for result in schema.get_all_operations():
        assert isinstance(result, Ok), result
        operation = result.ok()
        if operation.path in skip:
            continue
        wrong = [schemathesis.GenerationMode.NEGATIVE] if operation.body else []
        for mode in (schemathesis.GenerationMode.POSITIVE, *wrong):

            @bounded
            @given(case=operation.as_strategy(generation_mode=mode))
            def answers(case: Any) -> None:
                check(case, case.call(base_url=client.url, headers=headers, timeout=slow_s))

            answers()


def test_whatever_fits_the_document_is_answered(api: Client) -> None:
    fuzz(api, EXAMPLES, foreseen)


def foreseen(case: Any, answer: Any) -> None:
    """Nothing fails but what the double fails with itself, which stands for swarms that cannot answer."""
    if answer.status_code >= 500:
        error = answer.json()["error"]
        text = error if isinstance(error, str) else error["message"]
        assert "block 3" in text, (case, answer.content)


def well(case: Any, answer: Any) -> None:
    """Nothing fails at all."""
    assert answer.status_code < 500, (case, answer.content)


MOVING = {"/control/join", "/control/create", "/control/leave", "/control/pause", "/control/drain", "/control/resume"}


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(
    path=st.sampled_from(
        [
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/messages",
            "/v1/responses",
            "/api/chat",
            "/control/chat",
            "/control/join",
            "/control/pause",
        ]
    ),
    body=st.binary(max_size=200) | st.sampled_from([b"[" * 5000, b'{"a":' * 2000, b"1e999", b"\xff\xfe", b"null"]),
)
def test_bytes_that_are_no_json_are_refused(api: Client, web: httpx.Client, path: str, body: bytes) -> None:
    headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
    answer = web.post(api.url + path, content=body, headers=headers, timeout=SLOW_S)
    assert 400 <= answer.status_code < 500


def test_the_endless_stream_begins_whatever_it_is_told(api: Client) -> None:
    for last in ("0", "7", "x", "-1", "9" * 40):
        headers = {"authorization": f"Bearer {TOKEN}", "last-event-id": last}
        with httpx.stream("GET", api.url + ENDLESS, headers=headers, timeout=SLOW_S) as answer:
            assert answer.status_code in (200, 400)
            assert next(answer.iter_bytes())

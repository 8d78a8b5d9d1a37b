"""The control API over real sockets: who may speak, what routes answer, how failures look, how streams end."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from contextlib import aclosing, suppress
from functools import partial
from itertools import count
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import pytest
import trio
from trio.testing import MockClock

import app.api.client
from app.api import events
from app.api.client import ApiFailure, Client, Event, Hangup, NotAnswering, WrongToken
from app.api.guard import MAX_BODY_BYTES
from app.api.server import PortInUse, open_socket, url_of
from app.cli.chat import SwarmAnswers
from app.config.file import Config
from app.config.settings import Settings
from app.core.errors import AppError, NotRunning, UnknownSwarm, UsageError
from app.rounds.founding import TrainWish
from app.snapshot.codec import models_from, offer_from, prospects_from, to_json
from app.snapshot.views import FitView, Snapshot
from app.swarm.invitations import InviteLimits
from tests.app.api.api_double import TOKEN, DoubleNode, running_api

T = TypeVar("T")


async def threaded(function: Callable[..., T], *arguments: Any) -> T:
    """The client blocks, so it runs beside the server's loop."""
    return await trio.to_thread.run_sync(function, *arguments)


async def raw_status(client: Client, head: str, body: bytes = b"") -> int:
    """The status of a request written by hand."""
    parts = urlsplit(client.url)
    assert parts.hostname is not None
    assert parts.port is not None
    stream = await trio.open_tcp_stream(parts.hostname, parts.port)
    async with stream:
        try:
            await stream.send_all(head.encode() + b"\r\n\r\n" + body)
        except trio.BrokenResourceError:
            pass  # refused before all of it was read; the answer is there all the same
        answer = await stream.receive_some()
    return int(answer.split()[1])


def request_head(path: str, host: str = "127.0.0.1", token: str | None = TOKEN, more: str = "") -> str:
    authorization = "" if token is None else f"\r\nAuthorization: Bearer {token}"
    return f"GET {path} HTTP/1.1\r\nHost: {host}{authorization}{more}"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (request_head("/healthz", token=None), 200),
        (request_head("/control/status", token=None), 401),
        (request_head("/control/status", token="wrong"), 401),
        (request_head("/control/status", token=TOKEN + "x"), 401),
        (request_head("/docs", token=None), 401),
        (request_head("/openapi.json", token=None), 401),
        (request_head("/no/such/path", token=None), 401),
        (request_head("/no/such/path"), 404),
        (request_head("/control/status"), 200),
        (request_head("/control/status", host="localhost:7465"), 200),
        (request_head("/control/status", host="[::1]:7465"), 200),
        (request_head("/control/status", host="evil.example"), 403),
        (request_head("/control/status", host="127.0.0.1.evil.example"), 403),
        (request_head("/healthz", host="evil.example", token=None), 403),
        (request_head("/control/status", host="[not-an-address"), 403),
        (request_head("/control/status", more="\r\nOrigin: http://evil.example"), 403),
        (request_head("/control/status", more="\r\nOrigin: null"), 403),
        (request_head("/control/status", more="\r\nOrigin: http://localhost:3000"), 403),
        (request_head("/control/status", host="localhost:80", more="\r\nOrigin: http://localhost:80"), 200),
        (request_head("/control/status", host="192.0.2.7:7465"), 403),
        (request_head("/control/status", host="127.0.0.2"), 200),
        (request_head("/control/status", host=""), 403),
        (request_head("/control/events", more="\r\nLast-Event-ID: not-a-number"), 400),
        (request_head("/control/events", more="\r\nLast-Event-ID: -1"), 400),
    ],
)
async def test_who_may_speak(head: str, status: int) -> None:
    async with running_api(DoubleNode()) as client:
        assert await raw_status(client, head) == status


async def test_a_long_request_is_refused_whether_or_not_it_says_its_length() -> None:
    body = b"x" * (MAX_BODY_BYTES + 1)
    head = f"POST /control/join HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
    head += "Content-Type: application/json"
    async with running_api(DoubleNode()) as client:
        assert await raw_status(client, f"{head}\r\nContent-Length: {len(body)}", body) == 413
        chunk = f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
        assert await raw_status(client, f"{head}\r\nTransfer-Encoding: chunked", chunk) == 413


async def test_looking() -> None:
    node = DoubleNode()
    async with running_api(node) as client:
        status = await threaded(client.get, "/control/status")
        assert {"peer_id", "state", "reason", "swarm", "manifest", "blocks_total", "start", "stop"} <= status.keys()
        assert {"listen_addrs", "api_url", "device", "sessions"} <= status.keys()
        [peer] = await threaded(client.get, "/control/peers")
        assert {"peer", "name", "start", "stop", "rtt_s", "link", "score", "state"} <= peer.keys()
        assert await threaded(client.get, "/control/id") == {"peer_id": "12D3me"}
        assert (await threaded(client.get, "/control/swarms"))[0]["pinned"] == "home#abababababababababab"
        models = models_from(await threaded(client.get, "/control/models?folder=%2Fm"))
        assert [(model.title, model.here) for model in models] == [("small", False)]
        preview = offer_from(await threaded(partial(client.post, "/control/preview", {"target": "pond"})))
        assert (preview.target, preview.model) == ("pond", "small")
        prospects = prospects_from(await threaded(client.get, "/control/prospects"))
        assert (prospects.offers[0].fit, prospects.disk_free_bytes) == (FitView(3, 3), 34)
        assert (await threaded(client.get, "/control/doctor"))[0]["name"] == "clock"
        header, frame = await threaded(client.get, "/control/recording")
        assert (header["shoal_recording"], frame["all"]["peer_id"]) == (1, node.snapshot().peer_id)
        assert await threaded(client.snapshot) == node.snapshot()
        assert "paths" in await threaded(client.get, "/openapi.json")


async def test_acting() -> None:
    node = DoubleNode()
    async with running_api(node) as client:
        made = await threaded(client.post, "/control/create", {"name": "home", "model": "starter", "private": True})
        assert made["swarm"]["name"] == "home"
        assert (await threaded(client.post, "/control/join", {"target": "home"}))["state"] == "client"
        assert (await threaded(client.post, "/control/leave", {"name": "home"}))["name"] == "home"
        assert (await threaded(client.post, "/control/invite", {}))["invite"].startswith("shoal:")
        await threaded(client.set_config, "name", "a b/c")
        assert (await threaded(client.post, "/control/pause", {"for_s": 60}))["paused"]
        assert (await threaded(client.post, "/control/pause", {"for_s": None}))["by"] == "hand"
        assert (await threaded(client.post, "/control/drain", {}))["paused"]
        assert not (await threaded(client.post, "/control/resume", {}))["paused"]
        await threaded(client.post, "/control/stop", {})
        assert node.stopped.is_set()
    assert node.asked == [
        ("create", "home", "starter", True),
        ("join", "home"),
        ("leave", "home"),
        ("invite", None, None),
        ("set", "name", "a b/c"),
        ("pause", 60.0),
        ("pause", None),
        ("drain",),
        ("resume",),
    ]


async def test_invites_and_members() -> None:
    node = DoubleNode()
    async with running_api(node) as client:
        made = await threaded(client.post, "/control/invite", {"name": "home", "expires_in_s": 60, "approve": True})
        assert (made["limits"], made["private"]) == (None, False)
        [listed] = await threaded(client.get, "/control/invites")
        assert (listed["id"], listed["state"], listed["waiting"][0]["name"]) == ("1a2b3c4d", "open", "guest")
        for action in ("approve", "refuse"):
            assert (await threaded(client.post, f"/control/invites/{action}", {"peer": "guest"}))["peer"] == "12D3guest"
        assert (await threaded(client.post, "/control/invites/cancel", {"id": "1a2b3c4d"}))["id"] == "1a2b3c4d"
        assert await threaded(client.get, "/control/revoked") == {"revoked": ["12D3gone"]}
        assert await threaded(client.post, "/control/revoke", {"peer": "12D3gone"}) == {"revoked": ["12D3gone"]}
        for wrong in ({"uses": "x"}, {"expires_in_s": 10**9}, {"expires_in_s": -1}):
            with pytest.raises(UsageError, match="must be"):
                await threaded(client.post, "/control/invite", wrong)
        await threaded(client.post, "/control/invite", {"name": "home", "uses": 0})  # the node refuses it
    assert node.asked == [
        ("invite", "home", InviteLimits(60.0, 1, approve=True)),
        ("decide", "guest", True),
        ("decide", "guest", False),
        ("cancel", "1a2b3c4d"),
        ("revoke", "12D3gone", False),
        ("invite", "home", InviteLimits(uses=0)),
    ]


async def test_training_jobs() -> None:
    node = DoubleNode()
    async with running_api(node) as client:
        wish = {"name": "fish", "data": ["/text"], "shape": "/shape.json", "every": 7, "optimizer": "muon"}
        assert (await threaded(client.post, "/control/train", wish))["round"] == 3
        assert (await threaded(client.post, "/control/train/forecast", wish))["rounds"] == 20
        for action in ("join", "leave", "remove"):
            assert (await threaded(client.post, f"/control/train/{action}", {"job": "fish"}))["name"] == "fish"
        assert [job["name"] for job in await threaded(client.get, "/control/train")] == ["fish"]
        assert [job["name"] for job in await threaded(client.get, "/control/train/joinable")] == ["birds"]
        wrongs: list[dict[str, object]] = [
            {"data": []},
            {"optimizer": "sgd"},
            {"wire": "int2"},
            {"seed": -1},
            {"more": 1},
        ]
        for values in wrongs:
            with pytest.raises(UsageError):
                await threaded(client.post, "/control/train", wish | values)
    founded = TrainWish("fish", ("/text",), shape="/shape.json", every=7, optimizer="muon")
    asked = [(f"{action}_training", "fish") for action in ("join", "leave", "remove")]
    assert node.asked == [("found_training", founded), *asked]


@pytest.mark.parametrize(
    ("path", "body", "kind", "words"),
    [
        ("/control/join", {"target": "nowhere"}, UnknownSwarm, "nobody knows the swarm nowhere"),
        ("/control/join", {"target": "broken"}, ApiFailure, "internal error: ZeroDivisionError; the node's log"),
        ("/control/join", {}, UsageError, "the request's target is wrong"),
        ("/control/join", {"target": 5}, UsageError, "the request's target must be a valid string"),
        ("/control/join", {"target": "x" * 20_000}, UsageError, "the request's target is wrong"),
        ("/control/join", {"target": "x", "more": 1}, UsageError, "the request's more is wrong"),
        ("/control/pause", {"for_s": -5}, UsageError, "the request's for_s must be"),
        ("/control/nothing", {}, ApiFailure, "POST /control/nothing: Not Found"),
    ],
)
async def test_a_failure_keeps_its_kind_and_its_line(
    path: str, body: dict[str, Any], kind: type[Exception], words: str
) -> None:
    async with running_api(DoubleNode()) as client:
        with pytest.raises(kind, match=words) as caught:
            await threaded(client.post, path, body)
    assert "\n" not in str(caught.value)


async def test_a_wrong_token_is_said() -> None:
    async with running_api(DoubleNode()) as client:
        with pytest.raises(WrongToken, match="token"):
            await threaded(Client(client.url, "another-token").get, "/control/status")


def test_nobody_there_is_said() -> None:
    with open_socket(0, explicit=True) as sock:
        url = url_of(sock)
    with pytest.raises(NotRunning, match="cannot be reached"):
        Client(url, TOKEN).get("/control/status")


def test_a_node_that_hangs_is_told_from_one_that_thinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen process: connections are taken, and nothing comes back."""
    monkeypatch.setattr(app.api.client, "QUIET_S", 0.05)
    monkeypatch.setattr(app.api.client, "LIFE_S", 0.2)
    with open_socket(0, explicit=True) as sock:
        client = Client(url_of(sock), TOKEN, timeout_s=0.2)
        with pytest.raises(NotAnswering, match="did not answer in time"):
            client.get("/control/status")
        for stream in (client.chat({"messages": []}), client.events()):
            with pytest.raises(NotAnswering, match="did not answer in time"):
                next(stream)


async def test_a_reply_may_take_its_time_while_the_node_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app.api.client, "QUIET_S", 0.05)
    asked = threading.Semaphore(0)
    get = Client.get

    def counted(client: Client, path: str, *, timeout_s: float | None = None) -> Any:
        asked.release()
        return get(client, path, timeout_s=timeout_s)

    monkeypatch.setattr(Client, "get", counted)
    node = DoubleNode()
    async with running_api(node) as client:
        hangup, pieces = Hangup(), list[dict[str, Any]]()

        def read() -> None:
            with suppress(AppError):
                pieces.extend(client.chat({"messages": [{"role": "user", "content": "a wait b"}]}, hangup=hangup))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(threaded, read)
            for _ in range(4):
                await threaded(asked.acquire)
            assert not node.freed.is_set()
            hangup.hang_up()
            with trio.fail_after(5):
                await node.freed.wait()


def test_a_url_that_is_none_is_said() -> None:
    with pytest.raises(UsageError, match=r"http://127\.0\.0\.1:7465"):
        Client("ftp://x", TOKEN).get("/control/status")


async def chat(client: Client, text: str, **more: Any) -> list[dict[str, Any]]:
    request = {"messages": [{"role": "user", "content": text}], **more}
    return await threaded(lambda: list(client.chat(request)))


async def test_a_reply_comes_piece_by_piece() -> None:
    node = DoubleNode()
    async with running_api(node) as client:
        *pieces, last = await chat(client, "a b", temperature=0)
        assert pieces == [{"text": "a"}, {"text": "b"}]
        assert last["done"]["finish_reason"] == "stop"
    assert node.freed.is_set()


async def test_what_a_reply_waits_for_is_said_before_it_begins_or_fails(capsys: pytest.CaptureFixture[str]) -> None:
    words = "waiting up to 15 s for a member that serves block 3"
    async with running_api(DoubleNode()) as client:
        assert (await chat(client, "late a"))[:2] == [{"waiting": {"block": 3, "text": words}}, {"text": "a"}]
        with pytest.raises(AppError, match="nobody serves block 3"):
            await chat(client, "late never")
        answers = SwarmAnswers(client, {"max_tokens": 8, "seed": 1})
        pieces = await threaded(lambda: list(answers.answer([{"role": "user", "content": "late a"}])))
        assert ("".join(pieces), capsys.readouterr().err) == ("a", f"shoal: {words}\n")


async def test_a_reply_that_cannot_begin_or_breaks_off_is_said() -> None:
    async with running_api(DoubleNode()) as client:
        with pytest.raises(AppError, match="nobody serves block 3"):
            await chat(client, "a", max_tokens=1)
        with pytest.raises(AppError, match="block 3 was lost"):
            await chat(client, "a break b")
        with pytest.raises(UsageError, match="temperature"):
            await chat(client, "a", temperature=-1)


async def test_whoever_leaves_in_the_middle_frees_the_session_at_once() -> None:
    node = DoubleNode()
    async with running_api(node) as client:

        def read_one() -> None:
            pieces = client.chat({"messages": [{"role": "user", "content": "a wait b"}]})
            next(pieces)
            pieces.close()  # type: ignore[attr-defined]

        await threaded(read_one)
        with trio.fail_after(5):
            await node.freed.wait()


async def collect(client: Client, count: int) -> list[Event]:
    def read() -> list[Event]:
        found: list[Event] = []
        for event in client.events():
            found.append(event)
            if len(found) == count:
                break
        return found

    return await threaded(read)


async def test_events_begin_with_the_state_and_tell_changes() -> None:
    node = DoubleNode()
    node.event_log.note("state", "starting")
    async with running_api(node) as client:
        first = await collect(client, 2)
        assert [event.name for event in first] == ["note", "snapshot"]
        assert first[0].data["text"] == "starting"
        assert first[1].data["peer_id"] == "12D3me"

        async def keep_changing() -> None:
            for number in count():
                node.state = f"state {number}"
                node.event_log.touch()
                await trio.sleep(0.01)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_changing)
            events = await collect(client, 3)
            nursery.cancel_scope.cancel()
        before, after = (int(event.data["reason"].split()[-1]) for event in events[1:])
        assert after - before > 1, "changes that come quickly are told together"


async def test_all_followers_get_the_same_snapshots_and_the_loop_writes_none(
    monkeypatch: pytest.MonkeyPatch, patient_clock: MockClock
) -> None:
    """Each dashboard cost its node a tenth of the loop's time in a swarm of a thousand, in which no token was sent."""
    node, writers = DoubleNode(), list[int]()

    def write(snapshot: Snapshot) -> bytes:
        writers.append(threading.get_ident())
        return snapshot_event(snapshot)

    snapshot_event = events._snapshot_event
    monkeypatch.setattr(events, "_snapshot_event", write)
    feed, seen = events.EventFeed(node), [list[bytes]() for _ in range(3)]

    async def follow(chunks: list[bytes]) -> None:
        async with aclosing(feed.stream(0)) as stream:
            async for chunk in stream:
                chunks.append(chunk)

    async with trio.open_nursery() as nursery:
        for chunks in seen:
            nursery.start_soon(follow, chunks)
        for _ in range(100):
            node.event_log.touch()
            await trio.sleep(0.02)
        node.event_log.close()
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) == len(writers) <= 2 / events.APART_S + 2
    assert threading.get_ident() not in writers
    assert json.loads(seen[0][0].partition(b"data: ")[2]) == json.loads(json.dumps(to_json(node.snapshot())))


async def test_a_closing_feed_ends_the_streams_and_the_server_at_once() -> None:
    node = DoubleNode()
    ended: list[int] = []
    following = trio.Event()

    async def follow(client: Client) -> None:
        def read() -> int:
            count = 0
            for _ in client.events():
                count += 1
                trio.from_thread.run_sync(following.set)
            return count

        ended.append(await threaded(read))

    with trio.fail_after(5):  # hypercorn's grace and trio's threads would take longer
        async with trio.open_nursery() as nursery:
            async with running_api(node) as client:
                nursery.start_soon(follow, client)
                await following.wait()
                began = trio.current_time()
            assert trio.current_time() - began < 1.5
    assert len(ended) == 1


async def test_a_follower_that_leaves_frees_its_stream() -> None:
    node = DoubleNode()
    async with running_api(node) as client:
        for _ in range(5):
            await collect(client, 1)
        assert (await threaded(client.get, "/control/status"))["peer_id"] == "12D3me"


def test_a_taken_port_gives_way_only_where_nobody_chose_it() -> None:
    with open_socket(0, explicit=True) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=f"port {port} is taken"):
            open_socket(port, explicit=True)
        with open_socket(port, explicit=False) as other:
            assert other.getsockname()[1] not in (0, port)


def test_the_port_is_on_loopback_alone() -> None:
    with open_socket(0, explicit=True) as sock:
        assert sock.getsockname()[0] == "127.0.0.1"
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "code"),
    [
        ("/control/join", {"target": "nowhere"}, 404, "not_found_error", "unknown_swarm"),
        ("/control/join", {"target": 5}, 400, "invalid_request_error", "bad_request"),
        ("/control/join", {"target": "broken"}, 500, "server_error", "internal"),
        ("/control/nothing", {}, 404, "not_found_error", "not_found"),
        ("/v1/nothing", {}, 404, "not_found_error", "not_found"),
        ("/v1/audio/speech", {}, 404, "not_found_error", "not_found"),
    ],
)
async def test_errors_have_the_types_of_openai_everywhere(
    path: str, body: dict[str, Any], status: int, kind: str, code: str
) -> None:
    async with running_api(DoubleNode()) as client, httpx.AsyncClient() as asker:
        answer = await asker.post(client.url + path, json=body, headers={"authorization": f"Bearer {TOKEN}"})
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (status, kind, code)
        assert error["next_step"]
        refused = await asker.post(client.url + path, json=body)
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")


async def test_probes_need_no_token() -> None:
    async with running_api(DoubleNode()) as client, httpx.AsyncClient(base_url=client.url) as asker:
        assert (await asker.get("/")).json() == {"name": "Shoal", "openai": "/v1", "docs": "/docs"}
        assert (await asker.get("/health")).json() == {"status": "ok"}
        assert [(await asker.head(path)).status_code for path in ("/", "/health")] == [200, 200]
        assert (await asker.get("/v1/models")).status_code == 401
        assert (await asker.get("/health", headers={"origin": "http://evil.example"})).status_code == 403


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": TOKEN}, 200),
        ({"authorization": f"bearer {TOKEN}"}, 200),
        ({"authorization": f"Bearer {TOKEN}", "x-api-key": "other"}, 200),
        ({"authorization": f"Basic {TOKEN}"}, 401),
        ({"authorization": TOKEN}, 401),
        ({"x-api-key": ""}, 401),
        ({"x-api-key": TOKEN[:-1]}, 401),
    ],
)
async def test_the_token_may_be_an_api_key(headers: dict[str, str], status: int) -> None:
    async with running_api(DoubleNode()) as client, httpx.AsyncClient(base_url=client.url) as asker:
        assert (await asker.get("/v1/models", headers=headers)).status_code == status


class OpenNode(DoubleNode):
    """A node whose owner allows one site."""

    def config(self) -> Config:
        return Config(Settings(api_origins=("http://localhost:3000",)), {}, ())


ASKED = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}


async def test_an_allowed_origin_may_ask_and_use_the_api_with_the_token() -> None:
    ours = {"origin": "http://localhost:3000"}
    async with running_api(OpenNode()) as client, httpx.AsyncClient(base_url=client.url) as asker:
        preflight = await asker.options("/v1/chat/completions", headers={**ours, **ASKED})
        assert (preflight.status_code, preflight.content) == (204, b"")
        assert preflight.headers["access-control-allow-origin"] == ours["origin"]
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        refused = await asker.get("/v1/models", headers=ours)
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, ours["origin"])
        answer = await asker.get("/v1/models", headers={**ours, "authorization": f"Bearer {TOKEN}"})
        assert (answer.status_code, answer.headers["vary"]) == (200, "Origin")
        assert answer.headers["access-control-allow-origin"] == ours["origin"]
        forged = await asker.options("/v1/models", headers={**ours, **ASKED, "host": "rebound.example"})
        assert forged.status_code == 403


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://localhost:3001", "http://localhost:3000.evil"]
)
async def test_other_origins_are_told_nothing(origin: str) -> None:
    headers = {"origin": origin, "authorization": f"Bearer {TOKEN}"}
    async with running_api(OpenNode()) as client, httpx.AsyncClient(base_url=client.url) as asker:
        for answer in (
            await asker.options("/v1/models", headers={**headers, **ASKED}),
            await asker.get("/v1/models", headers=headers),
        ):
            assert answer.status_code == 403
            assert "access-control-allow-origin" not in answer.headers

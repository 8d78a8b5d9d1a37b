"""A node tries what it offers: an API whose handler hangs begins anew, and so does hosting that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

import app.api.supervisor
import app.node.node
import app.node.self_check
from app.api import server
from app.api.guard import Application, Receive, Scope, Send
from app.api.routes import build_application
from app.api.supervisor import ApiHealth, ApiSupervisor
from tests.app.node.test_node import cache, found_swarm, living, until

__all__ = ["cache"]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (app.node.self_check, app.api.supervisor):
        monkeypatch.setattr(module, "EVERY_S", 0.05)
        monkeypatch.setattr(module, "PATIENCE_S", 2.0)
    monkeypatch.setattr(app.api.supervisor, "TRY_AGAIN_S", 0.05)


class Wedged:
    """Applications of which some never answer `/healthz`."""

    def __init__(self, build: Callable[..., Application]) -> None:
        self._build, self.built, self.wedged = build, 0, False
        self.gone = 0  # requests that hung and were cut off

    def __call__(self, *arguments: Any, **options: Any) -> Application:
        self.built += 1
        self.wedged = False
        inner = self._build(*arguments, **options)

        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            if self.wedged and scope["type"] == "http":
                try:
                    await trio.sleep_forever()
                finally:
                    self.gone += 1
            await inner(scope, receive, send)

        return application


async def healthy(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


@pytest.mark.usefixtures("impatient")
async def test_an_api_that_hangs_begins_anew_on_the_same_port() -> None:
    build, health = Wedged(lambda: healthy), ApiHealth()
    api = ApiSupervisor(server.open_socket(0, explicit=False), build, health)
    async with trio.open_nursery() as nursery:
        await nursery.start(api.run)
        with trio.fail_after(20):
            assert await app.api.supervisor.api_trouble(api.url) is None
            build.wedged = True
            await health.wait_change()
            assert health.trouble is not None
            assert (health.trouble.code, health.trouble.peers) == ("probe_api", ())
            await health.wait_change()
            assert health.trouble is None
            assert await app.api.supervisor.api_trouble(api.url) is None
            await api.end()
    assert build.built == 2
    assert build.gone >= 1
    assert await app.api.supervisor.api_trouble(api.url) is not None


@pytest.mark.usefixtures("impatient")
async def test_an_api_that_crashes_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    crashes = 2

    def build() -> Application:
        nonlocal crashes
        crashes -= 1
        if crashes >= 0:
            raise RuntimeError("no application today")
        return healthy

    api = ApiSupervisor(server.open_socket(0, explicit=False), build, ApiHealth())
    with caplog.at_level(logging.CRITICAL):
        async with trio.open_nursery() as nursery:
            await nursery.start(api.run)
            with trio.fail_after(20):
                assert await app.api.supervisor.api_trouble(api.url) is None
                await api.end()


@pytest.mark.usefixtures("impatient")
async def test_a_node_offers_nothing_while_its_api_hangs_and_keeps_its_blocks(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = Wedged(build_application)
    monkeypatch.setattr(app.node.node, "build_application", build)
    monkeypatch.setattr(app.node.self_check, "EVERY_S", 0.3)
    found_swarm(tmp_path, cache, "home")
    async with living(tmp_path, cache, max_vram=10**9, device="cpu", blocks="0:8") as node:
        await until(node, lambda: node.snapshot().state == "serving")
        active_swarm = node._network_owner.active_swarm
        assert active_swarm is not None
        assert active_swarm.membership is not None
        block_host, before = active_swarm.block_host, node.snapshot().why
        build.wedged = True
        await until(node, lambda: node.snapshot().state == "loading")
        seen = node.snapshot()
        assert (seen.why and seen.why.code, active_swarm.membership.own.state) == ("probe_api", "loading")
        assert (seen.start, seen.stop) == (0, 8)
        await until(node, lambda: node.snapshot().state == "serving")
        assert active_swarm.membership.own.state == "serving"
        assert (active_swarm.block_host, node.snapshot().why) == (block_host, before)
        assert build.built >= 2  # a busy machine may be slow to answer the new one's test, too


async def test_a_node_that_fails_its_own_test_withdraws_and_hosts_anew(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.node.self_check, "EVERY_S", 0.1)
    found_swarm(tmp_path, cache, "home")
    async with living(tmp_path, cache, max_vram=10**9, device="cpu", blocks="0:8") as node:
        await until(node, lambda: node.snapshot().state == "serving")
        active_swarm = node._network_owner.active_swarm
        assert active_swarm is not None
        network, block_host = node._network_owner.network, active_swarm.block_host
        assert network is not None
        assert block_host is not None
        runner = block_host.runner
        assert runner is not None
        assert await app.node.self_check.span_trouble(network, block_host.server, runner) is None
        assert await app.api.supervisor.api_trouble(node.snapshot().api_url) is None
        assert await app.api.supervisor.api_trouble("http://127.0.0.1:9") is not None

        def broken(work: object) -> None:
            raise RuntimeError("the device has fallen off the bus")

        monkeypatch.setattr(runner, "step", broken)
        await until(node, lambda: any("failed its own test" in note.text for note in node.event_log.notes_after(0)))
        await until(
            node, lambda: node.snapshot().state == "serving" and active_swarm.block_host not in (None, block_host)
        )
        told = [note.text for note in node.event_log.notes_after(0) if "failed its own test" in note.text]
        assert len(told) == 1
        assert "fallen off the bus" in told[0]

"""A node whose memory other programs take and give back: it hosts less, nothing, and everything again."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from app.asker.reply import ReplyDone
from app.asker.reply_service import ReplyRequest
from app.hosting import loader, memory
from app.hosting.block_host import RAISE_CAP
from app.node import hosting_loop
from app.node.node import Node
from engine import hosting
from engine.device import probe
from engine.errors import DeviceFull
from engine.hosting import DeviceShare, HostingPlan
from engine.model.hosted_span import HostedSpan
from engine.sources.base import ModelSource
from tests.app.node.test_node import cache, found_swarm, living, until

__all__ = ["cache"]

PLENTY = 10**15


def serves(node: Node) -> bool:
    return node.snapshot().state == "serving"


async def ask(node: Node) -> list[int]:
    """The tokens of a greedy reply."""
    replies = node._network_owner.active_swarm
    assert replies is not None
    assert replies.replies is not None
    request = ReplyRequest(messages=({"role": "user", "content": "hello"},), max_tokens=8, temperature=0.0)
    async with aclosing(replies.replies.reply(request)) as events:
        done = [event async for event in events if isinstance(event, ReplyDone)]
    return done[0].stats.token_ids


async def test_memory_that_others_take_costs_blocks_until_they_give_it_back(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {"bytes": PLENTY}
    left = {"blocks": 4}  # that are left to others

    def headroom(share: DeviceShare) -> int:
        return left["blocks"] * share.block_bytes

    monkeypatch.setattr(probe, "free_memory_bytes", lambda device: free["bytes"])
    monkeypatch.setattr(memory, "_headroom", headroom)
    monkeypatch.setattr(memory, "REGROW_AFTER_S", 0.2)
    monkeypatch.setattr(loader, "LOOK_S", 0.02)
    monkeypatch.setattr(hosting_loop, "CROWDED_RETRY_S", 0.05)
    found_swarm(tmp_path / "a", cache, "home")

    def hosted(node: Node) -> tuple[str, int]:
        shown = node.snapshot()
        count = 0 if shown.start is None or shown.stop is None else shown.stop - shown.start
        return ("" if shown.why is None else shown.why.code, count)

    async with living(tmp_path / "a", cache, max_vram=10**9, device="cpu") as node:
        await until(node, lambda: node.snapshot().state == "serving")
        expected = await ask(node)
        swarm = node._network_owner.active_swarm
        assert swarm is not None
        assert swarm.block_host is not None
        assert swarm.block_host._plan is not None
        block_bytes = swarm.block_host._plan.shares[0].block_bytes

        free["bytes"] = block_bytes  # three blocks' worth is missing
        await until(node, lambda: hosted(node) == ("memory_short", 5))
        assert node.snapshot().state == "serving"

        free["bytes"] = PLENTY
        await until(node, lambda: hosted(node) == ("memory_back", 8))
        assert await ask(node) == expected

        free["bytes"], left["blocks"] = 0, 100
        await until(node, lambda: node.snapshot().state == "client")
        assert hosted(node) == ("device_full", 0)

        free["bytes"] = PLENTY
        await until(node, lambda: node.snapshot().state == "serving" and hosted(node)[1] == 8)
        assert await ask(node) == expected


async def test_a_cap_below_one_block_is_to_be_raised(tmp_path: Path, cache: Path) -> None:
    found_swarm(tmp_path / "a", cache, "home")
    async with living(tmp_path / "a", cache, max_vram=1000, device="cpu") as node:
        await until(node, lambda: node.snapshot().state == "client")
        why = node.snapshot().why
        assert why is not None
        assert why.text.startswith("not even one block fits: the memory cap is at least ")
        assert (why.code, why.next_step) == ("no_room", RAISE_CAP)


async def test_a_node_without_room_looks_again_later(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting_loop, "FIRST_RETRY_S", 0.1)
    right, free = probe.probe_cpu, {"bytes": 1}

    def small(note: str = "") -> probe.Device:
        found = right(note)
        return found if free["bytes"] == PLENTY else replace(found, free_bytes=1)

    monkeypatch.setattr(probe, "probe_cpu", small)
    found_swarm(tmp_path / "a", cache, "home")
    async with living(tmp_path / "a", cache, max_vram=10**9, device="cpu") as node:
        await until(node, lambda: node.snapshot().state == "client")
        why = node.snapshot().why
        assert why is not None
        assert why.code == "no_room"
        assert "close other programs" in why.next_step
        free["bytes"] = PLENTY
        await until(node, lambda: node.snapshot().state == "serving")


async def test_a_node_on_several_devices_writes_what_one_device_writes_and_shows_each(
    tmp_path: Path, cache: Path
) -> None:
    found_swarm(tmp_path / "a", cache, "home")
    said = []
    for device, parts in (("cpu", []), ("cpu,cpu", [("cpu", 0, 4), ("cpu", 4, 8)])):
        async with living(tmp_path / "a", cache, max_vram=10**9, device=device) as node:
            await until(node, partial(serves, node))
            shown = node.snapshot()
            assert [(one.id, one.start, one.stop) for one in shown.devices] == parts
            assert shown.device == "cpu"
            said.append(await ask(node))
    assert said[0] == said[1]


async def test_a_node_whose_blocks_take_more_than_was_forecast_hosts_fewer(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting_loop, "CROWDED_RETRY_S", 0.05)
    right, tried = hosting.load_blocks, list[int]()

    def crowded(source: ModelSource, start: int, stop: int, plan: HostingPlan, *args: Any, **how: Any) -> HostedSpan:
        tried.append(plan.blocks)
        if plan.blocks > 5:
            raise DeviceFull("the device's memory is full: out of memory")
        return right(source, start, stop, plan, *args, **how)

    monkeypatch.setattr(hosting, "load_blocks", crowded)
    found_swarm(tmp_path / "a", cache, "home")
    async with living(tmp_path / "a", cache, max_vram=10**9, device="cpu") as node:
        await until(node, partial(serves, node))
        shown = node.snapshot()
        assert (shown.start, shown.stop) in ((0, 5), (3, 8))  # as the node's id decides
    assert tried == [8, 8, 6, 5]  # the first time as it was: a program may have ended in between

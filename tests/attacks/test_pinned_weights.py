"""Weights of blocks that a node hosts no longer make way on its disk for those that it is to host."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from app.node import hosting_loop
from app.node.node import Node
from app.weights.part_store import PartFiles
from tests.app.node.test_node import cache, found_swarm, living, until

__all__ = ["cache"]

FOUR_BLOCKS = 3_800_000  # bytes of memory, in which four of the model's eight blocks fit
FLOOR_BYTES = 10**9  # the setting `disk_floor`, unless somebody changes it
SPARE_BYTES = 100_000  # half a block


class SmallDisk:
    """A disk on which nothing but one node's cache grows."""

    def __init__(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._cache, self._real = cache, shutil.disk_usage
        self.room = 10**12  # for weights, those that are here included
        monkeypatch.setattr(shutil, "disk_usage", self.usage)

    @property
    def used(self) -> int:
        return sum(size for _, size in PartFiles(self._cache).names())

    def usage(self, path: Any) -> Any:
        if Path(path) != self._cache:
            return self._real(path)
        return SimpleNamespace(free=FLOOR_BYTES + self.room - self.used, total=FLOOR_BYTES + self.room)


def span_of(node: Node) -> tuple[int, int]:
    shown = node.snapshot()
    return shown.start or 0, shown.stop or 0


def serves_all(node: Node) -> bool:
    start, stop = span_of(node)
    return node.snapshot().state == "serving" and stop - start == 4


@asynccontextmanager
async def founder_and_small_node(tmp_path: Path, cache: Path) -> AsyncIterator[tuple[str, Node]]:
    """A founder that serves all blocks, and a node with four of them in the cache `small`; the invite and that node."""
    found_swarm(tmp_path / "a", cache, "home")
    async with living(tmp_path / "a", cache, max_vram=10**9, device="cpu", blocks="0:8") as a:
        await until(a, lambda: a.snapshot().state == "serving")
        invite = str(await a.invite(None))
        async with living(tmp_path / "b", tmp_path / "small", invite, max_vram=FOUR_BLOCKS, device="cpu") as b:
            await until(b, lambda: serves_all(b))
            yield invite, b


async def test_a_node_that_comes_back_from_a_pause_hosts_what_the_swarm_lacks(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile another member has taken its blocks, and its disk has room for one span: the old one must go.

    It stayed in the list of what is in use, so that the new one never fitted, however often it was tried.
    """
    monkeypatch.setattr(hosting_loop, "FIRST_RETRY_S", 0.2)
    monkeypatch.setattr(hosting_loop, "LONGEST_RETRY_S", 0.2)
    disk = SmallDisk(tmp_path / "small", monkeypatch)
    async with founder_and_small_node(tmp_path, cache) as (invite, b):
        before = span_of(b)
        disk.room = disk.used + SPARE_BYTES
        await b.pause(None)
        await until(b, lambda: b.snapshot().state == "paused")
        blocks = f"{before[0]}:{before[1]}"
        async with living(tmp_path / "c", cache, invite, max_vram=10**9, device="cpu", blocks=blocks) as c:
            await until(c, lambda: c.snapshot().state == "serving")
            await until(b, lambda: [peer.state for peer in b.snapshot().peers].count("serving") == 2)
            await b.resume()
            with trio.move_on_after(20):
                await until(b, lambda: serves_all(b))
            assert b.snapshot().state == "serving", b.snapshot().reason
            assert span_of(b) != before

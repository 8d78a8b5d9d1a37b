"""Tokenizer, embedding and head stay on the disk of a node that is to ask: blocks that it leaves make way first."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.asker.reply import ReplyText
from app.asker.reply_service import ReplyRequest
from app.node.node import Node
from app.weights.disk_space import DiskRoom, make_room
from app.weights.library import ENDS
from app.weights.part_store import PartFiles
from tests.app.node.test_node import cache, found_swarm, living, until
from tests.attacks.test_pinned_weights import FOUR_BLOCKS, SPARE_BYTES, SmallDisk, serves_all, span_of

__all__ = ["cache"]


async def ask(node: Node) -> int:
    """How many tokens a question brings."""
    request = ReplyRequest(prompt=(1, 2, 3), max_tokens=3, temperature=0.0)
    return len([event async for event in node.reply(request) if isinstance(event, ReplyText)])


async def test_a_node_that_moved_on_a_small_disk_still_answers_its_user(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU they are read with the first question, and the move had removed them, for good, before old blocks."""
    disk = SmallDisk(tmp_path / "small", monkeypatch)
    found_swarm(tmp_path / "a", cache, "home")
    async with living(tmp_path / "a", cache, max_vram=10**9, device="cpu", blocks="0:8") as a:
        await until(a, lambda: a.snapshot().state == "serving")
        invite = str(await a.invite(None))
        async with living(tmp_path / "b", tmp_path / "small", invite, max_vram=FOUR_BLOCKS, device="cpu") as b:
            await until(b, lambda: serves_all(b))
            swarm = b._network_owner.active_swarm
            assert swarm is not None
            weights = swarm.weights
            assert weights is not None
            await until(b, lambda: weights.library.held().issuperset(ENDS))
            before = span_of(b)
            disk.room = disk.used + SPARE_BYTES
            blocks = f"{before[0]}:{before[1]}"
            async with living(tmp_path / "c", cache, invite, max_vram=10**9, device="cpu", blocks=blocks) as c:
                await until(c, lambda: c.snapshot().state == "serving")
                await until(b, lambda: serves_all(b) and span_of(b) != before)
                assert await ask(b) == 3
                assert weights.library.held().issuperset(ENDS)


async def test_a_founder_that_was_in_another_swarm_still_has_its_models_tokenizer(tmp_path: Path) -> None:
    """A model that was imported lies in its own files, all but the tokenizer: nobody else may have that.

    What another swarm's blocks need is taken from old blocks, of which there are enough.
    """
    cache = tmp_path / "cache"
    found_swarm(tmp_path / "a", cache, "home")
    files = PartFiles(cache)
    (files.folder / ("ab" * 32)).write_bytes(bytes(10**6))
    held = sum(size for _, size in files.names())
    make_room(cache, 500_000, DiskRoom(limit_bytes=held))
    async with living(tmp_path / "a", cache, max_vram=10**9, device="cpu") as a:
        await until(a, lambda: a.snapshot().state == "serving")
        assert await ask(a) == 3

"""Tokenizer, embedding and head stay on the disk of a node that is to ask: blocks that it leaves make way first."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from app.asker.reply import ReplyText
from app.asker.reply_service import ReplyRequest
from app.membership import Membership
from app.membership.membership import MembershipSetup
from app.node.node import Node
from app.weights.disk_space import DiskRoom
from app.weights.library import ENDS, span_parts
from app.weights.model_weights import ModelWeights
from app.weights.part_store import PartFiles
from tests.app.node.test_node import cache, found_swarm, living, until
from tests.app.swarms import RECORD, identity, wall_clock
from tests.app.weights.models import WIDE
from tests.app.weights.test_exchange import world
from tests.attacks.test_pinned_weights import SPARE_BYTES, SmallDisk, founder_and_small_node, serves_all, span_of

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
    async with founder_and_small_node(tmp_path, cache) as (invite, b):
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


async def host_elsewhere(folder: Path, cache: Path) -> None:
    """Host a block of another swarm's model, then another one, with room for one of them in the cache."""
    async with world(folder) as there, trio.open_nursery() as nursery:
        who, manifest = identity(1), there.studied.manifest
        network = there.fabric.node(who.peer_id)
        swarm = Membership(network, who, RECORD, WIDE.n_blocks, MembershipSetup(wall_clock=wall_clock))
        block = manifest.block(0).size_bytes
        files = PartFiles(cache)
        held = sum(size for _, size in files.names())
        weights = ModelWeights(network, swarm, manifest, cache, lambda: DiskRoom(limit_bytes=held + block + block // 2))
        weights._holders = lambda part: ["seed"]  # type: ignore[method-assign]
        await nursery.start(weights.run)
        for number in range(2):
            weights.host(span_parts(number, number + 1))
            await weights.need(span_parts(number, number + 1))
        nursery.cancel_scope.cancel()


async def test_a_founder_that_was_in_another_swarm_still_has_its_models_tokenizer(tmp_path: Path) -> None:
    """A model that was imported lies in its own files, all but the tokenizer: nobody else may have that.

    The room that another swarm's blocks need can be taken from old blocks, of which there are enough.
    """
    cache = tmp_path / "cache"
    found_swarm(tmp_path / "a", cache, "home")
    await host_elsewhere(tmp_path / "other", cache)
    async with living(tmp_path / "a", cache, max_vram=10**9, device="cpu") as a:
        await until(a, lambda: a.snapshot().state == "serving")
        assert await ask(a) == 3

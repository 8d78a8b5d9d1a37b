"""A holder that answers nothing for hours is asked again soon after it is well, among others that never answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from app.weights.chunk_schedule import RETRY_S
from app.weights.chunk_server import ChunkServer
from tests.app.weights.test_exchange import world

OUTAGE_S = 3 * 3600.0


@pytest.mark.parametrize(
    ("silent", "within_s"), [pytest.param(0, RETRY_S + 60, marks=pytest.mark.soak), (24, 3 * RETRY_S)]
)
async def test_the_only_holder_is_asked_again_minutes_after_its_disk_is_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patient_clock: MockClock, silent: int, within_s: float
) -> None:
    """Its disk hung for three hours, and a newcomer asked it again two hours after that."""
    over = trio.Event()
    chunks = ChunkServer._chunks

    async def hanging(self: ChunkServer, *args: Any) -> Any:
        await over.wait()
        return await chunks(self, *args)

    monkeypatch.setattr(ChunkServer, "_chunks", hanging)
    async with world(tmp_path) as here, trio.open_nursery() as nursery:
        asked = [0] * silent
        for number in range(silent):
            node = here.fabric.node(f"silent-{number}")

            async def stay_silent(peer: str, body: bytes, number: int = number) -> Any:
                asked[number] += 1
                await trio.sleep_forever()

            for method in ("weights.leaves", "weights.chunk"):
                node.serve(method, stay_silent)
            here.holders[node.peer_id] = {"block.0"}
        newcomer = here.peer("newcomer")
        nursery.start_soon(newcomer.fetching.fetch, ["block.0"])
        await trio.sleep(OUTAGE_S)
        assert max(asked, default=0) <= OUTAGE_S / RETRY_S + 5
        assert newcomer.fetching.progress.wanted == ("block.0",)
        over.set()
        with trio.fail_after(within_s):
            while "block.0" not in newcomer.library.held():  # noqa: ASYNC110 - nobody tells
                await trio.sleep(1)
        nursery.cancel_scope.cancel()

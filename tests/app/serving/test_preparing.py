"""A block server lets its device prepare for later steps only while no session has work."""

from __future__ import annotations

from typing import Any

import trio
from trio.testing import MockClock

from app.serving.block_server import PREPARE_AFTER_S
from tests.app.hash_model import HashRunner
from tests.app.session_swarm import PROMPT, ask, open_swarm


class Preparing(HashRunner):
    """Has three things to prepare after its first step, and notes when it did."""

    def __init__(self) -> None:
        super().__init__(0, 8)
        self.prepared: list[float] = []

    def prepare(self) -> bool:
        self.prepared.append(trio.current_time())
        return len(self.prepared) < 3


async def test_a_device_prepares_when_it_has_been_idle_for_a_while(autojump_clock: MockClock) -> None:
    async with open_swarm() as swarm:
        runner = Preparing()
        await swarm.serve("host", runner)
        await trio.sleep(60)
        assert runner.prepared == [], "nothing ran yet that could need preparing"
        asker = await swarm.asker()
        await ask(asker, PROMPT, 20)
        ended_at = trio.current_time()
        await trio.sleep(60)
        assert len(runner.prepared) == 3
        assert runner.prepared[0] >= ended_at
        assert runner.prepared[-1] <= ended_at + 4 * PREPARE_AFTER_S + 1


async def test_no_reply_waits_for_work_that_can_wait_behind_a_preparation(autojump_clock: MockClock) -> None:
    async with open_swarm() as swarm:
        runner = Preparing()
        await swarm.serve("host", runner)

        async def endless(*args: Any) -> Any:
            await trio.sleep_forever()

        swarm.devices["host"].run_later = endless  # type: ignore[assignment, method-assign]
        asker = await swarm.asker()
        await ask(asker, PROMPT, 20)
        await trio.sleep(2 * PREPARE_AFTER_S)
        with trio.fail_after(60):
            await ask(asker, PROMPT, 20)
        assert runner.prepared

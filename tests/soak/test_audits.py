"""A liar that audits cannot catch: it remembers every prompt, and lies only where it sees one for the first time."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import trio
from trio.testing import MockClock

from app.asker.asker import Asker
from app.core.compute import StepWork
from engine.session_runner import SessionRunner, StepResult
from engine.sources.base import ModelSource
from engine.swarm_ends import SwarmEnds
from tests.app.asker.test_audit import (
    REPLY_TOKENS,
    SETTINGS,
    THIRDS,
    LyingRunner,
    audit_swarm,
    check_share,
    distrusted,
    ends,
    runner,
    scaled,
    source,
)

__all__ = ["ends", "source"]
pytestmark = pytest.mark.soak

PATIENT_REQUESTS = 3000


async def ask_new(asker: Asker, number: int) -> None:
    """Ask something that nobody has asked before."""
    prompt = random.Random(number).choices(range(20, 200), k=6)
    async with asker.reply(prompt, SETTINGS, max_tokens=REPLY_TOKENS) as reply:
        async for _ in reply:
            pass
    if asker.stats().replies % 20 == 0:  # one more session may be an audit
        await trio.sleep(40)


class ForgetfulOfNothing(LyingRunner):
    """Lies in every session whose prompt is new to it, and never in one that it knows: that may be an audit."""

    def __init__(self, honest: SessionRunner) -> None:
        super().__init__(honest, scaled)
        self._prompts: set[bytes] = set()
        self._honest_in: set[bytes] = set()

    def _falsified(self, item: StepWork, output: StepResult) -> StepResult:
        if item.position == 0:
            prompt = bytes(item.data)
            if prompt in self._prompts:
                self._honest_in.add(item.session)
            self._prompts.add(prompt)
        return output if item.session in self._honest_in else super()._falsified(item, output)


async def test_a_liar_that_recognises_audits_is_used_no_more_when_doubts_have_added_up(
    source: ModelSource, ends: SwarmEnds, autojump_clock: MockClock, record_property: Callable[[str, object], None]
) -> None:
    async with audit_swarm() as swarm:
        for index in range(3):
            for copy in "abc":
                await swarm.hold(source, f"{copy}{index}", index)
        await swarm.serve("liar", ForgetfulOfNothing(runner(source, *THIRDS[0])), speed=500.0)
        asker = await swarm.audited(ends, seed=1)
        asked = 0
        while asker.planner.book.standing("liar").trusted:
            await ask_new(asker, asked)
            asked += 1
            assert asked <= PATIENT_REQUESTS, asker.planner.book.standing("liar")
        record_property("requests", asked)
        check_share(asker)
        assert distrusted(asker) == {"liar"}
        assert "wrong" not in asker.planner.book.standing("liar").why

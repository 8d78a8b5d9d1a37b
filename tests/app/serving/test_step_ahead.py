"""Steps that begin before their frame has come: the same tokens, whatever comes instead of the expected frame.

On the real clock: a loop that stays awake never lets an autojump clock jump.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import trio
import trio.testing

from app.asker.asker import Asker, AskerOptions
from app.asker.guessing import Guesser
from app.core.compute import NextStep, StepWork, TokenChoice
from app.core.span import Span
from app.serving.batching import QueuedTokens
from app.serving.block_server import BlockServer, ServerSettings
from app.serving.hop_session import HopSession
from app.serving.step_ahead import StepAhead
from app.session.wire import KEEP, EpochOrder
from engine.errors import CacheFull, DeviceFull
from tests.app.hash_model import (
    HashEnds,
    HashRunner,
    InlineDevice,
    Launched,
    LaunchedChoice,
    LaunchedStep,
    Output,
    greedy,
)
from tests.app.session_swarm import PROMPT, SessionSwarm, ask, no_leaks, open_swarm

AWAKE = ServerSettings(stays_awake=True)


class Launching(HashRunner):
    """Can launch steps of single tokens; the steps ahead whose numbers are in `fails` end with an error."""

    def __init__(self, start: int, stop: int) -> None:
        super().__init__(start, stop)
        self.launches = 3
        self.fails: dict[int, Exception] = {}
        self.refuses: dict[int, Exception] = {}

    def launch(self, work: Sequence[StepWork]) -> Launched | None:
        return None if any(item.rows > 1 for item in work) else super().launch(work)

    def launch_ahead(self, work: Sequence[StepWork], rows: Any) -> LaunchedStep | None:
        number = len(self.aheads) + 1
        if number in self.refuses:
            self.aheads.append([])
            raise self.refuses[number]
        started = super().launch_ahead(work, rows)
        if number not in self.fails:
            return started

        def fail() -> Any:
            raise self.fails[number]

        return LaunchedStep(lambda: True, fail, None)


class CountingEnds(HashEnds):
    """Counts the passes that begin with outputs that came from a hop."""

    def __init__(self) -> None:
        super().__init__(launches=2)
        object.__setattr__(self, "passes", [])

    def launch(self, choices: Sequence[TokenChoice]) -> LaunchedChoice | None:
        self.passes.append(len(choices))  # type: ignore[attr-defined]
        return super().launch(choices)


async def own_asker(swarm: SessionSwarm, server: BlockServer, name: str = "n0", **options: Any) -> Asker:
    """An asker on the node of this server."""
    asker = Asker(
        swarm.fabric.nodes[name],
        CountingEnds(),
        InlineDevice(),
        lambda: list(swarm.announcements.values()),
        own_server=server.attend,
        go_ahead=server.go_ahead,
        options=AskerOptions(**({"guesser": lambda prompt, cost: None} | options), stays_awake=True),
    )
    await swarm.nursery.start(asker.run)
    return asker


async def asking(swarm: SessionSwarm, *, stop: int = 8, **options: Any) -> tuple[Asker, Launching, BlockServer]:
    """A node that hosts blocks from the first on, and asks."""
    runner = Launching(0, stop)
    server = await swarm.serve("n0", runner, settings=AWAKE)
    return await own_asker(swarm, server, **options), runner, server


@pytest.mark.parametrize("stop", [8, 5])
async def test_every_token_after_the_first_was_computed_ahead(stop: int) -> None:
    async with open_swarm(delay_s=0.0) as swarm:
        asker, runner, _ = await asking(swarm, stop=stop)
        if stop < 8:
            await swarm.serve("rest", Launching(stop, 8), settings=AWAKE)
        stats = await ask(asker, PROMPT, 20)
        assert stats.token_ids == greedy(PROMPT, 20)
        assert runner.accepted == 19
        passes = asker._ends.passes  # type: ignore[attr-defined]
        assert len(passes) == (1 if stop == 8 else 20), "the others began before their outputs were here"
        assert len(runner.batches) == 1, "the prompt alone was computed when it came"
        await no_leaks(swarm)


async def test_replies_side_by_side_go_ahead_together_once_none_reads_its_prompt() -> None:
    async with open_swarm(delay_s=0.0) as swarm:
        asker, runner, _ = await asking(swarm)
        found: dict[int, list[int]] = {}

        async def write(number: int) -> None:
            found[number] = (await ask(asker, [*PROMPT, number], 30 + number)).token_ids

        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(write, number)
        assert found == {number: greedy([*PROMPT, number], 30 + number) for number in range(3)}
        assert any(len(step) == 3 for step in runner.aheads)
        assert runner.accepted > 20
        await no_leaks(swarm)


async def test_a_pass_never_begins_with_an_output_that_another_step_has_overwritten() -> None:
    async with open_swarm(delay_s=0.0) as swarm:
        asker, runner, server = await asking(swarm)
        other = await swarm.asker(guesser=lambda prompt, cost: None)
        async with asker.reply(PROMPT, 60, max_tokens=60) as reply:
            for _ in range(3):
                for _ in range(5):
                    await anext(reply)
                latest = server._latest_ahead
                assert latest is not None
                while server._aheads and server._aheads[-1].is_under_way:
                    await trio.lowlevel.checkpoint()
                assert (await ask(other, PROMPT, 3)).token_ids == greedy(PROMPT, 3)
                assert latest.rows is None
            async for _ in reply:
                pass
        assert reply.stats.token_ids == greedy(PROMPT, 60)
        assert runner.accepted > 40
        await no_leaks(swarm)


async def test_guesses_come_instead_of_the_expected_token() -> None:
    class Sometimes(Guesser):
        """Guesses wrongly at every third token."""

        def propose(self, room: int, *, can_draft: bool = False) -> Any:
            self.count = getattr(self, "count", 0) + 1
            usual = super().propose(room, can_draft=can_draft)
            return replace(usual, tokens=(1, 2)[:room]) if self.count % 3 == 0 else usual

    async with open_swarm(delay_s=0.0) as swarm:
        asker, runner, _ = await asking(swarm, guesser=Sometimes)
        stats = await ask(asker, PROMPT, 30)
        assert stats.token_ids == greedy(PROMPT, 30)
        assert 0 < runner.accepted < len(runner.aheads)
        await no_leaks(swarm)


async def test_a_reply_that_stops_leaves_nothing_behind_and_the_next_one_is_right() -> None:
    async with open_swarm(delay_s=0.0) as swarm:
        asker, runner, _ = await asking(swarm, keep_sessions=lambda: 4, rng=random.Random(1))
        async with asker.reply(PROMPT, 50, max_tokens=50) as reply:
            for _ in range(5):
                await anext(reply)
        written = (await ask(asker, PROMPT, 10)).token_ids
        assert written == greedy(PROMPT, 10)
        before = runner.accepted
        longer = [*PROMPT, *written, 7]
        stats = await ask(asker, longer, 10)
        assert stats.token_ids == greedy(longer, 10)
        assert stats.cached_tokens > 0
        assert runner.accepted == before + 9, "what an earlier reply left behind is in nobody's way"


async def test_another_asker_s_session_is_not_made_to_wait() -> None:
    async with open_swarm(delay_s=0.0) as swarm:
        asker, runner, _ = await asking(swarm)
        other = await swarm.asker(guesser=lambda prompt, cost: None)
        async with other.reply(PROMPT, 50, max_tokens=50) as reply:
            await anext(reply)
            assert (await ask(asker, PROMPT, 10)).token_ids == greedy(PROMPT, 10)
            assert not runner.aheads
        await trio.testing.wait_all_tasks_blocked()
        assert (await ask(asker, PROMPT, 10)).token_ids == greedy(PROMPT, 10)
        assert runner.accepted == 9


@pytest.mark.parametrize("error", [RuntimeError("the card says no"), DeviceFull("full")])
async def test_a_step_ahead_that_fails_is_computed_again(error: Exception) -> None:
    async with open_swarm(delay_s=0.0) as swarm:
        asker, runner, _ = await asking(swarm)
        runner.fails = {4: error, 5: error}
        runner.refuses = {9: CacheFull("no room")}
        stats = await ask(asker, PROMPT, 20)
        assert (stats.token_ids, stats.recoveries) == (greedy(PROMPT, 20), 0)
        assert runner.accepted == 16
        await no_leaks(swarm)


def test_only_the_frame_that_was_expected_gets_the_result() -> None:
    session = HopSession(bytes(16), "asker", 3, EpochOrder(Span(0, 8), "", "", 100, 0, 0), 0.0)
    session.took(5)
    output, done = Output(b"out", "f32"), False
    item = QueuedTokens(session.key, "asker", "asker", 3, 5, 1, memoryview(b"row"), "f32", True, 0.0)

    def begun() -> StepAhead:
        started = LaunchedStep(lambda: done, lambda: [output], "on the device")
        return StepAhead(started, [session], [NextStep(session.id, 5, True)], 0.0)

    ahead = begun()
    ahead.look(1.0)
    assert (ahead.is_under_way, ahead.rows, ahead.take(item, session)) == (True, "on the device", None)
    done = True
    ahead.look(2.0)
    assert (ahead.is_under_way, ahead.rows, ahead.ended_at) == (False, "on the device", 2.0)
    assert ahead.take(item, session) is None, "nobody knows what it began with"
    ahead.expect({0: b"row"})
    for other in (
        replace(item, data=memoryview(b"raw")),
        replace(item, rows=2),
        replace(item, position=4),
    ):
        assert ahead.take(other, session) is None
    assert ahead.take(item, session) == output
    assert ahead.take(item, session) is None, "a result is for one frame"
    for change in ("revision", "epoch"):
        ahead = begun()
        ahead.look(1.0)
        ahead.expect({0: b"row"})
        if change == "revision":
            session.begin_revision(1, 5)
        else:
            session.begin_epoch(4, KEEP, session.turn)
        assert ahead.take(item, session) is None


async def test_blocks_that_are_given_back_in_between_take_no_result_along() -> None:
    async with open_swarm(delay_s=0.0) as swarm:
        asker, _, server = await asking(swarm)
        await swarm.serve("spare", Launching(0, 8), settings=AWAKE, speed=1.0)
        async with asker.reply(PROMPT, 20, max_tokens=20) as reply:
            for _ in range(5):
                await anext(reply)
            await server.host(None)
            assert not server._aheads
            async for _ in reply:
                pass
        assert reply.stats.token_ids == greedy(PROMPT, 20)
        assert reply.stats.recoveries == 1

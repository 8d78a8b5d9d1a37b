"""Steps that a device runs by itself while the event loop goes on: the same tokens, and the loop sleeps afterwards.

On the real clock: a loop that stays awake never lets an autojump clock jump.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import trio

from app.core.compute import StepWork
from app.serving import block_server
from app.serving.block_server import BlockServer, ServerSettings
from engine.errors import DeviceFull, SessionError
from tests.app.hash_model import HashRunner, Launched, Output, greedy
from tests.app.session_swarm import PROMPT, SessionSwarm, ask, no_leaks, open_swarm

AWAKE = ServerSettings(stays_awake=True)


class Launching(HashRunner):
    """Can launch steps of single tokens; the launches whose numbers are in `fails` raise."""

    def __init__(self, start: int, stop: int) -> None:
        super().__init__(start, stop)
        self.launches, self.launched = 3, 0
        self.fails: dict[int, Exception] = {}

    def launch(self, work: Sequence[StepWork]) -> Launched | None:
        if any(item.rows > 1 for item in work):
            return None
        self.launched += 1
        if self.launched in self.fails:
            raise self.fails[self.launched]
        return super().launch(work)


async def serve(swarm: SessionSwarm) -> list[Launching]:
    runners = [Launching(0, 4), Launching(4, 8)]
    for index, runner in enumerate(runners):
        await swarm.serve(f"n{index}", runner, settings=AWAKE)
    return runners


async def sleeps(server: BlockServer) -> None:
    with trio.fail_after(10):
        while server._awake:  # noqa: ASYNC110
            await trio.sleep(0.001)


@pytest.mark.parametrize("replies", [1, 3])
async def test_launched_steps_write_the_same_tokens_and_the_loop_sleeps_afterwards(replies: int) -> None:
    async with open_swarm(delay_s=0.0) as swarm:
        runners = await serve(swarm)
        asker = await swarm.asker(guesser=lambda prompt, cost: None)
        found: list[list[int]] = []

        async def write(count: int) -> None:
            found.append((await ask(asker, PROMPT, count)).token_ids)

        async with trio.open_nursery() as nursery:
            for number in range(replies):
                nursery.start_soon(write, 20 + number)
        assert sorted(found, key=len) == [greedy(PROMPT, 20 + number) for number in range(replies)]
        assert all(runner.launched >= 19 for runner in runners)
        for server in swarm.servers.values():
            await sleeps(server)
        await no_leaks(swarm)


@pytest.mark.parametrize("error", [RuntimeError("the card says no"), SessionError("bad input"), DeviceFull("full")])
async def test_a_launch_that_fails_costs_its_session_alone_and_the_reply_ends(error: Exception) -> None:
    async with open_swarm(delay_s=0.0) as swarm:
        runners = await serve(swarm)
        await swarm.serve("spare", Launching(4, 8), settings=AWAKE, speed=1.0)
        runners[1].fails[5] = error
        asker = await swarm.asker(guesser=lambda prompt, cost: None)
        stats = await ask(asker, PROMPT, 20)
        assert stats.token_ids == greedy(PROMPT, 20)
        assert stats.recoveries == 1


class Reading(Launching):
    """Notes whether the event loop goes to sleep during its steps of several tokens, which a thread computes."""

    def __init__(self, start: int, stop: int) -> None:
        super().__init__(start, stop)
        self.server: BlockServer | None = None
        self.slept: list[bool] = []

    def step(self, work: Sequence[StepWork]) -> list[Output]:
        if any(item.rows > 1 for item in work) and self.server is not None:
            deadline = time.monotonic() + 5.0
            while self.server._awake and time.monotonic() < deadline:
                time.sleep(0.0001)
            self.slept.append(not self.server._awake)
        return super().step(work)


async def test_the_loop_sleeps_while_a_thread_computes_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that stayed awake took the interpreter from that thread: chunks of 50 rows took 12 ms on a card."""
    monkeypatch.setattr(block_server, "AWAKE_S", 60.0)
    async with open_swarm(delay_s=0.0) as swarm:
        runner = Reading(0, 8)
        runner.server = await swarm.serve("n0", runner, settings=AWAKE)
        asker = await swarm.asker(guesser=lambda prompt, cost: None)
        for _ in range(2):
            assert (await ask(asker, PROMPT, 5)).token_ids == greedy(PROMPT, 5)
            assert runner.server._awake
        assert len(runner.slept) >= 2
        assert all(runner.slept)
        runner.server._awake_until = 0.0


async def test_without_leave_nothing_is_launched() -> None:
    async with open_swarm(delay_s=0.0) as swarm:
        runner = Launching(0, 8)
        await swarm.serve("n0", runner, settings=ServerSettings(stays_awake=False))
        asker = await swarm.asker()
        assert (await ask(asker, PROMPT, 10)).token_ids == greedy(PROMPT, 10)
        assert runner.launched == 0


async def test_a_server_that_ends_in_the_middle_of_a_launched_step_takes_its_result_first() -> None:
    async with open_swarm(delay_s=0.0) as swarm:
        runner = Launching(0, 8)
        server = await swarm.serve("n0", runner, settings=AWAKE)
        runner.launches = 1000
        asker = await swarm.asker(guesser=lambda prompt, cost: None)
        async with asker.reply(PROMPT, 50, max_tokens=50) as reply:
            await anext(reply)
            assert server._nursery is not None
            async with trio.open_nursery() as nursery:
                nursery.start_soon(reply.__anext__)
                while not runner.launched:
                    await trio.lowlevel.checkpoint()
                steps = len(runner.batches)
                server._nursery.cancel_scope.cancel()
                while server._nursery is not None:
                    await trio.lowlevel.checkpoint()
                assert len(runner.batches) == steps + 1
                nursery.cancel_scope.cancel()

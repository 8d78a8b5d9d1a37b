"""The self-test of hosting: blocks that are busy with others' rows have not failed, blocks that stand still have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
import trio
import trio.testing

from app.core.network import FrameStream
from app.core.reasons import Reason
from app.node.self_check import EVERY_S, PATIENCE_S, span_trouble
from app.serving.stats import ServerStats
from tests.app.hash_model import InlineDevice, greedy, whole_result
from tests.app.session_swarm import SessionSwarm, ask, open_swarm

T = TypeVar("T")

STARTS, STOPS, HIDDEN = 0, 8, 16
STEP_ROWS = 256


class Silent:
    """A block server that opens no session, because the step under way takes long; others' rows may pass meanwhile."""

    def __init__(self, rows_at_once: int) -> None:
        self._rows_at_once, self._rows = rows_at_once, 0

    async def attend(self, stream: FrameStream) -> None:
        await trio.sleep_forever()

    @property
    def stats(self) -> ServerStats:
        self._rows += self._rows_at_once
        return ServerStats(rows=self._rows)


@pytest.mark.parametrize(("rows_at_once", "has_failed"), [(256, False), (0, True)])
async def test_blocks_that_are_busy_with_a_long_prompt_have_not_failed(
    rows_at_once: int, has_failed: bool, autojump_clock: trio.testing.MockClock
) -> None:
    """A step of a prompt that took more than 5 s made the node unload its blocks, and the prompt began anew."""
    network, runner = SimpleNamespace(peer_id="me"), SimpleNamespace(start=STARTS, stop=STOPS, hidden_size=HIDDEN)
    began = trio.current_time()
    trouble = await span_trouble(cast(Any, network), Silent(rows_at_once), cast(Any, runner))
    assert trio.current_time() - began >= PATIENCE_S
    assert (trouble is not None) is has_failed
    if trouble is not None:
        assert trouble.code == "probe_blocks"
        assert "a token did not pass its blocks within" in trouble.text


class SlowDevice(InlineDevice):
    """Computes a full step of a prompt in `step_s`; from `hangs_at` on a step never ends."""

    def __init__(self, step_s: float, hangs_at: float = float("inf"), fails: bool = False) -> None:
        super().__init__()
        self._row_s, self._hangs_at, self._fails = step_s / STEP_ROWS, hangs_at, fails

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        if getattr(function, "__name__", "") != "step":
            return await super().run(function, *args)
        await trio.sleep(0.3 + sum(work.rows for work in args[0]) * self._row_s)
        if trio.current_time() >= self._hangs_at:
            await trio.sleep_forever()
        if self._fails and any(work.rows == 1 for work in args[0]):
            raise RuntimeError("a kernel failed")
        result: T = whole_result(function(*args))
        return result


def slow(swarm: SessionSwarm, device: SlowDevice, step_s: float) -> None:
    """Let the only node be slow, and say so."""
    swarm.servers["n0"]._device = swarm.devices["n0"] = device
    serving = swarm.announcements["n0"]
    swarm.announcements["n0"] = replace(serving, prefill_tokens_per_s=STEP_ROWS / step_s, decode_tokens_per_s=2.0)


async def trouble_of(swarm: SessionSwarm) -> Reason | None:
    return await span_trouble(swarm.fabric.nodes["n0"], swarm.servers["n0"], swarm.runners["n0"])


@pytest.mark.parametrize("step_s", [10.0, 20.0, 28.0, 40.0, 50.0])
@pytest.mark.parametrize("begins_at", [1.0, 30.0])
async def test_a_slow_node_that_reads_a_long_prompt_passes_its_own_test(
    step_s: float, begins_at: float, autojump_clock: trio.testing.MockClock
) -> None:
    """With 16 tokens of a prompt a second or less, it unloaded its blocks and began anew, again and again."""
    prompt = [token % 500 for token in range(1000)]
    async with open_swarm((0, 8)) as swarm:
        slow(swarm, SlowDevice(step_s), step_s)
        asker, replies = await swarm.asker(), []

        async def one() -> None:
            replies.append(await ask(asker, prompt, 2))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            await trio.sleep(begins_at)
            assert await trouble_of(swarm) is None
        assert [(reply.token_ids, reply.recoveries) for reply in replies] == [(greedy(prompt, 2), 0)]


async def test_the_test_waits_for_one_step_of_a_prompt_and_not_for_two(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Apart from the step under way while the session is opened: its row goes before the rows of the prompt."""
    step_s = 20.0
    async with open_swarm((0, 8)) as swarm:
        slow(swarm, SlowDevice(step_s), step_s)
        asker = await swarm.asker()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, asker, [token % 500 for token in range(2000)], 2)
            await trio.sleep(30)
            begun_at = trio.current_time()
            assert await trouble_of(swarm) is None
            assert trio.current_time() - begun_at < 2 * step_s
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("hangs_at", [0.0, 35.0, 61.0, 119.0])
async def test_a_device_that_hangs_is_found_soon(hangs_at: float, autojump_clock: trio.testing.MockClock) -> None:
    """Within two tests and the pause between them: rows that passed at the beginning of a test count for all of it."""
    async with open_swarm((0, 8)) as swarm:
        slow(swarm, SlowDevice(20.0, hangs_at), 20.0)
        asker = await swarm.asker()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, asker, [token % 500 for token in range(4000)], 2)
            trouble = None
            while trouble is None:
                await trio.sleep(EVERY_S)
                trouble = await trouble_of(swarm)
            assert trouble.code == "probe_blocks"
            assert trio.current_time() <= hangs_at + EVERY_S + 2 * PATIENCE_S + 1
            nursery.cancel_scope.cancel()


async def test_a_step_that_fails_is_a_failure_however_many_rows_of_others_pass(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_swarm((0, 8)) as swarm:
        slow(swarm, SlowDevice(2.0, fails=True), 2.0)
        asker = await swarm.asker()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, asker, [token % 500 for token in range(4000)], 2)
            await trio.sleep(3)
            begun_at = trio.current_time()
            trouble = await trouble_of(swarm)
            assert trouble is not None
            assert "a kernel failed" in trouble.text
            assert trio.current_time() - begun_at < 10
            nursery.cancel_scope.cancel()

"""Sessions at hops that answer but begin none, because a step of a prompt takes long or because they never will."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import trio
from trio.testing import MockClock

from app.core.errors import AppError
from app.session.frame import plain
from app.session.wire import PROTOCOL, Kind, decode
from p2p.memory.fabric import MemoryStream
from tests.app.hash_model import HashRunner, InlineDevice, greedy, whole_result
from tests.app.session_swarm import PROMPT, SessionSwarm, ask, open_swarm

T = TypeVar("T")
STEP_ROWS = 256


class SlowDevice(InlineDevice):
    """Computes a full step of a prompt in `step_s`."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self._row_s = step_s / STEP_ROWS

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        if getattr(function, "__name__", "") != "step":
            return await super().run(function, *args)
        await trio.sleep(0.3 + sum(work.rows for work in args[0]) * self._row_s)
        result: T = whole_result(function(*args))
        return result


def slow(swarm: SessionSwarm, name: str, step_s: float) -> None:
    """Let a node be slow, and say so."""
    swarm.servers[name]._device = swarm.devices[name] = SlowDevice(step_s)
    serving = swarm.announcements[name]
    swarm.announcements[name] = replace(serving, prefill_tokens_per_s=STEP_ROWS / step_s, decode_tokens_per_s=2.0)


async def answers_only(stream: MemoryStream) -> None:
    """Answer every probe and begin no session."""
    while True:
        frame = decode(await stream.receive())
        if frame.kind == Kind.PROBE:
            await stream.send(plain(Kind.STATE, frame.session, frame.epoch))


@pytest.mark.parametrize("step_s", [8.0, 16.0, 24.0])
async def test_a_hop_in_a_long_step_has_not_failed(step_s: float, autojump_clock: MockClock) -> None:
    """It begins a session between two steps. Four short replies took its score from 1.0 to 0.5."""
    async with open_swarm((0, 8)) as swarm:
        slow(swarm, "n0", step_s)
        reader, asker = await swarm.asker("reader"), await swarm.asker()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, reader, [token % 500 for token in range(3000)], 2)
            for number in range(3):
                await trio.sleep(10)
                stats = await ask(asker, [number, *PROMPT], 2)
                assert (stats.token_ids, stats.recoveries) == (greedy([number, *PROMPT], 2), 0)
                assert asker.planner.book.standing("n0").score == 1.0
                assert not asker.bans.active(trio.current_time())
            nursery.cancel_scope.cancel()


async def test_a_hop_in_a_long_step_is_left_for_an_idle_one_without_blame(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 8), (0, 8)) as swarm:
        slow(swarm, "n0", 24.0)
        swarm.announcements["n0"] = replace(
            swarm.announcements["n0"], prefill_tokens_per_s=1e4, decode_tokens_per_s=1e3
        )
        idle = swarm.announcements.pop("n1")
        reader, asker = await swarm.asker("reader"), await swarm.asker()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, reader, [token % 500 for token in range(3000)], 2)
            await trio.sleep(1)
            swarm.announcements["n1"] = idle
            stats = await ask(asker, PROMPT, 2)
            assert [hop.peer for hop in stats.route] == ["n1"]
            assert stats.ttft_s is not None
            assert stats.ttft_s < 8
            assert asker.planner.book.standing("n0").score == 1.0
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize(("others", "within_s"), [(True, 8.0), (False, 40.0)])
async def test_a_hop_that_only_answers_is_left(others: bool, within_s: float, autojump_clock: MockClock) -> None:
    """Within 7 s if others can take its place, else within 35 s: the other one comes while it is waited for."""
    async with open_swarm((0, 4), (4, 8)) as swarm:
        await swarm.serve("liar", HashRunner(4, 8), speed=500.0)
        swarm.fabric.nodes["liar"].accept(PROTOCOL, answers_only)
        honest = swarm.announcements["n1"]
        if not others:
            del swarm.announcements["n1"]
        asker = await swarm.asker()

        async def come() -> None:
            await trio.sleep(20)
            swarm.announcements["n1"] = honest

        swarm.nursery.start_soon(come)
        stats = await ask(asker, PROMPT, 4)
        assert stats.token_ids == greedy(PROMPT, 4)
        assert stats.ttft_s is not None
        assert stats.ttft_s < within_s
        if others:
            assert sum([(await ask(asker, [number, *PROMPT], 2)).ttft_s or 0.0 for number in range(10)]) < 20


async def test_a_hop_that_only_answers_is_noted_as_failed_where_there_is_no_other(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 4)) as swarm:
        await swarm.serve("liar", HashRunner(4, 8), speed=500.0)
        swarm.fabric.nodes["liar"].accept(PROTOCOL, answers_only)
        asker = await swarm.asker()
        with pytest.raises(AppError), trio.fail_after(45):
            await ask(asker, PROMPT, 4)
        assert asker.planner.book.standing("liar").score < 1.0

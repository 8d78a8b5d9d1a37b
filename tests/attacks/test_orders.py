"""Attacks with orders that change a hop's cache: steps go on, others have their turn, and their asker pays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import outcome
import pytest
import trio
from trio.testing import MockClock

from app.core.network import FrameStream
from app.core.span import Span
from app.serving import block_server
from app.serving.admission import AdmissionLimits
from app.serving.orders import MAX_ORDERS
from app.session.frame import header, new_session_id, plain
from app.session.wire import KEEP, PROTOCOL, EpochOrder, Kind, Prefix, encode_turn
from tests.app.hash_model import WIDTH
from tests.app.session_swarm import SessionSwarm, open_swarm
from tests.attacks.test_sessions import F32, next_frame, zeros

WORK_S = 0.01  # of the device: a step, or a fork
TURN = EpochOrder(Span(0, 8), "", "", 64, 0, 0)


async def began(swarm: SessionSwarm, name: str) -> tuple[FrameStream, bytes]:
    """A stream of an asker, and its session, for which tokens are computed."""
    node = swarm.fabric.nodes.get(name) or swarm.fabric.node(name)
    stream, id = await node.open("n0", PROTOCOL), new_session_id(name)
    await stream.send(encode_turn(id, 1, KEEP, TURN))
    await next_frame(stream, Kind.READY)
    await stream.send(zeros(id, 1, 0, 40, WIDTH))
    await next_frame(stream, Kind.DATA)
    return stream, id


async def flood(swarm: SessionSwarm, name: str, forks: int) -> None:
    """Orders that fork a session, and close the fork."""
    stream, id = await began(swarm, name)
    for _ in range(forks):
        fork = new_session_id(name)
        await stream.send(encode_turn(fork, 1, KEEP, replace(TURN, prefix=Prefix(id, 39, False))))
        await stream.send(plain(Kind.CLOSE, fork, 1))


async def test_steps_go_on_between_many_orders(autojump_clock: MockClock) -> None:
    """Every order that waited was carried out before the next step."""
    async with open_swarm((0, 8), delay_s=0.0) as swarm:
        swarm.devices["n0"].seconds = WORK_S
        honest, id = await began(swarm, "honest")
        for number in range(4):
            await flood(swarm, f"attacker {number}", 400)
        await trio.sleep(0.1)
        assert len(swarm.servers["n0"]._orders) > 200
        for position in range(40, 50):
            asked_at = trio.current_time()
            await honest.send(zeros(id, 1, position, 1, WIDTH))
            await next_frame(honest, Kind.DATA)
            assert trio.current_time() - asked_at < 6 * WORK_S


async def test_an_order_waits_for_one_of_each_other_asker(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 8), delay_s=0.0) as swarm:
        swarm.devices["n0"].seconds = WORK_S
        await flood(swarm, "attacker", 400)
        await trio.sleep(0.1)
        asked_at = trio.current_time()
        await began(swarm, "honest")
        assert trio.current_time() - asked_at < 10 * WORK_S


async def test_few_orders_of_one_asker_wait(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 8), delay_s=0.0) as swarm:
        orders, most = swarm.servers["n0"]._orders, 0
        await began(swarm, "attacker")
        swarm.devices["n0"].seconds = WORK_S
        for _ in range(3):
            swarm.nursery.start_soon(flood, swarm, "attacker", 300)
        for _ in range(300):
            most = max(most, len(orders))
            await trio.sleep(0.01)
        assert MAX_ORDERS <= most <= MAX_ORDERS + 4, "one more for each of its streams, and what the device prepares"


def taking(seconds: float, ours: Callable[..., Any]) -> Callable[..., tuple[float, outcome.Outcome[Any]]]:
    """A clock by which `ours` takes so long, and everything else no time."""

    def timed(function: Callable[..., Any], *args: Any) -> tuple[float, outcome.Outcome[Any]]:
        return seconds if getattr(function, "__func__", None) is ours else 0.0, outcome.capture(function, *args)

    return timed


async def test_an_asker_pays_for_the_time_that_its_orders_take(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """A fork takes 4 to 8 ms on a CPU, and cost as much as an order that does nothing: 200 of them a second."""
    fork_s, seconds, limits = 0.008, 30, AdmissionLimits()
    async with open_swarm((0, 8), delay_s=0.0) as swarm:
        hop, runner = swarm.servers["n0"], swarm.runners["n0"]
        monkeypatch.setattr(block_server, "timed", taking(fork_s, type(runner).fork))
        swarm.nursery.start_soon(flood, swarm, "attacker", 5000)
        await trio.sleep(seconds)
        forks = hop.stats.opened - 1
        cost = fork_s / limits.order_s
        most = (limits.frames_burst + limits.frames_per_s * seconds) / cost + MAX_ORDERS
        assert 100 < forks <= most, "a tenth of the time, after the burst"
        assert hop._frame_limit.delay_s("honest", trio.current_time(), 0.0) == 0.0


@pytest.mark.parametrize("copies", [False, True])
async def test_a_cut_costs_its_asker_nothing_unless_pages_are_copied_for_it(
    copies: bool, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Guesses are cut all the time; but a cut into pages that two sessions share copies them."""
    async with open_swarm((0, 8), delay_s=0.0) as swarm:
        hop, runner = swarm.servers["n0"], swarm.runners["n0"]
        stream, id = await began(swarm, "asker")
        truncate = type(runner).truncate

        def copying(self: Any, session: bytes, length: int) -> None:
            truncate(self, session, length)
            runner.kv_free_tokens -= copies

        monkeypatch.setattr(type(runner), "truncate", copying)
        monkeypatch.setattr(block_server, "timed", taking(1.0, copying))
        head = header(Kind.DATA, id, 1, 39, dtype=F32, rows=1, width=WIDTH, length=4 * WIDTH, revision=1)
        await stream.send(head + bytes(4 * WIDTH))
        await next_frame(stream, Kind.DATA)
        assert (hop._frame_limit.delay_s("asker", trio.current_time(), 0.0) > 0) == copies
        assert runner.caches[id + b"asker", 0][39:], "it was cut, then computed"

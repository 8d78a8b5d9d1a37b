"""Sessions that come to travel together, and what that must not cost anybody: a swarm whose steps all take 10 ms."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import trio
from trio.testing import MockClock

from app.asker.asker import Asker
from app.asker.reply import ReplyStats
from app.serving.batching import BatchLimits
from app.serving.block_server import ServerSettings
from p2p.memory.fabric import LinkProfile, open_fabric
from tests.app.hash_model import HashRunner, greedy
from tests.app.session_swarm import PROMPT, SessionSwarm, ask, no_leaks, open_swarm

SPANS = ((0, 3), (3, 6), (6, 8))
TOKEN_S = 4 * 0.005 + 3 * 0.01  # alone: four links and three steps


async def ask_all(askers: Sequence[Asker], count: int, apart_s: float) -> list[ReplyStats]:
    """One reply for each of these, begun one after another; checks their tokens."""
    results: dict[int, ReplyStats] = {}

    async def one(number: int) -> None:
        await trio.sleep(apart_s * number)
        prompt = [number, *PROMPT]
        results[number] = await ask(askers[number], prompt, count)
        assert results[number].token_ids == greedy(prompt, count)

    async with trio.open_nursery() as nursery:
        for number in range(len(askers)):
            nursery.start_soon(one, number)
    return [results[number] for number in range(len(askers))]


def late_batches(swarm: SessionSwarm, name: str, sessions: int) -> float:
    """Mean rows of a step at a hop when all sessions had long begun, and none was about to end."""
    batches = [len(batch) for batch in swarm.runners[name].batches if all(rows == 1 for _, _, rows in batch)]
    tail = batches[-2 * sessions - 20 : -2 * sessions]
    return sum(tail) / len(tail)


@pytest.mark.parametrize("apart_s", [0.0, 0.013, 0.031])
async def test_one_askers_sessions_become_one_convoy(autojump_clock: MockClock, apart_s: float) -> None:
    async with open_swarm(*SPANS) as swarm:
        asker = await swarm.asker()
        stats = await ask_all([asker] * 8, 60, apart_s)
        for name in swarm.runners:
            assert late_batches(swarm, name, 8) > 7
        speeds = [1 / reply.tokens_per_s for reply in stats if reply.tokens_per_s]
        assert max(speeds) < 1.15 * TOKEN_S
        await no_leaks(swarm)


async def test_sessions_of_different_askers_come_to_share_steps(autojump_clock: MockClock) -> None:
    async with open_swarm(*SPANS) as swarm:
        askers = [await swarm.asker(f"asker{number}") for number in range(8)]
        stats = await ask_all(askers, 80, 0.011)
        assert min(late_batches(swarm, name, 8) for name in swarm.runners) >= 2
        assert max(1 / reply.tokens_per_s for reply in stats if reply.tokens_per_s) < 1.3 * TOKEN_S
        await no_leaks(swarm)


async def test_a_distant_asker_does_not_slow_a_near_one(autojump_clock: MockClock) -> None:
    async with open_swarm(*SPANS) as swarm:
        near, far = await swarm.asker("near"), await swarm.asker("far")
        for name in swarm.runners:
            swarm.fabric.set_link("far", name, LinkProfile(delay_s=0.06))
        stats = await ask_all([near, far], 60, 0.003)
        assert stats[0].tokens_per_s is not None
        assert 1 / stats[0].tokens_per_s < 1.15 * TOKEN_S
        await no_leaks(swarm)


async def test_one_of_32_greedy_sessions_gets_less_than_a_modest_peers_only_one(autojump_clock: MockClock) -> None:
    settings = ServerSettings(batch=BatchLimits(urgent_rows=2))
    async with open_fabric(profile=LinkProfile(delay_s=0.005)) as fabric, trio.open_nursery() as nursery:
        swarm = SessionSwarm(fabric, nursery)
        for index, (start, stop) in enumerate(SPANS):
            await swarm.serve(f"n{index}", HashRunner(start, stop), settings=settings)
        askers = [await swarm.asker("greedy")] * 32 + [await swarm.asker("modest")]
        *greedy_ones, modest = await ask_all(askers, 12, 0.0)
        speeds = [reply.tokens_per_s or 0.0 for reply in greedy_ones]
        assert modest.tokens_per_s is not None
        # 33 sessions and 2 rows a step: where peers take turns, every step has room for the modest one's token.
        assert modest.tokens_per_s > 2 * max(speeds)
        assert modest.tokens_per_s > 0.6 / TOKEN_S
        await no_leaks(swarm)
        nursery.cancel_scope.cancel()

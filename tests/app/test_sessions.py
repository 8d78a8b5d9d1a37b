"""Sessions over the swarm: right tokens through splits, deaths, freezes, full caches and departures; nothing leaks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import trio
from trio.testing import MockClock

from app.asker import Asker, PromptTooLong
from app.routing import NoRoute
from engine.asking import load_swarm_ends
from engine.local import load_local, local_options
from engine.reply import ReplySettings
from engine.runner import SessionRunner
from engine.sampler import Sampling
from engine.sources.base import ModelSource
from engine.sources.opening import open_source
from engine.span import SpanOptions, load_span
from p2p.memory import LinkProfile, open_fabric
from tests.app.hash_model import HashRunner, greedy
from tests.app.session_swarm import SessionSwarm, ask, open_swarm

CPU = torch.device("cpu")
PROMPT = list(range(100, 140))


async def no_leaks(swarm: SessionSwarm) -> None:
    """Wait for what is on its way; then no living node holds a session or a slot."""
    await trio.sleep(1)
    for name, server in swarm.servers.items():
        if name in swarm.fabric.nodes:
            runner = swarm.runners[name]
            assert (server.sessions, server.queued_rows) == (0, 0), name
            assert runner.kv_free_tokens == runner.kv_total_tokens, name


async def test_a_reply_goes_through_three_hops(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 3), (3, 6), (6, 8)) as swarm:
        asker = await swarm.asker()
        figures = await ask(asker, PROMPT, 12)
        assert figures.token_ids == greedy(PROMPT, 12)
        assert [(hop.peer, str(hop.span)) for hop in figures.route] == [("n0", "0:3"), ("n1", "3:6"), ("n2", "6:8")]
        assert (figures.recoveries, figures.finish_reason) == (0, "length")
        # One way over four links and three steps a token: pushes go directly.
        assert figures.tokens_per_s == pytest.approx(1 / (4 * 0.005 + 3 * 0.01), rel=0.05)
        await no_leaks(swarm)


@pytest.mark.parametrize("victim", ["n0", "n1", "n2"])
async def test_a_hop_dies_and_a_replica_takes_over(autojump_clock: MockClock, victim: str) -> None:
    async with open_swarm((0, 3), (3, 6), (6, 8), (0, 3), (3, 6), (6, 8)) as swarm:
        for name in ("n3", "n4", "n5"):
            swarm.fabric.set_link("asker", name, LinkProfile(delay_s=0.02))
        asker = await swarm.asker()
        async with asker.reply(PROMPT, 12, max_tokens=12) as reply:
            async for _ in reply:
                if len(reply.figures.token_ids) == 5:
                    assert victim in {hop.peer for hop in reply.figures.route}
                    swarm.kill(victim)
        assert reply.figures.token_ids == greedy(PROMPT, 12)
        assert reply.figures.recoveries == 1
        assert reply.figures.longest_gap_s < 0.5
        assert victim not in {hop.peer for hop in reply.figures.route}
        await no_leaks(swarm)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return open_source("tiny-random", Path(tmp_path_factory.mktemp("cache")))


async def test_the_swarm_writes_what_one_process_writes(autojump_clock: MockClock, tiny: ModelSource) -> None:
    local = load_local(tiny, local_options(tiny, CPU, torch.float32, 1 << 32))
    prompt = local.prompt_ids([{"role": "user", "content": "Tell me of shoals."}])
    settings = ReplySettings(24, Sampling(temperature=0))
    expected = local.reply(prompt, settings)
    text = "".join(expected)
    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        swarm = SessionSwarm(fabric, nursery)
        for name, start, stop in (("a", 0, 3), ("b", 2, 6), ("c", 6, 8), ("d", 2, 6)):
            span = load_span(tiny, start, stop, SpanOptions(CPU, torch.float32, 1 << 22))
            await swarm.serve(name, SessionRunner(span))
        asker = await swarm.asker("asker", load_swarm_ends(tiny, CPU, torch.float32))
        for victim in (None, "b"):
            async with asker.reply(prompt, settings, max_tokens=24) as reply:
                pieces = []
                async for piece in reply:
                    pieces.append(piece.text)
                    if victim and len(pieces) == 10:
                        swarm.kill(reply.figures.route[1].peer)
            assert reply.figures.token_ids == expected.writer.token_ids
            assert "".join(pieces) == text
            assert reply.figures.recoveries == (1 if victim else 0)
        await no_leaks(swarm)
        nursery.cancel_scope.cancel()

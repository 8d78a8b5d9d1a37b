"""Sessions over the swarm: right tokens through splits, deaths, freezes, full caches and departures; nothing leaks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import trio
from trio.testing import MockClock

from app.asker.asker import Asker, PromptTooLong
from app.asker.reply import ReplyStats
from app.asker.route_session import SessionSettings
from app.core.errors import AppError
from app.routing.route import NoRoute
from engine.local_model import load_local, local_options
from engine.model.block import WeightOptions
from engine.model.hosted_span import HostedSpan
from engine.model.kv_cache import Segment
from engine.model.span import SpanOptions, load_span
from engine.session_runner import SessionRunner
from engine.sources.base import ModelSource
from engine.sources.opening import open_source
from engine.swarm_ends import load_swarm_ends
from engine.text.output_form import Constraint
from engine.text.reply import ReplySettings
from engine.text.sampler import Sampling
from p2p.memory.fabric import open_fabric
from tests.app.hash_model import HashEnds, HashRunner, InlineDevice, greedy
from tests.app.session_swarm import PROMPT, SessionSwarm, ask, no_leaks, open_swarm

CPU = torch.device("cpu")


async def test_a_reply_goes_through_three_hops(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 3), (3, 6), (6, 8)) as swarm:
        asker = await swarm.asker()
        stats = await ask(asker, PROMPT, 12)
        assert stats.token_ids == greedy(PROMPT, 12)
        assert [(hop.peer, str(hop.span)) for hop in stats.route] == [("n0", "0:3"), ("n1", "3:6"), ("n2", "6:8")]
        assert (stats.recoveries, stats.finish_reason) == (0, "length")
        # One way over four links and three steps a token: pushes go directly.
        assert stats.tokens_per_s == pytest.approx(1 / (4 * 0.005 + 3 * 0.01), rel=0.05)
        await no_leaks(swarm)


async def test_overlapping_spans_are_used_in_parts(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 5), (3, 8)) as swarm:
        stats = await ask(await swarm.asker(), PROMPT, 4)
        assert stats.token_ids == greedy(PROMPT, 4)
        first, second = stats.route
        assert first.span.stop == second.span.start
        await no_leaks(swarm)


async def test_a_prompt_that_takes_long_tells_how_far_it_is(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 4), (4, 8)) as swarm:
        asker = await swarm.asker(settings=SessionSettings(chunk_rows=2))
        prompt = list(range(1000))
        told: list[int | None] = []

        async def watch() -> None:
            while True:
                told.extend(session.prompt_done for session in asker.stats().sessions)
                await trio.sleep(0.5)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            assert (await ask(asker, prompt, 60)).token_ids == greedy(prompt, 60)
            nursery.cancel_scope.cancel()
        known = [done for done in told if done is not None]
        assert told[0] is None  # nothing is known before a hop has said it
        assert known == sorted(known)
        assert len(set(known)) > 2
        assert all(0 < done < len(prompt) for done in known)
        assert told[-1] is None  # the reply is being written
        await no_leaks(swarm)


async def test_a_long_prompt_goes_in_chunks_and_its_hops_work_at_the_same_time(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 4), (4, 8)) as swarm:
        asker = await swarm.asker(settings=SessionSettings(chunk_rows=64))
        prompt = list(range(640))
        stats = await ask(asker, prompt, 2)
        assert stats.token_ids == greedy(prompt, 2)
        # 10 chunks through two hops of 10 ms a chunk, side by side; one after the other would take 0.2 s and more.
        assert stats.ttft_s is not None
        assert stats.ttft_s < 0.18


async def test_eight_sessions_share_device_steps(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 3), (3, 6), (6, 8)) as swarm:
        asker = await swarm.asker()
        begin = trio.current_time()
        await ask(asker, PROMPT, 20)
        alone_s, begin = trio.current_time() - begin, trio.current_time()
        results: dict[int, ReplyStats] = {}

        async def one(number: int) -> None:
            results[number] = await ask(asker, [number, *PROMPT], 20)

        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(one, number)
        for number, stats in results.items():
            assert stats.token_ids == greedy([number, *PROMPT], 20)
        assert trio.current_time() - begin < 1.6 * alone_s
        batches = [len(batch) for batch in swarm.runners["n1"].batches][-40:]
        assert sum(batches) / len(batches) > 2
        await no_leaks(swarm)


async def test_an_asker_that_leaves_frees_its_hops_at_once(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 4), (4, 8)) as swarm:
        asker = await swarm.asker()
        with trio.move_on_after(0.3):
            async with asker.reply(PROMPT, 1000, max_tokens=1000) as reply:
                async for _ in reply:
                    pass
        assert len(reply.stats.token_ids) > 3
        await trio.sleep(0.05)
        assert [server.sessions for server in swarm.servers.values()] == [0, 0]
        await no_leaks(swarm)


async def test_an_asker_that_dies_frees_its_hops_at_once(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 4), (4, 8)) as swarm:
        asker = await swarm.asker()
        async with asker.reply(PROMPT, 1000, max_tokens=1000) as reply:
            await anext(reply)
            assert [server.sessions for server in swarm.servers.values()] == [1, 1]
            swarm.kill("asker")
            await trio.sleep(0.05)
            assert [server.sessions for server in swarm.servers.values()] == [0, 0]
            with pytest.raises(AppError):
                await anext(reply)


async def test_a_silent_session_is_freed_and_can_still_go_on(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 4), (4, 8)) as swarm:
        asker = await swarm.asker()
        async with asker.reply(PROMPT, 6, max_tokens=6) as reply:
            await anext(reply)
            await trio.sleep(200)
            assert [server.sessions for server in swarm.servers.values()] == [0, 0]
            async for _ in reply:
                pass
        assert reply.stats.token_ids == greedy(PROMPT, 6)
        await no_leaks(swarm)


async def test_a_full_cache_sends_the_session_elsewhere(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 4), (4, 8)) as swarm:
        await swarm.serve("small", HashRunner(4, 8, kv_tokens=60), speed=10_000)
        asker = await swarm.asker()
        async with asker.reply(PROMPT, 12, max_tokens=12) as first:
            await anext(first)
            assert first.stats.route[1].peer == "small"
            second = await ask(asker, PROMPT, 12)
            assert (second.token_ids, second.route[1].peer) == (greedy(PROMPT, 12), "n1")
        await no_leaks(swarm)


async def test_full_caches_everywhere_are_named(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 4)) as swarm:
        await swarm.serve("small", HashRunner(4, 8, kv_tokens=60))
        asker = await swarm.asker()
        async with asker.reply(PROMPT, 12, max_tokens=12) as first:
            await anext(first)
            with pytest.raises(NoRoute, match=r"block 4.*small \(no room for 52 tokens: 52 cache slots are taken"):
                await ask(asker, PROMPT, 12)
        await no_leaks(swarm)


async def test_caches_that_are_too_small_everywhere_are_named(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 4)) as swarm:
        await swarm.serve("small", HashRunner(4, 8, kv_tokens=30))
        with pytest.raises(NoRoute, match=r"block 4.*small \(a session of 52 tokens is larger than its cache of 30"):
            await ask(await swarm.asker(), PROMPT, 12)
        await no_leaks(swarm)


async def test_a_block_without_a_holder_is_named(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 3), (4, 8)) as swarm:
        asker = await swarm.asker()
        with pytest.raises(NoRoute, match="nobody serves block 3 now"):
            await ask(asker, PROMPT, 12)
        assert trio.current_time() < 17


async def test_a_prompt_beyond_the_context_is_refused(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 8)) as swarm:
        asker = await swarm.asker()
        with pytest.raises(PromptTooLong, match="4096 tokens, but the model's context is 4096"):
            await ask(asker, [1] * 4096, 12)
        stats = await ask(asker, [1] * 4090, 6)
        assert len(stats.token_ids) == 6


async def test_a_node_asks_its_own_blocks_without_the_network(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 4)) as swarm:
        server = await swarm.serve("both", HashRunner(4, 8))
        asker = Asker(
            swarm.fabric.nodes["both"],
            HashEnds(),
            InlineDevice(),
            lambda: list(swarm.announcements.values()),
            own_server=server.attend,
        )
        await swarm.nursery.start(asker.run)
        stats = await ask(asker, PROMPT, 6)
        assert stats.token_ids == greedy(PROMPT, 6)
        assert [hop.peer for hop in stats.route] == ["n0", "both"]
        await no_leaks(swarm)


async def test_many_sessions_live_through_restarts(autojump_clock: MockClock) -> None:
    spans = ((0, 3), (3, 6), (6, 8)) * 2
    async with open_swarm(*spans) as swarm:
        asker = await swarm.asker()
        recoveries: list[int] = []

        async def converse(number: int, until: float) -> None:
            while trio.current_time() < until:
                prompt = [number, *PROMPT]
                stats = await ask(asker, prompt, 30)
                assert stats.token_ids == greedy(prompt, 30)
                assert stats.longest_gap_s < 2
                recoveries.append(stats.recoveries)

        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(converse, number, trio.current_time() + 8)
            for turn in (0, 3, 2, 5):  # both holders of a span, one after the other
                await trio.sleep(1)
                name, span = f"n{turn}", spans[turn]
                swarm.kill(name)
                swarm.announcements.pop(name)
                await trio.sleep(1)
                await swarm.serve(name, HashRunner(*span))
        assert sum(recoveries) >= 4
        await trio.sleep(30)  # an audit of the last replies may be under way
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
            span = load_span(tiny, start, stop, SpanOptions(CPU, torch.float32, kv_bytes=1 << 22))
            await swarm.serve(name, SessionRunner(HostedSpan([span])))
        asker = await swarm.asker("asker", load_swarm_ends(tiny, WeightOptions(CPU, torch.float32)))
        for victim in (None, "b"):
            async with asker.reply(prompt, settings, max_tokens=24) as reply:
                pieces = []
                async for piece in reply:
                    pieces.append(piece.text)
                    if victim and len(pieces) == 10:
                        swarm.kill(reply.stats.route[1].peer)
            assert reply.stats.token_ids == expected.writer.token_ids
            assert "".join(pieces) == text
            assert reply.stats.recoveries == (1 if victim else 0)
        await no_leaks(swarm)
        nursery.cancel_scope.cancel()


async def test_a_reply_in_a_form_survives_a_hop_and_is_what_one_process_writes(
    autojump_clock: MockClock, tiny: ModelSource
) -> None:
    local = load_local(tiny, local_options(tiny, CPU, torch.float32, 1 << 32))
    ends = load_swarm_ends(tiny, WeightOptions(CPU, torch.float32))
    schema = {"type": "array", "items": {"enum": ["shoal", "reef"]}, "minItems": 6, "maxItems": 9}
    grammar = ends.text.grammars.compile(Constraint("json", json.dumps(schema), "f"))
    prompt = local.prompt_ids([{"role": "user", "content": '["shoal", "reef", "shoal", "reef"]'}])
    settings = ReplySettings(200, Sampling(temperature=0.9, seed=2), grammar=grammar, logprobs=2)
    expected = local.reply(prompt, settings)
    text = "".join(expected)
    assert 6 <= len(json.loads(text)) <= 9
    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        swarm = SessionSwarm(fabric, nursery)
        for name, start, stop in (("a", 0, 4), ("b", 4, 8), ("c", 4, 8)):
            span = load_span(tiny, start, stop, SpanOptions(CPU, torch.float32, kv_bytes=1 << 22))
            await swarm.serve(name, SessionRunner(HostedSpan([span])))
        asker = await swarm.asker("asker", ends)
        for victim in (None, "a hop"):
            async with asker.reply(prompt, settings, max_tokens=200) as reply:
                pieces = []
                async for piece in reply:
                    pieces.append(piece)
                    if victim and len(pieces) == 10:
                        swarm.kill(reply.stats.route[1].peer)
            assert reply.stats.token_ids == expected.writer.token_ids
            assert "".join(piece.text for piece in pieces) == text
            assert reply.stats.finish_reason == "stop"
            assert all(len(piece.logprob.top) == 2 and piece.logprob.logprob <= 0 for piece in pieces)
        await no_leaks(swarm)
        nursery.cancel_scope.cancel()


async def test_an_embedding_is_the_mean_of_what_the_last_block_says(
    autojump_clock: MockClock, tiny: ModelSource
) -> None:
    ids = list(range(32, 90))
    span = load_span(tiny, 0, 8, SpanOptions(CPU, torch.float32, kv_bytes=1 << 22))
    ends = load_swarm_ends(tiny, WeightOptions(CPU, torch.float32))
    whole = span.step(ends.both.embed(ids), [Segment(span.open(len(ids)), 0, len(ids))]).double().mean(dim=0)
    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        swarm = SessionSwarm(fabric, nursery)
        for name, start, stop in (("a", 0, 4), ("b", 4, 8), ("c", 4, 8)):
            part = load_span(tiny, start, stop, SpanOptions(CPU, torch.float32, kv_bytes=1 << 22))
            await swarm.serve(name, SessionRunner(HostedSpan([part])))
        asker = await swarm.asker("asker", ends)
        for victim in (None, "b"):
            if victim:
                swarm.kill(victim)
            states = await asker.hidden_states(ids)
            assert len(states) == len(ids)
            assert ends.mean(states) == pytest.approx((whole / whole.norm()).tolist(), abs=1e-4)
        with pytest.raises(PromptTooLong):
            await asker.hidden_states([1] * 5000)
        await no_leaks(swarm)
        nursery.cancel_scope.cancel()


async def test_servers_and_hops_tell_where_the_time_goes(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 4), (4, 8)) as swarm:
        asker = await swarm.asker()
        async with asker.session(100, len(PROMPT)) as session:
            await session.advance(PROMPT)
            for token in range(30):
                await session.advance([token])
            for pace in (session.paces["n0"], session.paces["n1"]):
                assert pace.step_s == pytest.approx(0.01, rel=0.01)
                assert pace.queue_s == pytest.approx(0.0, abs=0.001)
                assert pace.host_s == pytest.approx(0.0, abs=0.001)
            stats = swarm.servers["n0"].stats
            tokens = len(PROMPT) + 30
            assert (stats.rows, stats.urgent_rows, stats.batch_rows, stats.opened) == (tokens, 30, 1.0, 1)
            assert (stats.queued_rows, stats.queued_sessions) == (0, 0)
            (own,) = stats.sessions
            assert (own.asker, own.start, own.stop, own.tokens) == ("asker", 0, 4, tokens)
            # Every token costs one row of 16 bytes each way, under a header of 40 bytes a frame.
            assert own.bytes_in == own.bytes_out == 16 * tokens + 40 * 31
            assert own.age_s > 30 * 0.01
        await no_leaks(swarm)
        after = swarm.servers["n0"].stats
        assert (after.sessions, after.bytes_in, after.askers) == ((), own.bytes_in, 1)

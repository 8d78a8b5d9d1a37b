"""Replies with an adapter over hops of the model of hashes: slow, silent and refusing hops, and audits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import trio
from trio.testing import MockClock

from app.asker.asker import Asker
from app.asker.reply import ReplyAdapter, ReplyStats
from app.core.errors import AppError, NoAdapter
from app.routing.planner import WITHOUT_ADAPTER_S
from app.routing.route import NoRoute
from app.serving.adapters import AdapterLimits
from app.serving.block_server import ServerSettings
from app.session.frame import plain
from app.session.wire import PROTOCOL, Kind, decode
from p2p.memory.fabric import LinkProfile, MemoryStream, open_fabric
from tests.app.hash_model import AdapterShelf, HashAdapter, HashRunner, greedy
from tests.app.session_swarm import PROMPT, SessionSwarm, no_leaks, open_swarm

POND, LAKE = HashAdapter(1), HashAdapter(2)
OFFERED = ReplyAdapter("pond", POND.ref)


async def ask(asker: Asker, count: int = 10, prompt: Sequence[int] = PROMPT) -> ReplyStats:
    async with asker.reply(prompt, count, max_tokens=count, adapter=OFFERED) as reply:
        async for _ in reply:
            pass
    assert reply.stats.token_ids == greedy(prompt, count, adapter=POND)
    return reply.stats


async def test_a_hop_that_fetches_for_long_is_waited_for_while_it_answers(autojump_clock: MockClock) -> None:
    async with open_swarm() as swarm:
        await swarm.serve("slow", HashRunner(0, 8), adapters=AdapterShelf(POND, seconds=100.0))
        asker = await swarm.asker()
        begin = trio.current_time()
        stats = await ask(asker)
        assert 100 < trio.current_time() - begin < 110
        assert (stats.recoveries, stats.adapter, stats.adapter_root) == (0, "pond", POND.ref.short)
        begin = trio.current_time()
        await ask(asker)
        assert trio.current_time() - begin < 2  # it stays loaded
        await no_leaks(swarm)


async def test_a_hop_that_freezes_while_it_fetches_is_replaced(autojump_clock: MockClock) -> None:
    async with open_swarm() as swarm:
        await swarm.serve("frozen", HashRunner(0, 8), speed=1000.0, adapters=AdapterShelf(POND, seconds=1e6))
        await swarm.serve("quick", HashRunner(0, 8), adapters=AdapterShelf(POND))
        asker = await swarm.asker()

        async def freeze() -> None:
            await trio.sleep(20)
            swarm.fabric.freeze("frozen")

        swarm.nursery.start_soon(freeze)
        begin = trio.current_time()
        stats = await ask(asker)
        assert [hop.peer for hop in stats.route] == ["quick"]
        assert trio.current_time() - begin < 40


async def never_ready(stream: MemoryStream) -> None:
    """Answer probes, and begin no session."""
    while True:
        frame = decode(await stream.receive())
        if frame.kind == Kind.PROBE:
            await stream.send(plain(Kind.STATE, frame.session, 0))


async def serve_without_end(swarm: SessionSwarm, name: str, *, hostile: bool) -> None:
    """A fast hop that fetches the adapter for ever, or says so."""
    await swarm.serve(name, HashRunner(0, 8), speed=1000.0, adapters=AdapterShelf(POND, LAKE, seconds=1e6))
    if hostile:
        swarm.fabric.nodes[name].accept(PROTOCOL, never_ready)


async def seconds_for(asker: Asker, adapter: HashAdapter | None = POND) -> tuple[float, str]:
    """How long a short reply takes, and the hop that it went over."""
    begin, offered = trio.current_time(), None if adapter is None else ReplyAdapter("one", adapter.ref)
    async with asker.reply(PROMPT, 2, max_tokens=2, adapter=offered) as reply:
        async for _ in reply:
            pass
    assert reply.stats.token_ids == greedy(PROMPT, 2, adapter=adapter)
    return trio.current_time() - begin, reply.stats.route[0].peer


@pytest.mark.parametrize("hostile", [False, True])
async def test_a_hop_that_the_adapter_does_not_get_to_is_left_for_another_one(
    autojump_clock: MockClock, hostile: bool
) -> None:
    """And replies that come later with this adapter begin at the other one."""
    async with open_swarm() as swarm:
        await serve_without_end(swarm, "fast", hostile=hostile)
        await swarm.serve("healthy", HashRunner(0, 8), adapters=AdapterShelf(POND, LAKE))
        asker = await swarm.asker()
        for most_s in (40, 1, 1):
            seconds, peer = await seconds_for(asker)
            assert (seconds < most_s, peer) == (True, "healthy")
        assert asker.planner.book.standing("fast").score == 1.0
        assert 30 < (await seconds_for(asker, LAKE))[0] < 40, "another adapter is tried there"
        assert (await seconds_for(asker, None))[1] == ("healthy" if hostile else "fast")
        await trio.sleep(WITHOUT_ADAPTER_S)
        if not hostile:
            assert 30 < (await seconds_for(asker))[0] < 40, "and this one too, after a while"


@pytest.mark.parametrize("names", [["one"], ["one", "two"], ["one", "two", "three", "four"]])
async def test_hops_that_never_get_the_adapter_end_the_reply_in_words_and_are_reported(
    autojump_clock: MockClock, names: list[str]
) -> None:
    async with open_swarm() as swarm:
        for name in names:
            await serve_without_end(swarm, name, hostile=True)
        asker = await swarm.asker()
        with pytest.raises(AppError):
            await seconds_for(asker)
        assert trio.current_time() < 900
        assert any(asker.planner.book.standing(name).score < 1.0 for name in names)
        assert asker.planner.without_adapter(POND.ref) == set(names)


async def test_a_hop_that_is_slow_to_get_the_adapter_is_waited_for_if_the_others_are_too(
    autojump_clock: MockClock,
) -> None:
    async with open_swarm() as swarm:
        for name, seconds in (("slow", 150.0), ("slower", 250.0)):
            await swarm.serve(name, HashRunner(0, 8), adapters=AdapterShelf(POND, seconds=seconds))
        assert (await seconds_for(await swarm.asker()))[0] < 300


async def test_a_holder_that_joins_replaces_a_hop_that_waits_for_the_adapter(autojump_clock: MockClock) -> None:
    async with open_swarm() as swarm:
        await serve_without_end(swarm, "fast", hostile=True)

        async def join() -> None:
            await trio.sleep(100)
            await swarm.serve("healthy", HashRunner(0, 8), adapters=AdapterShelf(POND))

        swarm.nursery.start_soon(join)
        seconds, peer = await seconds_for(await swarm.asker())
        assert (seconds < 110, peer) == (True, "healthy")


async def test_hops_that_refuse_the_adapter_are_left_out_of_its_replies_alone(autojump_clock: MockClock) -> None:
    strict = ServerSettings(adapters=AdapterLimits(asker_bytes=1))
    async with open_swarm() as swarm:
        for name in ("small", "smaller"):
            await swarm.serve(name, HashRunner(0, 8), speed=1000.0, settings=strict, adapters=AdapterShelf(POND))
        asker = await swarm.asker()
        with pytest.raises(NoRoute, match=r"with the adapter: small.* \(the adapter takes .* up to") as caught:
            await ask(asker)
        assert caught.value.code == "no_adapter_route"
        assert not asker.bans.active(trio.current_time())
        async with asker.reply(PROMPT, 5, max_tokens=5) as reply:
            async for _ in reply:
                pass
        assert reply.stats.token_ids == greedy(PROMPT, 5)
        assert (reply.stats.adapter, reply.stats.adapter_root) == (None, None)
        await swarm.serve("large", HashRunner(0, 8), adapters=AdapterShelf(POND))
        assert [hop.peer for hop in (await ask(asker)).route] == ["large"]


async def test_a_reply_whose_adapter_makes_way_goes_on_elsewhere(autojump_clock: MockClock) -> None:
    async with open_swarm() as swarm:
        crowded = await swarm.serve("crowded", HashRunner(0, 8), speed=1000.0, adapters=AdapterShelf(POND))
        await swarm.serve("other", HashRunner(0, 8), adapters=AdapterShelf(POND))
        asker = await swarm.asker()
        async with asker.reply(PROMPT, 10, max_tokens=10, adapter=OFFERED) as reply:
            async for _ in reply:
                if len(reply.stats.token_ids) == 3:
                    assert [hop.peer for hop in reply.stats.route] == ["crowded"]
                    await crowded.end_users(list(crowded._adapters._loaded.values()))
        assert reply.stats.token_ids == greedy(PROMPT, 10, adapter=POND)
        assert ([hop.peer for hop in reply.stats.route], reply.stats.recoveries) == (["other"], 1)
        assert not asker.bans.active(trio.current_time())


async def test_audits_compute_with_the_same_adapter(autojump_clock: MockClock) -> None:
    async with open_fabric(profile=LinkProfile(delay_s=0.005)) as fabric, trio.open_nursery() as nursery:
        swarm = SessionSwarm(fabric, nursery)
        for name in ("a", "b", "c"):
            await swarm.serve(name, HashRunner(0, 8), adapters=AdapterShelf(POND))
        asker = await swarm.asker()
        for number in range(60):
            await ask(asker, 4, [*PROMPT, number])
            await trio.sleep(2)
        await trio.sleep(100)
        audits = asker.stats().audits
        assert (audits.passed > 0, audits.failed) == (True, 0)
        withdrawn = ReplyAdapter("pond", POND.ref, withdrawn=True)
        with pytest.raises(NoAdapter, match="not offered"):
            async with asker._auditor._context.pinned((), 10, withdrawn):
                pass
        nursery.cancel_scope.cancel()

"""The first route of a reply: it is waited for, with a message, and a holder that is slow to answer is still used."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock

from app.asker.asker import Asker, AskerOptions
from app.asker.reply_service import UsableMembers
from app.asker.route_session import REPORT_AFTER_S, SessionSettings
from app.core.span import Span
from app.routing.route import NoRoute, RouteRequest
from app.serving.block_server import BlockServer
from app.swarm.records import Announcement
from p2p.memory.fabric import LinkProfile
from tests.app.hash_model import HashEnds, HashRunner, InlineDevice, greedy
from tests.app.session_swarm import PROMPT, STEP_S, SessionSwarm, ask, no_leaks, open_swarm
from tests.app.swarms import N_BLOCKS, Sim, SimNode, open_sim

SLOW = LinkProfile(delay_s=4.0)
QUICK = LinkProfile()


async def waits_of(asker: Asker) -> tuple[list[int], list[int]]:
    """The blocks that a reply said it waits for, and its tokens."""
    async with asker.reply(PROMPT, 12, max_tokens=12) as reply:
        blocks = []
        while (waiting := await reply.waiting()) is not None:
            blocks.append(waiting.block)
            assert f"block {waiting.block}" in waiting.text
        async for _ in reply:
            pass
    return blocks, reply.stats.token_ids


def serves_after(swarm: SessionSwarm, name: str, after_s: float) -> None:
    """Hide a node until it has been waited for."""
    said = swarm.announcements.pop(name)

    async def appear() -> None:
        await trio.sleep(after_s)
        swarm.announcements[name] = said

    swarm.nursery.start_soon(appear)


async def test_a_block_whose_holder_comes_late_is_waited_for_and_named(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 3), (3, 6), (6, 8)) as swarm:
        asker = await swarm.asker()
        serves_after(swarm, "n2", 9.0)
        serves_after(swarm, "n1", 14.0)
        assert await waits_of(asker) == ([3], greedy(PROMPT, 12))
        assert 14 <= trio.current_time() < 15
        await no_leaks(swarm)


async def test_the_time_of_a_prompt_begins_with_its_route(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 3), (3, 6), (6, 8)) as swarm:
        asker = await swarm.asker()
        serves_after(swarm, "n1", 9.0)
        await waits_of(asker)
        latest = asker.stats().latest
        assert latest is not None
        assert latest.prompt_s is not None
        assert 3 * STEP_S <= latest.prompt_s < 1.0  # each of the hops makes a step


async def test_each_missing_block_is_named_once(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 3), (3, 6), (6, 8)) as swarm:
        asker = await swarm.asker()
        serves_after(swarm, "n0", 5.0)
        serves_after(swarm, "n2", 11.0)
        assert await waits_of(asker) == ([0, 6], greedy(PROMPT, 12))


async def test_a_short_wait_is_not_mentioned(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 8)) as swarm:
        asker = await swarm.asker()
        serves_after(swarm, "n0", REPORT_AFTER_S / 2)
        assert await waits_of(asker) == ([], greedy(PROMPT, 12))


async def test_a_reply_fails_after_the_wait_and_not_after_twice_the_wait(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 3)) as swarm:
        asker = await swarm.asker()
        with pytest.raises(NoRoute, match="nobody serves block 3 now"):
            await waits_of(asker)
        assert SessionSettings().first_route_s == 15.0
        assert 15 <= trio.current_time() <= 16
        assert asker.stats().prompt_tokens == 0  # `shoal status` counted it as read


async def test_a_prompt_counts_once_it_was_read(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 8)) as swarm:
        asker = await swarm.asker()
        await waits_of(asker)
        assert asker.stats().prompt_tokens == len(PROMPT)


async def test_a_block_that_this_node_loads_is_not_waited_for_at_others(autojump_clock: MockClock) -> None:
    async with holder_and_newcomer() as (sim, holder, newcomer, asker):
        holder.swarm.announce(state="serving", span=Span(0, 3))
        newcomer.swarm.announce(state="joining", span=None)
        request = RouteRequest(Span(0, N_BLOCKS), 64)
        said: list[str] = []

        async def listen() -> None:
            async with asker.reply(PROMPT, 12, max_tokens=12) as reply:
                while (waiting := await reply.waiting()) is not None:
                    said.append(waiting.text)
                    newcomer.swarm.announce(state="loading", span=Span(2, N_BLOCKS))
                with pytest.raises(NoRoute, match="nobody serves block 3: this node is still loading it"):
                    await reply.__anext__()

        await sim.until(lambda: all(len(one.span or ()) <= 3 for one in asker.planner.members()), 5)
        await listen()
        assert said == [
            "waiting up to 15 s for a member that serves block 3",
            "waiting until this node has loaded block 3",
        ]
        newcomer.swarm.announce(state="loading", span=Span(4, N_BLOCKS))  # not the missing block
        with pytest.raises(NoRoute, match="nobody serves block 3 now"):
            await asker.planner.find((), request, ())


@pytest.mark.parametrize("begun", [False, True])
async def test_a_reply_that_fails_while_this_node_is_paused_says_so(autojump_clock: MockClock, begun: bool) -> None:
    """It said to wait for a member, although the only one that could host the block was this node."""
    async with open_swarm((0, 8)) as swarm:
        asker = await swarm.asker()
        swarm.announcements["asker"] = Announcement("asker", 1, 0, "", "paused")
        async with asker.reply(PROMPT, 12, max_tokens=12) as reply:
            if begun:
                await reply.__anext__()
            else:
                swarm.announcements.pop("n0")
            swarm.kill("n0")
            with pytest.raises(NoRoute, match="this node is paused; `shoal status` says why"):
                async for _ in reply:
                    pass


async def test_a_reply_that_fails_while_this_node_serves_other_blocks_says_what_helps(
    autojump_clock: MockClock,
) -> None:
    """It said to wait for a member, although more memory for the only node would do."""
    async with open_swarm((0, 3)) as swarm:
        asker = await swarm.asker()
        swarm.announcements["asker"] = Announcement("asker", 1, 0, "", "serving", Span(0, 3))
        with pytest.raises(NoRoute, match=r"nobody serves block 3 now: wait .* raise this node's memory limit"):
            await waits_of(asker)
        swarm.announcements["asker"] = Announcement("asker", 1, 0, "", "client")
        with pytest.raises(NoRoute, match="nobody serves block 3 now; wait until a member hosts it"):
            await waits_of(asker)


def loads(swarm: SessionSwarm, span: Span) -> None:
    """Let the asker's own node announce that it loads blocks."""
    swarm.announcements["asker"] = Announcement("asker", 1, 0, "", "loading", span)


@pytest.mark.parametrize("begun", [False, True])
async def test_a_reply_waits_as_long_as_this_node_gets_on_with_loading(autojump_clock: MockClock, begun: bool) -> None:
    """The wait was 15 or 60 s, whatever the node was doing: it ended seconds before the blocks were there."""
    async with open_swarm((0, 3), (3, 8)) as swarm:
        loaded = 0
        asker = await swarm.asker(loading=lambda: loaded)
        async with asker.reply(PROMPT, 12, max_tokens=12) as reply:
            if begun:
                await reply.__anext__()
            swarm.announcements.pop("n0")
            swarm.kill("n0")
            loads(swarm, Span(0, 5))

            async def load() -> None:
                nonlocal loaded
                for _ in range(20):
                    await trio.sleep(10.0)
                    loaded += 1
                await swarm.serve("late", HashRunner(0, 3))

            swarm.nursery.start_soon(load)
            async for _ in reply:
                pass
        assert reply.stats.token_ids == greedy(PROMPT, 12)
        assert 200 <= trio.current_time() < 210


@pytest.mark.parametrize("begun", [False, True])
async def test_loading_that_gets_stuck_is_not_waited_for_for_ever(autojump_clock: MockClock, begun: bool) -> None:
    async with open_swarm((0, 3), (3, 8)) as swarm:
        stuck_at = trio.current_time() + 100
        asker = await swarm.asker(loading=lambda: int(min(trio.current_time(), stuck_at)))
        async with asker.reply(PROMPT, 12, max_tokens=12) as reply:
            if begun:
                await reply.__anext__()
            swarm.announcements.pop("n0")
            swarm.kill("n0")
            loads(swarm, Span(0, 3))
            with pytest.raises(NoRoute, match="this node is still loading it"):
                async for _ in reply:
                    pass
        assert stuck_at + 58 <= trio.current_time() <= stuck_at + 62
        await no_leaks(swarm)


async def test_progress_with_other_blocks_does_not_prolong_the_wait(autojump_clock: MockClock) -> None:
    async with open_swarm((3, 8)) as swarm:
        asker = await swarm.asker(loading=lambda: int(10 * trio.current_time()))
        loads(swarm, Span(3, 8))
        with pytest.raises(NoRoute, match="nobody serves block 0 now"):
            await waits_of(asker)
        assert trio.current_time() <= 16


async def test_a_wait_that_is_cancelled_leaves_nothing(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 3)) as swarm:
        asker = await swarm.asker()
        with trio.move_on_after(5) as scope:
            await waits_of(asker)
        assert scope.cancelled_caught
        assert asker.active == 0
        await no_leaks(swarm)


# --- a full holder that a newcomer has just met -----------------------------------------------------------------------


@asynccontextmanager
async def holder_and_newcomer() -> AsyncIterator[tuple[Sim, SimNode, SimNode, Asker]]:
    """A node that serves every block, and one that has just joined and asks."""
    async with open_sim() as sim, trio.open_nursery() as nursery:
        holder, newcomer = await sim.grow(2)
        server = BlockServer(holder.network, HashRunner(0, N_BLOCKS), InlineDevice(STEP_S))
        await nursery.start(server.run)
        holder.swarm.announce(state="serving", span=Span(0, N_BLOCKS), decode_tokens_per_s=10.0, kv_free_tokens=1 << 20)
        await sim.until(lambda: any(one.serves for one in newcomer.swarm.announcements()), 5)
        options = AskerOptions(rng=random.Random(1))
        members = UsableMembers(newcomer.swarm)
        ends = HashEnds(n_blocks=N_BLOCKS)
        asker = Asker(newcomer.network, ends, InlineDevice(), members, options=options)
        await nursery.start(asker.run)
        yield sim, holder, newcomer, asker
        nursery.cancel_scope.cancel()


async def test_a_holder_that_missed_one_probe_is_still_used(autojump_clock: MockClock) -> None:
    """Two machines that load torch are silent for seconds: the only holder is suspect, and the swarm has no hole."""
    async with holder_and_newcomer() as (sim, holder, newcomer, asker):
        sim.fabric.set_link(newcomer.peer, holder.peer, SLOW)
        await sim.until(lambda: newcomer.state_of(holder.peer) == "suspect", 30)
        sim.fabric.set_link(newcomer.peer, holder.peer, QUICK)
        began_at = trio.current_time()
        route = await asker.planner.find((), RouteRequest(Span(0, N_BLOCKS), 64), ())
        assert [hop.peer for hop in route] == [holder.peer]
        stats = await ask(asker, PROMPT, 12)
        assert stats.token_ids == greedy(PROMPT, 12, N_BLOCKS)
        assert trio.current_time() - began_at < 2


async def test_a_suspect_member_is_not_used_where_others_serve_its_blocks(autojump_clock: MockClock) -> None:
    async with holder_and_newcomer() as (sim, holder, newcomer, asker):
        sim.fabric.set_link(newcomer.peer, holder.peer, SLOW)
        await sim.until(lambda: newcomer.state_of(holder.peer) == "suspect", 30)
        assert holder.peer in {one.peer for one in asker.planner.members()}
        newcomer.swarm.announce(state="serving", span=Span(0, N_BLOCKS), kv_free_tokens=1 << 20)
        assert {one.peer for one in asker.planner.members()} == {newcomer.peer}


async def test_a_dead_member_is_not_used(autojump_clock: MockClock) -> None:
    async with holder_and_newcomer() as (sim, holder, newcomer, asker):
        sim.fabric.kill(holder.peer)
        await sim.until(lambda: newcomer.state_of(holder.peer) == "dead", 30)
        assert holder.peer not in {one.peer for one in asker.planner.members()}
        assert newcomer.swarm.own in asker.planner.members()

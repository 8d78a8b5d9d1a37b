"""Memory that other programs need: when blocks are given back and taken again, and what sessions notice of it."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from app.asker.asker import Asker, AskerOptions
from app.asker.route_session import SessionSettings
from app.core.compute import StepWork
from app.core.reasons import Reason
from app.core.span import Span
from app.hosting.block_host import BlockHost, HostingOptions
from app.hosting.memory import (
    LOW_LOOKS,
    REGROW_AFTER_S,
    Free,
    MemoryChange,
    MemoryWatch,
    after_giving_back,
    after_taking_back,
    blocks_of,
    kept_span,
)
from app.snapshot.views import State
from engine.benchmark import Throughput
from engine.budget import BlockBudget, default_headroom
from engine.device.probe import Device
from engine.errors import DeviceFull
from engine.hosting import DeviceShare, Hosted, HostingPlan, HostingWish
from tests.app.hash_model import HashEnds, HashRunner, InlineDevice, Output, greedy
from tests.app.session_swarm import PROMPT, ask
from tests.app.swarms import N_BLOCKS, Sim, SimNode, open_sim

GB = 10**9
HEADROOM = default_headroom("cuda", 20 * GB)  # 1 GB


def plan_of(*blocks: int) -> HostingPlan:
    """A plan with cards of 20 GB, and blocks of 400 MB each with 100 MB of cache."""
    shares = [
        DeviceShare(
            Device(f"cuda:{index}", "cuda", "a card", 20 * GB, 20 * GB),
            BlockBudget(count, 4 * GB // 10, count * GB // 10, count * 4096, 0, 0, ""),
        )
        for index, count in enumerate(blocks)
    ]
    first, *more = shares
    return HostingPlan(first.device, torch.bfloat16, "none", first.budget, None, tuple(more))


def free(*gigabytes: float) -> Free:
    return {f"cuda:{index}": int(amount * GB) for index, amount in enumerate(gigabytes)}


@pytest.mark.parametrize(
    ("blocks", "free_gb", "kept"),
    [
        ((8,), (1.0,), None),
        ((8,), (0.5,), None),  # half of what is left to others is still there
        ((8,), (0.49,), (6,)),  # 510 MB are missing: two blocks of 500 MB
        ((8,), (0.0,), (6,)),
        ((1,), (0.0,), (0,)),
        ((4, 4), (9.0, 0.2), (4, 2)),
        ((4, 4), (0.2, 0.2), (2, 2)),
    ],
)
def test_giving_back(blocks: tuple[int, ...], free_gb: tuple[float, ...], kept: tuple[int, ...] | None) -> None:
    change = after_giving_back(plan_of(*blocks), free(*free_gb))
    assert (None if change is None else change.blocks) == kept


def test_a_step_that_failed_costs_the_tightest_device_a_block() -> None:
    assert after_giving_back(plan_of(4, 4), free(9, 3), at_least=1) == MemoryChange((4, 3))
    assert after_giving_back(plan_of(4, 4), free(9, 0.4), at_least=1) == MemoryChange((4, 2))


@pytest.mark.parametrize(
    ("full", "now", "free_gb", "expected"),
    [
        ((8,), (8,), (9.0,), None),  # nothing was given back
        ((8,), (4,), (2.9,), (7,)),
        ((8,), (4,), (1.9,), None),  # room for one of four: not worth a move
        ((8,), (7,), (1.5,), (8,)),
        ((8,), (7,), (1.4,), None),
        ((4, 4), (4,), (1.0, 3.0), (4, 4)),  # the second card was left out altogether
        ((4, 4), (4, 2), (9.0, 2.0), (4, 4)),
    ],
)
def test_taking_back(
    full: tuple[int, ...], now: tuple[int, ...], free_gb: tuple[float, ...], expected: tuple[int, ...] | None
) -> None:
    change = after_taking_back(plan_of(*now), plan_of(*full), free(*free_gb))
    assert (None if change is None else change.blocks) == expected


def test_a_moment_of_little_memory_changes_nothing() -> None:
    watch = MemoryWatch(plan_of(8), plan_of(8))
    for at in range(10):
        assert watch.look(free(0.1 if at % LOW_LOOKS else 1.0), at) is None
    assert [watch.look(free(0.1), 10 + at) for at in range(LOW_LOOKS)][-1] == MemoryChange((6,))


def test_blocks_come_back_only_after_a_long_time_of_room() -> None:
    watch = MemoryWatch(plan_of(6), plan_of(8))
    assert watch.look(free(5), 0) is None
    assert watch.look(free(5), REGROW_AFTER_S - 1) is None
    assert watch.look(free(0.8), REGROW_AFTER_S) is None  # somebody took it for a moment
    assert watch.look(free(5), REGROW_AFTER_S + 1) is None
    assert watch.look(free(5), 2 * REGROW_AFTER_S) is None
    assert watch.look(free(5), 2 * REGROW_AFTER_S + 1) == MemoryChange((8,))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=3), st.integers(0, 10**10))
def test_giving_back_never_leads_to_taking_back_at_once(blocks: list[int], free_bytes: int) -> None:
    plan = plan_of(*blocks)
    now = {share.device.id: free_bytes for share in plan.shares}
    change = after_giving_back(plan, now)
    if change is None or not change.total:
        return
    smaller = plan.with_blocks(change.blocks)
    after = {
        share.device.id: free_bytes + (share.budget.blocks - count) * share.block_bytes
        for share, count in zip(plan.shares, change.blocks, strict=True)
    }
    assert after_giving_back(smaller, after) is None
    assert after_taking_back(smaller, plan, after) is None


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=3),
    st.integers(0, 5),
    st.lists(st.integers(0, 3), min_size=24, max_size=24),
)
def test_the_longest_run_within_the_limits_is_kept(
    shares: list[tuple[int, int]], start: int, others: list[int]
) -> None:
    plan = plan_of(*(have for have, _ in shares))
    change = MemoryChange(tuple(min(have, may) for have, may in shares))
    span = Span(start, start + plan.blocks)

    def fits(run: Span) -> bool:
        return all(n <= may for n, may in zip(blocks_of(span, run, plan), change.blocks, strict=True))

    runs = [Span(a, b) for a in span.blocks() for b in range(a + 1, span.stop + 1) if fits(Span(a, b))]
    kept = kept_span(span, plan, change, others)
    if kept is None:
        assert not runs
        return
    longest = max(len(run) for run in runs)
    spared = {run: sum(others[block] for block in run.blocks()) for run in runs if len(run) == longest}
    assert spared[kept] == min(spared.values())
    assert plan.with_blocks(blocks_of(span, kept, plan)).blocks == len(kept)


# --- a host whose memory is taken, in a swarm -------------------------------------------------------------------------


class FullRunner(HashRunner):
    """Blocks whose next step finds the device's memory full."""

    is_full = False

    def step(self, work: Any) -> list[Output]:
        if self.is_full:
            self.is_full = False
            raise DeviceFull("the device's memory is full")
        return super().step(cast("list[StepWork]", work))


class FakeLoader:
    """Loads a model of hashes at once; `take` says that memory has changed."""

    def __init__(self, plan: HostingPlan) -> None:
        self.device = InlineDevice(0.01)
        self._plan = plan
        self.free: Free | None = None
        self.loaded: list[Span] = []
        self.released = 0
        self.watched: list[int] = []
        self.take, self._changes = trio.open_memory_channel[MemoryChange](8)

    async def plan(self, wish: HostingWish) -> HostingPlan:
        return self._plan

    async def held(self) -> tuple[Span, ...]:
        return (Span(0, N_BLOCKS),)

    async def fetch(self, span: Span) -> None:
        raise AssertionError("all blocks are on disk")

    async def fitting(self, span: Span) -> Span | None:
        raise AssertionError("all blocks are on disk")

    async def load(self, plan: HostingPlan, span: Span, on_grown: Callable[[Hosted, Span], Awaitable[None]]) -> Hosted:
        await trio.sleep(1)
        self.loaded.append(span)
        runner = FullRunner(span.start, span.stop)
        return cast(Hosted, SimpleNamespace(runner=runner, throughput=Throughput(100.0, 1000.0, None)))

    async def keep(self, hosted: Hosted, span: Span) -> Hosted:
        runner = cast(FullRunner, hosted.runner)
        assert all(key[1] in span for key in runner.caches), "sessions over blocks that go are ended first"
        runner.start, runner.stop = span.start, span.stop
        return hosted

    async def memory_change(self, plan: HostingPlan, full: HostingPlan) -> MemoryChange:
        self.watched.append(plan.blocks)
        return await self._changes.receive()

    async def free_bytes(self, plan: HostingPlan) -> Free | None:
        return self.free

    async def release(self, plan: HostingPlan) -> None:
        self.released += 1


BLOCK_S = 10.0  # that the download of a block takes


class SlowDownload(FakeLoader):
    """Serves the first four blocks once they are there, and then one more at a time."""

    on_disk: tuple[Span, ...] = ()

    async def held(self) -> tuple[Span, ...]:
        return self.on_disk

    async def fetch(self, span: Span) -> None:
        self.on_disk = (span,)

    async def load(self, plan: HostingPlan, span: Span, on_grown: Callable[[Hosted, Span], Awaitable[None]]) -> Hosted:
        self.loaded.append(span)
        await trio.sleep(4 * BLOCK_S)
        runner = FullRunner(span.start, span.start + 4)
        hosted = cast(Hosted, SimpleNamespace(runner=runner, throughput=Throughput(100.0, 1000.0, None)))
        while runner.stop < span.stop:
            await on_grown(hosted, Span(span.start, runner.stop))
            await trio.sleep(BLOCK_S)
            runner.stop += 1
        return hosted


@dataclass
class Host:
    """A node of a simulated swarm that hosts blocks."""

    node: SimNode
    loader: FakeLoader
    blocks: BlockHost
    said: list[tuple[State, str]]


def host(
    nursery: trio.Nursery, node: SimNode, options: HostingOptions | None = None, kind: type[FakeLoader] = FakeLoader
) -> Host:
    """Let a node host all blocks, on one card."""
    loader, said = kind(plan_of(N_BLOCKS)), list[tuple[State, str]]()

    def say(state: State, why: Reason) -> None:
        said.append((state, why.code))

    blocks = BlockHost(node.network, node.swarm, loader, options or HostingOptions(), say)
    nursery.start_soon(blocks.run)
    return Host(node, loader, blocks, said)


async def asker_of(nursery: trio.Nursery, node: SimNode) -> Asker:
    options = AskerOptions(SessionSettings(), rng=random.Random(1))
    asker = Asker(node.network, HashEnds(N_BLOCKS), InlineDevice(), node.swarm.announcements, options=options)
    await nursery.start(asker.run)
    return asker


async def until_served(sim: Sim, node: SimNode, *hosts: Host) -> None:
    """Wait until a node knows that these hosts serve all blocks."""
    peers = {each.node.peer for each in hosts}
    await sim.until(lambda: peers <= {a.peer for a in node.swarm.announcements() if a.serves}, 30)


async def test_a_reply_goes_on_while_its_only_host_gives_blocks_back(autojump_clock: MockClock) -> None:
    """One host of two is chosen; it gives four blocks back in the middle, and the other one helps out."""
    async with open_sim() as sim, trio.open_nursery() as nursery:
        first, second, third = await sim.grow(3)
        one, two = host(nursery, first), host(nursery, second)
        await until_served(sim, third, one, two)
        asker = await asker_of(nursery, third)
        async with asker.reply(PROMPT, 40, max_tokens=40) as reply:
            async for _ in reply:
                if len(reply.stats.token_ids) == 10:
                    used = one if reply.stats.route[0].peer == first.peer else two
                    await used.loader.take.send(MemoryChange((N_BLOCKS - 4,)))
        assert reply.stats.token_ids == greedy(PROMPT, 40, N_BLOCKS)
        assert reply.stats.recoveries >= 1
        kept = used.blocks.span
        assert kept is not None
        assert len(kept) == N_BLOCKS - 4
        assert used.node.swarm.own.span == kept
        assert used.said[-1] == ("serving", "memory_short")
        assert used.loader.loaded == [Span(0, N_BLOCKS)], "nothing was loaded again"
        assert not asker.planner.avoided(), "a host that gives blocks back is not blamed"
        await trio.sleep(1)
        assert used.loader.watched[-1] == N_BLOCKS - 4
        nursery.cancel_scope.cancel()


async def test_a_host_announces_the_size_of_its_whole_cache(autojump_clock: MockClock) -> None:
    async with open_sim() as sim, trio.open_nursery() as nursery:
        first, second = await sim.grow(2)
        one = host(nursery, first)
        await until_served(sim, second, one)
        (said,) = [member for member in second.swarm.announcements() if member.serves]
        assert one.blocks.runner is not None
        assert 0 < said.kv_total_tokens == one.blocks.runner.kv_total_tokens
        nursery.cancel_scope.cancel()


async def test_sessions_over_the_blocks_that_stay_notice_nothing(autojump_clock: MockClock) -> None:
    async with open_sim() as sim, trio.open_nursery() as nursery:
        first, second, third = await sim.grow(3)
        whole = host(nursery, first, HostingOptions(blocks=Span(0, N_BLOCKS)))
        tail = host(nursery, second, HostingOptions(blocks=Span(N_BLOCKS - 4, N_BLOCKS)))
        await until_served(sim, third, whole, tail)
        await whole.loader.take.send(MemoryChange((N_BLOCKS - 4,)))
        await sim.until(lambda: whole.node.swarm.own.span == Span(0, N_BLOCKS - 4), 5)  # the other one has the tail
        await trio.sleep(5)
        asker = await asker_of(nursery, third)
        async with asker.reply(PROMPT, 30, max_tokens=30) as reply:
            async for _ in reply:
                if len(reply.stats.token_ids) == 10:
                    await tail.loader.take.send(MemoryChange((4,)))  # nothing to give back
                    await trio.sleep(1)
        assert reply.stats.token_ids == greedy(PROMPT, 30, N_BLOCKS)
        assert reply.stats.recoveries == 0
        nursery.cancel_scope.cancel()


async def test_a_step_that_finds_the_memory_full_costs_a_block_and_no_reply(autojump_clock: MockClock) -> None:
    async with open_sim() as sim, trio.open_nursery() as nursery:
        first, second, third = await sim.grow(3)
        one, two = host(nursery, first), host(nursery, second)
        await until_served(sim, third, one, two)
        asker = await asker_of(nursery, third)
        stats: list[list[int]] = []

        async def reply_to(prompt: list[int]) -> None:
            stats.append((await ask(asker, prompt, 60)).token_ids)
            assert stats[-1] == greedy(prompt, 60, N_BLOCKS)

        async with trio.open_nursery() as replies:
            for number in range(4):
                replies.start_soon(reply_to, [*PROMPT, number])
            await sim.until(lambda: one.blocks.server.sessions + two.blocks.server.sessions == 4, 5)
            full = [each for each in (one, two) if each.blocks.server.sessions]
            for each in full:
                each.loader.free = free(5)  # whoever took it has given it back already
                cast(FullRunner, each.blocks.runner).is_full = True
        assert len(stats) == 4
        assert [len(each.blocks.span or ()) for each in full] == [N_BLOCKS - 1] * len(full)
        nursery.cancel_scope.cancel()


async def test_a_host_without_any_room_ends_and_frees_everything(autojump_clock: MockClock) -> None:
    async with open_sim() as sim, trio.open_nursery() as nursery:
        (node,) = await sim.grow(1)
        loader = FakeLoader(plan_of(N_BLOCKS))
        blocks = BlockHost(node.network, node.swarm, loader, HostingOptions(), lambda state, why: None)
        with pytest.RaisesGroup(DeviceFull, flatten_subgroups=True):
            async with trio.open_nursery() as hosting:
                hosting.start_soon(blocks.run)
                await sim.until(lambda: node.swarm.own.serves, 10)
                await loader.take.send(MemoryChange((0,)))
        assert (blocks.span, blocks.runner, loader.released) == (None, None, 1)
        nursery.cancel_scope.cancel()


async def test_given_back_blocks_are_loaded_again_around_those_that_stayed(autojump_clock: MockClock) -> None:
    async with open_sim() as sim, trio.open_nursery() as nursery:
        (node,) = await sim.grow(1)
        one = host(nursery, node)
        await sim.until(lambda: node.swarm.own.serves, 10)
        await one.loader.take.send(MemoryChange((10,)))
        await sim.until(lambda: len(node.swarm.own.span or ()) == 10, 5)
        await one.loader.take.send(MemoryChange((16,)))
        await sim.until(lambda: node.swarm.own.serves and len(node.swarm.own.span or ()) == 16, 60)
        assert one.said[-1] == ("serving", "memory_back")
        kept, again = Span(0, N_BLOCKS), one.loader.loaded[-1]
        assert len(again) == 16
        assert again.start >= kept.start
        nursery.cancel_scope.cancel()


def served(node: SimNode) -> int:
    """Number of blocks that a node serves."""
    own = node.swarm.own
    return len(own.span) if own.serves and own.span is not None else 0


@pytest.mark.parametrize(("allowed", "kept"), [(5, 5), (10, 6), (1, 1)])
async def test_blocks_are_given_back_while_others_are_downloaded(
    autojump_clock: MockClock, allowed: int, kept: int
) -> None:
    """A download may take hours; with `allowed` above what is loaded, the cache for the rest is given back."""
    async with open_sim() as sim, trio.open_nursery() as nursery:
        (node,) = await sim.grow(1)
        one = host(nursery, node, kind=SlowDownload)
        await sim.until(lambda: served(node) == 6, 120)
        await one.loader.take.send(MemoryChange((allowed,)))
        await sim.until(lambda: one.said[-1] == ("serving", "memory_short"), 2)
        assert (served(node), node.swarm.own.growing, one.blocks.is_loading) == (kept, None, False)
        await trio.sleep(10 * BLOCK_S)
        assert served(node) == one.loader.watched[-1] == kept
        assert len(one.loader.loaded) == 1
        nursery.cancel_scope.cancel()


async def test_memory_that_was_short_before_the_first_blocks_were_loaded_costs_none(autojump_clock: MockClock) -> None:
    async with open_sim() as sim, trio.open_nursery() as nursery:
        (node,) = await sim.grow(1)
        one = host(nursery, node, kind=SlowDownload)
        await sim.until(lambda: one.blocks.is_loading, 30)
        await one.loader.take.send(MemoryChange((1,)))
        await sim.until(lambda: served(node) == N_BLOCKS, 600)
        assert len(one.loader.loaded) == 1
        assert "memory_short" not in [why for _, why in one.said]
        nursery.cancel_scope.cancel()


async def test_blocks_that_are_taken_back_are_given_back_while_they_are_downloaded(autojump_clock: MockClock) -> None:
    async with open_sim() as sim, trio.open_nursery() as nursery:
        (node,) = await sim.grow(1)
        one = host(nursery, node, kind=SlowDownload)
        await sim.until(lambda: served(node) == N_BLOCKS, 600)
        await one.loader.take.send(MemoryChange((4,)))
        await sim.until(lambda: served(node) == 4, 10)
        for _ in range(2):  # the first time the weights are downloaded beside the blocks that are served
            await one.loader.take.send(MemoryChange((16,)))
        await sim.until(lambda: len(one.loader.loaded) == 2 and served(node) == 8, 300)
        await one.loader.take.send(MemoryChange((3,)))
        await sim.until(lambda: one.said[-1] == ("serving", "memory_short"), 2)
        assert served(node) == 3
        await trio.sleep(10 * BLOCK_S)
        assert served(node) == one.loader.watched[-1] == 3
        nursery.cancel_scope.cancel()


def test_a_plan_of_fewer_blocks_keeps_the_cache_of_each() -> None:
    plan = plan_of(8, 4)
    smaller = plan.with_blocks((0, 2))
    assert [(share.device.id, share.budget.blocks) for share in smaller.shares] == [("cuda:1", 2)]
    assert smaller.more == ()
    assert smaller.budget.kv_tokens == plan.more[0].budget.kv_tokens
    assert replace(plan, more=()).with_blocks((4,)).budget.kv_bytes == plan.budget.kv_bytes // 2

"""Hosts that alone serve a block, and move: what they go on serving does not wait for what they have to download."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import pytest
import trio
from trio.testing import MockClock

from app.core.span import Span
from app.hosting.block_host import FETCH_AGAIN_S, BlockHost, HostingOptions
from app.hosting.memory import MemoryChange
from app.weights.extents import WeightsError
from app.weights.model_weights import runs
from engine.benchmark import Throughput
from engine.hosting import Hosted, HostingPlan
from tests.app.hash_model import HashRunner
from tests.app.hosting.test_memory import FakeLoader, asker_of, plan_of
from tests.app.session_swarm import PROMPT, ask
from tests.app.swarms import N_BLOCKS, Sim, SimNode, open_sim

DOWNLOAD_S = 120.0  # for one block: 440 MB through 30 Mbit/s
LOAD_S = 0.5


class DownloadingLoader(FakeLoader):
    """Blocks that are not on disk arrive one after the other; the first ones are served meanwhile, as `SpanLoad` does.

    Like there, the served part begins with the span's first block and has no gap.
    """

    def __init__(self, plan: HostingPlan) -> None:
        super().__init__(plan)
        self.disk: set[int] = set()
        self.is_full = False  # the disk

    async def held(self) -> tuple[Span, ...]:
        return runs(sorted(self.disk))

    async def fetch(self, span: Span) -> None:
        for block in span.blocks():
            if block not in self.disk:
                if self.is_full:
                    raise WeightsError("the disk is full")
                await trio.sleep(DOWNLOAD_S)
                self.disk.add(block)

    async def load(self, plan: HostingPlan, span: Span, on_grown: Callable[[Hosted, Span], Awaitable[None]]) -> Hosted:
        self.loaded.append(span)
        runner: HashRunner | None = None
        hosted = cast(Hosted, None)
        for block in span.blocks():
            await self.fetch(Span(block, block + 1))
            await trio.sleep(LOAD_S)
            ready = block + 1
            if ready - span.start < max(1, len(span) // 4):
                continue
            if runner is None:
                runner = HashRunner(span.start, ready)
                hosted = cast(Hosted, SimpleNamespace(runner=runner, throughput=Throughput(100.0, 1000.0, None)))
            runner.stop = ready
            if ready < span.stop and not self.disk >= set(span.blocks()):
                await on_grown(hosted, Span(span.start, ready))
        return hosted


async def started(nursery: trio.Nursery, node: SimNode, capacity: int, blocks: Span) -> BlockHost:
    """A host that an earlier life of the swarm has brought to these blocks; it has them on disk, and may move."""
    loader = DownloadingLoader(plan_of(capacity))
    loader.disk |= set(blocks.blocks())
    host = BlockHost(node.network, node.swarm, loader, HostingOptions(blocks=blocks), lambda state, why: None)
    with trio.fail_after(60):
        await nursery.start(host.run)
    assert host.span == blocks
    return host


def set_free(hosts: list[BlockHost]) -> None:
    """Let hosts choose their blocks from now on."""
    for host in hosts:
        host._options = HostingOptions()
        host._news.notify()


async def longest_gap_s(hosts: list[BlockHost], within_s: int) -> float:
    """Seconds in a row in which some block of the model has no host."""
    dark_s = longest_s = 0.0
    for _ in range(within_s):
        await trio.sleep(1)
        serving = [host.span for host in hosts if host._swarm.own.serves and host.span is not None]
        dark_s = 0.0 if {block for span in serving for block in span.blocks()} >= set(range(N_BLOCKS)) else dark_s + 1
        longest_s = max(longest_s, dark_s)
    return longest_s


@pytest.mark.soak
async def test_a_sole_holder_does_not_stop_the_swarm_while_it_downloads_blocks_that_others_serve(
    autojump_clock: MockClock,
) -> None:
    """Others joined where it is not needed any more, so the only host of six blocks could help another one."""
    spans = [Span(0, 6), Span(6, 18), Span(18, N_BLOCKS), Span(12, N_BLOCKS), Span(12, N_BLOCKS)]
    async with open_sim() as sim, trio.open_nursery() as nursery:
        *nodes, user = await sim.grow(len(spans) + 1)
        hosts = [await started(nursery, node, len(span), span) for node, span in zip(nodes, spans, strict=True)]
        asker = await asker_of(nursery, user)
        assert len((await ask(asker, PROMPT, 5)).token_ids) == 5, "the swarm works"
        set_free(hosts)
        gap_s = await longest_gap_s(hosts, 1500)
        nursery.cancel_scope.cancel()
    assert gap_s < 60, f"no reply was possible for {gap_s:.0f} s"


@pytest.mark.soak
async def test_memory_that_is_free_again_does_not_stop_the_swarm(autojump_clock: MockClock) -> None:
    """A host that gave blocks back, and is the only one of the others, takes more blocks again."""
    spans = [Span(0, 6), Span(6, 18), Span(12, N_BLOCKS), Span(12, N_BLOCKS)]
    async with open_sim() as sim, trio.open_nursery() as nursery:
        nodes = await sim.grow(len(spans))
        hosts = [await started(nursery, node, len(span), span) for node, span in zip(nodes, spans, strict=True)]
        shrinking = hosts[1]
        loader = cast(DownloadingLoader, shrinking._loader)
        shrinking._options = HostingOptions()
        await loader.take.send(MemoryChange((6,)))
        await sim.until(lambda: shrinking.span == Span(6, 12), 30)
        await trio.sleep(300)
        await loader.take.send(MemoryChange((12,)))
        gap_s = await longest_gap_s(hosts, 1500)
        nursery.cancel_scope.cancel()
    assert gap_s < 60, f"no reply was possible for {gap_s:.0f} s"


async def test_a_member_that_restarts_does_not_stop_the_swarm_for_as_long_as_a_download(
    autojump_clock: MockClock,
) -> None:
    """Three hosts just cover the model. One restarts within half a minute; another one could take over its blocks, and
    is the only host of some.
    """
    spans = [Span(0, 6), Span(6, 18), Span(12, N_BLOCKS)]
    async with open_sim() as sim, trio.open_nursery() as nursery:
        nodes = await sim.grow(len(spans))
        hosts = [await started(nursery, node, len(span), span) for node, span in zip(nodes, spans, strict=True)]
        set_free(hosts[1:])
        assert await longest_gap_s(hosts, 600) == 0, "three hosts rest where they are"
        sim.kill(nodes[0])
        await trio.sleep(20)
        again = sim.add(nodes[0].number, [node.peer for node in nodes[1:]])
        hosts[0] = await started(nursery, again, 6, spans[0])
        gap_s = await longest_gap_s(hosts, 1500)
        nursery.cancel_scope.cancel()
    assert gap_s < 60, f"no reply was possible for {gap_s:.0f} s after all members were back"


async def test_six_seconds_of_silence_do_not_stop_the_swarm_for_as_long_as_a_download(
    autojump_clock: MockClock,
) -> None:
    """The same three hosts; one of them is only cut off for a moment, with its blocks loaded."""
    spans = [Span(0, 6), Span(6, 18), Span(12, N_BLOCKS)]
    async with open_sim() as sim, trio.open_nursery() as nursery:
        nodes = await sim.grow(len(spans))
        hosts = [await started(nursery, node, len(span), span) for node, span in zip(nodes, spans, strict=True)]
        set_free(hosts)
        await trio.sleep(60)
        sim.fabric.freeze(nodes[0].peer)
        await trio.sleep(6)
        sim.fabric.resume(nodes[0].peer)
        gap_s = await longest_gap_s(hosts, 1500)
        nursery.cancel_scope.cancel()
    assert gap_s < 60, f"no reply was possible for {gap_s:.0f} s"


@pytest.mark.parametrize("number", [0, *(pytest.param(number, marks=pytest.mark.soak) for number in (1, 2)), 3])
async def test_a_sole_holder_that_restarts_serves_what_it_has_on_disk(autojump_clock: MockClock, number: int) -> None:
    """Seven windows are of equal worth, and one of them is on its disk."""
    spans = [Span(0, 6), Span(12, N_BLOCKS), Span(6, 18)]
    async with open_sim() as sim, trio.open_nursery() as nursery:
        nodes = await sim.grow(2)
        nodes.append(sim.add(10 + number, [node.peer for node in nodes]))
        hosts = [await started(nursery, node, len(span), span) for node, span in zip(nodes, spans, strict=True)]
        assert await longest_gap_s(hosts, 10) == 0
        sim.kill(nodes[2])
        await trio.sleep(20)
        again = sim.add(10 + number, [node.peer for node in nodes[:2]])
        await trio.sleep(3)  # it meets the others
        loader = DownloadingLoader(plan_of(12))
        loader.disk |= set(spans[2].blocks())
        hosts[2] = BlockHost(again.network, again.swarm, loader, HostingOptions(), lambda state, why: None)
        nursery.start_soon(hosts[2].run)
        gap_s = await longest_gap_s(hosts, 1500)
        nursery.cancel_scope.cancel()
    assert gap_s < 60, f"no reply was possible for {gap_s:.0f} s: it chose {loader.loaded[0]}, and had {spans[2]}"


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1)])
async def test_members_that_all_restart_serve_what_their_disks_hold(
    autojump_clock: MockClock, order: tuple[int, ...]
) -> None:
    """They just cover the model, and come back in the course of a minute: none of them has to download anything."""
    spans = [Span(0, 6), Span(6, 18), Span(12, N_BLOCKS)]
    async with open_sim() as sim, trio.open_nursery() as nursery:
        hosts: list[BlockHost] = []
        for number in order:
            node = sim.add(number, [host._network.peer_id for host in hosts])
            await trio.sleep(20)
            loader = DownloadingLoader(plan_of(len(spans[number])))
            loader.disk |= set(spans[number].blocks())
            hosts.append(BlockHost(node.network, node.swarm, loader, HostingOptions(), lambda state, why: None))
            nursery.start_soon(hosts[-1].run)
        await sim.until(lambda: [host.span for host in hosts] == [spans[number] for number in order], 30)
        assert await longest_gap_s(hosts, 300) == 0
        nursery.cancel_scope.cancel()


# --- a download before a move ----------------------------------------------------------------------------------------


@dataclass
class Shrunk:
    """Two hosts that are left of three, and miss blocks 0:6: the only host of 6:12 can take them over."""

    sim: Sim
    sole: BlockHost
    loader: DownloadingLoader


@asynccontextmanager
async def shrunk(*, is_full: bool = False) -> AsyncIterator[Shrunk]:
    spans = [Span(0, 6), Span(6, 18), Span(12, N_BLOCKS)]
    async with open_sim() as sim, trio.open_nursery() as nursery:
        nodes = await sim.grow(len(spans))
        hosts = [await started(nursery, node, len(span), span) for node, span in zip(nodes, spans, strict=True)]
        loader = cast(DownloadingLoader, hosts[1]._loader)
        loader.is_full = is_full
        set_free(hosts[1:])
        sim.kill(nodes[0])
        yield Shrunk(sim, hosts[1], loader)
        nursery.cancel_scope.cancel()


async def test_a_sole_holder_serves_its_blocks_until_those_of_a_hole_are_downloaded(autojump_clock: MockClock) -> None:
    async with shrunk() as swarm:
        while not swarm.loader.disk >= set(range(12)):
            assert swarm.sole.span == Span(6, 18)
            assert swarm.sole._swarm.own.serves
            await trio.sleep(1)
        await swarm.sim.until(lambda: swarm.sole.span == Span(0, 12), 30)


async def test_a_sole_holder_whose_disk_is_full_stays_and_tries_again_later(autojump_clock: MockClock) -> None:
    async with shrunk(is_full=True) as swarm:
        await trio.sleep(FETCH_AGAIN_S / 2)
        swarm.loader.is_full = False
        await trio.sleep(FETCH_AGAIN_S / 4)
        assert swarm.loader.disk == set(range(6, 18))
        assert swarm.sole._swarm.own.serves
        await swarm.sim.until(lambda: swarm.sole.span == Span(0, 12), FETCH_AGAIN_S + 6 * DOWNLOAD_S)


async def test_memory_that_others_need_is_given_back_during_a_download(autojump_clock: MockClock) -> None:
    async with shrunk() as swarm:
        await swarm.sim.until(lambda: 1 in swarm.loader.disk, 3 * DOWNLOAD_S)
        await swarm.loader.take.send(MemoryChange((10,)))
        await swarm.sim.until(lambda: swarm.sole.span == Span(6, 16), DOWNLOAD_S / 2)


async def test_a_node_leaves_in_the_middle_of_a_download(autojump_clock: MockClock) -> None:
    async with shrunk() as swarm:
        await swarm.sim.until(lambda: 1 in swarm.loader.disk, 3 * DOWNLOAD_S)
        with trio.fail_after(DOWNLOAD_S / 2):
            await swarm.sole.retire()
        await trio.sleep(2 * DOWNLOAD_S)
        assert 3 not in swarm.loader.disk


async def test_blocks_that_come_back_are_downloaded_before_the_present_ones_are_unloaded(
    autojump_clock: MockClock,
) -> None:
    """Its memory is free again, but the weights of the blocks that it gave back are no longer on its disk."""
    spans = [Span(0, 6), Span(6, 18), Span(12, N_BLOCKS), Span(12, N_BLOCKS)]
    async with open_sim() as sim, trio.open_nursery() as nursery:
        nodes = await sim.grow(len(spans))
        hosts = [await started(nursery, node, len(span), span) for node, span in zip(nodes, spans, strict=True)]
        shrinking = hosts[1]
        loader = cast(DownloadingLoader, shrinking._loader)
        await loader.take.send(MemoryChange((6,)))
        await sim.until(lambda: shrinking.span == Span(6, 12), 30)
        loader.disk -= set(range(12, 18))
        await loader.take.send(MemoryChange((12,)))
        while not loader.disk >= set(range(6, 18)):
            assert shrinking.span == Span(6, 12)
            assert shrinking._swarm.own.serves
            await trio.sleep(1)
        await loader.take.send(MemoryChange((12,)))
        await sim.until(lambda: shrinking.span == Span(6, 18), 30)
        nursery.cancel_scope.cancel()

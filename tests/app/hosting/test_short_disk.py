"""A disk or a device that gets full while blocks are downloaded and loaded: what is loaded by then stays served."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from app.api.supervisor import ApiHealth
from app.config.file import Config
from app.config.home import Home
from app.config.settings import Settings
from app.core.span import Span
from app.courtesy.pause import PauseControl
from app.hosting.block_host import FETCH_AGAIN_S, REFRESH_S
from app.hosting.memory import REGROW_AFTER_S, MemoryChange
from app.membership import Membership, MembershipSetup
from app.node import self_check
from app.node.hosting_loop import HostingLoop
from app.training.activations import ActivationDisk
from app.training.states import StateStore
from app.weights.disk_space import DiskRoom
from app.weights.extents import WeightsError
from app.weights.manifest_store import ManifestStore
from app.weights.model_weights import ModelWeights
from app.weights.part_store import NewPart
from engine import hosting
from engine.benchmark import Throughput
from engine.device.probe import Device
from engine.errors import DeviceFull
from engine.hosting import Hosted, HostingPlan
from p2p.memory.fabric import LinkProfile, open_fabric
from tests.app.hosting.test_memory import BLOCK_S, FakeLoader, FullRunner, host, served
from tests.app.swarms import N_BLOCKS, RECORD, identity, open_sim, wall_clock
from tests.app.weights.models import WIDE, import_model
from tests.attacks.test_hosting import Observer

BYTES_PER_S = 1_000_000
HOUR_S = 3600.0


@dataclass
class Newcomer:
    """A node that downloads what it hosts from a member, onto a disk that may be full."""

    swarm: Membership
    weights: ModelWeights
    told: Observer
    is_full: bool = False
    fits_bytes: int | None = None  # beside what is there; None: everything

    @property
    def served(self) -> int:
        """Number of blocks that it says it serves."""
        own = self.swarm.own
        return len(own.span) if own.serves and own.span is not None else 0

    def room(self) -> DiskRoom:
        """The disk as its owner sees it: with a limit at which the parts are, once it is full."""
        if self.is_full:
            return DiskRoom(limit_bytes=sum(size for _, size in self.weights.library.files.names()))
        return DiskRoom(limit_bytes=self.fits_bytes)

    async def until(self, is_so: Callable[[], bool], within_s: float) -> None:
        with trio.fail_after(within_s):
            while not is_so():  # noqa: ASYNC110 - nobody tells
                await trio.sleep(0.5)

    async def serves_throughout(self, blocks: int, seconds: float) -> None:
        """Assert that it serves so many blocks all the time."""
        over = trio.current_time() + seconds
        while trio.current_time() < over:
            assert (self.served, self.swarm.own.growing) == (blocks, None), self.told.why
            await trio.sleep(1)


@asynccontextmanager
async def newcomer(folder: Path, monkeypatch: pytest.MonkeyPatch, **short: Any) -> AsyncIterator[Newcomer]:
    """A node that is about to host all four blocks of a model beside a member that only has their weights."""
    device = Device("cpu", "cpu", "a processor", 8 << 30, 8 << 30)
    monkeypatch.setattr(hosting, "probe_devices", lambda: [device])
    monkeypatch.setattr(self_check, "EVERY_S", math.inf)  # the made-up blocks compute no finite numbers
    manifest = import_model(folder / "model", folder / "seed").manifest
    (folder / "empty").mkdir()
    ManifestStore(folder / "empty").save(manifest)
    context: Any = SimpleNamespace(
        config=lambda: Config(Settings(device="cpu"), {}),
        pause_control=PauseControl(folder / "pause.json", lambda: None),
        api=ApiHealth(),
        home=Home.open(folder / "home"),
    )
    write = NewPart.write
    profile = LinkProfile(delay_s=0.01, bytes_per_s=BYTES_PER_S)
    async with open_fabric(1, profile) as fabric, trio.open_nursery() as nursery:
        holder = fabric.node(identity(2).peer_id)
        theirs = Membership(holder, identity(2), RECORD, WIDE.n_blocks, MembershipSetup(wall_clock=wall_clock))
        theirs.announce(state="client")
        await nursery.start(theirs.run)
        await nursery.start(ModelWeights(holder, theirs, manifest, folder / "seed").run)
        who = identity(1)
        network = fabric.node(who.peer_id)
        swarm = Membership(network, who, RECORD, WIDE.n_blocks, MembershipSetup(wall_clock=wall_clock))
        swarm.announce(state="joining")
        swarm.join_via([identity(2).peer_id])
        await nursery.start(swarm.run)
        weights = ModelWeights(network, swarm, manifest, folder / "empty", lambda: one.room())
        one = Newcomer(swarm, weights, Observer(), **short)

        def write_unless_full(new: NewPart, *chunks: Any) -> None:
            if one.is_full:
                raise WeightsError("the disk is full", code="disk_full")
            write(new, *chunks)

        monkeypatch.setattr(NewPart, "write", write_unless_full)
        await nursery.start(weights.run)
        replies: Any = SimpleNamespace(place_head=head_stays, failing=frozenset)
        states = StateStore(network, context.home.training_folder, lambda peer: True)
        activations = ActivationDisk(folder / "activations", lambda: 0)
        loop = HostingLoop(network, swarm, weights, replies, states, activations, context, one.told)
        nursery.start_soon(loop.run)
        yield one
        nursery.cancel_scope.cancel()


async def head_stays(options: object) -> None:
    """A plan for the CPU leaves the head there."""


async def test_a_disk_that_fills_costs_none_of_the_blocks_that_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patient_clock: MockClock
) -> None:
    """A person's own files filled the disk during a download: the blocks that were served had no holder for days."""
    async with newcomer(tmp_path, monkeypatch) as one:
        await one.until(lambda: one.served == 2, 600)
        one.is_full = True
        await one.until(lambda: one.told.why.code == "disk_full", 60)
        assert one.told.state == "serving"
        assert "blocks 0:2 of 0:4" in one.told.why.text
        await one.serves_throughout(2, 2 * FETCH_AGAIN_S)
        one.is_full = False
        await one.until(lambda: one.served == 4, FETCH_AGAIN_S + REFRESH_S + 120)
        assert one.told.why.code != "disk_full"


@pytest.mark.parametrize("fit", [1, pytest.param(3, marks=pytest.mark.soak)])
async def test_a_disk_without_room_for_all_blocks_takes_as_many_as_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patient_clock: MockClock, fit: int
) -> None:
    async with newcomer(tmp_path, monkeypatch, fits_bytes=0) as one:
        blocks = [one.weights.manifest.block(index).size_bytes for index in range(WIDE.n_blocks)]
        one.fits_bytes = sum(blocks[:fit]) + 1000
        await one.until(lambda: one.served == fit and one.swarm.own.growing is None, 600)
        assert one.told.why.code == "disk_full"
        await one.serves_throughout(fit, FETCH_AGAIN_S + 2 * REFRESH_S)
        one.fits_bytes = None
        await one.until(lambda: one.served == 4, FETCH_AGAIN_S + REFRESH_S + 120)


class FullDevice(FakeLoader):
    """A device on which a fifth block does not fit, until it `has_room`."""

    has_room = False

    async def load(self, plan: HostingPlan, span: Span, on_grown: Callable[[Hosted, Span], Awaitable[None]]) -> Hosted:
        if self.has_room:
            return await super().load(plan, span, on_grown)
        self.loaded.append(span)
        runner = FullRunner(span.start, span.start + 4)
        hosted = cast(Hosted, SimpleNamespace(runner=runner, throughput=Throughput(100.0, 1000.0, None)))
        await on_grown(hosted, Span(span.start, span.start + 4))
        await trio.sleep(BLOCK_S)
        raise DeviceFull("the device's memory is full")


async def test_a_device_that_is_full_before_the_last_block_keeps_those_that_are_served(
    autojump_clock: MockClock,
) -> None:
    async with open_sim() as sim, trio.open_nursery() as nursery:
        (node,) = await sim.grow(1)
        one = host(nursery, node, kind=FullDevice)
        loader = cast(FullDevice, one.loader)
        await sim.until(lambda: one.said != [] and one.said[-1] == ("serving", "memory_short"), 60)
        assert (served(node), node.swarm.own.growing, one.blocks.is_loading) == (4, None, False)
        await sim.until(lambda: loader.watched[-1] == 4, 5)  # or it would not see that memory is free again
        loader.has_room = True
        await loader.take.send(MemoryChange((N_BLOCKS,)))
        await sim.until(lambda: served(node) == N_BLOCKS, 60)
        nursery.cancel_scope.cancel()


class WrongForecast(FullDevice):
    """A device whose memory looks free after blocks of it could not be loaded."""

    async def memory_change(self, plan: HostingPlan, full: HostingPlan) -> MemoryChange:
        if plan.blocks == full.blocks:
            await trio.sleep_forever()
        await trio.sleep(REGROW_AFTER_S)
        return MemoryChange((full.blocks,))


async def test_a_device_that_is_full_again_at_once_is_not_tried_a_third_time(autojump_clock: MockClock) -> None:
    """A forecast of the memory that is too low would interrupt those that are served every few minutes."""
    async with open_sim() as sim, trio.open_nursery() as nursery:
        (node,) = await sim.grow(1)
        one = host(nursery, node, kind=WrongForecast)
        await trio.sleep(HOUR_S)
        assert (served(node), node.swarm.own.growing) == (4, None)
        assert len(one.loader.loaded) == 2
        nursery.cancel_scope.cancel()

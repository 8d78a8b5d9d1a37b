"""Retries of hosting, and what a node offers to training jobs while it does not host."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from app.api.supervisor import ApiHealth
from app.config.file import Config
from app.config.home import Home
from app.config.settings import Settings
from app.core.reasons import because
from app.courtesy.pause import PauseControl
from app.membership import Membership, MembershipSetup
from app.node.hosting_loop import LONGEST_RETRY_S, HostingLoop
from app.rounds.machines import ASK_AGAIN_S, Helpers, NoMachines, Room, ask_rooms, machine_routes
from app.training.activations import ActivationDisk
from app.training.states import StateStore
from app.training.wire import PROTOCOL
from app.weights.disk_space import DiskRoom
from app.weights.extents import WeightsError
from app.weights.model_weights import ModelWeights
from engine import hosting
from engine.device.probe import Device
from engine.errors import DeviceFull
from p2p.errors import StreamClosed
from p2p.memory.fabric import MemoryFabric, open_fabric
from tests.app.swarms import RECORD, identity, wall_clock
from tests.app.weights.models import WIDE, import_model
from tests.attacks.test_hosting import Observer

DAY_S = 86400.0


class FailsDaily(HostingLoop):
    """Hosts for a day, then finds the device full, again and again."""

    def __init__(self) -> None:
        context: Any = SimpleNamespace(config=lambda: SimpleNamespace(settings=Settings(max_vram=None)))
        unused: Any = None
        membership: Any = SimpleNamespace(announce=lambda **fields: None)
        steps = SimpleNamespace(failed=lambda why: None)
        observer: Any = SimpleNamespace(steps=steps, settle=lambda state, why: None)
        super().__init__(unused, membership, unused, unused, unused, unused, context, observer)
        self.began: list[float] = []

    async def _host_once(self, failed_loads: int) -> None:
        self.began.append(trio.current_time())
        await trio.sleep(DAY_S)
        raise DeviceFull("a game took the memory")


async def test_a_node_that_hosted_for_a_day_comes_back_soon_after_every_failure(autojump_clock: MockClock) -> None:
    loop = FailsDaily()
    with trio.move_on_after(14 * DAY_S):
        await loop._host()
    pauses = [later - earlier - DAY_S for earlier, later in zip(loop.began, loop.began[1:], strict=False)]
    assert len(pauses) > 10
    assert max(pauses) < LONGEST_RETRY_S / 20


class FailsAtOnce(FailsDaily):
    """The disk is full until a setting is changed."""

    error: Exception = WeightsError("66.5 MB of weights do not fit", code="disk_full")

    async def _host_once(self, failed_loads: int) -> None:
        self.began.append(trio.current_time())
        await trio.sleep(1)
        raise self.error


@pytest.mark.parametrize("when_s", [300.0, 31.5])
async def test_a_changed_setting_is_tried_at_once(when_s: float, autojump_clock: MockClock) -> None:
    """It was tried at the next turn, which is minutes away after some failures; 31.5 s: while it fails once more."""
    loop, began = FailsAtOnce(), trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(loop._host)
        await trio.sleep(when_s)
        tries = len(loop.began)
        loop.follow_settings()
        await trio.sleep(0.6)
        assert len(loop.began) == tries + 1
        nursery.cancel_scope.cancel()
    assert loop.began[-1] - began <= when_s + 0.6


# --- what it offers to training jobs ----------------------------------------------------------------------------------


class Hosting:
    """A node that hosts, and the owner of an island that it may help."""

    def __init__(self, fabric: MemoryFabric, folder: Path, settings: dict[str, Any]) -> None:
        owner, who = identity(1).peer_id, identity(2)
        self.network: Any = fabric.node(who.peer_id)
        self.peer, self.told = who.peer_id, Observer()
        self.pause = PauseControl(folder / "pause.json", lambda: None)
        settings = {"device": "cpu", "trusted": (owner,), **settings}
        context: Any = SimpleNamespace(
            config=lambda: Config(Settings(**settings), {}),
            pause_control=self.pause,
            api=ApiHealth(),
            home=Home.open(folder / "home"),
        )
        manifest = import_model(folder / "model", folder / "seed").manifest
        swarm = Membership(self.network, who, RECORD, WIDE.n_blocks, MembershipSetup(wall_clock=wall_clock))
        self.weights = ModelWeights(self.network, swarm, manifest, folder / "seed", lambda: DiskRoom())
        states = StateStore(self.network, context.home.training_folder, lambda peer: True)
        replies: Any = SimpleNamespace(place_head=self._place_head, failing=frozenset)
        disk = ActivationDisk(folder / "activations", lambda: 0)
        self.loop = HostingLoop(self.network, swarm, self.weights, replies, states, disk, context, self.told)
        self.owner: Any = fabric.node(owner)
        self.helpers = Helpers(self.owner, lambda: [self.peer], self._no_room, self._serve_nobody)

    async def _place_head(self, options: object) -> None:
        pass

    async def _no_room(self) -> int:
        return 0

    async def _serve_nobody(self, stream: Any) -> None:
        pass

    async def until(self, state: str) -> None:
        with trio.fail_after(60):  # torch may have to be imported
            while self.told.state != state:  # noqa: ASYNC110
                await trio.sleep(0.01)

    async def rooms(self) -> list[Room]:
        return await ask_rooms(self.helpers, frozenset(), {})


@asynccontextmanager
async def open_hosting(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> AsyncIterator[Hosting]:
    monkeypatch.setattr(hosting, "probe_devices", lambda: [Device("cpu", "cpu", "a processor", 8 << 30, 8 << 30)])
    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        found = Hosting(fabric, folder, settings)
        nursery.start_soon(found.weights.run)
        nursery.start_soon(found.loop.run)
        yield found
        nursery.cancel_scope.cancel()


@pytest.mark.soak
async def test_a_paused_node_offers_no_room_to_islands_until_it_hosts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_hosting(tmp_path, monkeypatch, blocks="0:2") as node:
        find = machine_routes(node.helpers, 2, lambda blocks, under_way: blocks)
        for _ in range(2):
            await node.until("serving")
            [hop] = await find(frozenset())
            assert (hop.peer, hop.span.start, hop.span.stop) == (node.peer, 0, 2)
            before = await node.owner.open(node.peer, PROTOCOL)
            server = node.loop.training
            assert server is not None
            node.pause.by_rule(because("pause_battery", "this machine runs on battery"))
            await node.until("paused")
            assert node.loop.training is None
            assert await server.room_for(node.peer) == 0, "for a job of its own"
            with pytest.raises(NoMachines, match="nobody anything"):
                await find(frozenset())
            for stream in (before, await node.owner.open(node.peer, PROTOCOL)):
                with pytest.raises(StreamClosed):  # a frame on it would never be answered
                    await stream.receive()
            node.pause.rule_over()
            await trio.sleep(ASK_AGAIN_S)


async def test_a_node_that_is_about_to_pause_takes_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_hosting(tmp_path, monkeypatch, blocks="0:2") as node:
        await node.until("serving")
        assert await node.rooms()
        drained = trio.Event()

        async def drain(within_s: float) -> None:
            await drained.wait()

        assert node.loop.block_host is not None
        monkeypatch.setattr(node.loop.block_host, "retire", drain)
        await node.pause.by_hand(None, patient=True)
        await node.until("draining")
        assert not await node.rooms()
        await node.pause.resume()  # before it was carried out
        assert await node.rooms()
        drained.set()


async def test_a_node_on_which_not_even_one_block_fits_offers_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_hosting(tmp_path, monkeypatch, max_vram=1) as node:
        with trio.fail_after(60):
            await node.told.is_client.wait()
        await trio.testing.wait_all_tasks_blocked()
        assert node.loop.training is None
        assert not await node.rooms()
